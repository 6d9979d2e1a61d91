"""What the text of one chat answer says: content, and calls of tools."""

import re

from msgspec import UNSET, UnsetType

from radixserve.api.responses import CalledFunction, ChatDelta, ChatMessage, DeltaToolCall, MessageToolCall
from radixserve.api.tool_parser import CallDelta, HermesParser, ParsedText
from radixserve.api.tools import ToolUse
from radixserve.protocol import FinishReason
from radixserve.tokenizer.hermes import CALL_BEGIN, CALL_END
from radixserve.tokenizer.tokenizer import Tokenizer


class AnswerReader:
    """Reads one answer. tool_use: the tools that it may call; None for none, and then all text is content."""

    def __init__(self, tool_use: ToolUse | None, tokenizer: Tokenizer) -> None:
        self._tool_use = tool_use
        self._parser: HermesParser | None = None
        self._skipped: re.Pattern[str] | None = None
        self._is_empty = True
        if tool_use is None:
            return
        self._parser = HermesParser(
            is_constrained=tool_use.is_required, only_tool=tool_use.only, max_calls=tool_use.max_calls
        )
        if tool_use.skips_special_tokens and CALL_BEGIN in tokenizer.special_texts:
            skipped = tokenizer.special_texts - {CALL_BEGIN, CALL_END}
            self._skipped = re.compile("|".join(map(re.escape, skipped)) or r"(?!)")

    @property
    def may_call(self) -> bool:
        """Whether the answer may call tools."""
        return self._parser is not None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said so far."""
        return self._is_empty

    def read(self, text: str, finish_reason: FinishReason | None) -> ParsedText:
        """Take in more of the answer, the last of it if there is a finish_reason; return what it adds."""
        if self._parser is None:
            self._is_empty = self._is_empty and not text
            return ParsedText(text, finish_reason=finish_reason)
        # A special token is one piece of text, unless it could be the beginning of a stop string.
        parsed = self._parser.push(self._skipped.sub("", text) if self._skipped else text, finish_reason)
        self._is_empty = self._is_empty and not (parsed.content or parsed.calls)
        return parsed

    def stop_reason(self, reason: str | int | None) -> str | int | None:
        """Return the stop that the caller asked for, of the one that ended the answer."""
        is_ours = reason == CALL_END and self._tool_use is not None and self._tool_use.stops_after_call
        return None if is_ours else reason


def whole_message(parsed: ParsedText) -> ChatMessage:
    """Return what was read of a whole answer."""
    calls = [
        MessageToolCall(id=call.id or "", function=CalledFunction(name=call.name or "", arguments=call.arguments))
        for call in parsed.calls
    ]
    return ChatMessage(
        "assistant", content=parsed.content or (None if calls else ""), tool_calls=calls if calls else UNSET
    )


def chunk_delta(parsed: ParsedText, reader: AnswerReader, *, is_first: bool) -> ChatDelta:
    """Return what was read of a piece of an answer. is_first: it begins the answer, so it names the role."""
    content: str | UnsetType | None = parsed.content or UNSET
    if parsed.finish_reason is not None and reader.is_empty:
        content = ""
    elif content is UNSET and is_first:
        # As long as calls may be all that there is, the content is null.
        content = None if reader.may_call else ""
    calls = [_delta_call(call) for call in parsed.calls]
    return ChatDelta(role="assistant" if is_first else UNSET, content=content, tool_calls=calls if calls else UNSET)


def _delta_call(call: CallDelta) -> DeltaToolCall:
    if call.id is None or call.name is None:
        return DeltaToolCall(index=call.index, function=CalledFunction(arguments=call.arguments))
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return DeltaToolCall(index=call.index, id=call.id, type="function", function=function)
