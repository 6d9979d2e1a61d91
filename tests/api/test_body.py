"""Bodies are decoded strictly, and an error says which field is wrong and why."""

import json
import logging
import tracemalloc

import pytest

from radixserve.api.body import decode_body
from radixserve.api.fields import NO_OP_FIELDS, UNSUPPORTED_FIELDS, FieldCheck
from radixserve.api.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from radixserve.errors import InvalidRequest

ALL_REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def decode(body: bytes | str) -> CompletionRequest:
    return decode_body(body.encode() if isinstance(body, str) else body, CompletionRequest, FieldCheck())


def refused(body: bytes | str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("body", ["", "  ", "{", '{"model":"m",x}', "[]", "null", "3", '"s"', '{"prompt":"a"} {}'])
def test_api_9_a_body_that_is_no_json_object_is_refused(body: str) -> None:
    refused(body)


@pytest.mark.parametrize("body", [b'{"prompt":"\xff"}', b'{"unknown":"\xff"}', b"\xff"])
def test_api_9_invalid_utf_8_is_refused_in_fields_that_nobody_reads_too(body: bytes) -> None:
    assert "UTF-8" in refused(body).message


@pytest.mark.parametrize("body", ["[" * 100_000, '{"unknown":' + "[" * 100_000, '{"prompt":' + "[" * 100_000])
def test_api_9_deep_nesting_is_refused(body: str) -> None:
    refused(body)


def test_api_9_of_a_repeated_key_the_last_one_counts() -> None:
    assert decode('{"prompt":"a","prompt":"b"}').prompt == "b"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_api_7_a_number_that_is_not_finite_is_refused_by_name(field: str, number: str) -> None:
    error = refused(f'{{"prompt":"NaN","{field}":{number}}}')
    assert error.param == field
    assert f"$.{field}" in error.message


def test_api_7_the_path_of_a_nested_nan_is_told() -> None:
    error = refused('{"logit_bias":{"1":0,"5":NaN}}')
    assert (error.param, "$.logit_bias.5" in error.message) == ("logit_bias", True)
    error = refused('{"prompt":[[1],[2,NaN]],"seed":Infinity}')
    assert (error.param, "$.prompt.1.1:" in error.message) == ("prompt", True)


def test_api_7_the_search_for_a_nan_takes_little_memory() -> None:
    body = f'{{"prompt":[{"0," * 200_000}NaN]}}'
    tracemalloc.start()
    try:
        refused(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "'1'"),
        ("temperature", "true"),
        ("max_tokens", "true"),
        ("max_tokens", "'5'"),
        ("max_tokens", "5.0"),
        ("max_tokens", "5.5"),
        ("max_tokens", "9" * 5000),
        ("n", "{}"),
        ("seed", "1.5"),
        ("stop", "[1]"),
        ("stop", "5"),
        ("stop_token_ids", "['a']"),
        ("logit_bias", "{'a':1}"),
        ("logit_bias", "{'1':'x'}"),
        ("logit_bias", "[1]"),
        ("logprobs", "true"),
        ("prompt", "[1.5]"),
        ("prompt", "[true]"),
        ("prompt", "[[true]]"),
        ("prompt", "[['a']]"),
        ("prompt", "{}"),
        ("stream", "'yes'"),
        ("stream", "1"),
        ("stream_options", "[]"),
        ("model", "5"),
        ("cache_salt", "5"),
    ],
)
def test_a_wrong_type_is_refused_by_name(field: str, value: str) -> None:
    error = refused(f'{{"{field}":{value}}}'.replace("'", '"'))
    assert error.param == field
    assert f"$.{field}" in error.message


@pytest.mark.parametrize("shape", ALL_REQUESTS)
def test_null_is_the_same_as_absent_for_every_field(shape: type) -> None:
    required = {"messages": [{"role": "user", "content": "a"}], "tokens": [1]}
    given = {name: required.get(name) for name in shape.__struct_fields__}
    given |= dict.fromkeys([*UNSUPPORTED_FIELDS, *NO_OP_FIELDS])
    needed = {name: value for name, value in given.items() if value is not None}
    decoded = [decode_body(json.dumps(body).encode(), shape, FieldCheck()) for body in (given, needed)]
    assert decoded[0] == decoded[1]


@pytest.mark.parametrize("name", UNSUPPORTED_FIELDS)
def test_a_known_field_that_is_not_supported_is_refused_by_name(name: str) -> None:
    error = refused(json.dumps({name: {"unlike": "anything neutral"}}))
    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, field in UNSUPPORTED_FIELDS.items() for value in field.neutral]
)
def test_a_field_that_is_not_supported_may_have_its_neutral_value(name: str, value: object) -> None:
    assert decode(json.dumps({name: value})) == CompletionRequest()


@pytest.mark.parametrize(("name", "value"), [("echo", 0), ("length_penalty", True)])
def test_a_boolean_is_not_the_neutral_number_nor_the_other_way_round(name: str, value: object) -> None:
    assert refused(json.dumps({name: value})).param == name


def test_api_10_harmless_and_unknown_fields_change_nothing() -> None:
    extras = dict.fromkeys(NO_OP_FIELDS, "x") | {"made_up": [1, {"a": None}]}
    assert decode(json.dumps({"prompt": "a", **extras})) == CompletionRequest(prompt="a")


def test_api_10_an_unknown_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    check = FieldCheck()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            decode_body(b'{"made_up":"a secret","user":"me"}', CompletionRequest, check)
    assert [record.getMessage() for record in caplog.records] == ["ignoring the unknown request field 'made_up'"]


def test_a_caller_cannot_make_the_log_of_unknown_fields_grow_without_end(caplog: pytest.LogCaptureFixture) -> None:
    check = FieldCheck()
    for first in range(0, 2 * FieldCheck.MAX_LOGGED, 64):
        body = {f"{number:0500}": 1 for number in range(first, first + 64)}
        decode_body(json.dumps(body).encode(), CompletionRequest, check)
    assert len(caplog.records) <= FieldCheck.MAX_LOGGED
    assert all(len(record.getMessage()) < 200 for record in caplog.records)
