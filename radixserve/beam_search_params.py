"""How a request wants beam search to run: values, checked once when they are made."""

from functools import cache
from typing import Any, Literal, get_type_hints

import msgspec

from radixserve.errors import InvalidRequest
from radixserve.sampling_params import MAX_INTEGER, SamplingParams, check_integer, check_number, check_types

MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 100.0


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="beam_search"):
    """Settings of one beam search. Raises InvalidRequest, with the field as param, for a value out of range.

    beam_width: live hypotheses; 1 is greedy decoding. n: how many of the best are returned; None means beam_width.
    A hypothesis scores cumulative_logprob / generated_length ** length_penalty; an end token counts in the length.
    early_stopping: True ends with the beam_width-th finished hypothesis, False when no live one is expected to do
    better, "never" when none can.
    The rest is as in SamplingParams; biases and penalties change log-probabilities, which are not normalised again.
    Source: the semantics are those of transformers' generate(num_beams=beam_width, do_sample=False).
    """

    beam_width: int
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        check_types(self, _field_types())
        check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if self.n is not None and not 1 <= self.n <= self.beam_width:
            raise InvalidRequest(
                f"n is {self.n}; a beam search of beam_width {self.beam_width} returns 1 to {self.beam_width}",
                param="n",
            )
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, MAX_INTEGER)
        check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        self.sampling_params()

    @property
    def num_returned(self) -> int:
        """How many hypotheses the caller gets."""
        return self.beam_width if self.n is None else self.n

    def sampling_params(self) -> SamplingParams:
        """Return what applies to each beam as to any sequence: lengths, stops, biases and penalties."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )


@cache
def _field_types() -> dict[str, Any]:
    return get_type_hints(BeamSearchParams)
