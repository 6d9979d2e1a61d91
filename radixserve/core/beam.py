"""Beam search: which continuations of the live hypotheses stay, which are finished, and when the search is over.

Each live beam brings its best next tokens. All of them in one order, by summed log-probability:

    the first beam_width    those that end are finished hypotheses, ranked by their score with the length penalty
    those that do not end   the best beam_width of them are the next live beams

So a hypothesis that ends never takes the place of a live one. Source: transformers 5, GenerationMixin._beam_search,
whose results these are; it looks at max(2, 1 + end tokens) * beam_width continuations, which is enough for both.
"""

import heapq
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol, Self

from radixserve.beam_search_params import BeamSearchParams
from radixserve.protocol import BeamMemory, FinishReason

# Beyond e to this power a length penalty would leave the range of float64 for the sums that occur.
_MAX_EXPONENT = 600.0


class StopText(Protocol):
    """Follows the text of one hypothesis and notices a stop string in it."""

    stopped_by: str | None

    def push(self, token_ids: list[int]) -> str:
        """Take the next tokens."""

    def fork(self) -> Self:
        """Return a follower in the same state that goes on by itself."""


@dataclass(slots=True, frozen=True)
class Hypothesis:
    """A finished answer. token_ids: all generated ones, also the end token or those of the stop string."""

    token_ids: "array[int]"
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: str | int | None


class Child(NamedTuple):
    """A live beam of the next step: which beam of this step it continues, and with which token."""

    parent: int
    token_id: int


class _Ending(NamedTuple):
    finish_reason: FinishReason
    stop_reason: str | int | None


class BeamGroup:
    """The hypotheses of one request. Knows tokens and numbers; its beams' K/V are those of the request's sequences.

    max_tokens: the most tokens a hypothesis may have. end_token_ids: the model's. text: follows the first token on,
    if there are stop strings.
    num_candidates: how many next tokens each beam has to bring. finished: best first, beam_width at most.
    """

    def __init__(
        self, params: BeamSearchParams, *, max_tokens: int, end_token_ids: frozenset[int], text: StopText | None = None
    ) -> None:
        self.params = params
        self.is_done = False
        self.finished: list[Hypothesis] = []
        self._max_tokens = max_tokens
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._end_token_ids = frozenset() if params.ignore_eos else end_token_ids
        self._sums = [0.0]
        self._texts = [text]
        self._peak_blocks = (0, 0)
        self._num_copied_blocks = 0
        # So many that beam_width of them do not end; and some more, for those that complete a stop string.
        width = params.beam_width
        self.num_candidates = max(2 * width, width + len(self._stop_token_ids | self._end_token_ids))

    @property
    def width(self) -> int:
        """Live beams, apart from the beginning, when there is one."""
        return self.params.beam_width

    @property
    def returned(self) -> list[Hypothesis]:
        """The hypotheses that the caller gets, best first."""
        return self.finished[: self.params.num_returned]

    def select(self, outputs: Sequence["array[int]"], candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Child]:
        """Take one step. Return the beams that live on, best first, and set is_done.

        outputs: the tokens generated so far by each live beam. candidates: for each of them its num_candidates best
        next tokens with their log-probabilities, best first. The beams returned are the live ones of the next call.
        """
        length = len(outputs[0]) + 1
        is_last = length == self._max_tokens
        children: list[Child] = []
        sums: list[float] = []
        texts: list[StopText | None] = []
        for rank, (total, beam, token_id) in enumerate(self._ranked(candidates, self.width if is_last else None)):
            text = self._extended_text(beam, token_id)
            ending = self._ending(token_id, text) or (_Ending("length", None) if is_last else None)
            if ending is None:
                children.append(Child(beam, token_id))
                sums.append(total)
                texts.append(text)
                if len(children) == self.width:
                    break
            elif rank < self.width:
                token_ids = outputs[beam] + array("i", [token_id])
                self.finished.append(Hypothesis(token_ids, total, self._score(total, length), *ending))
        # Stable: of equal scores the one that was finished first stays ahead.
        self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[: self.width]
        self._sums, self._texts = sums, texts
        self.is_done = not children or self._is_decided(length)
        return children

    def record_blocks(self, num_blocks: int, num_blocks_without_sharing: int) -> None:
        """Note what the beams hold in a step, and what they would hold on their own."""
        self._peak_blocks = max(self._peak_blocks, (num_blocks, num_blocks_without_sharing))

    def record_copy(self) -> None:
        """Note that a beam got its own copy of a block before it wrote into it."""
        self._num_copied_blocks += 1

    def memory(self, block_size: int) -> BeamMemory:
        """Return the figures of all steps so far."""
        return BeamMemory(block_size, *self._peak_blocks, self._num_copied_blocks)

    def _ranked(
        self, candidates: Sequence[Sequence[tuple[int, float]]], count: int | None
    ) -> Iterator[tuple[float, int, int]]:
        """Yield (sum of log-probabilities, beam, token id), best first; of equal ones the lower beam and id first."""
        sorted_keys = (
            [(-(total + logprob), beam, token_id) for token_id, logprob in best]
            for beam, (total, best) in enumerate(zip(self._sums, candidates, strict=True))
        )
        for negative, beam, token_id in islice(heapq.merge(*sorted_keys), count):
            yield -negative, beam, token_id

    def _extended_text(self, beam: int, token_id: int) -> StopText | None:
        text = self._texts[beam]
        if text is None or token_id in self._stop_token_ids or token_id in self._end_token_ids:
            return None
        text = text.fork()
        text.push([token_id])
        return text

    def _ending(self, token_id: int, text: StopText | None) -> _Ending | None:
        if token_id in self._stop_token_ids:
            return _Ending("stop", token_id)
        if token_id in self._end_token_ids:
            return _Ending("stop", None)
        if text is not None and text.stopped_by is not None:
            return _Ending("stop", text.stopped_by)
        return None

    def _is_decided(self, length: int) -> bool:
        """Whether the live beams, of so many tokens, are not waited for any longer."""
        if len(self.finished) < self.width:
            return False
        if self.params.early_stopping is True or self.width == 1:
            return True  # a single beam is greedy decoding, which ends with its first end
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            # Sums only fall, so with this penalty the longest answer is the one that could score best.
            length = self._max_tokens
        return self._score(self._sums[0], length) <= self.finished[-1].score

    def _score(self, total: float, length: int) -> float:
        exponent = -self.params.length_penalty * math.log(length)
        return total * math.exp(max(-_MAX_EXPONENT, min(exponent, _MAX_EXPONENT)))
