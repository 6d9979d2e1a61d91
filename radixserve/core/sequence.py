"""Requests and the sequences that answer them."""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

from radixserve.core.bad_words import BadWords, banned_token_ids
from radixserve.core.beam import BeamGroup
from radixserve.core.constraint import TokenConstraint
from radixserve.core.eviction.use import Use
from radixserve.core.namespace import tenant_of
from radixserve.core.pin import WantedPin
from radixserve.core.prompt_scores import PromptScores
from radixserve.core.public_prefixes import CachePath
from radixserve.core.tiers.load_wait import LoadWait
from radixserve.protocol import FinishReason
from radixserve.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence is. A preempted sequence is waiting again.

    PARKED: a beam without blocks. One beam of a preempted group waits for all, and they run again one by one.
    """

    WAITING = auto()
    PARKED = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One request and the sequences that answer it, one for each choice once its prompt is computed.

    seed: the caller's, or one drawn for this request. num_cached_tokens: prompt tokens found in the cache when the
    request was first admitted; None before. What it finds again after a preemption does not count.
    priority: lower goes first, under the priority policy. arrival: how many requests were queued before this one.
    number: how many of them were of its tenant. queued_at: when that was, on the monotonic clock.
    prompt_scores: None unless the prompt's log-probabilities are wanted. bad_words: what no answer may contain.
    beam: decides about a beam search, whose live beams are the sequences, the best first.
    allowed_tokens: what answers without a constraint are limited to, in the form of TokenConstraint.allowed_tokens.
    tool_call_begin: the text by which an answer's call of a tool begins; None if answers can call none.
    path: where its blocks lie; the KVCache says so once it is first asked.
    pins: those that it still has to make, or to cover the part-filled last block of; they belong to the KVCache.
    """

    request_id: str
    params: SamplingParams
    namespace: bytes
    num_prompt_tokens: int
    seed: int
    sequences: list["Sequence"] = field(default_factory=list)
    num_cached_tokens: int | None = None
    priority: int = 0
    arrival: int = 0
    number: int = 0
    queued_at: float = 0.0
    prompt_scores: PromptScores | None = None
    bad_words: BadWords = ()
    beam: BeamGroup | None = None
    allowed_tokens: bytes | None = None
    tool_call_begin: str | None = None
    path: CachePath | None = None
    pins: list[WantedPin] = field(default_factory=list)

    @property
    def tenant(self) -> str | None:
        """Whose request it is; None is the tenant without a name."""
        return tenant_of(self.namespace)

    @property
    def has_started(self) -> bool:
        """Whether the request has run, though it may be waiting again."""
        return self.num_cached_tokens is not None

    @property
    def is_finished(self) -> bool:
        """Whether every sequence of the request is finished."""
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """Token ids of prompt and answer, and the blocks that hold their K/V.

    token_ids: int32. block_table, num_computed_tokens, num_committed_blocks, digests and names belong to the KVCache:
    K/V of tokens before num_computed_tokens are in block_table, and the first num_committed_blocks are in the radix
    tree. digests[i]: chained digest of blocks 0 to i, as far as it was needed; never more than the full blocks.
    names[i]: the name of that block, likewise.
    use: what the order of eviction knows of the sequence, from its first block on, if it asks.
    num_steps_let_pass: steps that it has let pass for the sake of what others compute; 0 once it runs (in_flight.py).
    load_wait: how long it waits for blocks to be read back into the pool, if it does (tiers/loading.py).
    constraint: what limits the answer's next token; None for nothing. Its state is that of the answer so far.
    """

    request: Request
    choice_index: int
    token_ids: "array[int]"
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    block_table: "array[int]" = field(default_factory=lambda: array("i"))
    num_computed_tokens: int = 0
    num_committed_blocks: int = 0
    digests: list[bytes] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    use: Use | None = None
    num_steps_let_pass: int = 0
    load_wait: LoadWait | None = None
    constraint: TokenConstraint | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer, the last sampled one included."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that have no K/V yet; at least one before each step."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Tokens that would complete a bad word."""
        request = self.request
        return banned_token_ids(request.bad_words, self.token_ids, request.num_prompt_tokens)

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens whose K/V may be read from the cache: not the last, and none whose logits are still wanted."""
        scores = self.request.prompt_scores
        if scores is None or scores.is_complete:
            return len(self.token_ids) - 1
        return scores.num_scored_positions
