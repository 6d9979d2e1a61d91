"""Beam searches that are refused: by name, and before anything is computed."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixserve.api.requests import BeamSearchRequest, ChatRequest, CompletionRequest
from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import alphabet, called, error_of
from tests.byte_tokenizer import load_byte_tokenizer
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BEAM_SEARCH = "/v1/beam_search"
MESSAGES = [{"role": "user", "content": "hi"}]
SEARCHES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "use_beam_search": True, "beam_width": 2},
    COMPLETIONS: {"prompt": "hi", "use_beam_search": True, "beam_width": 2},
    BEAM_SEARCH: {"prompt": "hi", "beam_width": 2},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
EACH = pytest.mark.parametrize("route", SEARCHES)


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with called(stub_engine(tokenizer, alphabet, max_model_len=64)) as client:
        yield client


async def refusal(client: httpx.AsyncClient, route: str, **fields: Any) -> dict[str, Any]:
    response = await client.post(route, json=SEARCHES[route] | fields)
    assert response.status_code == 400, response.text
    assert (await client.get("/v1/cache")).json()["tokens"]["queried"] == 0, "it is refused before it runs"
    return error_of(response)


@EACH
@pytest.mark.parametrize("width", [0, -1, 2.5, "x", True, [2], 65, 129, 2**63, 10**30])
async def test_bs_5_a_width_that_is_none_is_refused_by_name_with_the_limit(
    client: httpx.AsyncClient, route: str, width: Any
) -> None:
    error = await refusal(client, route, beam_width=width)
    assert error["param"] == "beam_width"
    assert "1 to 64" in error["message"]


@pytest.mark.parametrize("route", [CHAT, BEAM_SEARCH])
async def test_messages_that_the_template_makes_nothing_of_are_refused_by_name(tmp_path: Path, route: str) -> None:
    silent = load_byte_tokenizer(tmp_path, chat_template="{% if add_generation_prompt %}x{% endif %}")
    body = {"messages": MESSAGES, "add_generation_prompt": False, "use_beam_search": True, "beam_width": 2}
    async with called(stub_engine(silent, alphabet)) as client:
        response = await client.post(route, json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, "messages")


@EACH
async def test_bs_5_the_limit_is_what_the_server_runs_at_once(tokenizer: Tokenizer, route: str) -> None:
    async with called(stub_engine(tokenizer, alphabet, config=EngineConfig(max_num_seqs=4))) as client:
        assert "1 to 4" in (await refusal(client, route, beam_width=5))["message"]
    async with called(stub_engine(tokenizer, alphabet, config=EngineConfig(max_num_seqs=512))) as client:
        assert "1 to 128" in (await refusal(client, route, beam_width=129))["message"]


@EACH
@pytest.mark.parametrize("n", [0, -1, 3])
async def test_bs_5_more_answers_than_beams_are_refused(client: httpx.AsyncClient, route: str, n: int) -> None:
    error = await refusal(client, route, n=n)
    assert error["param"] == "n"
    assert "beam_width" in error["message"]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), [("n", 65), ("best_of", 65), ("best_of", 0)])
async def test_bs_5_a_width_that_comes_from_another_field_names_that_field(
    client: httpx.AsyncClient, route: str, field: str, value: int
) -> None:
    error = await refusal(client, route, beam_width=None, **{field: value})
    assert error["param"] == field
    assert "beam_width must be an integer from 1 to 64" in error["message"]


@EACH
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"seed": 1}, "seed"),
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
async def test_bs_6_what_a_beam_search_cannot_honour_is_refused_by_name(
    client: httpx.AsyncClient, route: str, fields: dict[str, Any], param: str
) -> None:
    assert (await refusal(client, route, **fields))["param"] == param


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, "logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": 0}, "logprobs"),
        (COMPLETIONS, {"logprobs": 2}, "logprobs"),
        (BEAM_SEARCH, {"logprobs": True}, "logprobs"),
        (BEAM_SEARCH, {"logprobs": 0}, "logprobs"),
        (BEAM_SEARCH, {"top_logprobs": 0}, "top_logprobs"),
    ],
)
async def test_bs_6_log_probabilities_of_tokens_are_refused(
    client: httpx.AsyncClient, route: str, fields: dict[str, Any], param: str
) -> None:
    assert (await refusal(client, route, **fields))["param"] == param


@EACH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("early_stopping", "True"),
        ("length_penalty", "1"),
        ("length_penalty", True),
        ("length_penalty", 101),
        ("length_penalty", -101),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("stop", ""),
        ("repetition_penalty", 0),
        ("frequency_penalty", 3),
        ("logit_bias", {"1": 101}),
        ("cache_salt", ""),
    ],
)
async def test_settings_of_a_search_are_checked(client: httpx.AsyncClient, route: str, field: str, value: Any) -> None:
    assert (await refusal(client, route, **{"max_tokens": 16, field: value}))["param"] == field


@EACH
async def test_a_penalty_that_is_not_finite_is_no_json(client: httpx.AsyncClient, route: str) -> None:
    for number in ("NaN", "Infinity", "1e400"):
        response = await client.post(route, content=f'{{"length_penalty":{number}}}')
        assert (response.status_code, error_of(response)["param"]) == (400, "length_penalty")


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("field", "value"),
    [("beam_width", 2), ("length_penalty", 0.5), ("early_stopping", True), ("early_stopping", "never")],
)
@pytest.mark.parametrize("asked", [None, False])
async def test_settings_of_a_search_that_is_not_asked_for_are_refused(
    client: httpx.AsyncClient, route: str, field: str, value: Any, asked: bool | None
) -> None:
    error = await refusal(client, route, **{"use_beam_search": asked, "beam_width": None, field: value})
    assert error["param"] == field
    assert "use_beam_search" in error["message"]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_settings_that_ask_for_no_search_are_taken(client: httpx.AsyncClient, route: str) -> None:
    fields = {"use_beam_search": False, "beam_width": None, "length_penalty": 1, "early_stopping": False}
    response = await client.post(route, json=SEARCHES[route] | fields)
    assert response.status_code == 200, response.text


@EACH
async def test_what_asks_for_nothing_is_taken_beside_a_search(client: httpx.AsyncClient, route: str) -> None:
    fields: dict[str, Any] = {"stream": False, "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "echo": False}
    fields |= {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "bad_words": [], "seed": None}
    fields |= {"parallel_tool_calls": True, "user": "u", "max_tokens": 2}
    for extra in (fields, {"tools": TOOLS, "tool_choice": "none", "max_tokens": 2}):
        response = await client.post(route, json=SEARCHES[route] | extra)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"beam_width": 2}, "prompt"),
        ({"beam_width": 2, "prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"beam_width": 2, "prompt": ["a", "b"]}, "prompt"),
        ({"beam_width": 2, "prompt": [[1], [2]]}, "prompt"),
        ({"beam_width": 2, "prompt": ""}, "prompt"),
        ({"beam_width": 2, "prompt": [999]}, "prompt"),
        ({"beam_width": 2, "messages": []}, "messages"),
        ({"prompt": "a"}, "beam_width"),
        ({"prompt": "a", "beam_width": None}, "beam_width"),
        ({"prompt": "a", "beam_width": 2, "use_beam_search": False}, "use_beam_search"),
    ],
)
async def test_the_route_takes_one_prompt_and_a_width(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    response = await client.post(BEAM_SEARCH, json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (BEAM_SEARCH, {"prompt": [1] * 60, "max_tokens": 5}, "max_tokens"),
        (BEAM_SEARCH, {"prompt": [1] * 64}, "prompt"),
        (BEAM_SEARCH, {"prompt": None, "messages": [{"role": "user", "content": "x" * 64}]}, "messages"),
        (COMPLETIONS, {"prompt": [1] * 60, "max_tokens": 5}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 64}]}, "messages"),
    ],
)
async def test_a_prompt_without_room_for_its_answer_is_refused(
    client: httpx.AsyncClient, route: str, fields: dict[str, Any], param: str
) -> None:
    error = await refusal(client, route, **fields)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


async def test_another_model_is_not_found(client: httpx.AsyncClient) -> None:
    response = await client.post(BEAM_SEARCH, json=SEARCHES[BEAM_SEARCH] | {"model": "gpt-4"})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_the_route_knows_every_field_of_the_other_routes_so_that_none_is_ignored() -> None:
    known = set(BeamSearchRequest.__struct_fields__)
    assert known >= {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
