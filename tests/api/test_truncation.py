"""A prompt that is too long is cut at its beginning where the request says so, and only there."""

from typing import Any

import pytest

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import alphabet, ask, called, refusal_of
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CONTEXT = 64
LONG = list(range(100))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 1}, LONG[-1:]),
        ({"truncate_prompt_tokens": 20}, LONG[-20:]),
        ({"truncate_prompt_tokens": 63, "max_tokens": 1}, LONG[-63:]),
        ({"truncate_prompt_tokens": -1}, LONG[-63:]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 10}, LONG[-54:]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 0, "echo": True}, LONG[-63:]),
    ],
)
async def test_the_last_tokens_of_a_long_prompt_are_kept(
    tokenizer: Tokenizer, fields: dict[str, Any], kept: list[int]
) -> None:
    async with called(stub_engine(tokenizer, alphabet, max_model_len=CONTEXT)) as client:
        body = await ask(client, COMPLETIONS, prompt=LONG, return_token_ids=True, **fields)
    assert body["prompt_token_ids"] == kept
    assert body["usage"]["prompt_tokens"] == len(kept)


@pytest.mark.parametrize("number", [3, 50, -1, None])
async def test_a_prompt_that_is_short_enough_is_left_alone(tokenizer: Tokenizer, number: int | None) -> None:
    async with called(stub_engine(tokenizer, alphabet, max_model_len=CONTEXT)) as client:
        body = await ask(client, COMPLETIONS, prompt=["abc", "d"], return_token_ids=True, truncate_prompt_tokens=number)
    assert body["prompt_token_ids"] == [[97, 98, 99], [100]]


async def test_each_prompt_of_a_list_is_cut_and_its_echo_too(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        body = await ask(
            client, COMPLETIONS, prompt=["abcd", "efg", "h"], truncate_prompt_tokens=2, echo=True, max_tokens=0
        )
    assert [choice["text"] for choice in body["choices"]] == ["cd", "fg", "h"]


async def test_a_chat_is_cut_as_well(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x" * 100}]
    async with called(stub_engine(tokenizer, alphabet, max_model_len=CONTEXT)) as client:
        for fields, length in (({}, 63), ({"max_tokens": 4}, 60)):
            body = await ask(
                client, CHAT, messages=messages, truncate_prompt_tokens=-1, return_token_ids=True, **fields
            )
            assert tokenizer.decode(body["prompt_token_ids"]).endswith("xxx\nassistant\n")
            assert body["usage"]["prompt_tokens"] == length


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 64}, "prompt"),
        ({"truncate_prompt_tokens": 60, "max_tokens": 5}, "max_tokens"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 64}, "max_tokens"),
        ({}, "prompt"),
    ],
)
async def test_what_does_not_fit_all_the_same_is_refused(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    async with called(stub_engine(tokenizer, alphabet, max_model_len=CONTEXT)) as client:
        assert (await refusal_of(client, COMPLETIONS, prompt=LONG, **fields))["param"] == param
