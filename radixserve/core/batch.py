"""What one step computes: the scheduler fills a ScheduledBatch, an executor answers with SampledTokens.

Plain integers and packed arrays, so that a batch can be sent to another process as it is.
"""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from radixserve.core.block_store import BlockBytes
from radixserve.protocol import TokenLogprobs
from radixserve.sampling_params import SamplingParams


class BlockLoads(NamedTuple):
    """Copy blocks[i] into block block_ids[i], in every layer. No block is written twice.

    blocks: [n, block_bytes]. Of a block, the first layer's keys come first, then its values, the next layer's keys, and
    so on, each as the pool has them.
    """

    block_ids: "array[int]"
    blocks: BlockBytes


class BlockCopy(NamedTuple):
    """Copy one whole block, in every layer. All sources of a batch are read before any destination is written."""

    source: int
    destination: int


@dataclass(slots=True, frozen=True)
class SampleSlot:
    """One token to draw from the logits of a row's last token.

    choice_index, num_output_tokens: with the seed, all that the draw depends on.
    token_ids: the sequence so far, prompt then output, read only during the step; the penalties look at it.
    suppressed_token_ids: may not be drawn (end and stop tokens before min_tokens, ends of bad words), unless no other
    is allowed.
    allowed_tokens: see TokenConstraint.allowed_tokens; None allows all.
    num_candidates: above 0, a beam asks for its so many best next tokens instead of a draw.
    """

    params: SamplingParams
    seed: int
    choice_index: int
    token_ids: "array[int]"
    num_prompt_tokens: int
    suppressed_token_ids: tuple[int, ...] = ()
    allowed_tokens: bytes | None = None
    num_candidates: int = 0

    @property
    def num_output_tokens(self) -> int:
        """How many tokens of the answer there are before this draw."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(slots=True, frozen=True)
class ScheduledRow:
    """The tokens of one sequence that this step computes.

    token_ids: [num_tokens], at positions num_computed_tokens onwards; all before them have K/V in block_table.
    block_table: block ids, position p in block_table[p // block_size]; covers every position of the row.
    samples: empty while the prompt is still being computed; several when answers of one prompt start together.
    prompt_targets: the logits of the row's token i are to score prompt_targets[i], the prompt's token behind it, with
    num_prompt_logprobs alternatives; fewer than token_ids where the row reaches the prompt's end.
    """

    token_ids: "array[int]"
    num_computed_tokens: int
    block_table: "array[int]"
    samples: tuple[SampleSlot, ...] = ()
    num_prompt_logprobs: int = 0
    prompt_targets: "array[int]" = field(default_factory=lambda: array("i"))


@dataclass(slots=True, frozen=True)
class ScheduledBatch:
    """One step's work: spills are copied out of the pool, then loads into it, then copies run, then the rows.

    spills: ids of blocks, all different. A loaded block is the source of no copy.
    """

    rows: list[ScheduledRow] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    spills: "array[int]" = field(default_factory=lambda: array("i"))
    loads: BlockLoads | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.rows or self.copies or self.spills or self.loads)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(slots=True, frozen=True)
class SampledTokens:
    """What an executor made of a batch: one entry for each SampleSlot, rows in order, slots in order.

    logprobs[i] is None unless asked for. is_finite[j], one entry for each *row*, without samples too, is False when
    the logits of its last token, or some that score its prompt, held a NaN or an infinity: the row's tokens mean
    nothing, and the K/V that it wrote in this step have been zeroed.
    prompt_logprobs: for the index of each finite row with prompt_targets, an entry a target.
    candidates[i] is None for a draw, and for a beam its best next tokens, as (id, log-probability after the
    processors), best first and the lower id first among equals; then token_ids[i] means nothing. Empty: no beams.
    spilled: the batch's spills, in their order and packed as BlockLoads are, if it has any.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    is_finite: list[bool]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    candidates: list[list[tuple[int, float]] | None] = field(default_factory=list)
    spilled: BlockBytes | None = None
