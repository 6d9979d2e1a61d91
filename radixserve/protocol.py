"""The messages between the API process and the engine process, and their frames.

A frame is a 4-byte little-endian length and that many bytes of msgpack. Token ids travel as packed int32. The sender
of a message gives it away: nothing in a message is changed afterwards.

API -> engine:   StartEngine, then AddRequest | Abort | Control
engine -> API:   EngineReady, then StepOutput | ControlReply; or EngineFailed, and the end
"""

from typing import Literal

import msgspec

from radixserve.beam_search_params import BeamSearchParams
from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest, PinBudgetExceeded, RequestError
from radixserve.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]
FailureKind = Literal["invalid_request", "queue_full", "pin_budget", "internal_error"]
LossReason = Literal["evicted", "expired", "unpinned", "reset"]


class StartEngine(msgspec.Struct, frozen=True, tag="start"):
    """Load a model; the first message, sent once.

    public_prefixes: beginnings of prompts that all tenants share, each as int32 in native order, of whole blocks.
    """

    config: EngineConfig
    public_prefixes: list[bytes]


class PinAt(msgspec.Struct, frozen=True, array_like=True):
    """Keep a prompt's first num_tokens tokens in the cache for ttl seconds, from the time they are computed.

    pin_id: unique among pins; the sender makes it, never a caller of the API.
    """

    pin_id: str
    num_tokens: int
    ttl: float


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Start a request.

    request_id: unique among live requests; the sender makes it, never a caller of the API.
    prompt_token_ids: int32 in native order, at least one, each inside the vocabulary, fewer than max_model_len.
    namespace: prefixes are shared between requests of equal namespaces only (see radixserve.core.namespace).
    priority: lower goes first, under the priority policy.
    tool_call_begin: the text by which an answer's call of a tool begins; None if answers can call none.
    pins: refused as a whole, with the request, if there is no room for one of them.
    """

    request_id: str
    prompt_token_ids: bytes
    params: SamplingParams | BeamSearchParams
    namespace: bytes = b""
    priority: int = 0
    tool_call_begin: str | None = None
    pins: list[PinAt] = []


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End requests and free what they hold. No Delta of theirs follows the next StepOutput. Unknown ids are ignored."""

    request_ids: list[str]


class ResetCache(msgspec.Struct, frozen=True, tag="reset_cache"):
    """Drop every cached block that no running request holds, of one tenant, or of all if it is None."""

    tenant: str | None = None


class CacheWasReset(msgspec.Struct, frozen=True, tag="cache_was_reset"):
    """num_dropped blocks were freed; num_kept are held by running requests and stay findable."""

    num_dropped_blocks: int
    num_kept_blocks: int


class ShowTenant(msgspec.Struct, frozen=True, tag="show_tenant"):
    """Ask for one tenant's figures; None is the tenant without a name."""

    tenant: str | None


class TenantStats(msgspec.Struct, frozen=True, tag="tenant_stats"):
    """What the engine has of one tenant, and nothing that depends on what the others do with it.

    num_blocks: the whole pool's. Cached blocks, and those in use, are the tenant's own. Counters: queried, hit and
    evicted tokens. Gauges: num_running and num_waiting sequences. num_pinned_blocks: under pins of the tenant, public
    ones too.
    """

    block_size: int
    num_blocks: int
    num_cached_blocks: int
    num_in_use_blocks: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_evicted_tokens: int
    num_running: int
    num_waiting: int
    num_pinned_blocks: int = 0


class ExplainPrompt(msgspec.Struct, frozen=True, tag="explain"):
    """Ask what a request of this prompt would find in the cache now, and what became of the rest. Changes nothing.

    token_ids: int32 in native order. namespace: as in AddRequest. sees_other_namespaces: whether the tenant's
    namespaces of other salts are looked at too.
    """

    token_ids: bytes
    namespace: bytes
    sees_other_namespaces: bool


class LostPrefix(msgspec.Struct, frozen=True, array_like=True):
    """What was cached of a prompt right behind its hit, and is not any more.

    num_tokens: from the end of the hit to the end of the last whole block that is known to be lost.
    reason: why, of the first of its blocks. evicted: others needed the room. expired: the same, when a pin's time was
    over. unpinned: a pin was broken for a request that could not run alone. reset: its owner or the operator wished so.
    seconds_ago: since when, of the first of its blocks, to a second. idle_seconds: how long it was unused by then.
    """

    num_tokens: int
    reason: LossReason
    seconds_ago: float
    idle_seconds: float


# That are told of another prompt.
MAX_OTHER_TOKENS = 2048


class OtherPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A cached prompt that begins with another one's first num_common_tokens.

    token_ids: int32 in native order; what it holds from that one's num_hit_tokens on, the first MAX_OTHER_TOKENS of it
    if it is more. seconds_idle: since it was last used; 0 while it is in use. num_requests_hit: how many began with
    what it holds right there.
    """

    token_ids: bytes
    seconds_idle: float
    num_requests_hit: int


class PromptFacts(msgspec.Struct, frozen=True, tag="prompt_facts"):
    """What the cache holds of a prompt.

    num_hit_tokens: what a request would read from the cache, at most num_tokens - 1. num_common_tokens: the most that a
    cached prompt of its namespace shares with it, at least num_hit_tokens and at most num_tokens.
    lost: None if nothing is known to be lost behind the hit. others: cached prompts of the same namespace that share
    num_common_tokens with it and hold more, the one used last first, at most 4. None if it goes on where they end.
    num_tokens_elsewhere: the longest match in the tenant's namespaces of other salts. num_stored_tokens: those right
    behind the hit that a lower tier has, from which they would be read.
    """

    num_tokens: int
    num_hit_tokens: int
    num_common_tokens: int
    lost: LostPrefix | None
    others: list[OtherPrompt]
    num_tokens_elsewhere: int
    num_stored_tokens: int = 0


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """End a pin of a tenant's, or of anyone's if tenant is None."""

    pin_id: str
    tenant: str | None


class Unpinned(msgspec.Struct, frozen=True, tag="unpinned"):
    """is_found: whether there was such a pin."""

    is_found: bool


class ShowPins(msgspec.Struct, frozen=True, tag="show_pins"):
    """Ask for a tenant's pins, or for those of all tenants if tenant is None. pin_id: for that one alone, if given."""

    tenant: str | None
    pin_id: str | None = None


class PinInfo(msgspec.Struct, frozen=True, array_like=True):
    """A pin. num_blocks: that it keeps, some of them perhaps under other pins too."""

    pin_id: str
    num_tokens: int
    num_blocks: int
    seconds_left: float


class Pins(msgspec.Struct, frozen=True, tag="pins"):
    """The pins that were asked for, the one that ends first in front.

    max_blocks: that all pins may hold together. num_other_blocks: held by, or reserved for, pins that are not listed.
    """

    pins: list[PinInfo]
    max_blocks: int
    num_other_blocks: int


class ShowTree(msgspec.Struct, frozen=True, tag="show_tree"):
    """Ask for what is cached of one tenant's; of None, the tenant without a name, public prefixes too.

    max_depth: nodes on the way down. max_nodes: in all; those used last are shown.
    """

    tenant: str | None
    max_depth: int
    max_nodes: int


class TreeNode(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that follow one another without a branch, or the part-filled last block of an ended request.

    depth: nodes shown on the path down to this one, itself included. num_tokens_above: position of its first token.
    preview_token_ids: int32 in native order, the first ones. num_holders: most sequences that hold one of its blocks.
    request_ids: the tenant's running requests that hold a block of this node, and none of a node shown below it.
    seconds_idle: since a block of it was last used; 0 while one is in use. num_hits: requests that began with it since
    it was computed. is_tail: whether it is a part-filled block.
    """

    depth: int
    num_tokens_above: int
    num_tokens: int
    num_blocks: int
    preview_token_ids: bytes
    num_holders: int
    request_ids: list[str]
    seconds_idle: float
    num_hits: int
    num_pinned_blocks: int
    is_tail: bool


class TreeView(msgspec.Struct, frozen=True, tag="tree_view"):
    """Nodes depth first, each before those below it, of equal ones above the one used last in front.

    num_nodes: all that the tenant has; if these are more, some were cut off.
    """

    nodes: list[TreeNode]
    num_nodes: int


class SaveCache(msgspec.Struct, frozen=True, tag="save_cache"):
    """Write all that is cached to the tiers below.

    begins: all that is cached now; otherwise nothing new, and the reply tells how far the save is that began last.
    """

    begins: bool = True


class SaveProgress(msgspec.Struct, frozen=True, tag="save_progress"):
    """How far a save is.

    is_done: nothing of it is left, or an error ended it. num_saved_blocks: written by this save. num_left_blocks: found
    cached when it began, and not yet written. error: why it cannot go on.
    """

    is_done: bool
    num_saved_blocks: int
    num_left_blocks: int
    error: str | None = None


ControlCommand = ResetCache | ShowTenant | Unpin | ShowPins | ExplainPrompt | ShowTree | SaveCache
ControlResult = CacheWasReset | TenantStats | Unpinned | Pins | PromptFacts | TreeView | SaveProgress


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Run one command between two steps; answered by one ControlReply of the same call_id."""

    call_id: int
    command: ControlCommand


class ControlReply(msgspec.Struct, frozen=True, tag="control_reply"):
    """The answer to one Control."""

    call_id: int
    result: ControlResult


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one token: its own, and the most likely alternatives, best first.

    rank: 1 for the most likely token of the vocabulary; equal ones in the order of their ids. None: not counted.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int | None = None


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why the engine ended a request without an answer. param: the field at fault, if it is one."""

    kind: FailureKind
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: RequestError) -> "Failure":
        """Return what tells the caller of an error that the engine met."""
        kind: FailureKind = "internal_error"
        if isinstance(error, InvalidRequest):
            kind = "invalid_request"
        elif isinstance(error, PinBudgetExceeded):
            kind = "pin_budget"
        return cls(kind, error.message, error.param)


class BeamScore(msgspec.Struct, frozen=True, array_like=True):
    """What a hypothesis is worth: the sum of its log-probabilities, and that with the length penalty."""

    cumulative_logprob: float
    score: float


class BeamMemory(msgspec.Struct, frozen=True, array_like=True):
    """The K/V blocks of one beam search.

    peak_blocks: most distinct blocks that its beams held at a step. peak_blocks_without_sharing: what the live beams
    of that step would have held on their own, ceil(length / block_size) each. blocks_copied: copies on write.
    """

    block_size: int
    peak_blocks: int
    peak_blocks_without_sharing: int
    blocks_copied: int


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one answer (choice `index`) of a request.

    token_ids may be non-empty while text is still "": a character or a possible stop string is not yet complete.
    logprobs: one entry per token id, or None when they were not asked for.
    num_cached_tokens: prompt tokens of the request whose K/V were read from the cache; the same in all its deltas.
    stop_reason: the stop string, or the stop token id other than the end token, that ended the answer.
    failure: set on the one delta that ends a whole request (index 0) without an answer.
    A beam search tells each hypothesis it returns in one delta, all in the step that ends it, index 0 the best.
    beam: that hypothesis's score. beam_memory: the figures of the search, in each of its deltas.
    prompt_logprobs: in a request's first delta if they were asked for: one entry a prompt token, None for the first.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    failure: Failure | None = None
    beam: BeamScore | None = None
    beam_memory: BeamMemory | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class TierStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters and gauges of a place that blocks go to when the pool has no room for them.

    name: "host" or "disk". capacity_bytes, used_bytes, num_blocks: what it may hold and holds now. Counted are blocks,
    and the counters only grow: num_hit_blocks given back to reads, num_written_blocks, num_read_blocks (of the hits,
    those read from the medium itself and not from the queue of writes), num_dropped_blocks (never written: the queue
    was full, or the tier was off), num_failed_blocks (what was found is not what was written). is_on: whether it takes
    new blocks.
    """

    name: str
    capacity_bytes: int
    used_bytes: int
    num_blocks: int
    num_hit_blocks: int
    num_written_blocks: int
    num_read_blocks: int
    num_dropped_blocks: int
    num_failed_blocks: int
    is_on: bool


class CacheStats(msgspec.Struct, frozen=True):
    """Counters and gauges of the K/V cache.

    num_free + num_cached + num_in_use == num_blocks. A cached block is held by the tree alone, a block in use by a
    sequence. queried, hit and evicted tokens only ever grow; a resumed request does not count as queried again.
    num_pinned_blocks: under a pin, cached or in use. num_broken_pins: counts those that ended before their time as a
    request could not run alone without their blocks. tiers: what lies below the pool.
    """

    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_in_use_blocks: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_evicted_tokens: int
    num_tree_nodes: int
    tree_depth: int
    num_pinned_blocks: int = 0
    num_broken_pins: int = 0
    tiers: list[TierStats] = []


class EngineStats(msgspec.Struct, frozen=True):
    """The engine after a step.

    Gauges: num_running and num_waiting sequences. Counters: num_steps, num_preemptions, num_computed_tokens (whose K/V
    were computed, again after a preemption too), num_generated_tokens, num_started_requests, queue_seconds (their waits
    before they first ran, added up) and num_overtakes (by a request of their tenant and priority that came later).
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_preemptions: int
    num_computed_tokens: int
    num_generated_tokens: int
    num_started_requests: int
    queue_seconds: float
    num_overtakes: int
    cache: CacheStats


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and the cache allocated; said once.

    weights_dtype, kv_cache_dtype: what weights and K/V blocks are stored in; dtype: what the rest is computed in.
    max_model_len: tokens a sequence may have, prompt and answer together, after any lowering to what the pool holds.
    vocab_size: token ids that the model takes are 0 to vocab_size - 1.
    attention_backend: torch, cpp or triton, the kernels of attention. num_threads: of the CPU that compute.
    notices: what start-up changed or chose on its own, a sentence each.
    """

    model_name: str
    architecture: str
    weights_dtype: str
    dtype: str
    kv_cache_dtype: str
    device: str
    attention_backend: str
    num_threads: int
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    load_seconds: float
    notices: list[str]
    stats: EngineStats


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start. is_config_error: the settings are at fault, and message says what to change."""

    message: str
    is_config_error: bool


class StepOutput(msgspec.Struct, frozen=True, tag="step"):
    """All that one step of the engine produced."""

    deltas: list[Delta]
    stats: EngineStats


ClientMessage = AddRequest | Abort | Control
EngineMessage = EngineReady | EngineFailed | StepOutput | ControlReply
