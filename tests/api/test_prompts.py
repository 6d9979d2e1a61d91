"""Prompts of every kind become token ids that the engine can take, or a 400."""

from pathlib import Path
from typing import Any

import pytest

from radixserve.api.prompts import MAX_PROMPTS, BudgetFields, encode_prompts, fit_budget, split_prompts
from radixserve.errors import InvalidRequest, PromptTooLong
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import VOCAB_SIZE, load_byte_tokenizer

CONTEXT = 64
COMPLETION = BudgetFields(prompt="prompt", budget="max_tokens", clamp=False)
CHAT = BudgetFields(prompt="messages", budget="max_completion_tokens", clamp=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encode(prompt: Any, tokenizer: Tokenizer) -> list[list[int]]:
    return encode_prompts(split_prompts(prompt), tokenizer, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        ([97, 98], [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([[97], [98]], [[97], [98]]),
        ([VOCAB_SIZE - 1, 0], [[VOCAB_SIZE - 1, 0]]),
    ],
)
def test_the_four_kinds_of_prompt(tokenizer: Tokenizer, prompt: Any, expected: list[list[int]]) -> None:
    assert encode(prompt, tokenizer) == expected


@pytest.mark.parametrize("prompt", [None, "", [""], [], [[]], ["a", ""], [[1], []]])
def test_api_5_an_empty_prompt_is_refused_where_no_token_begins_a_text(tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode(prompt, tokenizer)
    assert caught.value.param == "prompt"


def test_api_5_the_empty_one_of_several_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt\[1\]"):
        encode(["a", ""], tokenizer)


@pytest.mark.parametrize("prompt", [None, "", [""]])
def test_api_5_an_empty_text_begins_a_text(tmp_path: Path, prompt: Any) -> None:
    tokenizer = load_byte_tokenizer(tmp_path)
    tokenizer.bos_token_id = 257
    assert encode(prompt, tokenizer) == [[257]]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([999999], "999999"),
        ([VOCAB_SIZE], str(VOCAB_SIZE)),
        ([-1], "-1"),
        ([[-1]], "-1"),
        ([0, 2**63], str(2**63)),
        ([[1], [2, VOCAB_SIZE]], r"prompt\[1\].*position 1"),
    ],
)
def test_api_6_an_id_outside_the_vocabulary_is_refused_by_name(tokenizer: Tokenizer, prompt: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught:
        encode(prompt, tokenizer)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [["a", 1], [1, [1]], ["a", [1]]])
def test_api_6_kinds_of_prompt_cannot_be_mixed(tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="mixes"):
        encode(prompt, tokenizer)


def test_a_list_holds_a_limited_number_of_prompts(tokenizer: Tokenizer) -> None:
    assert len(encode(["a"] * MAX_PROMPTS, tokenizer)) == MAX_PROMPTS
    with pytest.raises(InvalidRequest, match=str(MAX_PROMPTS)):
        encode(["a"] * (MAX_PROMPTS + 1), tokenizer)


def fit(num_tokens: int, budget: int | None, fields: BudgetFields) -> int | None:
    return fit_budget([[1] * num_tokens], SamplingParams(max_tokens=budget), CONTEXT, fields).max_tokens


@pytest.mark.parametrize("fields", [COMPLETION, CHAT])
@pytest.mark.parametrize(("num_tokens", "budget"), [(60, 4), (63, 1), (63, None)])
def test_api_4_what_fits_is_left_as_it_is(fields: BudgetFields, num_tokens: int, budget: int | None) -> None:
    assert fit(num_tokens, budget, fields) == budget


def test_api_4_a_chats_budget_is_a_bound_and_a_completions_is_not() -> None:
    assert fit(60, 5, CHAT) == 4
    with pytest.raises(PromptTooLong, match=r"60 tokens and max_tokens is 5.*64") as caught:
        fit(60, 5, COMPLETION)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


@pytest.mark.parametrize("fields", [COMPLETION, CHAT])
@pytest.mark.parametrize(("num_tokens", "budget"), [(64, 1), (65, 1), (64, None), (200, None)])
def test_api_4_a_prompt_that_leaves_no_room_is_refused(
    fields: BudgetFields, num_tokens: int, budget: int | None
) -> None:
    with pytest.raises(PromptTooLong, match=rf"{num_tokens} tokens.*{budget or 'not set'}.*64") as caught:
        fit(num_tokens, budget, fields)
    assert caught.value.param == fields.prompt


def test_the_longest_prompt_decides() -> None:
    with pytest.raises(PromptTooLong, match=r"prompt\[1\] has 64"):
        fit_budget([[1], [1] * 64, [1] * 2], SamplingParams(max_tokens=1), CONTEXT, COMPLETION)
