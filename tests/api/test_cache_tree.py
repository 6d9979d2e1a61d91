"""GET /v1/cache/tree: what is cached, told to whom it belongs."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from radixserve.api.cache_tree import preview_text
from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import COMPLETIONS, alphabet, ask, called, error_of, served
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

TREE = "/v1/cache/tree"
KEYS = ("operator", "acme=first", "other=second")
SYSTEM = "You are an agent of few words. "


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with called(stub_engine(tokenizer, alphabet, config=EngineConfig(enable_cache_introspection=True))) as client:
        yield client


async def tree(client: httpx.AsyncClient, query: str = "", key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = await client.get(TREE + query, headers=headers)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def test_without_the_switch_the_tree_is_a_403_that_names_it(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        response = await client.get(TREE)
        assert response.status_code == 403
        error = error_of(response)
        assert error["code"] == "introspection_off"
        assert "--enable-cache-introspection" in error["message"]


async def test_an_empty_cache_is_an_empty_tree(client: httpx.AsyncClient) -> None:
    assert await tree(client) == {"nodes": [], "total_nodes": 0}


async def test_what_prompts_share_stands_above_where_they_part(client: httpx.AsyncClient) -> None:
    for task in ("Count the words of a poem now.", "Sing the whole song of the sea."):
        await ask(client, COMPLETIONS, prompt=SYSTEM + "@" + task, max_tokens=1)
    view = await tree(client)
    top, *below = view["nodes"]
    assert view["total_nodes"] == len(view["nodes"])
    assert (top["parent"], top["depth"], top["position"], top["tokens"], top["hits"]) == (None, 1, 0, 32, 1)
    assert top["preview"] == SYSTEM + "@"
    assert [node["id"] for node in view["nodes"]] == list(range(len(view["nodes"])))
    runs = [node for node in below if node["parent"] == 0]
    assert {node["preview"][:4] for node in runs} == {"Coun", "Sing"}
    for node in below:
        above = view["nodes"][node["parent"]]
        assert (node["depth"], node["position"]) == (above["depth"] + 1, above["position"] + above["tokens"])
        assert node["blocks"] == -(-node["tokens"] // 16)
        assert (node["holders"], node["requests"], node["pinned_blocks"]) == (0, [], 0)
        assert node["tail"] == (node["tokens"] % 16 > 0)


async def test_depth_and_max_nodes_cut_the_tree_and_say_how_much(client: httpx.AsyncClient) -> None:
    for letter in "abcdef":
        await ask(client, COMPLETIONS, prompt=SYSTEM + "@" + letter * 20, max_tokens=1)
    whole = await tree(client)
    shallow = await tree(client, "?depth=1")
    assert [node["depth"] for node in shallow["nodes"]] == [1]
    few = await tree(client, "?max_nodes=3")
    assert len(few["nodes"]) == 3
    assert whole["total_nodes"] == shallow["total_nodes"] == few["total_nodes"] == len(whole["nodes"]) > 3


@pytest.mark.parametrize("query", ["depth=0", "depth=1001", "depth=x", "max_nodes=10001", "max_nodes=-1", "depth="])
async def test_a_number_out_of_range_is_a_400_that_names_it(query: str, client: httpx.AsyncClient) -> None:
    response = await client.get(f"{TREE}?{query}")
    assert response.status_code == 400
    assert error_of(response)["param"] == query.partition("=")[0]


async def test_a_tenant_sees_its_own_alone(tokenizer: Tokenizer) -> None:
    config = EngineConfig(enable_cache_introspection=True, api_key=KEYS)
    async with called(stub_engine(tokenizer, alphabet, config=config)) as client:
        for key in ("operator", "first", "second"):
            body = {"prompt": f"{key} has a secret of many words", "max_tokens": 1, "cache_salt": "s"}
            response = await client.post(COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 200
        for key in ("operator", "first", "second"):
            view = await tree(client, key=key)
            assert view["total_nodes"] == len(view["nodes"]) > 0
            tops = [node["preview"] for node in view["nodes"] if node["parent"] is None]
            assert tops
            assert all(text.startswith(key) for text in tops)
        assert (await client.get(TREE)).status_code == 401


async def test_a_running_request_is_named_as_its_caller_named_it(tokenizer: Tokenizer) -> None:
    config = EngineConfig(enable_cache_introspection=True)
    engine = stub_engine(tokenizer, lambda _: {ord("x"): 1.0}, config=config, max_model_len=4096, num_blocks=300)
    async with served(engine) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": SYSTEM + "@" + "Go on", "max_tokens": 4000, "stream": True}
        request = client.stream("POST", COMPLETIONS, json=body, headers={"x-request-id": "job-7"})
        async with request as response:
            await anext(response.aiter_lines())
            nodes = (await tree(client))["nodes"]
            assert [node["requests"] for node in nodes if node["requests"]] == [["job-7"]]
            assert nodes[0]["holders"] == 1
            assert nodes[0]["idle_seconds"] == 0
        async with asyncio.timeout(10):
            while any(node["holders"] for node in (await tree(client))["nodes"]):
                await asyncio.sleep(0)
        assert not any(node["requests"] for node in (await tree(client))["nodes"])


@pytest.mark.parametrize(
    ("start", "end", "text"),
    [(0, 6, "a€é"), (0, 5, "a€"), (0, 4, "a€"), (0, 3, "a"), (1, 6, "€é"), (2, 6, "é"), (2, 4, "")],
)
def test_a_preview_leaves_out_what_is_part_of_a_character(
    start: int, end: int, text: str, tokenizer: Tokenizer
) -> None:
    ids = array("i", list("a€é".encode()[start:end])).tobytes()
    assert preview_text(tokenizer, ids, begins_text=start == 0) == text


def test_bytes_that_are_no_text_are_shown_as_such(tokenizer: Tokenizer) -> None:
    ids = array("i", list(b"\x80\x80ab\xffc")).tobytes()
    assert preview_text(tokenizer, ids, begins_text=True) == "��ab�c"
    assert preview_text(tokenizer, ids, begins_text=False) == "ab�c"
