"""Conversations to token ids, so that only the chat template writes special tokens.

A special token's string inside a message must stay text: otherwise a user could close their own turn. Two renamings
see to that. In the messages, each such string is replaced by a stand-in while the template runs. In a second copy of
the tokenizer, each special token has a private name that nobody can type; the strings that the template wrote are
renamed to it, then the stand-ins turn back into what the user wrote. One call encodes the result, so everything else
(normalisation at special tokens, spaces they swallow) is as the tokenizer would do it.
"""

import re
import secrets
from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec
import tokenizers

from radixserve.errors import InvalidRequest
from radixserve.tokenizer.chat_template import ChatTemplate


class ChatEncoder:
    """Renders and encodes the conversations of one model.

    templates: at least "default"; "tool_use", if there, serves the requests that bring tools.
    special_tokens: what templates may read, by name.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, templates: dict[str, ChatTemplate], special_tokens: dict[str, str]
    ) -> None:
        self._backend = backend
        self._templates = templates
        self._special_tokens = special_tokens
        contents = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
        self._stand_ins = _StandIns(contents)
        # Secret, unlike the stand-ins, which a template may show in an error message.
        self._private_names = {content: f"<{secrets.token_hex(16)}>" for content in contents}
        self._template_tokens = _any_of(contents)

    def encode(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
    ) -> list[int]:
        """Return the token ids of a conversation. Raises InvalidRequest if the template cannot render it."""
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt contradict each other; set one of them to false",
                param="continue_final_message",
            )
        protected = self._stand_ins.put(messages)
        end = _random_digits()
        if continue_final_message:
            _check_final_message(messages)
            protected[-1]["content"] += end + " "
        variables = {
            **self._special_tokens,
            **self._stand_ins.put(template_kwargs),
            "messages": protected,
            "tools": self._stand_ins.put(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._templates["default"]
        if tools is not None:
            template = self._templates.get("tool_use", template)
        try:
            rendered = template.render(variables)
        except InvalidRequest as error:
            raise InvalidRequest(self._stand_ins.restore(error.message), param=error.param) from error
        if continue_final_message:
            rendered = _cut(rendered, end)
        renamed = self._template_tokens.sub(lambda match: self._private_names[match[0]], rendered)
        return self._private_backend.encode_batch_fast([self._stand_ins.restore(renamed)], add_special_tokens=False)[
            0
        ].ids

    @cached_property
    def _private_backend(self) -> tokenizers.Tokenizer:
        """The tokenizer with its special tokens under their private names. The engine process never needs it."""
        spec = msgspec.json.decode(self._backend.to_str())
        for token in spec["added_tokens"]:
            token["content"] = self._private_names.get(token["content"], token["content"])
        # In the model too, whose merges could otherwise arrive at a special token.
        vocabulary = spec["model"]["vocab"]
        if isinstance(vocabulary, dict):
            spec["model"]["vocab"] = {self._private_names.get(token, token): i for token, i in vocabulary.items()}
        else:
            spec["model"]["vocab"] = [[self._private_names.get(token, token), score] for token, score in vocabulary]
        if (unknown := spec["model"].get("unk_token")) is not None:
            spec["model"]["unk_token"] = self._private_names.get(unknown, unknown)
        spec["post_processor"] = None
        return tokenizers.Tokenizer.from_str(msgspec.json.encode(spec).decode())


class _StandIns:
    """Exchanges special-token strings in a caller's text for digits, and back.

    Digits pass unchanged through what templates do to content: trim, case, JSON. The beginning of a special token at
    the end of a string is exchanged too, as the template might join it to a string that holds the rest.
    """

    def __init__(self, contents: list[str]) -> None:
        # Words are left alone: "user" may well end as some special word begins, and templates compare it.
        joinable = [content for content in contents if not content[0].isalnum() and not content[0].isspace()]
        self._prefixes = {content[:length] for content in joinable for length in range(1, len(content))}
        self._max_prefix_length = max(map(len, self._prefixes), default=0)
        self._whole = _any_of(contents)
        self._originals = [*contents, *self._prefixes.difference(contents)]
        self._number = {original: i for i, original in enumerate(self._originals)}
        self._mark = _random_digits()
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


def _random_digits() -> str:
    return "".join(secrets.choice("0123456789") for _ in range(20))


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
