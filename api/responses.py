"""The bodies of answers. UNSET leaves a key out; None is sent as null."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from radixserve.diagnosis.report import Diagnosis
from radixserve.protocol import FinishReason

ChatFinishReason = FinishReason | Literal["tool_calls"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens whose K/V were read from the cache and not computed for this request."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request: a prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    """A likely token of a position, its text decoded on its own. bytes: what that text is made of, exactly."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
    """A token of the answer, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry for each token."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry for each token in every list; null at the first token of an echoed prompt.

    text_offset: characters of the answer before the token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a call, or a piece of it. arguments: JSON text."""

    name: str | UnsetType = UNSET
    arguments: str


class MessageToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class DeltaToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the call of this index; the first one has id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class PromptLogprob(msgspec.Struct, frozen=True):
    """What the model thought of one token at a position of the prompt. rank: 1 for the most likely one."""

    logprob: float
    rank: int | None
    decoded_token: str


# By token id: the prompt's own token, then the most likely ones. None for the first token, which nothing foretells.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class ChatMessage(msgspec.Struct, frozen=True):
    """The whole answer. content: null if there are calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """A piece of the answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer. stop_reason: the stop string, or the stop token other than the model's own end, that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """What all chunks of an answer share."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(AnswerHead, frozen=True, kw_only=True):
    """A whole chat answer."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    cache_diagnostics: Diagnosis | UnsetType = UNSET


class ChatChunk(AnswerHead, frozen=True, kw_only=True):
    """One event of a streamed chat answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    cache_diagnostics: Diagnosis | UnsetType = UNSET


class Completion(AnswerHead, frozen=True, kw_only=True):
    """A whole completion, or one event of a streamed one. What is told of each prompt is no list if there is one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | list[list[int]] | UnsetType = UNSET
    cache_diagnostics: Diagnosis | list[Diagnosis] | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    """A model that is served. max_model_len: tokens of prompt and answer together."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "radixserve"


class ModelList(msgspec.Struct, frozen=True):
    """The models that are served."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct, frozen=True):
    """Token ids, and how many of them the model takes."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(msgspec.Struct, frozen=True):
    """The text of token ids."""

    prompt: str


class CacheBlocks(msgspec.Struct, frozen=True):
    """K/V blocks; free + cached + in_use == total, and pinned are among cached and in_use.

    To a tenant cached and in_use are its own, and all others count as free, as if it were alone.
    """

    total: int
    free: int
    cached: int
    in_use: int
    pinned: int


class CacheTokens(msgspec.Struct, frozen=True):
    """Prompt tokens looked up, found, and given up, since the engine started. hit_rate is 0 before any look-up."""

    queried: int
    hit: int
    hit_rate: float
    evicted: int


class CacheRequests(msgspec.Struct, frozen=True):
    """What the engine works on; a request with several answers counts once for each, when its prompt is computed."""

    running: int
    waiting: int


class CacheTree(msgspec.Struct, frozen=True):
    """The radix tree's size."""

    nodes: int
    depth: int


class CacheTier(msgspec.Struct, frozen=True):
    """One place below the pool where blocks are kept; see protocol.TierStats for what is counted."""

    name: str
    is_on: bool
    capacity_bytes: int
    used_bytes: int
    blocks: int
    hit_blocks: int
    written_blocks: int
    read_blocks: int
    dropped_blocks: int
    failed_blocks: int


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/cache. tree, tiers: of all tenants, so that no single one is told."""

    block_size: int
    blocks: CacheBlocks
    tokens: CacheTokens
    requests: CacheRequests
    tree: CacheTree | UnsetType = UNSET
    tiers: list[CacheTier]


class CacheSaved(msgspec.Struct, frozen=True, tag="cache.save", tag_field="object"):
    """POST /v1/cache/save: blocks that were written, of those that were not in the tier already."""

    saved_blocks: int


class CacheTreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A run of blocks that no prompt leaves in between, or a tail, the part-filled last block of an ended request.

    id: its place in the list. parent: the id of the node above; null at the top. position: tokens above it.
    preview: the beginning of its text, of preview_tokens tokens. holders: running sequences that hold it.
    requests: x-request-id of those that hold it and nothing below. hits: requests that began with it.
    """

    id: int
    parent: int | None
    depth: int
    position: int
    tokens: int
    blocks: int
    preview: str
    preview_tokens: int
    holders: int
    requests: list[str]
    idle_seconds: float
    hits: int
    pinned_blocks: int
    tail: bool


class CacheTreeView(msgspec.Struct, frozen=True):
    """GET /v1/cache/tree: each node before those below it. total_nodes: those that were left out too."""

    nodes: list[CacheTreeNode]
    total_nodes: int


class CacheReset(msgspec.Struct, frozen=True):
    """POST /v1/cache/reset: blocks that were freed, and those that running requests still hold."""

    dropped_blocks: int
    kept_blocks: int


class CacheWarmed(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/cache/warm: tokens of the prompt, and how many of them were in the cache and how many were computed."""

    object: Literal["cache.warm"] = "cache.warm"
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int


class CachePin(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/cache/pin. blocks: K/V blocks that hold the tokens. expires_at: Unix time. ttl: seconds, as asked."""

    id: str
    object: Literal["cache.pin"] = "cache.pin"
    tokens: int
    blocks: int
    expires_at: int
    ttl: float


class CacheUnpinned(msgspec.Struct, frozen=True, kw_only=True):
    """DELETE /v1/cache/pin/{id}."""

    id: str
    object: Literal["cache.pin"] = "cache.pin"
    deleted: bool = True


class HealthStatus(msgspec.Struct, frozen=True):
    """GET /health and /ready."""

    status: str


class VersionReport(msgspec.Struct, frozen=True):
    """GET /version."""

    version: str
