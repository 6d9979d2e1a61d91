"""A request's fields as BeamSearchParams, and the fields that a beam search cannot honour."""

from typing import Any

from radixserve.api.fields import asks_for_nothing
from radixserve.api.requests import GenerationRequest
from radixserve.api.sampling import given_fields, stop_strings
from radixserve.beam_search_params import MAX_BEAM_WIDTH, BeamSearchParams
from radixserve.errors import InvalidRequest

DEFAULT_BEAM_WIDTH = 2

# Fields that have the same name and meaning in BeamSearchParams.
_SHARED_FIELDS = (
    "min_tokens",
    "length_penalty",
    "early_stopping",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
# What else a beam search honours. Any other field of a request is refused, so that a new one is never just dropped.
_HONOURED_FIELDS = frozenset(_SHARED_FIELDS) | {
    "use_beam_search",
    "beam_width",
    "n",
    "best_of",
    "model",
    "prompt",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stop_token_ids",
    "return_token_ids",
    "priority",
    "parallel_tool_calls",  # of tools, which are refused
    "cache_salt",
}
# Values of the others that ask for nothing, beside null.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "logprobs": (False,),
    "echo": (False,),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "cache_diagnostics": (False,),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "tool_choice": ("none", "auto"),
}


def is_beam_search(request: GenerationRequest) -> bool:
    """Return whether a request asks for beam search. Raises InvalidRequest for settings of one that it does not."""
    if request.use_beam_search:
        return True
    for name, neutral in (("beam_width", ()), ("length_penalty", (1,)), ("early_stopping", (False,))):
        if not asks_for_nothing(getattr(request, name), neutral):
            raise InvalidRequest(f"{name} needs use_beam_search: true", param=name)
    return False


def beam_search_params(
    request: GenerationRequest, *, default_n: int | None, max_tokens: int | None, max_num_seqs: int
) -> BeamSearchParams:
    """Return the settings of a beam search; max_tokens None means until the model ends or the context is full.

    default_n: the answers of a request that gives no n; None for all beam_width of them. max_num_seqs: of the engine,
    which runs every beam as a sequence. Raises InvalidRequest, with the field as param, for a value out of range and
    for a field that a beam search does not honour.
    """
    _check_fields(request)
    n = default_n if request.n is None else request.n
    return BeamSearchParams(
        **given_fields(request, _SHARED_FIELDS),
        beam_width=_beam_width(request, n or 1, min(MAX_BEAM_WIDTH, max_num_seqs)),
        n=n,
        max_tokens=max_tokens,
        stop=stop_strings(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
    )


def _check_fields(request: GenerationRequest) -> None:
    for name in request.__struct_fields__:
        if name in _HONOURED_FIELDS or asks_for_nothing(getattr(request, name), _NEUTRAL.get(name, ())):
            continue
        if name == "tools" and (not request.tools or request.tool_choice == "none"):
            continue
        raise InvalidRequest(f"{name} is not supported together with beam search; leave it out", param=name)


def _beam_width(request: GenerationRequest, n: int, limit: int) -> int:
    """Return beam_width, else best_of, which means the same, else the least that n answers and a search take."""
    widths = {
        "beam_width": request.beam_width,
        "best_of": request.best_of,
        "n": max(n, min(DEFAULT_BEAM_WIDTH, limit)),
    }
    given = {name: width for name, width in widths.items() if width is not None}
    name, width = next(iter(given.items()))
    if type(width) is not int or not 1 <= width <= limit:
        raise InvalidRequest(
            f"{name} is {width!r:.100}; beam_width must be an integer from 1 to {limit} on this server", param=name
        )
    if given.get("best_of", width) != width:
        raise InvalidRequest(
            f"best_of is {request.best_of} and beam_width {width}; they mean the same", param="best_of"
        )
    return width
