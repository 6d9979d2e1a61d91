"""Scoring of prompts over HTTP: echo with logprobs, prompt_logprobs, and answers of no tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import openai
import pytest

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import ask, called, refusal_of, served, stream
from tests.byte_tokenizer import END, START
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
IDS = list(b"abcxyz")
GREEDY: dict[str, Any] = {"prompt": IDS, "temperature": 0, "return_token_ids": True}


def table(context: Sequence[int]) -> Mapping[int, float]:
    """Every byte is as likely as the lengths of the context and of the byte say; the best one is known."""
    best = ord("a") + (sum(context) + len(context)) % 26
    return {best: 0.5, **{byte: 0.5 / 255 for byte in range(256) if byte != best}}


def scores(ids: Sequence[int]) -> list[float | None]:
    """What teacher forcing says of each token."""
    return [None, *(math.log(table(ids[:end]).get(ids[end], 1e-5)) for end in range(1, len(ids)))]


def assert_scores(given: list[float | None], expected: list[float | None]) -> None:
    assert given[0] is None
    assert given[1:] == pytest.approx(expected[1:], abs=1e-4)


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Put streamed choices together again."""
    whole: dict[str, Any] = {"text": "".join(piece["text"] for piece in pieces)}
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        lists = [piece["logprobs"][name] for piece in pieces]
        whole[name] = None if lists[0] is None else [value for values in lists for value in values]
    return whole


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_api_13_echo_with_logprobs_scores_the_prompt(tokenizer: Tokenizer, max_tokens: int) -> None:
    async with called(stub_engine(tokenizer, table)) as client:
        for _ in ("cold", "cached"):
            body = await ask(client, COMPLETIONS, **GREEDY, echo=True, logprobs=1, max_tokens=max_tokens)
            [choice] = body["choices"]
            logprobs, every_id = choice["logprobs"], IDS + choice["token_ids"]
            assert len(every_id) == 6 + max_tokens
            assert_scores(logprobs["token_logprobs"], scores(every_id))
            assert logprobs["tokens"] == [chr(token_id) for token_id in every_id]
            assert logprobs["text_offset"] == list(range(6 + max_tokens))
            assert choice["text"] == bytes(every_id).decode()
            assert choice["finish_reason"] == "length"
            assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (6, max_tokens)
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert logprobs["top_logprobs"][0] is None
            for end, top in enumerate(logprobs["top_logprobs"][1:], start=1):
                best = max(table(every_id[:end]), key=table(every_id[:end]).__getitem__)
                assert top.keys() == {chr(best), chr(every_id[end])}
                assert max(top.values()) == pytest.approx(math.log(0.5), abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_api_13_logprobs_0_scores_the_tokens_alone(tokenizer: Tokenizer, max_tokens: int) -> None:
    async with called(stub_engine(tokenizer, table)) as client:
        body = await ask(client, COMPLETIONS, **GREEDY, echo=True, logprobs=0, max_tokens=max_tokens, prompt_logprobs=2)
    logprobs = body["choices"][0]["logprobs"]
    assert_scores(logprobs["token_logprobs"], scores(IDS + body["choices"][0]["token_ids"]))
    assert logprobs["top_logprobs"] is None
    assert [len(entry) for entry in body["choices"][0]["prompt_logprobs"][1:]] == [3] * 5


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
async def test_api_13_echo_without_logprobs_repeats_the_prompt(tokenizer: Tokenizer, max_tokens: int) -> None:
    async with called(stub_engine(tokenizer, table)) as client:
        plain = (await ask(client, COMPLETIONS, temperature=0, prompt="abcxyz", max_tokens=3))["choices"][0]["text"]
        for prompt in ("abcxyz", IDS):
            [choice] = (await ask(client, COMPLETIONS, temperature=0, prompt=prompt, echo=True, max_tokens=max_tokens))[
                "choices"
            ]
            assert (choice["text"], choice["logprobs"]) == ("abcxyz" + plain[:max_tokens], None)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_api_13_each_of_two_prompts_has_its_own_scores(tokenizer: Tokenizer, max_tokens: int) -> None:
    prompts = [IDS, list(b"xyz")]
    fields = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": 2}
    async with called(stub_engine(tokenizer, table)) as client:
        body = await ask(client, COMPLETIONS, temperature=0, **fields, return_token_ids=True)
        chunks = await stream(client, COMPLETIONS, temperature=0, **fields)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    for choice in body["choices"]:
        every_id = prompts[choice["index"] // 2] + choice["token_ids"]
        assert_scores(choice["logprobs"]["token_logprobs"], scores(every_id))
        assert choice["text"] == bytes(every_id).decode()
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert joined(pieces) == {"text": choice["text"], **choice["logprobs"]}
    assert body["usage"]["completion_tokens"] == 4 * max_tokens


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_streamed_echo_comes_whole_in_the_first_chunk(tokenizer: Tokenizer, max_tokens: int) -> None:
    fields = {"prompt": "abcxyz", "echo": True, "logprobs": 2, "max_tokens": max_tokens, "prompt_logprobs": 1}
    async with called(stub_engine(tokenizer, table)) as client:
        [whole] = (await ask(client, COMPLETIONS, temperature=0, **fields))["choices"]
        pieces = [chunk["choices"][0] for chunk in await stream(client, COMPLETIONS, temperature=0, **fields)]
    assert len(pieces) == max(max_tokens, 1)
    assert pieces[0]["text"].startswith("abcxyz")
    assert joined(pieces) == {"text": whole["text"], **whole["logprobs"]}
    assert [piece.get("prompt_logprobs") for piece in pieces] == [whole["prompt_logprobs"]] + [None] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] == "length"


async def test_an_echo_is_sent_though_the_answers_text_is_held_back(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, lambda _: {240: 1.0})) as client:
        pieces = [
            chunk["choices"][0]["text"]
            for chunk in await stream(client, COMPLETIONS, temperature=0, prompt="abc", echo=True, max_tokens=2)
        ]
    assert pieces[0] == "abc"


async def test_prompt_logprobs_are_told_by_token_id(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with called(stub_engine(tokenizer, table)) as client:
        ids = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
        chat = await ask(client, CHAT, temperature=0, messages=messages, max_tokens=2, prompt_logprobs=1)
        empty = await ask(client, CHAT, temperature=0, messages=messages, max_completion_tokens=0, prompt_logprobs=1)
        chunks = await stream(client, CHAT, temperature=0, messages=messages, max_tokens=2, prompt_logprobs=1, n=2)
        completion = await ask(client, COMPLETIONS, temperature=0, prompt=ids, prompt_logprobs=1)
    assert chat["prompt_logprobs"][0] is None
    for position, entry in enumerate(chat["prompt_logprobs"][1:], start=1):
        probabilities = table(ids[:position])
        best = max(probabilities, key=probabilities.__getitem__)
        assert entry.keys() == {str(ids[position]), str(best)}
        assert entry[str(best)] == {
            "logprob": pytest.approx(math.log(0.5), abs=1e-4),
            "rank": 1,
            "decoded_token": chr(best),
        }
    assert [chunk.get("prompt_logprobs") for chunk in chunks] == [chat["prompt_logprobs"]] + [None] * (len(chunks) - 1)
    assert completion["choices"][0]["prompt_logprobs"] == chat["prompt_logprobs"] == empty["prompt_logprobs"]
    assert empty["choices"][0]["message"]["content"] == ""
    assert (empty["choices"][0]["finish_reason"], empty["usage"]["completion_tokens"]) == ("length", 0)


@pytest.mark.parametrize(
    ("prompt", "text", "offsets"),
    [
        ("<|start|>a", "<|start|>a", [0, 9]),
        ([START, 97], "<|start|>a", [0, 9]),
        ([END, 97, 98], "<|end|>ab", [0, 7, 8]),
        ("a😊b", "a😊b", [0, 1, 1, 1, 1, 2]),
        ([97, 240, 159], "a\ufffd", [0, 1, 1]),
    ],
)
async def test_offsets_point_into_the_echoed_text(
    tokenizer: Tokenizer, prompt: Any, text: str, offsets: list[int]
) -> None:
    async with called(stub_engine(tokenizer, table)) as client:
        [choice] = (await ask(client, COMPLETIONS, temperature=0, prompt=prompt, echo=True, logprobs=0, max_tokens=0))[
            "choices"
        ]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


async def test_an_answer_completes_the_character_that_the_prompt_ends_in(tokenizer: Tokenizer) -> None:
    smile = list("😊".encode())
    async with called(stub_engine(tokenizer, lambda context: {[*smile, 97][len(context) - 1]: 1.0})) as client:
        [choice] = (
            await ask(client, COMPLETIONS, temperature=0, prompt=[97, *smile[:2]], echo=True, logprobs=0, max_tokens=3)
        )["choices"]
    assert choice["text"] == "a😊a"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2]


async def test_a_prompt_is_scored_whatever_form_its_answer_has(tokenizer: Tokenizer) -> None:
    fields = {"prompt": IDS, "structured_outputs": {"choice": ["yes", "no"]}, "echo": True, "logprobs": 0}
    async with called(stub_engine(tokenizer, table)) as client:
        for max_tokens in (0, 10):
            body = await ask(client, COMPLETIONS, **fields, max_tokens=max_tokens, return_token_ids=True)
            [choice] = body["choices"]
            assert_scores(choice["logprobs"]["token_logprobs"][:6], scores(IDS))
            assert choice["text"] in (("abcxyz",) if max_tokens == 0 else ("abcxyzyes", "abcxyzno"))


async def test_pc_2_a_cached_prompt_scores_as_on_a_fresh_engine(tokenizer: Tokenizer) -> None:
    prompt = [(7 * i) % 26 + 97 for i in range(2 * 16 + 5)]
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1}
    async with called(stub_engine(tokenizer, table)) as client:
        plain = await ask(client, COMPLETIONS, temperature=0, prompt=prompt, max_tokens=1)
        cached = await ask(client, COMPLETIONS, temperature=0, **fields)
        after = await ask(client, COMPLETIONS, temperature=0, prompt=prompt, max_tokens=1)
    async with called(stub_engine(tokenizer, table)) as client:
        fresh = await ask(client, COMPLETIONS, temperature=0, **fields)
    assert cached["choices"] == fresh["choices"]
    assert len(cached["choices"][0]["logprobs"]["token_logprobs"]) == len(prompt) + 1
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert after["choices"] == plain["choices"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "echo": False}, "max_tokens"),
        (COMPLETIONS, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (COMPLETIONS, {"max_tokens": -1, "echo": True}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": "yes"}, "echo"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"prompt_logprobs": True}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_name(
    tokenizer: Tokenizer, route: str, fields: dict[str, Any], param: str
) -> None:
    inputs = {"messages": [{"role": "user", "content": "a"}]} if route == CHAT else {"prompt": "a"}
    async with called(stub_engine(tokenizer, table)) as client:
        assert (await refusal_of(client, route, **inputs, **fields))["param"] == param


async def test_api_13_the_openai_client_reads_the_scores(tokenizer: Tokenizer) -> None:
    async with (
        served(stub_engine(tokenizer, table)) as base_url,
        openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client,
    ):
        answer = await client.completions.create(
            model="stub", prompt=IDS, echo=True, logprobs=1, max_tokens=0, temperature=0
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert_scores(logprobs.token_logprobs, scores(IDS))
    assert answer.choices[0].text == "abcxyz"
