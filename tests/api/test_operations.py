"""Models, tokens, cache, health, metrics, ids and logs."""

import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from radixserve.api.app import create_app
from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from radixserve.version import __version__
from tests.api.serving import alphabet, called, error_of
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        yield client


async def get(client: httpx.AsyncClient, path: str) -> Any:
    response = await client.get(path)
    assert response.status_code == 200, response.text
    return response.json()


async def test_models(tokenizer: Tokenizer) -> None:
    config = EngineConfig(served_model_name="org/some-model")
    async with called(stub_engine(tokenizer, alphabet, config=config)) as client:
        listed = await get(client, "/v1/models")
        [card] = listed["data"]
        assert (listed["object"], card["object"], card["id"]) == ("list", "model", "org/some-model")
        assert await get(client, "/v1/models/org/some-model") == card
        for name in ("other", ""):
            response = await client.get(f"/v1/models/{name}")
            assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
        answer = await client.post(COMPLETIONS, json={"prompt": "a", "model": "org/some-model"})
        assert answer.json()["model"] == "org/some-model"


async def test_tokenize_counts_what_a_request_will_use(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "héllo"}]
    counted = (await client.post("/tokenize", json={"messages": messages})).json()
    answer = (await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})).json()
    assert counted["count"] == len(counted["tokens"]) == answer["usage"]["prompt_tokens"]
    assert counted["max_model_len"] == 512
    text = (await client.post("/tokenize", json={"prompt": "héllo"})).json()
    assert text["tokens"] == list("héllo".encode())
    back = (await client.post("/detokenize", json={"tokens": text["tokens"]})).json()
    assert back == {"prompt": "héllo"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"prompt": ["a"]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": "a"}),
    ],
)
async def test_tokenize_refuses_what_it_cannot_take(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400
    error_of(response)


async def test_the_cache_report_and_a_reset(client: httpx.AsyncClient) -> None:
    for _ in range(2):
        await client.post(COMPLETIONS, json={"prompt": "x" * 40, "max_tokens": 1})
    report = await get(client, "/v1/cache")
    blocks, tokens = report["blocks"], report["tokens"]
    assert blocks["free"] + blocks["cached"] + blocks["in_use"] == blocks["total"] == 64
    assert (report["block_size"], blocks["in_use"], blocks["pinned"], report["tiers"]) == (16, 0, 0, [])
    assert tokens["queried"] == 80
    assert tokens["hit"] == 39
    assert tokens["hit_rate"] == pytest.approx(39 / 80)
    assert report["requests"] == {"running": 0, "waiting": 0}
    assert report["tree"]["nodes"] > 0
    reset = (await client.post("/v1/cache/reset")).json()
    assert reset == {"dropped_blocks": blocks["cached"], "kept_blocks": 0}
    assert (await client.post("/v1/cache/reset", json={})).json() == {"dropped_blocks": 0, "kept_blocks": 0}


async def test_version(client: httpx.AsyncClient) -> None:
    assert await get(client, "/version") == {"version": __version__}


async def test_health_is_about_the_engine_and_ready_about_requests(tokenizer: Tokenizer) -> None:
    engine = stub_engine(tokenizer, alphabet)
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def statuses() -> tuple[int, int]:
            answers = [await client.get(path) for path in ("/health", "/ready")]
            for answer in answers:
                if answer.status_code != 200:
                    error_of(answer)
            return answers[0].status_code, answers[1].status_code

        async def refused() -> bool:
            answer = await client.post(COMPLETIONS, json={"prompt": "a"})
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) > 0
                assert error_of(answer)["code"] == "engine_unavailable"
            return answer.status_code == 503

        engine.status = "loading"
        assert (await statuses(), await refused()) == ((200, 503), True)
        assert (await client.get("/v1/cache")).status_code == 503
        await engine.start()
        assert (await statuses(), await refused()) == ((200, 200), False)
        engine.status = "restarting"
        assert (await statuses(), await refused()) == ((503, 503), True)
        engine.status = "ready"
        engine.drain()
        assert (await statuses(), await refused()) == ((200, 503), True)
        await engine.close()
        assert (await statuses(), await refused()) == ((503, 503), True)


async def test_metrics_tell_of_the_engine_and_of_requests(client: httpx.AsyncClient) -> None:
    await client.post(COMPLETIONS, json={"prompt": "a" * 20, "max_tokens": 3})
    await client.post(COMPLETIONS, json={"prompt": ""})
    await client.get("/v1/models/a/b")
    await client.request("BREW", "/made/up")
    text = (await client.get("/metrics")).text
    for line in (
        "radixserve_generated_tokens_total 3.0",
        "radixserve_requests_started_total 1.0",
        "radixserve_overtakes_total 0.0",
        "radixserve_kv_blocks 64.0",
        'radixserve_http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0',
        'radixserve_http_requests_total{method="POST",route="/v1/completions",status="400"} 1.0',
        'radixserve_http_requests_total{method="other",route="other",status="404"} 1.0',
        'radixserve_time_to_first_token_seconds_count{route="/v1/completions"} 1.0',
    ):
        assert line in text.splitlines()


async def test_callers_cannot_make_the_number_of_series_grow(client: httpx.AsyncClient) -> None:
    async def num_series() -> int:
        return len((await client.get("/metrics")).text.splitlines())

    await client.request("M", "/0")
    await client.get("/v1/models/m")
    await num_series()
    before = await num_series()
    for number in range(20):
        await client.request(f"M{number}", f"/{number}")
        await client.get(f"/v1/models/m{number}")
    assert await num_series() == before


@pytest.mark.parametrize("sent", ["trace-1:a/b", "x" * 128])
async def test_a_callers_request_id_comes_back(client: httpx.AsyncClient, sent: str) -> None:
    for path in ("/health", "/nowhere"):
        assert (await client.get(path, headers={"x-request-id": sent})).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", [None, "", "x" * 129, "a b", "a\tb", "<script>", "é"])
async def test_a_request_id_that_is_long_or_strange_is_replaced(client: httpx.AsyncClient, sent: str | None) -> None:
    headers = {} if sent is None else {"x-request-id": sent.encode()}
    made = [(await client.get("/health", headers=headers)).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(re.fullmatch("req-[0-9a-f]{32}", request_id) for request_id in made)


async def test_a_log_line_tells_of_tokens_and_never_of_prompts_or_keys(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="radixserve")
    engine = stub_engine(tokenizer, alphabet, config=EngineConfig(api_key=("s3cret",)))
    async with called(engine, authorization="Bearer s3cret") as client:
        body = {"prompt": "private words ", "max_tokens": 3}
        await client.post(COMPLETIONS, json=body, headers={"x-request-id": "r1"})
        await client.post(COMPLETIONS, json=body | {"stream": True})
        await client.post(COMPLETIONS, json=body | {"temperature": 5})
        await client.get("/no%0Awhere", headers={"authorization": "Bearer wr0ng"})
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("radixserve.api")]
    assert len(lines) == 4
    assert re.fullmatch(
        r"POST '/v1/completions' 200 in \d+\.\d{3} s, 14 prompt tokens \(0 cached\), 3 generated \[r1\]", lines[0]
    )
    assert "3 generated" in lines[1]
    assert " 400 " in lines[2]
    assert "'/no\\nwhere' 401" in lines[3]
    for secret in ("private", "s3cret", "wr0ng"):
        assert secret not in json.dumps(lines)


async def test_the_fingerprint_names_the_build_of_the_model(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    async def fingerprint(caller: httpx.AsyncClient) -> str:
        name: str = (await caller.post(COMPLETIONS, json={"prompt": "a"})).json()["system_fingerprint"]
        return name

    first = await fingerprint(client)
    assert first.startswith("fp_")
    async with called(stub_engine(tokenizer, alphabet)) as other:
        assert await fingerprint(other) == first
