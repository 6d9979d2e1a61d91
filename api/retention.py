"""How long a request asks to keep its prompt in the cache: up to marks on content parts, or all of it."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from radixserve.api.requests import GenerationRequest
from radixserve.config import parse_seconds
from radixserve.errors import ConfigError, InvalidRequest
from radixserve.protocol import PinAt
from radixserve.tokenizer.digit_marks import TextEnd
from radixserve.tokenizer.messages import Message, cache_marks, refuse_marked_parts

# Seconds.
MIN_TTL = 1.0
MAX_TTL = 24 * 3600.0

# Anthropic refuses more, OpenAI takes the latest of more.
MAX_MARKS = 4

Shape = TypeVar("Shape", bound=msgspec.Struct)


class _CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Breakpoint(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class _CacheOptions(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


_ALLOWED = {
    _CacheControl: '{"type": "ephemeral"}, with a ttl of "5m" (meant without one) or "1h"',
    _Breakpoint: '{"mode": "explicit"}, with a ttl of "30m" or "12h" or none',
    _CacheOptions: 'an object with a mode, "implicit" (meant without one) or "explicit", and a ttl, "30m" or "12h"',
}


@dataclass(frozen=True, slots=True)
class Retention:
    """What of a prompt to keep.

    parts: places in its messages, in their order, each with the seconds to keep the prompt up to there.
    whole: the seconds to keep all of it; 0 if that is not asked for.
    """

    parts: Sequence[tuple[TextEnd, float]] = ()
    whole: float = 0.0

    @property
    def ends(self) -> list[TextEnd]:
        """The places without their times."""
        return [end for end, _ in self.parts]

    def pins(self, num_tokens: int, end_positions: Sequence[int] = ()) -> list[PinAt]:
        """Return pins, under new names, for a prompt of num_tokens tokens.

        end_positions: how many of its tokens each part, with all before it, has.
        """
        ttls = {num_tokens: self.whole}
        for position, (_, ttl) in zip(end_positions, self.parts, strict=True):
            ttls[position] = max(ttl, ttls.get(position, 0.0))
        # A part may end inside the prompt's first token.
        return [new_pin(position, ttl) for position, ttl in sorted(ttls.items()) if position and ttl]


def new_pin(num_tokens: int, ttl: float) -> PinAt:
    """Return a pin of a prompt's first num_tokens tokens, under a name that nobody else has."""
    return PinAt(uuid.uuid4().hex, num_tokens, ttl)


def read_ttl(value: float | str) -> float:
    """Return seconds, given as a number of them or as in "30s", "5m" or "24h". Raises InvalidRequest."""
    if isinstance(value, str):
        try:
            value = parse_seconds(value)
        except ConfigError as error:
            raise InvalidRequest(f"ttl: {error}", param="ttl") from None
    if not MIN_TTL <= value <= MAX_TTL:
        raise InvalidRequest(f"ttl is {value:g} seconds; it must be from 1 second to 24 hours", param="ttl")
    return float(value)


def read_retention(
    request: GenerationRequest, messages: Sequence[Message] = (), *, has_prefix_cache: bool, is_beam_search: bool
) -> Retention:
    """Return what a request asks to keep of its messages, or of each of its prompts.

    Raises InvalidRequest for values that no client documents, and where what is asked for cannot be kept.
    """
    options = None
    if request.prompt_cache_options is not None:
        options = _convert(request.prompt_cache_options, _CacheOptions, "prompt_cache_options")
    default_ttl = read_ttl("30m" if options is None or options.ttl is None else options.ttl)
    whole = _retention_ttl(request.prompt_cache_retention)
    if options is not None and options.mode != "explicit":
        whole = max(whole, default_ttl)
    parts = _marked_parts(messages, default_ttl)
    if not has_prefix_cache:
        refuse_marked_parts(messages, "on this server, which runs with --no-prefix-cache")
        if whole:
            name = "prompt_cache_retention" if request.prompt_cache_retention == "24h" else "prompt_cache_options"
            raise InvalidRequest(
                f"{name} asks to keep the prompt, and this server runs with --no-prefix-cache; leave it out", param=name
            )
    if is_beam_search:
        refuse_marked_parts(messages, "together with beam search")
    if request.truncate_prompt_tokens is not None:
        refuse_marked_parts(messages, "together with truncate_prompt_tokens, which cuts off what it would keep")
    return Retention(parts, whole)


def _marked_parts(messages: Sequence[Message], breakpoint_ttl: float) -> list[tuple[TextEnd, float]]:
    """Return the marked places. breakpoint_ttl: of OpenAI's marks that name no time; the latest MAX_MARKS count."""
    marks = list(cache_marks(messages))
    controls = [mark for mark in marks if mark.name == "cache_control"]
    if len(controls) > MAX_MARKS:
        raise InvalidRequest(
            f"{controls[MAX_MARKS].path} is one too many: up to {MAX_MARKS} parts may have cache_control, each of "
            "which keeps all that stands before it",
            param="messages",
        )
    breakpoints = {mark.end for mark in marks if mark.name != "cache_control"}
    latest = set(sorted(breakpoints)[-MAX_MARKS:])
    ttls: dict[TextEnd, float] = {}
    for mark in marks:
        if mark.name == "cache_control":
            ttl = read_ttl(_convert(mark.value, _CacheControl, mark.path, "messages").ttl or "5m")
        else:
            given = _convert(mark.value, _Breakpoint, mark.path, "messages").ttl
            ttl = breakpoint_ttl if given is None else read_ttl(given)
        if mark.name == "cache_control" or mark.end in latest:
            ttls[mark.end] = max(ttl, ttls.get(mark.end, 0.0))
    return list(ttls.items())


def _retention_ttl(value: str | None) -> float:
    if value in (None, "in_memory", "in-memory"):
        return 0.0
    if value != "24h":
        raise InvalidRequest(
            f'prompt_cache_retention is {value!r:.100}; it must be "in_memory", or "24h" to keep the prompt so long',
            param="prompt_cache_retention",
        )
    return read_ttl(value)


def _convert(value: Any, shape: type[Shape], path: str, param: str | None = None) -> Shape:
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError:
        raise InvalidRequest(f"{path} must be {_ALLOWED[shape]}; it is {value!r:.100}", param=param or path) from None
