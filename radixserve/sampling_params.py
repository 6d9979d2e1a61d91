"""How a request wants its tokens chosen: values, checked once when they are made."""

import math
from functools import cache
from typing import Any, get_type_hints

import msgspec

from radixserve.errors import InvalidRequest
from radixserve.grammar import Grammar

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
# The largest number that a message to the engine process holds.
MAX_INTEGER = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="sampling"):
    """Sampling settings of one request. Raises InvalidRequest, with the field as param, for a value out of range.

    n: independent answers to the one prompt. max_tokens: None means until the model ends or the context is full; 0
    computes the prompt and ends.
    temperature 0 is greedy. top_k 0 or -1, top_p 1, min_p 0, the penalties' neutral values: off.
    seed: None draws a fresh one. A token depends only on the logits and (seed, index of the answer, position), so a
    seeded request repeats in any batch.
    logprobs: None for none, else how many alternatives a token reports beside its own (0 for the token alone), read
    from the logits before any of these settings is applied. prompt_logprobs: the same for each token of the prompt but
    the first; the whole prompt is then computed, whatever of it is cached.
    stop: strings that end the answer and are cut from it, unless include_stop_str_in_output.
    allowed_token_ids: no other token is drawn; an end token has to be among them for the model to end the answer.
    bad_words: the answer contains none of them as the tokenizer writes them, alone or behind a space; written with
    other tokens they are not found.
    min_tokens: before so many tokens neither an end token, a stop id nor a stop string ends the answer.
    grammar: the answer's text must belong to it. One that can only end is finished, before min_tokens too.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        check_types(self, _field_types())
        check_integer("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 0, MAX_INTEGER)
        check_integer("min_tokens", self.min_tokens, 0, MAX_INTEGER if self.max_tokens is None else self.max_tokens)
        check_number("temperature", self.temperature, 0.0, 2.0)
        check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be above 0; for greedy decoding send temperature 0", param="top_p")
        check_integer("top_k", self.top_k, -1, MAX_INTEGER)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 10.0)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty must be above 0; 1 means off", param="repetition_penalty")
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens", param="logit_bias")
        for bias in self.logit_bias.values():
            check_number("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            check_integer("seed", self.seed, -MAX_INTEGER - 1, MAX_INTEGER)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings", param="stop")
        if not all(self.stop):
            raise InvalidRequest("stop holds an empty string, which would end every answer at once", param="stop")
        if any(len(string) > MAX_STOP_STRING_LENGTH for string in self.stop):
            raise InvalidRequest(f"a stop string has at most {MAX_STOP_STRING_LENGTH} characters", param="stop")
        self._check_token_limits()
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)

    def _check_token_limits(self) -> None:
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids is empty, so nothing could be drawn", param="allowed_token_ids")
            check_integer("allowed_token_ids", min(self.allowed_token_ids), 0, MAX_INTEGER)
            if self.grammar is not None:
                raise InvalidRequest(
                    "allowed_token_ids cannot be combined with an output format or tools that must be called",
                    param="allowed_token_ids",
                )
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"bad_words takes at most {MAX_BAD_WORDS} words", param="bad_words")
        if not all(1 <= len(word.strip()) <= MAX_STOP_STRING_LENGTH for word in self.bad_words):
            raise InvalidRequest(
                f"a bad word has 1 to {MAX_STOP_STRING_LENGTH} characters, white space around it not counted; "
                "tokens of white space alone can be kept out by logit_bias",
                param="bad_words",
            )

    @property
    def num_returned(self) -> int:
        """How many answers the caller gets."""
        return self.n

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken at each step."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@cache
def _field_types() -> dict[str, Any]:
    return get_type_hints(SamplingParams)


def check_types(params: msgspec.Struct, field_types: dict[str, Any]) -> None:
    """Check what annotations only promise, and turn lists into tuples. Raises InvalidRequest, the field as param."""
    for name, kind in field_types.items():
        value = getattr(params, name)
        try:
            converted = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{name} is {value!r:.200}: {error}", param=name) from None
        if converted is not value:
            msgspec.structs.force_setattr(params, name, converted)


def check_integer(name: str, value: int, low: int, high: int) -> None:
    """Raise InvalidRequest with the field as param unless low <= value <= high."""
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be from {low} to {high}", param=name)


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Raise InvalidRequest with the field as param unless value is finite and low <= value <= high."""
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be from {low:g} to {high:g}", param=name)
