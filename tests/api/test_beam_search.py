"""Beam search over HTTP, on tables of probabilities where the right answers can be worked out by hand."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import alphabet, called, error_of, served, wait_until_idle
from tests.api.test_disconnect import send, wait_for_requests
from tests.byte_tokenizer import END
from tests.stub import Table
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BEAM_SEARCH = "/v1/beam_search"
MESSAGES = [{"role": "user", "content": "hi"}]
# Each prompt ends with a line break, which no answer holds.
SEARCHES: dict[str, dict[str, Any]] = {
    "chat": {"messages": MESSAGES, "use_beam_search": True},
    "completions": {"prompt": "hi\n", "use_beam_search": True},
    "prompt": {"prompt": "hi\n"},
    "token ids": {"prompt": list(b"hi\n")},
    "messages": {"messages": MESSAGES},
}
ROUTES = {"chat": CHAT, "completions": COMPLETIONS}
EACH = pytest.mark.parametrize("kind", SEARCHES)


def after_the_line(table: Callable[[str], Mapping[str, float]]) -> Table:
    """A table over the text of the answer so far, which is what follows the last line break; "." is the end token."""

    def probabilities(context: Sequence[int]) -> dict[int, float]:
        answer = bytes(token for token in context if token < END).decode().rpartition("\n")[2]
        return {END if text == "." else ord(text): share for text, share in table(answer).items()}

    return probabilities


async def search(client: httpx.AsyncClient, kind: str, **fields: Any) -> dict[str, Any]:
    response = await client.post(ROUTES.get(kind, BEAM_SEARCH), json=SEARCHES[kind] | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in body["choices"]]


def sums(body: dict[str, Any]) -> list[float]:
    return [choice["cumulative_logprob"] for choice in body["choices"]]


def log(*probabilities: float) -> float:
    return sum(map(math.log, probabilities))


def long_or_short(answer: str) -> dict[str, float]:
    """'bccc' or 'a'."""
    answers = {"": {"a": 0.55, "b": 0.45}, "a": {".": 1.0}, "b": {"c": 1.0}, "bc": {"c": 1.0}, "bcc": {"c": 1.0}}
    return answers.get(answer, {".": 1.0})


@EACH
async def test_bs_1_the_length_penalty_counts_generated_tokens_only(tokenizer: Tokenizer, kind: str) -> None:
    async with called(stub_engine(tokenizer, after_the_line(long_or_short))) as client:
        fields = {"beam_width": 2, "n": 2, "max_tokens": 8}
        assert texts(await search(client, kind, **fields)) == ["bccc", "a"]
        assert texts(await search(client, kind, **fields, length_penalty=0)) == ["a", "bccc"]


@pytest.mark.parametrize("prompt_length", [1, 7, 8, 64])
async def test_bs_1_scores_do_not_depend_on_the_prompt(tokenizer: Tokenizer, prompt_length: int) -> None:
    async with called(stub_engine(tokenizer, after_the_line(long_or_short))) as client:
        body = await search(client, "prompt", prompt="x" * (prompt_length - 1) + "\n", beam_width=2, max_tokens=8)
    assert texts(body) == ["bccc", "a"]
    assert sums(body) == pytest.approx([-0.7985, -0.5978], abs=1e-4)
    # The end token counts: 5 and 2 tokens.
    assert [choice["score"] for choice in body["choices"]] == pytest.approx([-0.7985 / 5, -0.5978 / 2], abs=1e-4)


@EACH
async def test_bs_2_a_stop_string_ends_a_hypothesis(tokenizer: Tokenizer, kind: str) -> None:
    def table(answer: str) -> dict[str, float]:
        spelled = "xENDy"
        if answer == "":
            return {"x": 0.6, "z": 0.4}
        return {spelled[len(answer)] if spelled.startswith(answer) and answer != spelled else "z": 1.0}

    async with called(stub_engine(tokenizer, after_the_line(table))) as client:
        fields: dict[str, Any] = {"beam_width": 2, "n": 2, "max_tokens": 8, "early_stopping": "never"}
        body = await search(client, kind, **fields, stop=["END"], return_token_ids=True)
        by_text = dict(zip(texts(body), body["choices"], strict=True))
        assert by_text.keys() == {"x", "zzzzzzzz"}
        assert (by_text["x"]["finish_reason"], by_text["x"]["stop_reason"]) == ("stop", "END")
        assert bytes(by_text["x"]["token_ids"]) == b"xEND"
        assert by_text["zzzzzzzz"]["finish_reason"] == "length"
        assert "xEND" in texts(await search(client, kind, **fields, stop="END", include_stop_str_in_output=True))


@EACH
async def test_bs_3_a_hypothesis_that_ends_takes_no_live_ones_place(tokenizer: Tokenizer, kind: str) -> None:
    def table(answer: str) -> dict[str, float]:
        if answer == "":
            return {".": 0.5, "a": 0.3, "b": 0.2}
        return {".": 1.0} if answer == "b" else {".": 0.1, "a": 0.3, "b": 0.3, "c": 0.3}

    async with called(stub_engine(tokenizer, after_the_line(table))) as client:
        body = await search(client, kind, beam_width=2, n=2, length_penalty=0, max_tokens=4)
    assert texts(body) == ["", "b"]
    assert all(choice["finish_reason"] == "stop" for choice in body["choices"])
    if "score" in body["choices"][0]:
        assert sums(body) == pytest.approx([-0.6931, -1.6094], abs=1e-4)


@EACH
@pytest.mark.parametrize(("beam_width", "max_tokens"), [(3, 4), (16, 4), (2, 1)])
async def test_bs_4_a_search_without_an_end_token_ends_at_max_tokens(
    tokenizer: Tokenizer, kind: str, beam_width: int, max_tokens: int
) -> None:
    async with called(stub_engine(tokenizer, after_the_line(lambda _: {"a": 0.6, "b": 0.4}))) as client:
        fields = {"beam_width": beam_width, "n": beam_width, "max_tokens": max_tokens}
        body, neighbour = await asyncio.gather(
            search(client, kind, **fields), client.post(COMPLETIONS, json={"prompt": "x\n", "max_tokens": 5})
        )
        await wait_until_idle(client)
    assert len(neighbour.json()["choices"][0]["text"]) == 5
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * beam_width
    assert {len(text) for text in texts(body)} == {max_tokens}
    assert len(set(texts(body))) == beam_width
    assert texts(body)[0] == "a" * max_tokens
    if "score" in body["choices"][0]:
        assert sums(body)[0] == pytest.approx(log(0.6) * max_tokens, abs=1e-4)


@EACH
@pytest.mark.parametrize("beam_width", [1, 2, 10, 11, 16, 64])
async def test_bs_5_every_width_up_to_the_limit_works(tokenizer: Tokenizer, kind: str, beam_width: int) -> None:
    table = after_the_line(lambda _: dict(zip("abcde", (5, 4, 3, 2, 1), strict=True)))
    engine = stub_engine(tokenizer, table, num_blocks=512)
    async with called(engine) as client:
        body = await search(client, kind, beam_width=beam_width, n=beam_width, max_tokens=4)
    assert len(set(texts(body))) == beam_width
    assert texts(body)[0] == "aaaa"


@EACH
async def test_bs_5_one_beam_is_greedy_decoding(tokenizer: Tokenizer, kind: str) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        body = await search(client, kind, beam_width=1, max_tokens=30)
    assert texts(body) == ["abcdefghijklmnopqrstuvwxyz"]
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_the_width_is_at_least_two_and_what_n_or_best_of_ask_for(tokenizer: Tokenizer, kind: str) -> None:
    """The most likely answer does not begin with the most likely token, so one beam does not find it."""

    def table(answer: str) -> dict[str, float]:
        first = {"": {"a": 0.5, "b": 0.3, "c": 0.2}, "a": {"x": 0.24, "y": 0.19, "z": 0.19, "v": 0.19, "w": 0.19}}
        return first.get(answer, {"d": 1.0})

    async with called(stub_engine(tokenizer, after_the_line(table))) as client:
        assert texts(await search(client, kind, max_tokens=2, beam_width=1)) == ["ax"]
        assert texts(await search(client, kind, max_tokens=2)) == ["bd"]
        assert texts(await search(client, kind, max_tokens=2, n=2)) == ["bd", "ax"]
        assert texts(await search(client, kind, max_tokens=2, n=2, best_of=3)) == ["bd", "cd"]
        assert texts(await search(client, kind, max_tokens=2, beam_width=3, best_of=3)) == ["bd"]


@EACH
async def test_bs_6_biases_and_penalties_are_honoured(tokenizer: Tokenizer, kind: str) -> None:
    async with called(stub_engine(tokenizer, after_the_line(lambda _: {"a": 0.6, "b": 0.4}))) as client:
        fields = {"beam_width": 2, "max_tokens": 3}
        assert texts(await search(client, kind, **fields))[0] == "aaa"
        assert texts(await search(client, kind, **fields, logit_bias={str(ord("a")): -100}))[0] == "bbb"
        assert set(texts(await search(client, kind, **fields, frequency_penalty=2))[0]) == {"a", "b"}
        assert texts(await search(client, kind, **fields, temperature=0))[0] == "aaa"


@EACH
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
async def test_early_stopping_is_honoured(tokenizer: Tokenizer, kind: str, early_stopping: bool | str) -> None:
    """Two short answers finish first; a long one that scores better needs more steps."""

    def table(answer: str) -> dict[str, float]:
        if answer == "":
            return {"a": 0.36, ".": 0.34, "b": 0.3}
        return {".": 1.0} if answer.startswith("b") or len(answer) == 9 else {"a": 1.0}

    async with called(stub_engine(tokenizer, after_the_line(table))) as client:
        body = await search(client, kind, beam_width=2, n=1, max_tokens=20, early_stopping=early_stopping)
    assert texts(body) == ["b" if early_stopping is True else "a" * 9]


async def test_bs_7_searches_at_once_equal_searches_alone_and_share_their_prompt(tokenizer: Tokenizer) -> None:
    def table(context: Sequence[int]) -> Mapping[int, float]:
        key = hash(tuple(context))
        shares = [1 + (key >> 4 * i) % 16 for i in range(6)]
        return {ord("a") + i: share / sum(shares) for i, share in enumerate(shares)}

    prompts = ["x" * 100, "x" * 80 + "y" * 30, "z" * 40]
    fields = {"beam_width": 4, "max_tokens": 3 * 16 + 1}
    async with called(stub_engine(tokenizer, table, num_blocks=256)) as client:
        alone = [await search(client, "prompt", prompt=prompt, **fields) for prompt in prompts]
        assert (await client.post("/v1/cache/reset")).json()["kept_blocks"] == 0
        together = await asyncio.gather(*(search(client, "prompt", prompt=prompt, **fields) for prompt in prompts))
        await wait_until_idle(client)
        for one, other, prompt in zip(alone, together, prompts, strict=True):
            assert texts(one) == texts(other)
            assert sums(one) == pytest.approx(sums(other), abs=1e-6)
            for choice in other["choices"]:
                context, total = list(prompt.encode()), 0.0
                for token in choice["text"].encode():
                    total += math.log(table(context)[token])
                    context.append(token)
                assert choice["cumulative_logprob"] == pytest.approx(total, abs=1e-3)
            memory = other["memory"]
            assert memory["block_size"] == 16
            num_prompt_blocks = len(prompt) // 16
            assert memory["peak_blocks"] <= memory["peak_blocks_without_sharing"] - 3 * num_prompt_blocks
            assert memory["blocks_copied"] > 0


@EACH
async def test_bs_8_hypotheses_end_at_the_end_token_and_differ(tokenizer: Tokenizer, kind: str) -> None:
    def table(answer: str) -> dict[str, float]:
        return {
            "": {"a": 0.9, "b": 0.1},
            "a": {".": 0.9, "b": 0.1},
            "b": {".": 0.9, "a": 0.1},
        }.get(answer, {".": 1.0})

    async with called(stub_engine(tokenizer, after_the_line(table))) as client:
        body = await search(
            client,
            kind,
            beam_width=3,
            n=3,
            length_penalty=0,
            max_tokens=8,
            early_stopping="never",
            return_token_ids=True,
        )
    assert texts(body)[0] == "a"
    assert set(texts(body)[1:]) == {"b", "ab"}
    assert all(choice["token_ids"].count(END) == 1 == choice["token_ids"][-1:].count(END) for choice in body["choices"])
    if "score" in body["choices"][0]:
        assert sums(body) == pytest.approx([-0.2107, -2.4079, -2.4079], abs=1e-4)


@EACH
async def test_api_12_usage_counts_the_prompt_once_and_the_hypotheses_that_are_returned(
    tokenizer: Tokenizer, kind: str
) -> None:
    async with called(stub_engine(tokenizer, after_the_line(lambda _: {"a": 0.6, "b": 0.4}))) as client:
        frame = (await client.post("/tokenize", json={"messages": MESSAGES})).json()["count"]
        bodies = [await search(client, kind, beam_width=4, n=3, max_tokens=8, return_token_ids=True) for _ in range(2)]
    num_prompt_tokens = frame if "messages" in SEARCHES[kind] else 3
    for body in bodies:
        assert len(body["prompt_token_ids"]) == num_prompt_tokens
        assert sum(len(choice["token_ids"]) for choice in body["choices"]) == 24
        usage = body["usage"]
        assert usage["prompt_tokens"] == num_prompt_tokens
        assert (usage["completion_tokens"], usage["total_tokens"]) == (24, num_prompt_tokens + 24)
    assert bodies[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert bodies[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": num_prompt_tokens - 1}


async def test_a_list_of_prompts_has_the_hypotheses_of_each_together(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, after_the_line(lambda _: {"a": 0.6, "b": 0.4}))) as client:
        body = await search(client, "completions", prompt=["one\n", "two\n"], n=2, max_tokens=1)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (8, 4)


async def test_the_answer_of_the_route_has_its_shape(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, after_the_line(long_or_short))) as client:
        response = await client.post(
            BEAM_SEARCH,
            json={"model": "stub", "prompt": "hi\n", "beam_width": 3, "max_tokens": 8},
            headers={"x-request-id": "mine"},
        )
    assert response.headers["x-request-id"] == "mine"
    body = response.json()
    assert body.keys() == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage", "memory"}
    assert (body["object"], body["model"], body["id"][:5]) == ("beam_search", "stub", "beam-")
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for choice in body["choices"]:
        assert choice.keys() == {"index", "text", "cumulative_logprob", "score", "finish_reason", "stop_reason"}
    assert body["memory"].keys() == {"block_size", "peak_blocks", "peak_blocks_without_sharing", "blocks_copied"}


@pytest.mark.parametrize(("kind", "budget"), [("prompt", 16), ("messages", None), ("chat", None), ("completions", 16)])
async def test_the_default_budget_is_that_of_completions_or_chat(
    tokenizer: Tokenizer, kind: str, budget: int | None
) -> None:
    async with called(
        stub_engine(tokenizer, after_the_line(lambda _: {"a": 0.6, "b": 0.4}), max_model_len=64)
    ) as client:
        usage = (await search(client, kind, beam_width=2, n=1))["usage"]
    assert usage["completion_tokens"] == budget or usage["total_tokens"] == 64


async def test_a_salt_keeps_prefixes_apart(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        cached = [
            (await search(client, "prompt", prompt="x" * 40, beam_width=2, max_tokens=1, cache_salt=salt))["usage"]
            for salt in ("s", "s", "t")
        ]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in cached] == [0, 39, 0]


@EACH
async def test_a_priority_goes_with_a_search(tokenizer: Tokenizer, kind: str) -> None:
    fields = {"beam_width": 2, "max_tokens": 2, "priority": 1}
    async with called(stub_engine(tokenizer, alphabet, config=EngineConfig(schedule_policy="priority"))) as client:
        assert texts(await search(client, kind, **fields))[0] == "ab"
    async with called(stub_engine(tokenizer, alphabet)) as client:
        response = await client.post(ROUTES.get(kind, BEAM_SEARCH), json=SEARCHES[kind] | fields)
        assert (response.status_code, error_of(response)["param"]) == (400, "priority")


async def test_what_does_not_fit_the_pool_is_refused_by_name(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet, num_blocks=16, max_model_len=256)) as client:
        wide = await client.post(BEAM_SEARCH, json={"prompt": "x" * 100, "beam_width": 64})
        assert (wide.status_code, error_of(wide)["param"]) == (400, "beam_width")
        long = await client.post(BEAM_SEARCH, json={"prompt": "x", "beam_width": 4, "max_tokens": 200})
        assert (long.status_code, error_of(long)["param"]) == (400, "max_tokens")
        assert texts(await search(client, "prompt", beam_width=2, max_tokens=2))[0] == "ab"


@pytest.mark.parametrize("kind", ["chat", "completions", "prompt", "messages"])
async def test_a_search_ends_with_its_client(tokenizer: Tokenizer, kind: str) -> None:
    engine = stub_engine(
        tokenizer,
        after_the_line(lambda _: {"a": 0.6, "b": 0.4}),
        config=EngineConfig(),
        num_blocks=4096,
        max_model_len=4096,
    )
    async with served(engine) as base_url, httpx.AsyncClient(base_url=base_url) as client:
        fields = SEARCHES[kind] | {"beam_width": 8, "max_tokens": 4000}
        _, writer = await send(base_url, ROUTES.get(kind, BEAM_SEARCH), fields)
        await wait_for_requests(client, running=8, waiting=0)
        writer.close()
        await wait_until_idle(client)
        answer = await client.post(BEAM_SEARCH, json=SEARCHES["prompt"] | {"beam_width": 2, "max_tokens": 2})
        assert texts(answer.json())[0] == "aa"


async def test_an_engine_that_fails_a_search_is_a_500_and_serves_the_next(tokenizer: Tokenizer) -> None:
    engine = stub_engine(tokenizer, alphabet, fail_on=lambda context: context[-1] == ord("e"))
    async with called(engine) as client:
        response = await client.post(BEAM_SEARCH, json={"prompt": "a", "beam_width": 2})
        assert (response.status_code, error_of(response)["type"]) == (500, "server_error")
        assert texts(await search(client, "prompt", beam_width=2, max_tokens=2))[0] == "ab"
        await wait_until_idle(client)


async def test_a_search_over_the_time_limit_is_a_504(tokenizer: Tokenizer) -> None:
    engine = stub_engine(
        tokenizer, alphabet, config=EngineConfig(request_timeout=0.05), num_blocks=4096, max_model_len=16384
    )
    async with called(engine) as client:
        body = {"prompt": "a", "beam_width": 2, "max_tokens": 16000, "ignore_eos": True}
        response = await client.post(BEAM_SEARCH, json=body)
        assert (response.status_code, error_of(response)["code"]) == (504, "request_timeout")
        await wait_until_idle(client)
