"""A request's fields as SamplingParams."""

from collections.abc import Iterable
from typing import Any

import msgspec

from radixserve.api.requests import ChatRequest, CompletionRequest, GenerationRequest
from radixserve.api.tools import check_tools
from radixserve.errors import InvalidRequest
from radixserve.grammar import Grammar
from radixserve.sampling_params import MAX_INTEGER, MAX_LOGPROBS, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16

# Fields that have the same name and meaning in both.
_SHARED_FIELDS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)


def chat_sampling_params(request: ChatRequest, grammar: Grammar | None = None) -> SamplingParams:
    """Return the sampling settings of a chat; max_tokens None means until the model ends or the context is full.

    grammar: what its answers have to follow. Raises InvalidRequest with the field as param.
    """
    logprobs: int | None = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    elif request.top_logprobs is not None:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    _check_logprobs("top_logprobs", logprobs)
    if request.echo:
        raise InvalidRequest("echo is for completions; leave it out of a chat", param="echo")
    return _sampling_params(request, max_tokens=max_tokens_of(request), logprobs=logprobs, grammar=grammar)


def completion_sampling_params(request: CompletionRequest, grammar: Grammar | None = None) -> SamplingParams:
    """Return the sampling settings of a completion. Raises InvalidRequest with the field as param."""
    if check_tools(request.tools, request.tool_choice):
        raise InvalidRequest("tools need the messages of /v1/chat/completions", param="tools")
    max_tokens = completion_max_tokens(request)
    _check_logprobs("logprobs", request.logprobs)
    params = _sampling_params(request, max_tokens=max_tokens, logprobs=request.logprobs, grammar=grammar)
    if request.echo and request.logprobs is not None:
        # What is echoed has log-probabilities as the answer has.
        most = max(request.logprobs, request.prompt_logprobs or 0)
        return msgspec.structs.replace(params, prompt_logprobs=most)
    return params


def budget_field(request: GenerationRequest) -> str:
    """Return the name of the field that limits the answer; of the two the newer one counts."""
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


def completion_max_tokens(request: GenerationRequest) -> int:
    """Return the budget of a completion. Raises InvalidRequest, the field as param, for one out of range."""
    max_tokens = max_tokens_of(request)
    if max_tokens is None:
        # A floor given by min_tokens says that more than the default is wanted.
        max_tokens = min(max(DEFAULT_COMPLETION_TOKENS, request.min_tokens or 0), MAX_INTEGER)
    return max_tokens


def max_tokens_of(request: GenerationRequest) -> int | None:
    """Return the budget that a request gives, if any. Raises InvalidRequest for one out of range."""
    name = budget_field(request)
    budget: int | None = getattr(request, name)
    tells_of_prompt = request.echo or request.prompt_logprobs is not None
    if budget == 0 and not tells_of_prompt:
        raise InvalidRequest(f"{name} may be 0 only beside echo or prompt_logprobs", param=name)
    if budget is not None and not 0 <= budget <= MAX_INTEGER:
        raise InvalidRequest(f"{name} is {budget}; it must be from 1 to {MAX_INTEGER}", param=name)
    return budget


def given_fields(request: GenerationRequest, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named fields that are there, as a request has them."""
    return {name: value for name in names if (value := getattr(request, name)) is not None}


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    """Return the stop strings of a request, which may give one alone."""
    stop = request.stop if request.stop is not None else ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _check_logprobs(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} is {value}; it must be from 0 to {MAX_LOGPROBS}", param=name)


def _sampling_params(
    request: GenerationRequest, *, max_tokens: int | None, logprobs: int | None, grammar: Grammar | None
) -> SamplingParams:
    params = SamplingParams(
        **given_fields(request, _SHARED_FIELDS),
        max_tokens=max_tokens,
        stop=stop_strings(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        bad_words=tuple(request.bad_words or ()),
        logprobs=logprobs,
        grammar=grammar,
    )
    if request.best_of is not None and request.best_of != params.n:
        raise InvalidRequest(
            f"best_of is {request.best_of}; only the value of n, {params.n} here, is supported", param="best_of"
        )
    return params
