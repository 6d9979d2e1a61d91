"""Conversations to token ids, so that only the chat template writes control tokens.

The string of a control token (a special one, or one that looks like <|this|>) inside a message must stay text:
otherwise a user could close their own turn. Two renamings see to that. In the messages, each such string is replaced
by a stand-in while the template runs. In a second copy of the tokenizer, each control token has a private name that
nobody can type; the strings that the template wrote are renamed to it, then the stand-ins turn back into what the user
wrote. One call encodes the result, so all else, such as spaces that a token swallows, is as the tokenizer has it.
"""

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import tokenizers

from radixserve.errors import InvalidRequest
from radixserve.tokenizer.answer_turns import AnswerLookup, Piece, find_opening, split_at_answers
from radixserve.tokenizer.chat_template import ChatTemplate
from radixserve.tokenizer.digit_marks import TextEnd, put_marks, random_digits, texts_before
from radixserve.tokenizer.encoded_chat import EncodedChat, encode_and_locate, encode_pieces
from radixserve.tokenizer.hermes import add_tools, is_hermes, with_call_objects, with_calls_as_text

# Some models do not mark their turn borders as special. Others, such as <think>, belong in an assistant's message.
_CONTROL_SHAPE = re.compile(r"<[|\uff5c].+[|\uff5c]>")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt; see Tokenizer.encode_chat. template_kwargs: variables of the template."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]


class ChatEncoder:
    """Renders and encodes the conversations of one model.

    templates: at least "default"; "tool_use", if there, serves the requests that bring tools.
    special_tokens: what templates may read, by name. control_token_ids: the tokens that only a template writes.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, templates: dict[str, ChatTemplate], special_tokens: dict[str, str]
    ) -> None:
        self._backend = backend
        self._templates = templates
        self._special_tokens = special_tokens
        control_tokens = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special or _CONTROL_SHAPE.fullmatch(token.content)
        }
        self.control_token_ids = frozenset(control_tokens)
        contents = list(control_tokens.values())
        self._stand_ins = _StandIns(contents)
        # Secret, unlike the stand-ins, which a template may show in an error message.
        self._private_names = {content: f"<{secrets.token_hex(16)}>" for content in contents}
        self._control_tokens = _any_of(contents)

    def encode(
        self,
        messages: list[dict[str, Any]],
        options: ChatOptions,
        answers: AnswerLookup | None = None,
        ends: Sequence[TextEnd] = (),
    ) -> EncodedChat:
        """Return the token ids of a conversation. Raises InvalidRequest if the template cannot render it.

        answers: finds the ids to use for an assistant's turn that is exactly an earlier answer.
        ends: places in the messages, in their order, to find in the prompt; InvalidRequest if the template drops one.
        """
        if options.continue_final_message and options.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt contradict each other; set one of them to false",
                param="continue_final_message",
            )
        if options.continue_final_message:
            _check_final_message(messages)
        template = self._template(options.tools is not None)
        final_mark = random_digits() if options.continue_final_message else None
        variables = self._variables(template, messages, options, final_mark)
        text = self._render(template, variables)
        opening = None if answers is None else self._opening(template, variables, text)
        if final_mark is not None:
            text = _cut(text, final_mark)
        pieces = [Piece(text)]
        if answers is not None and opening is not None:
            pieces = split_at_answers(
                text, opening, self._control_tokens, lambda turn: answers(self._stand_ins.restore(turn))
            )
        pieces = [Piece(self._finish(piece.text), piece.token_ids) for piece in pieces]
        if not ends:
            return encode_pieces(self._private_backend, pieces)
        marks = [random_digits() for _ in ends]
        marked = self._render(
            template, self._variables(template, put_marks(messages, ends, marks), options, final_mark)
        )
        befores = [self._finish(before) for before in texts_before(marked, ends, marks)]
        return encode_and_locate(self._private_backend, pieces, befores)

    def _variables(
        self, template: ChatTemplate, messages: list[dict[str, Any]], options: ChatOptions, final_mark: str | None
    ) -> dict[str, Any]:
        """Return what the template reads, all strings of the caller protected.

        final_mark: put behind the last message's content, with one space more.
        """
        if template.reads_tool_calls:
            messages = with_call_objects(messages)
        variables = self._protect(
            options.template_kwargs
            | {
                "messages": messages,
                "tools": options.tools,
                "add_generation_prompt": options.add_generation_prompt,
            }
        )
        # After the protection: this is the template's part, and may write control tokens.
        if not template.reads_tool_calls:
            variables["messages"] = with_calls_as_text(variables["messages"])
        if options.tools is not None and not template.reads_tools:
            variables["messages"] = add_tools(variables["messages"], variables["tools"])
        if final_mark is not None:
            variables["messages"][-1]["content"] += f"{final_mark} "
        return variables

    def _render(self, template: ChatTemplate, variables: dict[str, Any]) -> str:
        """Return a conversation whose control-token strings are the template's own."""
        try:
            return template.render(self._special_tokens | variables)
        except InvalidRequest as error:
            raise InvalidRequest(self._stand_ins.restore(error.message), param=error.param) from error

    def _opening(self, template: ChatTemplate, variables: dict[str, Any], rendered: str) -> str | None:
        """Return what opens the assistant's turns in a rendered conversation; None if it has none, or nothing does."""
        if not any(message.get("role") == "assistant" for message in variables["messages"]):
            return None
        is_open = variables["add_generation_prompt"]
        try:
            other = self._render(template, variables | {"add_generation_prompt": not is_open})
        except InvalidRequest:
            return None  # a template may refuse a generation prompt, or its absence, after certain messages
        return find_opening(*((rendered, other) if is_open else (other, rendered)), self._control_tokens)

    def _finish(self, rendered: str) -> str:
        """Return a rendered text as it is encoded: its control tokens by private names, the caller's as was written."""
        return self._stand_ins.restore(self._control_tokens.sub(lambda match: self._private_names[match[0]], rendered))

    @property
    def asks_for_hermes_calls(self) -> bool:
        """Whether prompts with tools show the model the hermes format: by the template, or else added to ChatML's."""
        template = self._template(has_tools=True)
        return is_hermes(template.source) if template.reads_tools else "<|im_start|>" in template.source

    def _template(self, has_tools: bool) -> ChatTemplate:
        default = self._templates["default"]
        return self._templates.get("tool_use", default) if has_tools else default

    def _protect(self, variables: dict[str, Any]) -> dict[str, Any]:
        try:
            return {name: self._stand_ins.put(value) for name, value in variables.items()}
        except RecursionError as error:
            raise InvalidRequest("messages or tools are nested too deeply", param="messages") from error

    @cached_property
    def _private_backend(self) -> tokenizers.Tokenizer:
        """The tokenizer with its control tokens under their private names. The engine process never needs it."""
        names = self._private_names
        spec = msgspec.json.decode(self._backend.to_str())
        for token in spec["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        # In the model too, whose merges could otherwise arrive at a control token.
        model = spec["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
            model["merges"] = [pair for pair in model["merges"] if names.keys().isdisjoint([*pair, "".join(pair)])]
        else:
            model["vocab"] = [(names.get(token, token), score) for token, score in model["vocab"]]
        if "unk_token" in model:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        spec["post_processor"] = None
        return tokenizers.Tokenizer.from_str(msgspec.json.encode(spec).decode())


class _StandIns:
    """Exchanges control-token strings in a caller's text for digits, and back.

    The beginning of a control token at the end of a string is exchanged too, as the template might join it to a string
    that holds the rest.
    """

    def __init__(self, contents: list[str]) -> None:
        # Words are left alone: "user" may well end as some special word begins, and templates compare it.
        joinable = [content for content in contents if not content[0].isalnum() and not content[0].isspace()]
        self._prefixes = {content[:length] for content in joinable for length in range(1, len(content))}
        self._max_prefix_length = max(map(len, self._prefixes), default=0)
        self._whole = _any_of(contents)
        self._originals = [*contents, *self._prefixes.difference(contents)]
        self._number = {original: i for i, original in enumerate(self._originals)}
        self._mark = random_digits()
        self._pattern = re.compile(f"{self._mark}(\\d{{6}})")

    def put(self, value: Any) -> Any:
        """Return value (JSON types) with stand-ins in its strings, keys included; the rest is copied as it is."""
        return _map_strings(value, self._put)

    def restore(self, text: str) -> str:
        """Return text with what the stand-ins stand for."""
        return self._pattern.sub(lambda match: self._originals[int(match[1])], text)

    def _put(self, text: str) -> str:
        text = self._whole.sub(lambda match: self._stand_in(match[0]), text)
        for length in range(min(self._max_prefix_length, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return text[:-length] + self._stand_in(text[-length:])
        return text

    def _stand_in(self, original: str) -> str:
        return f"{self._mark}{self._number[original]:06}"


def _map_strings(value: Any, function: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {function(key): _map_strings(item, function) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, function) for item in value]
    return value


def _any_of(contents: list[str]) -> re.Pattern[str]:
    """Match any of these strings, the longest where several begin; nothing at all if there are none."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _check_final_message(messages: list[dict[str, Any]]) -> None:
    final = messages[-1] if messages else {}
    if final.get("role") != "assistant" or not isinstance(final.get("content"), str):
        raise InvalidRequest(
            "continue_final_message needs a last message of role assistant with text content",
            param="continue_final_message",
        )


def _cut(rendered: str, end: str) -> str:
    """Return what stands before the mark `end`, which was put after the last message's content with one space more.

    Where the template trims content, and so that space, the content's own spaces go too, as transformers has it.
    """
    before, mark, after = rendered.rpartition(end)
    if not mark:
        raise InvalidRequest(
            "continue_final_message: the chat template does not show the end of the last message, so it cannot go on",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()
