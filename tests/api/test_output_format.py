"""response_format and structured_outputs, over HTTP and with the openai package's client."""

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import called, error_of, events_of, served, wait_until_idle
from tests.byte_tokenizer import END
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
CHAT = "/v1/chat/completions"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


def scribbler(_: Sequence[int]) -> Mapping[int, float]:
    """A model that writes any character, and likes to close what is open."""
    return dict.fromkeys(range(END), 0.001) | dict.fromkeys(b'"}]', 0.2) | {END: 0.1}


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with called(stub_engine(tokenizer, scribbler)) as client:
        yield client


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, **more}}


async def text_of(client: httpx.AsyncClient, route: str, **fields: Any) -> str:
    body = ROUTES[route] | {"max_tokens": 200, "seed": 1} | fields
    response = await client.post(route, json=body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


async def refusal(client: httpx.AsyncClient, param: str, **fields: Any) -> str:
    response = await client.post(CHAT, json=ROUTES[CHAT] | fields)
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    message: str = error["message"]
    return message


@pytest.mark.parametrize("route", ROUTES)
async def test_every_form_of_the_answer_is_kept_on_both_routes(client: httpx.AsyncClient, route: str) -> None:
    for seed in range(3):
        made = json.loads(await text_of(client, route, seed=seed, response_format=schema_format(CITY)))
        assert made.keys() == {"city", "size"}
        assert made["city"] in ("Paris", "Rome")
        assert isinstance(
            json.loads(await text_of(client, route, seed=seed, response_format={"type": "json_object"})), dict
        )
        for schema in (CITY, json.dumps(CITY)):
            assert (
                json.loads(await text_of(client, route, seed=seed, structured_outputs={"json": schema})).keys()
                == CITY["properties"].keys()
            )
        text = await text_of(client, route, seed=seed, structured_outputs={"regex": r"[a-f]{3}\.\d{1,2}"})
        assert re.fullmatch(r"[a-f]{3}\.\d{1,2}", text)
        text = await text_of(client, route, seed=seed, structured_outputs={"grammar": 'start: "(" start ")" | "x"'})
        assert re.fullmatch(r"\(*x\)*", text)
        assert text.count("(") == text.count(")")


async def test_a_choice_is_one_of_the_texts_whatever_they_hold(client: httpx.AsyncClient) -> None:
    choices = ['a "b"', "a|b", "(.*)", "back\\slash", "new\nline", "é😀", "\x7f\x00", "x/y", "<|end|>", ""]
    made = {
        await text_of(client, CHAT, seed=seed, structured_outputs={"choice": choices}, temperature=2.0)
        for seed in range(60)
    }
    assert made <= set(choices)
    assert len(made) > 6


async def test_a_streamed_answer_is_the_same(client: httpx.AsyncClient) -> None:
    body = ROUTES[CHAT] | {"response_format": schema_format(CITY), "seed": 5, "max_tokens": 200}
    whole = (await client.post(CHAT, json=body)).json()["choices"][0]
    events = events_of((await client.post(CHAT, json=body | {"stream": True})).text)
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "stop"


@pytest.mark.parametrize("value", [None, {"type": "text"}])
async def test_api_11_text_and_null_ask_for_nothing(client: httpx.AsyncClient, value: Any) -> None:
    plain = ROUTES[CHAT] | {"seed": 1, "max_tokens": 20}
    answers = [(await client.post(CHAT, json=body)).json() for body in (plain, plain | {"response_format": value})]
    assert answers[0]["choices"] == answers[1]["choices"]


@pytest.mark.parametrize(
    "value",
    [
        "json",
        {},
        [],
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "schema": CITY},
        {"type": "json_schema", "json_schema": None},
        {"type": "json_schema", "json_schema": {"schema": CITY}},
        {"type": "json_schema", "json_schema": {"name": "city"}},
        {"type": "json_object", "schema": CITY},
        {"type": "text", "made_up": 1},
        schema_format({"type": "object", "properties": {"foo": "bar"}}),
        schema_format("string"),
        schema_format(CITY, made_up=1),
        schema_format(CITY, strict="yes"),
    ],
)
async def test_api_11_a_wrong_response_format_is_a_400_and_harms_no_one(client: httpx.AsyncClient, value: Any) -> None:
    assert await refusal(client, "response_format", response_format=value)
    assert await text_of(client, CHAT, response_format={"type": "json_object"})
    await wait_until_idle(client)


@pytest.mark.parametrize("keyword", ["uniqueItems", "not", "contains", "propertyNames", "dependentRequired"])
async def test_api_11_an_unsupported_keyword_is_named(client: httpx.AsyncClient, keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{keyword: {}}]}}}
    assert keyword in await refusal(client, "response_format", response_format=schema_format(schema, strict=False))
    assert keyword in await refusal(client, "structured_outputs", structured_outputs={"json": schema})


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("x", "object"),
        ({}, "none"),
        ({"json": CITY, "regex": "a"}, "json and regex"),
        ({"made_up": 1}, "made_up"),
        ({"regex": 5}, r"\$.regex"),
        ({"regex": "("}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", 1]}, r"\$.choice"),
        ({"choice": "abc"}, r"\$.choice"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"json": "no JSON"}, "json_schema"),
        ({"json": True}, r"\$.json"),
    ],
)
async def test_wrong_structured_outputs_are_refused(client: httpx.AsyncClient, value: Any, named: str) -> None:
    assert re.search(named, await refusal(client, "structured_outputs", structured_outputs=value))


async def test_the_form_can_be_given_in_one_way_only(client: httpx.AsyncClient) -> None:
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    assert "response_format" in await refusal(client, "structured_outputs", **both)
    text = await text_of(client, CHAT, response_format={"type": "text"}, structured_outputs={"regex": "abc"})
    assert text == "abc"


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar"])
async def test_the_old_names_point_to_the_new_ones(client: httpx.AsyncClient, name: str) -> None:
    assert f"structured_outputs.{name}" in await refusal(client, f"guided_{name}", **{f"guided_{name}": ["a"]})


async def test_a_schema_nested_beyond_all_bounds_is_refused(client: httpx.AsyncClient) -> None:
    for depth in (200, 5000):
        schema = '{"items":' * depth + "{}" + "}" * depth
        body = f'{{"prompt": "a", "structured_outputs": {{"json": {schema}}}}}'
        assert (await client.post("/v1/completions", content=body)).status_code == 400


async def test_tc_7_an_answer_cut_at_its_budget_says_length_and_is_not_repaired(client: httpx.AsyncClient) -> None:
    endless = {"type": "array", "items": {"type": "string"}, "minItems": 1000}
    for form in ({"type": "json_object"}, schema_format(endless)):
        for seed in range(3):
            body = ROUTES[CHAT] | {
                "response_format": form,
                "max_tokens": 20 if "json_schema" in form else 1,
                "seed": seed,
            }
            [choice] = (await client.post(CHAT, json=body)).json()["choices"]
            events = events_of((await client.post(CHAT, json=body | {"stream": True})).text)
            assert choice["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "length"
            with pytest.raises(json.JSONDecodeError):
                json.loads(choice["message"]["content"])


class City(BaseModel):
    city: Literal["Paris", "Rome"]
    is_capital: bool
    twin: "City | None"


async def test_parse_of_the_openai_client(tokenizer: Tokenizer) -> None:
    async with (
        served(stub_engine(tokenizer, scribbler)) as base_url,
        openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client,
    ):
        for seed in range(3):
            answer = await client.chat.completions.parse(
                model="stub", messages=[{"role": "user", "content": "hi"}], response_format=City, seed=seed
            )
            assert isinstance(answer.choices[0].message.parsed, City)
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(
                model="stub", messages=[{"role": "user", "content": "hi"}], response_format=City, max_tokens=5
            )
