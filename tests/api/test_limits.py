"""Budgets and stop strings in every form that clients send, over HTTP."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import BOTH, CHAT, COMPLETIONS, INPUTS, alphabet, ask, called, refusal_of, text_of
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        yield client


async def answer(client: httpx.AsyncClient, route: str, **fields: Any) -> str:
    return text_of((await ask(client, route, **INPUTS[route], **fields))["choices"])


@BOTH
@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({}, None),
        ({"max_tokens": None, "max_completion_tokens": None}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": None, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
        ({"max_completion_tokens": 9, "max_tokens": 5}, 9),
    ],
)
async def test_api_3_either_name_limits_and_null_is_absent(
    client: httpx.AsyncClient, route: str, fields: dict[str, Any], num_tokens: int | None
) -> None:
    default = 26 if route == CHAT else 16
    assert await answer(client, route, **fields) == ALPHABET[: num_tokens or default]


@BOTH
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", ["0", "-1", "5.0", '"5"', "true", "1e9", "[5]", "1e400", "9223372036854775808"])
async def test_api_3_what_is_no_budget_is_refused_by_name(
    client: httpx.AsyncClient, route: str, name: str, value: str
) -> None:
    field = "messages" if route == CHAT else "prompt"
    inputs = '[{"role": "user", "content": "hi"}]' if route == CHAT else '"hi"'
    response = await client.post(route, content=f'{{"{field}": {inputs}, "{name}": {value}}}')
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


async def test_api_3_a_budget_over_the_context_bounds_a_chat_and_is_refused_for_a_completion(
    client: httpx.AsyncClient,
) -> None:
    assert await answer(client, CHAT, max_tokens=1_000_000_000) == ALPHABET
    error = await refusal_of(client, COMPLETIONS, prompt="hi ", max_tokens=1_000_000_000)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")


@BOTH
@pytest.mark.parametrize("stop", ["", [""], ["", "x"], ["x", ""], [1], [None], 1, "x" * 10_000, ["c", "x" * 10_000]])
async def test_api_8_a_stop_that_means_nothing_is_refused(client: httpx.AsyncClient, route: str, stop: Any) -> None:
    assert (await refusal_of(client, route, **INPUTS[route], stop=stop))["param"] == "stop"


@BOTH
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (None, ALPHABET),
        ([], ALPHABET),
        ("x", ALPHABET[:23]),
        (["x"], ALPHABET[:23]),
        (["e", "d", "c", "b", "a"], ""),
        (["zz", "yy", "xx", "ww", "k"], ALPHABET[:10]),
    ],
)
async def test_api_8_stop_strings_end_the_answer_where_they_stand(
    client: httpx.AsyncClient, route: str, stop: Any, text: str
) -> None:
    assert await answer(client, route, stop=stop, max_tokens=26) == text


async def test_a_list_of_prompts_longer_than_the_queue_is_no_matter_of_trying_again(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet, config=EngineConfig(max_queued_requests=2))) as client:
        assert len((await ask(client, COMPLETIONS, prompt=["a", "b"], max_tokens=1))["choices"]) == 2
        refusal = await refusal_of(client, COMPLETIONS, prompt=["a", "b", "c"], max_tokens=1)
        assert refusal["param"] == "prompt"
        assert "2" in refusal["message"]
