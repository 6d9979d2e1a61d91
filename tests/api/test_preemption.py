"""A preempted request, seen by its caller: nothing repeated, nothing missing, every count right."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import called, events_of
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
PROMPTS = ["the first prompt here", "another one, longer", "9 times something else"]


def letters(context: list[int]) -> dict[int, float]:
    """Printable tokens that depend on the whole context."""
    first = hash(tuple(context)) % 90
    return {32 + first: 0.5, 32 + (first + 1) % 90: 0.3, context[-1]: 0.2}


async def ask_all(tokenizer: Tokenizer, num_blocks: int, **fields: Any) -> tuple[list[httpx.Response], int]:
    """Ask all prompts at once; return the answers and how many preemptions there were."""
    engine = stub_engine(tokenizer, letters, num_blocks=num_blocks, max_model_len=96)
    body = {"max_tokens": 60, "logprobs": 2, "temperature": 0, **fields}
    async with called(engine) as client:
        calls = (client.post(COMPLETIONS, json=body | {"prompt": prompt}) for prompt in PROMPTS)
        responses = await asyncio.gather(*calls)
        assert all(response.status_code == 200 for response in responses)
        assert engine.stats is not None
        return list(responses), engine.stats.num_preemptions


@pytest.mark.parametrize(
    "fields", [{}, {"frequency_penalty": 1.5}, {"seed": 7, "temperature": 1}, {"min_tokens": 12, "stop": ["a"]}]
)
async def test_sc_3_a_preemption_changes_neither_the_answer_nor_its_stream(
    tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    roomy, num_roomy = await ask_all(tokenizer, 64, **fields)
    tight, num_tight = await ask_all(tokenizer, 6, **fields)
    streamed, num_streamed = await ask_all(tokenizer, 6, stream=True, stream_options={"include_usage": True}, **fields)
    assert num_roomy == 0
    assert num_tight > 0
    assert num_streamed > 0
    for expected, answer, stream in zip(roomy, tight, streamed, strict=True):
        whole = json.loads(expected.text)
        assert whole["choices"] == answer.json()["choices"]
        assert whole["usage"] == answer.json()["usage"]
        *chunks, last = events_of(stream.text)
        choices = [chunk["choices"][0] for chunk in chunks]
        (choice,) = whole["choices"]
        assert last["usage"] == whole["usage"]
        assert "".join(part["text"] for part in choices) == choice["text"]
        assert [part["finish_reason"] for part in choices if part["finish_reason"]] == [choice["finish_reason"]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [entry for part in choices if part["logprobs"] for entry in part["logprobs"][name]]
            assert parts == choice["logprobs"][name]
            assert len(parts) == whole["usage"]["completion_tokens"]
