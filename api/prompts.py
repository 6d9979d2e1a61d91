"""Prompts as token ids, checked before the engine sees them. Slow for long texts: call it off the event loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from radixserve.beam_search_params import BeamSearchParams
from radixserve.errors import InvalidRequest, PromptTooLong
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer

MAX_PROMPTS = 128

Prompt = str | list[int]
Params = TypeVar("Params", bound=SamplingParams | BeamSearchParams)


@dataclass(frozen=True, slots=True)
class BudgetFields:
    """How a request speaks of its length: the fields of prompt and budget, and whether a budget is only a bound."""

    prompt: str
    budget: str
    clamp: bool


def check_prompt_or_messages(prompt: object, messages: object) -> None:
    """Raise InvalidRequest unless one of the two was sent, and not both."""
    if (prompt is None) == (messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")


def split_prompts(prompt: str | list[str | int | list[int]] | None, max_prompts: int = MAX_PROMPTS) -> list[Prompt]:
    """Return the prompts that a completion request names: one text, one list of ids, or a list of one of the two.

    None is an empty text. Raises InvalidRequest for an empty list, a mixed one, and more than max_prompts.
    """
    if not isinstance(prompt, list):
        return [prompt or ""]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    token_ids = [entry for entry in prompt if isinstance(entry, int)]
    prompts = [entry for entry in prompt if not isinstance(entry, int)]
    if token_ids and not prompts:
        return [token_ids]
    if token_ids or len({type(entry) for entry in prompts}) > 1:
        raise InvalidRequest("prompt mixes texts, token ids and lists of token ids; send one kind", param="prompt")
    if len(prompts) > max_prompts:
        raise InvalidRequest(f"prompt has {len(prompts)} entries; it may have {max_prompts} here", param="prompt")
    return prompts


def encode_prompts(prompts: list[Prompt], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Return the token ids of each prompt; an empty text becomes the token that begins a text.

    Raises InvalidRequest, with the index of the prompt, for ids outside the vocabulary and for an empty prompt.
    """
    encoded = []
    for index, prompt in enumerate(prompts):
        path = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str):
            token_ids = tokenizer.encode(prompt)
            if not token_ids and tokenizer.bos_token_id is not None:
                token_ids = [tokenizer.bos_token_id]
        else:
            token_ids = prompt
            check_token_ids(token_ids, path, vocab_size)
        if not token_ids:
            raise InvalidRequest(f"{path} is empty, and the model has no token to begin a text with", param="prompt")
        encoded.append(token_ids)
    return encoded


def truncate(token_ids: list[int], num_kept: int | None, max_model_len: int, budget: int | None) -> list[int]:
    """Return the last num_kept tokens of a prompt; all for None. -1: as many as leave room for the budget.

    Raises InvalidRequest for another number below 1.
    """
    if num_kept is None:
        return token_ids
    if num_kept == -1:
        # A budget that leaves no room at all is refused later.
        num_kept = max(max_model_len - (budget or 1), 1)
    if num_kept < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {num_kept}; it must be at least 1, or -1 for what the context leaves room for",
            param="truncate_prompt_tokens",
        )
    return token_ids[-num_kept:]


def check_token_ids(token_ids: list[int], path: str, vocab_size: int) -> None:
    """Raise InvalidRequest, naming the first one, for ids outside the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        position, token_id = next(
            (position, token_id) for position, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size
        )
        raise InvalidRequest(
            f"{path} holds the token id {token_id} at position {position}; token ids are 0 to {vocab_size - 1}",
            param=path.partition("[")[0],
        )


def fit_budget(prompts: Sequence[Sequence[int]], params: Params, max_model_len: int, fields: BudgetFields) -> Params:
    """Return params with a budget that fits the context; a clamped one beside the shortest prompt.

    The engine ends the answers to longer prompts where the context does. Raises PromptTooLong if a prompt leaves no
    room for a token of the answer, or less room than was asked for where that is not clamped.
    """
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    num_tokens = len(prompts[longest])
    path = fields.prompt if len(prompts) == 1 else f"{fields.prompt}[{longest}]"
    budget = params.max_tokens
    asked = f"{fields.budget} is {budget}" if budget is not None else f"{fields.budget} is not set"
    takes = f"the model takes {max_model_len} tokens, prompt and answer together"
    facts = f"{path} has {num_tokens} tokens and {asked}; {takes}"
    if num_tokens >= max_model_len:
        raise PromptTooLong(f"{facts}; shorten the prompt", param=fields.prompt)
    room = max_model_len - num_tokens
    if budget is None or budget <= room:
        return params
    if not fields.clamp:
        raise PromptTooLong(f"{facts}; send at most {room}", param=fields.budget)
    return msgspec.structs.replace(params, max_tokens=min(budget, max_model_len - min(map(len, prompts))))
