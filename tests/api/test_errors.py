"""Whatever is sent, the answer is OpenAI's error shape, and the next request works."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from radixserve.api.app import create_app
from radixserve.api.body import MAX_BODY_BYTES
from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import alphabet, called, error_of, served, wait_until_idle
from tests.byte_tokenizer import VOCAB_SIZE, load_byte_tokenizer
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPT_ROUTES = [CHAT, COMPLETIONS, "/v1/beam_search", "/tokenize", "/v1/cache/warm", "/v1/cache/pin"]
POST_ROUTES = [*PROMPT_ROUTES, "/detokenize", "/v1/cache/reset"]


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with called(stub_engine(tokenizer, alphabet, max_model_len=64)) as client:
        yield client


async def assert_serves(client: httpx.AsyncClient) -> None:
    answer = await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
    assert answer.json()["choices"][0]["text"] == "y"


async def refusal(client: httpx.AsyncClient, path: str, body: Any, **how: Any) -> dict[str, Any]:
    sent = {"json": body} if isinstance(body, dict) else {"content": body}
    response = await client.post(path, **sent, **how)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    await assert_serves(client)
    return error


@pytest.mark.parametrize("route", POST_ROUTES)
@pytest.mark.parametrize("body", ["{", "[]", "null", "3", '"s"', b"\xff", "[" * 100_000, '{"model":"m",x}'])
async def test_api_9_a_body_that_is_no_object(client: httpx.AsyncClient, route: str, body: str | bytes) -> None:
    await refusal(client, route, body)


@pytest.mark.parametrize("route", [*PROMPT_ROUTES, "/detokenize"])
async def test_api_9_an_empty_body(client: httpx.AsyncClient, route: str) -> None:
    await refusal(client, route, b"")


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}, {"content-type": "application/json"}])
async def test_api_9_json_is_taken_under_any_content_type(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    answer = await client.post(COMPLETIONS, content='{"prompt":"x","max_tokens":1}', headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("route", POST_ROUTES)
async def test_api_9_a_wrong_method(client: httpx.AsyncClient, route: str) -> None:
    response = await client.get(route)
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("route", ["/", "/nowhere", "/v1/chat/completions/", "/v1/responses"])
async def test_api_9_an_unknown_route(client: httpx.AsyncClient, route: str) -> None:
    for response in (await client.get(route), await client.post(route, json={})):
        assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-0.1", "2.1", '"1"'])
async def test_api_7_temperature(client: httpx.AsyncClient, number: str) -> None:
    error = await refusal(client, COMPLETIONS, f'{{"prompt":"a","temperature":{number}}}')
    assert error["param"] == "temperature"


async def test_api_7_what_is_allowed(client: httpx.AsyncClient) -> None:
    for fields in ({"temperature": None}, {"temperature": 0}, {"top_k": 0}, {"top_k": -1}):
        answer = await client.post(COMPLETIONS, json={"prompt": "a", **fields})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("num_tokens", "budget", "allowed"),
    [(60, 4, True), (60, 5, False), (63, 1, True), (64, 1, False), (65, 1, False), (200, 1, False), (64, None, False)],
)
async def test_api_4_completions_at_the_edge_of_the_context(
    client: httpx.AsyncClient, num_tokens: int, budget: int | None, allowed: bool
) -> None:
    body = {"prompt": [1] * num_tokens, "max_tokens": budget, "ignore_eos": True}
    if allowed:
        usage = (await client.post(COMPLETIONS, json=body)).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_tokens, budget)
    else:
        error = await refusal(client, COMPLETIONS, body)
        assert error["code"] == "context_length_exceeded"
        assert str(num_tokens) in error["message"]
        assert "64" in error["message"]


async def test_api_4_the_default_budget_of_completions_is_lowered_to_the_room(client: httpx.AsyncClient) -> None:
    for prompt, generated in (([1] * 63, 1), ([1] * 50, 14), ([[1] * 63, [1] * 5], 1 + 16)):
        answer = await client.post(COMPLETIONS, json={"prompt": prompt, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == generated
        assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"length"}


async def test_api_4_a_chat_goes_up_to_the_edge_of_the_context(client: httpx.AsyncClient) -> None:
    def chat(length: int, **fields: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "x" * length}], "ignore_eos": True, **fields}

    frame = (await client.post("/tokenize", json={"messages": chat(0)["messages"]})).json()["count"]
    for num_tokens, budget in ((60, 5), (63, 1), (63, None), (50, 1000)):
        answer = await client.post(CHAT, json=chat(num_tokens - frame, max_tokens=budget))
        assert answer.json()["usage"]["total_tokens"] == 64
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    for num_tokens in (64, 65, 200):
        error = await refusal(client, CHAT, chat(num_tokens - frame))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("fields", [{"prompt": prompt} for prompt in ("", [""], [], [[]], ["a", ""], None)] + [{}])
async def test_api_5_an_empty_prompt(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    assert (await refusal(client, COMPLETIONS, fields))["param"] == "prompt"


async def test_api_5_empty_messages(client: httpx.AsyncClient) -> None:
    assert (await refusal(client, CHAT, {"messages": []}))["param"] == "messages"
    answer = await client.post(CHAT, json={"messages": [{"role": "user", "content": ""}], "max_tokens": 1})
    assert answer.status_code == 200


async def test_a_chat_without_messages_names_the_field(client: httpx.AsyncClient) -> None:
    assert "messages" in (await refusal(client, CHAT, {"model": "stub"}))["message"]


@pytest.mark.parametrize(
    "prompt", [[999999], [VOCAB_SIZE], [-1], [[-1]], [0, 2**63], [1.5], [True], ["a", 1], [[1], [2.5]]]
)
async def test_api_6_ids_outside_the_vocabulary(client: httpx.AsyncClient, prompt: Any) -> None:
    assert (await refusal(client, COMPLETIONS, {"prompt": prompt}))["param"] == "prompt"


async def test_api_6_the_last_id_works_and_neighbours_are_untouched(client: httpx.AsyncClient) -> None:
    good, bad = await asyncio.gather(
        client.post(COMPLETIONS, json={"prompt": [VOCAB_SIZE - 1, 97], "max_tokens": 20}),
        client.post(COMPLETIONS, json={"prompt": [VOCAB_SIZE], "max_tokens": 20}),
    )
    assert good.json()["choices"][0]["text"] == "bcdefghijklmnopqrstu"
    assert bad.status_code == 400


async def test_an_unknown_model_names_the_served_one(client: httpx.AsyncClient) -> None:
    for route, body in ((CHAT, {"messages": [{"role": "user", "content": "a"}]}), (COMPLETIONS, {"prompt": "a"})):
        response = await client.post(route, json=body | {"model": "gpt-4"})
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "stub" in error["message"]
        for model in ("stub", None):
            assert (await client.post(route, json=body | {"model": model})).status_code == 200


async def test_api_10_harmless_extras_change_nothing(client: httpx.AsyncClient) -> None:
    plain = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    extras = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"}
    extras |= {"parallel_tool_calls": True, "made_up": {"x": [1]}}
    message = plain["messages"][0] | {"id": "msg_1", "refusal": None, "made_up": 1}
    answers = [
        (await client.post(CHAT, json=body)).json() for body in (plain, plain | extras | {"messages": [message]})
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


@pytest.mark.parametrize("field", ["audio", "modalities", "functions", "guided_json", "tools"])
async def test_api_10_a_field_that_would_change_the_answer_is_refused(client: httpx.AsyncClient, field: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], field: ["audio"]}
    error = await refusal(client, CHAT, body)
    assert error["param"] == field


async def test_api_16_a_model_without_a_chat_template(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = load_byte_tokenizer(tmp_path_factory.mktemp("plain"), chat_template=None)
    async with called(stub_engine(tokenizer, alphabet)) as client:
        for route in (CHAT, "/tokenize"):
            error = await refusal(client, route, {"messages": [{"role": "user", "content": "a"}]})
            assert "--chat-template" in error["message"]
        assert (await client.get("/v1/models")).status_code == 200


async def test_api_16_a_template_that_refuses_the_messages(tmp_path_factory: pytest.TempPathFactory) -> None:
    template = "{{ raise_exception('only users may speak') }}"
    tokenizer = load_byte_tokenizer(tmp_path_factory.mktemp("strict"), chat_template=template)
    async with called(stub_engine(tokenizer, alphabet)) as client:
        error = await refusal(client, CHAT, {"messages": [{"role": "user", "content": "a"}]})
        assert "only users may speak" in error["message"]


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_over_the_limit_is_refused_without_reading_it_all(
    tokenizer: Tokenizer, is_announced: bool
) -> None:
    size = MAX_BODY_BYTES + 4 * 2**20
    num_read = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_read
        for _ in range(0, size, 2**16):
            num_read += 2**16
            yield b" " * 2**16

    headers = {"content-length": str(size)} if is_announced else {}
    async with called(stub_engine(tokenizer, alphabet)) as client:
        response = await client.post(COMPLETIONS, content=pieces(), headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
        assert num_read <= (0 if is_announced else MAX_BODY_BYTES + 2**17)
        await assert_serves(client)


async def test_a_body_over_the_limit_is_refused_over_a_socket(tokenizer: Tokenizer) -> None:
    async with (
        served(stub_engine(tokenizer, alphabet)) as base_url,
        httpx.AsyncClient(base_url=base_url) as client,
    ):
        response = await client.post(COMPLETIONS, content=b" " * 20_000_000)
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
        await assert_serves(client)


async def test_a_full_queue_is_a_429_with_retry_after(tokenizer: Tokenizer) -> None:
    engine = stub_engine(tokenizer, alphabet, config=EngineConfig(max_num_seqs=1, max_queued_requests=1))
    async with called(engine) as client:
        answers = await asyncio.gather(
            *(
                client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 20, "stream": streams})
                for streams in (False, True, False, True)
            )
        )
        refused = [answer for answer in answers if answer.status_code != 200]
        assert refused
        for answer in refused:
            assert (answer.status_code, error_of(answer)["code"]) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) > 0
        await wait_until_idle(client)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_failure_before_the_first_token_has_its_status(tokenizer: Tokenizer, streams: bool) -> None:
    async with called(stub_engine(tokenizer, alphabet, fail_on=lambda context: context[-1] == ord("!"))) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "a!", "stream": streams})
        assert (response.status_code, error_of(response)["type"]) == (500, "server_error")
        await assert_serves(client)
        await wait_until_idle(client)


async def test_a_failure_after_the_first_token_ends_the_stream(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet, fail_on=lambda context: context[-1] == ord("e"))) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
        assert response.status_code == 200
        *events, last, rest = response.text.split("\n\n")
        assert rest == ""
        assert len(events) == 4
        assert last.startswith('data: {"error":{"message"')
        assert "[DONE]" not in response.text
        await wait_until_idle(client)


async def test_a_request_over_the_time_limit_is_a_504(tokenizer: Tokenizer) -> None:
    engine = stub_engine(
        tokenizer, alphabet, config=EngineConfig(request_timeout=0.05), num_blocks=4096, max_model_len=16384
    )
    async with called(engine) as client:
        body = {"prompt": "a", "max_tokens": 16000, "ignore_eos": True}
        response = await client.post(COMPLETIONS, json=body)
        assert (response.status_code, error_of(response)["code"]) == (504, "request_timeout")
        streamed = await client.post(COMPLETIONS, json=body | {"stream": True})
        assert "request_timeout" in streamed.text.split("\n\n")[-2]
        await wait_until_idle(client)


async def test_a_bug_is_a_500_that_tells_nothing_and_is_logged(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr("radixserve.api.operations.service_of", broken)
    transport = httpx.ASGITransport(create_app(stub_engine(tokenizer, alphabet)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/health")
    assert (response.status_code, error_of(response)["type"]) == (500, "server_error")
    assert "secret" not in response.text
    assert "a secret" in caplog.text
