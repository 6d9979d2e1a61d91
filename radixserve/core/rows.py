"""The row of a batch that computes a sequence's next tokens, and what it draws."""

from array import array

from radixserve.core.batch import SampleSlot, ScheduledRow
from radixserve.core.sequence import Sequence
from radixserve.core.units import num_answers_drawn


def row_of(sequence: Sequence, num_tokens: int, end_token_ids: frozenset[int]) -> ScheduledRow:
    """Return the row of a sequence's next num_tokens tokens; it draws if these are the last that lack K/V."""
    start = sequence.num_computed_tokens
    end = start + num_tokens
    scores = sequence.request.prompt_scores
    return ScheduledRow(
        token_ids=sequence.token_ids[start:end],
        num_computed_tokens=start,
        block_table=sequence.block_table,
        samples=_sample_slots(sequence, end_token_ids) if end == sequence.num_tokens else (),
        num_prompt_logprobs=scores.num_alternatives if scores is not None else 0,
        prompt_targets=scores.targets(sequence.token_ids, start, end) if scores is not None else array("i"),
    )


def _sample_slots(sequence: Sequence, end_token_ids: frozenset[int]) -> tuple[SampleSlot, ...]:
    request = sequence.request
    if request.params.max_tokens == 0:
        return ()
    first = sequence.choice_index
    constraint = sequence.constraint
    allowed_tokens = request.allowed_tokens if constraint is None else constraint.allowed_tokens()
    return tuple(
        SampleSlot(
            params=request.params,
            seed=request.seed,
            choice_index=choice_index,
            token_ids=sequence.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            suppressed_token_ids=(*_suppressed_ends(sequence, end_token_ids), *sequence.banned_token_ids),
            allowed_tokens=allowed_tokens,
            num_candidates=0 if request.beam is None else request.beam.num_candidates,
        )
        for choice_index in range(first, first + num_answers_drawn(sequence))
    )


def _suppressed_ends(sequence: Sequence, end_token_ids: frozenset[int]) -> tuple[int, ...]:
    """Return the end and stop tokens that may not come next."""
    params = sequence.request.params
    is_early = sequence.num_output_tokens < params.min_tokens
    # A constrained text is over at its end token, so to go on beyond it means not to draw it.
    ends_are_suppressed = sequence.constraint is not None if params.ignore_eos else is_early
    return (
        *(sorted(end_token_ids) if ends_are_suppressed else ()),
        *(params.stop_token_ids if is_early else ()),
    )
