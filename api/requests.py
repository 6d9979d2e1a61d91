"""The bodies of requests, as they come: types only. null and absent are the same everywhere."""

from typing import Any, Literal

import msgspec

from radixserve.tokenizer.messages import Message
from radixserve.tokenizer.tools import Tool


class StreamOptions(msgspec.Struct):
    """include_obfuscation is taken and changes nothing: no padding is ever added."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class FunctionName(msgspec.Struct):
    """The function of a tool choice."""

    name: str


class NamedToolChoice(msgspec.Struct):
    """A choice of one tool."""

    type: str
    function: FunctionName | None = None


class ModelRequest(msgspec.Struct, kw_only=True):
    """A request for a model; left out, it is the one that is served."""

    model: str | None = None


class GenerationRequest(ModelRequest, kw_only=True):
    """What chat, completions and beam search have in common. beam_width: checked where its limit is known."""

    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    priority: int | None = None
    response_format: Any = None
    structured_outputs: Any = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    use_beam_search: bool | None = None
    beam_width: Any = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    cache_diagnostics: bool | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions. prompt: text, token ids, or a list of one of the two."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None


class BeamSearchRequest(GenerationRequest, kw_only=True):
    """POST /v1/beam_search: of one text or list of token ids, or of messages. What it cannot honour is there too."""

    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ExplainRequest(GenerationRequest, kw_only=True):
    """POST /v1/cache/explain: the body of a chat or of a completion with one prompt. Only the prompt is looked at."""

    prompt: str | list[str | int | list[int]] | None = None
    messages: list[Message] | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(ModelRequest, kw_only=True):
    """POST /tokenize: of a text, or of messages. cache_salt: of the chat that they are for."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None


class WarmRequest(ModelRequest, kw_only=True):
    """POST /v1/cache/warm: one text or list of token ids, or messages. What would say more than these is there too."""

    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    truncate_prompt_tokens: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class PinRequest(WarmRequest, kw_only=True):
    """POST /v1/cache/pin. ttl: seconds, or as in "5m"."""

    ttl: float | str | None = None


class DetokenizeRequest(ModelRequest, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    skip_special_tokens: bool | None = None


class ResetCacheRequest(msgspec.Struct):
    """POST /v1/cache/reset takes no fields; an empty body is one too."""


class SaveCacheRequest(msgspec.Struct):
    """POST /v1/cache/save takes no fields; an empty body is one too."""
