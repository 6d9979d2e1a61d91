"""A request's fields as SamplingParams."""

from typing import Any

from radixserve.api.requests import ChatRequest, CompletionRequest, GenerationRequest
from radixserve.errors import InvalidRequest
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
)


def chat_sampling_params(request: ChatRequest) -> SamplingParams:
    """Return the sampling settings of a chat; max_tokens None means until the model ends or the context is full.

    Raises InvalidRequest with the field as param.
    """
    logprobs: int | None = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    elif request.top_logprobs is not None:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    _check_logprobs("top_logprobs", logprobs)
    return _sampling_params(request, max_tokens=max_tokens_of(request), logprobs=logprobs)


def completion_sampling_params(request: CompletionRequest) -> SamplingParams:
    """Return the sampling settings of a completion. Raises InvalidRequest with the field as param."""
    _check_logprobs("logprobs", request.logprobs)
    return _sampling_params(request, max_tokens=completion_max_tokens(request), logprobs=request.logprobs)


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
    if budget is not None and not 1 <= budget <= MAX_INTEGER:
        raise InvalidRequest(f"{name} is {budget}; it must be from 1 to {MAX_INTEGER}", param=name)
    return budget


def _check_logprobs(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} is {value}; it must be from 0 to {MAX_LOGPROBS}", param=name)


def _sampling_params(request: GenerationRequest, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    _check_tools(request)
    given: dict[str, Any] = {name: value for name in _SHARED_FIELDS if (value := getattr(request, name)) is not None}
    stop = request.stop if request.stop is not None else ()
    params = SamplingParams(
        **given,
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=logprobs,
    )
    if request.best_of is not None and request.best_of != params.n:
        raise InvalidRequest(
            f"best_of is {request.best_of}; only the value of n, {params.n} here, is supported", param="best_of"
        )
    return params


def _check_tools(request: GenerationRequest) -> None:
    """Refuse tools that the model might have to call; with tool_choice "none" they do not enter the prompt."""
    choice = request.tool_choice
    if choice not in (None, "none", "auto", "required") and not isinstance(choice, dict):
        raise InvalidRequest("tool_choice must be none, auto, required or a named tool", param="tool_choice")
    if request.tools and choice != "none":
        raise InvalidRequest('tools are not supported yet; leave them out or send tool_choice "none"', param="tools")
    if not request.tools and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice asks for a tool, but there are no tools", param="tool_choice")
