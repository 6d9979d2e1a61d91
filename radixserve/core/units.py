"""What the scheduler moves as one: a sequence by itself, or all beams of a group.

Beams of a group run, wait and give up their blocks together, so any one of them stands for all.
"""

from collections.abc import Iterable

from radixserve.core.beam_members import count_blocks, num_blocks_wanted
from radixserve.core.sequence import Sequence


def unit_of(sequence: Sequence) -> list[Sequence]:
    """Return the sequences that this one stands for, itself among them."""
    return [sequence] if sequence.request.beam is None else sequence.request.sequences


def one_of_each(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Return sequences, of each beam group only one."""
    by_unit = {sequence.request if sequence.request.beam else sequence: sequence for sequence in sequences}
    return list(by_unit.values())


def is_generating_beam(sequence: Sequence) -> bool:
    """Whether it is a beam whose group has chosen its first tokens; before, a group is one plain sequence."""
    return sequence.request.beam is not None and sequence.num_output_tokens > 0


def num_answers_drawn(sequence: Sequence) -> int:
    """Answers that it draws a token for: all of its request until its prompt is computed, then its own."""
    request = sequence.request
    return request.params.n if len(request.sequences) == 1 and sequence.num_output_tokens == 0 else 1


def num_reserved_places(sequence: Sequence) -> int:
    """Places of max_num_seqs that its unit takes: all that it may come to need."""
    return num_answers_drawn(sequence) if sequence.request.beam is None else sequence.request.beam.width


def num_uncomputed_tokens(sequence: Sequence) -> int:
    """Tokens of its unit that have no K/V."""
    return sum(member.num_uncomputed_tokens for member in unit_of(sequence))


def is_behind(sequence: Sequence) -> bool:
    """Whether its unit has more to compute than last tokens."""
    return any(member.num_uncomputed_tokens > 1 for member in unit_of(sequence))


def num_blocks_for(sequence: Sequence, block_size: int) -> int:
    """Blocks that hold all tokens of its unit."""
    if sequence.request.beam is not None:
        return num_blocks_wanted(sequence.request, block_size)
    return -(-sequence.num_tokens // block_size)


def num_blocks_held(sequence: Sequence, block_size: int) -> int:
    """Blocks that its unit has."""
    if sequence.request.beam is not None:
        return count_blocks(sequence.request.sequences, block_size)[0]
    return len(sequence.block_table)
