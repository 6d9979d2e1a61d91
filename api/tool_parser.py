"""Read tool calls in the hermes format out of an answer's text as it grows.

One parser serves streamed and plain answers: what it finds depends on the text alone, not on how that was cut. Text
outside of calls is content, without the white space before a call. A call whose JSON is wrong is none: its text, tags
and all, is content.
"""

import re
import uuid
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from radixserve.api.json_object import JsonObject
from radixserve.protocol import FinishReason
from radixserve.tokenizer.hermes import CALL_BEGIN, CALL_END

AnswerFinishReason = Literal["stop", "length", "tool_calls"]

# The names of tools need no escapes.
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')


@dataclass(slots=True)
class CallDelta:
    """What was added to the call of this index. id and name: in a call's first delta only."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class ParsedText:
    """What a piece of text added to an answer: content, at most one delta for each call, and perhaps its end.

    finish_reason: tool_calls if the model ended the answer and its calls are whole.
    """

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    finish_reason: AnswerFinishReason | None = None


class _CallObject(msgspec.Struct):
    """The JSON of a call. arguments: their exact text; a call may leave out what it has none of."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


@dataclass(slots=True)
class _Call:
    """A call that is being read. opening: what came before its JSON; empty if it has no tags.

    num_sent: characters of the JSON up to the last that was passed on as arguments; None before the call was begun.
    """

    opening: str
    json: JsonObject = field(default_factory=JsonObject)
    num_sent: int | None = None


class HermesParser:
    """Reads one answer.

    is_constrained: a grammar sees to it that calls are right, so their arguments are passed on as they come; otherwise
    a call is held back until its JSON is known to be right.
    only_tool: the tool that the answer has to call; the bare object of its arguments is a call, too.
    max_calls: what follows so many calls is dropped.
    """

    def __init__(
        self, *, is_constrained: bool = False, only_tool: str | None = None, max_calls: int | None = None
    ) -> None:
        self._is_constrained = is_constrained
        self._only_tool = only_tool
        self._may_be_bare = only_tool is not None
        self._max_calls = max_calls
        self._pending = ""
        self._call: _Call | None = None
        self._is_cut = False
        self._parsed = ParsedText()
        self._num_calls = 0

    def push(self, text: str, finish_reason: FinishReason | None = None) -> ParsedText:
        """Take in more of the answer, the last of it if there is a finish_reason; return what it adds.

        A call that the limit of length cuts off stays as far as it goes, if that is as far as its arguments.
        """
        self._pending += text
        while self._advance():
            pass
        if finish_reason is not None:
            self._finish(finish_reason)
        parsed, self._parsed = self._parsed, ParsedText()
        return parsed

    def _finish(self, reason: FinishReason) -> None:
        while self._call is not None:
            self._end(self._call, reason)
            while self._advance():
                pass
        if not ((self._num_calls and self._pending.isspace()) or self._is_cut_tag(self._pending)):
            self._parsed.content += self._pending
        self._pending = ""
        has_whole_calls = self._num_calls > 0 and not self._is_cut
        self._parsed.finish_reason = "tool_calls" if reason == "stop" and has_whole_calls else reason

    def _is_cut_tag(self, text: str) -> bool:
        """Whether the text is a part of a tag, or nothing: with a grammar no other text can begin so."""
        return self._is_constrained and CALL_BEGIN.startswith(text.strip())

    def _advance(self) -> bool:
        """Read on in the pending text, to the next border of a call; return whether there is one."""
        if self._num_calls == self._max_calls:
            self._pending = ""
            return False
        return self._read_content() if self._call is None else self._read_call(self._call)

    def _read_content(self) -> bool:
        text = self._pending
        if self._may_be_bare and text and not text.isspace():
            self._may_be_bare = False
            if text.lstrip().startswith("{"):
                self._call = _Call(opening="")
                return True
        content, tag, rest = text.partition(CALL_BEGIN)
        if tag:
            kept = content.rstrip()
            self._parsed.content += kept
            self._call = _Call(opening=content[len(kept) :] + tag)
            self._pending = rest
            return True
        num_safe = _num_safe(text)
        self._parsed.content += text[:num_safe]
        self._pending = text[num_safe:]
        return False

    def _read_call(self, call: _Call) -> bool:
        call.json.push(self._pending)
        self._pending = ""
        if self._is_constrained and call.opening:
            self._pass_on(call)
        if call.json.is_broken:
            self._give_back(call)
            return True
        if call.json.end is None:
            return False
        rest = call.json.text[call.json.end :]
        if call.opening:
            rest = rest.lstrip()
            if not rest.startswith(CALL_END):
                if CALL_END.startswith(rest):
                    return False
                self._give_back(call)
                return True
            rest = rest.removeprefix(CALL_END)
        self._complete(call, rest)
        return True

    def _complete(self, call: _Call, rest: str) -> None:
        """Tell of a call that is whole, unless its JSON is wrong after all, and go on with the rest of the text."""
        found = self._decode(call)
        if found is None:
            self._give_back(call)
            return
        if call.num_sent is None:
            name, arguments = found
            self._begin(call, name, arguments)
        self._call = None
        self._pending = rest
        self._num_calls += 1

    def _decode(self, call: _Call) -> tuple[str, str] | None:
        """Return the name and the arguments of a whole call, or None if it is not right."""
        text = call.json.text[: call.json.end]
        try:
            whole = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            # Without tags an object is the arguments alone, unless it names the tool.
            is_named = whole.keys() == {"name", "arguments"} and bytes(whole["name"]).decode() == f'"{self._only_tool}"'
            if not (call.opening or is_named):
                name, arguments = self._only_tool or "", text.strip()
            else:
                decoded = msgspec.json.decode(text, type=_CallObject)
                name, arguments = decoded.name, bytes(decoded.arguments).decode()
            # What msgspec takes as Raw it does not look into.
            msgspec.json.decode(arguments, type=dict)
        except (msgspec.DecodeError, RecursionError):
            return None
        return name, arguments

    def _give_back(self, call: _Call) -> None:
        """Take what looked like a call as text; another call may begin inside."""
        self._call = None
        if call.num_sent is None:
            self._parsed.content += call.opening
            self._pending = call.json.text
        else:
            self._is_cut = True
            self._num_calls += 1
            self._pending = call.json.text[call.num_sent :]

    def _end(self, call: _Call, reason: FinishReason) -> None:
        """Close a call after which there is no more text."""
        if call.json.end is not None:
            # Only the closing tag is missing, or a part of it.
            self._complete(call, "")
            return
        if reason == "stop" and call.num_sent is None and not self._is_constrained:
            self._give_back(call)
            return
        self._is_cut = True
        self._call = None
        self._pass_on(call)
        if call.num_sent is None and not call.opening:
            self._begin(call, self._only_tool or "", call.json.text.lstrip())
        self._num_calls += call.num_sent is not None

    def _pass_on(self, call: _Call) -> None:
        """Tell of the arguments so far, once the call's name is known."""
        text = call.json.text
        if call.num_sent is None:
            header = _HEADER.match(text)
            if header is None:
                return
            self._begin(call, header[1], "")
            call.num_sent = header.end()
        end = len(text) if call.json.first_value_end is None else call.json.first_value_end
        if call.num_sent < end:
            self._add(CallDelta(self._num_calls, text[call.num_sent : end]))
            call.num_sent = end

    def _begin(self, call: _Call, name: str, arguments: str) -> None:
        self._add(CallDelta(self._num_calls, arguments, id=f"call_{uuid.uuid4().hex[:24]}", name=name))
        call.num_sent = len(call.json.text)

    def _add(self, delta: CallDelta) -> None:
        calls = self._parsed.calls
        if calls and calls[-1].index == delta.index:
            calls[-1].arguments += delta.arguments
        else:
            calls.append(delta)


def _num_safe(text: str) -> int:
    """Return how much of the text is content, whatever follows: not white space or a part of a tag at its end."""
    num_safe = len(text)
    for length in range(min(len(CALL_BEGIN) - 1, len(text)), 0, -1):
        if text.endswith(CALL_BEGIN[:length]):
            num_safe -= length
            break
    return len(text[:num_safe].rstrip())
