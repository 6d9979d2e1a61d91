"""Seeds and biases over HTTP: what one request asks for is the same whoever runs beside it."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import ask, called, stream, text_of
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
LETTERS = b"abcdefgh"


def letters(context: Sequence[int]) -> Mapping[int, float]:
    """Eight letters, whose probabilities depend on the last token."""
    weights = {letter: 1 + (letter * context[-1]) % 7 for letter in LETTERS}
    total = sum(weights.values())
    return {letter: weight / total for letter, weight in weights.items()}


async def texts(client: httpx.AsyncClient, prompt: str = "hello", **fields: Any) -> list[str]:
    body = await ask(client, COMPLETIONS, **{"prompt": prompt, "temperature": 0.8, "max_tokens": 16} | fields)
    return [choice["text"] for choice in body["choices"]]


async def test_api_15_a_seeded_answer_is_the_same_in_any_company(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, letters)) as client:
        alone = await texts(client, seed=42)
        neighbours: list[list[dict[str, Any]]] = [
            [{}],
            [{"seed": 7}],
            [{}, {"seed": 7}, {"temperature": 0}, {"seed": 42, "top_p": 0.5}],
        ]
        for others in neighbours:
            for position in range(len(others) + 1):
                batch = [*others[:position], {"seed": 42}, *others[position:]]
                # The first run of a prompt computes it and later ones hit it: both are compared.
                calls = (texts(client, **fields) for fields in batch)
                assert (await asyncio.gather(*calls))[position] == alone
        assert await texts(client, seed=42) == alone
    async with called(stub_engine(tokenizer, letters)) as client:
        together = await asyncio.gather(texts(client, "hello", seed=42), texts(client, "other"))
        assert together[0] == alone, "cold, beside an unseeded one"


async def test_api_15_choices_of_one_seed_differ_and_repeat_as_a_set(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, letters)) as client:
        first = await texts(client, seed=42, n=3)
        second, _ = await asyncio.gather(texts(client, seed=42, n=3), texts(client))
        assert len(set(first)) == 3
        assert second == first
        assert first[:1] == await texts(client, seed=42)


async def test_api_15_unseeded_answers_differ(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, letters)) as client:
        assert len({tuple(await texts(client)) for _ in range(4)}) == 4


@pytest.mark.parametrize(("seed", "status"), [(0, 200), (-1, 200), (-(2**63), 200), (2**63 - 1, 200), (2**63, 400)])
async def test_api_15_any_seed_of_64_bits_draws(tokenizer: Tokenizer, seed: int, status: int) -> None:
    async with called(stub_engine(tokenizer, letters)) as client:
        answers = [await client.post(COMPLETIONS, json={"prompt": "a", "seed": seed}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status] * 2
    if status == 400:
        assert answers[0].json()["error"]["param"] == "seed"
    else:
        assert answers[0].json()["choices"] == answers[1].json()["choices"]


T, U = ord("t"), ord("u")


def prefers_t(context: Sequence[int]) -> Mapping[int, float]:
    return {T: 0.9, U: 0.02, ord("v"): 0.08}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 2}, {"frequency_penalty": 0.5, "presence_penalty": 0.5}, {"repetition_penalty": 1.2}]
)
async def test_api_18_a_bias_of_100_forbids_or_forces_a_token(
    tokenizer: Tokenizer, temperature: float, fields: dict[str, Any]
) -> None:
    async with called(stub_engine(tokenizer, prefers_t)) as client:
        for prompt in ("cold", "cold", "another"):
            plain, forbidden, forced = await asyncio.gather(
                *(
                    texts(client, prompt, temperature=temperature, seed=1, **fields, **bias)
                    for bias in ({}, {"logit_bias": {str(T): -100}}, {"logit_bias": {str(U): 100}})
                )
            )
            alone = await texts(client, prompt, temperature=temperature, seed=1, **fields)
            assert plain == alone, "a neighbour's bias reached it"
            assert "t" in plain[0]
            assert all("t" not in text for text in forbidden)
            assert all(set(text) == {"u"} for text in forced)
            assert len(forced) == fields.get("n", 1)


@pytest.mark.parametrize("bias", [{}, None])
async def test_api_18_no_bias_changes_nothing(tokenizer: Tokenizer, bias: Any) -> None:
    async with called(stub_engine(tokenizer, prefers_t)) as client:
        for temperature in (0, 1):
            settings = {"temperature": temperature, "seed": 3}
            assert await texts(client, **settings, logit_bias=bias) == await texts(client, **settings)


@pytest.mark.parametrize("temperature", [0, 1])
async def test_api_18_logprobs_are_those_before_the_bias(tokenizer: Tokenizer, temperature: float) -> None:
    fields = {"prompt": "a", "logit_bias": {str(U): 100}, "logprobs": 1, "max_tokens": 3, "temperature": temperature}
    async with called(stub_engine(tokenizer, prefers_t)) as client:
        whole = await ask(client, COMPLETIONS, **fields, n=2)
        pieces = [chunk["choices"][0] for chunk in await stream(client, COMPLETIONS, **fields)]
    assert text_of(pieces) == "uuu"
    every_choice = [*whole["choices"], *pieces]
    for choice in every_choice:
        assert choice["logprobs"]["token_logprobs"] == pytest.approx([math.log(0.02)] * len(choice["text"]), abs=1e-4)
        assert all(top["t"] == pytest.approx(math.log(0.9), abs=1e-4) for top in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize(
    "bias", [{"x": 1}, {"1.5": 1}, {"5": 101}, {"5": "1"}, [[5, 1]], {"-1": 1}, {"259": 1}, {"99999": -100}]
)
async def test_api_18_what_is_no_bias_is_refused_by_name(tokenizer: Tokenizer, bias: Any) -> None:
    async with called(stub_engine(tokenizer, prefers_t)) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "a", "logit_bias": bias})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")
