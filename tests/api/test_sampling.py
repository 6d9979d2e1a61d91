"""Requests' fields become sampling settings, under the names that clients know."""

from typing import Any

import pytest

from radixserve.api.requests import ChatRequest, CompletionRequest
from radixserve.api.sampling import chat_sampling_params, completion_sampling_params
from radixserve.errors import InvalidRequest
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tools import Tool, ToolFunction


def chat(**fields: Any) -> SamplingParams:
    return chat_sampling_params(ChatRequest(messages=[], **fields))


def completion(**fields: Any) -> SamplingParams:
    return completion_sampling_params(CompletionRequest(**fields))


def refused_field(make: Any, **fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        make(**fields)
    return caught.value.param


def test_every_setting_arrives() -> None:
    settings: dict[str, Any] = {
        "n": 3,
        "max_tokens": 20,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {5: 1.5},
        "seed": 11,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 4,
    }
    lists: dict[str, Any] = {
        "stop": ["a", "b"],
        "stop_token_ids": [4, 5],
        "bad_words": ["c", "d"],
        "allowed_token_ids": [6],
    }
    as_tuples = {name: tuple(values) for name, values in lists.items()}
    expected = SamplingParams(**settings, **as_tuples)
    assert chat(**settings, **lists) == expected
    assert completion(**settings, **lists) == expected


def test_api_3_the_default_budget() -> None:
    assert chat().max_tokens is None
    assert completion().max_tokens == 16
    assert completion(min_tokens=20).max_tokens == 20


@pytest.mark.parametrize("make", [chat, completion])
def test_api_3_either_name_limits_and_the_newer_one_wins(make: Any) -> None:
    assert make(max_tokens=5).max_tokens == 5
    assert make(max_completion_tokens=5).max_tokens == 5
    assert make(max_completion_tokens=5, max_tokens=9).max_tokens == 5
    assert make(max_completion_tokens=9, max_tokens=5).max_tokens == 9


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_api_3_a_budget_of_nothing_is_refused_by_name(make: Any, name: str, value: int) -> None:
    assert refused_field(make, **{name: value}) == name


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0.0),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 10**30),
        ("min_tokens", 10**30),
        ("max_tokens", 10**30),
        ("max_completion_tokens", 10**30),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("n", 0),
        ("n", 129),
        ("seed", 2**63),
        ("logit_bias", {5: 101.0}),
        ("stop", ""),
        ("stop", ["x", ""]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 10_000),
        ("best_of", 2),
    ],
)
def test_api_7_a_value_out_of_range_is_refused_by_name(make: Any, name: str, value: Any) -> None:
    assert refused_field(make, **{name: value}) == name


@pytest.mark.parametrize("top_k", [0, -1])
def test_api_7_top_k_of_0_or_minus_1_is_off(top_k: int) -> None:
    assert chat(top_k=top_k).top_k == top_k


@pytest.mark.parametrize("stop", [None, []])
def test_api_8_no_stop_strings(stop: Any) -> None:
    assert chat(stop=stop).stop == ()


def test_api_8_a_stop_string_may_stand_alone() -> None:
    assert chat(stop="x").stop == ("x",)


def test_best_of_may_repeat_n() -> None:
    assert completion(n=2, best_of=2).n == 2


def test_api_17_chat_logprobs() -> None:
    assert chat().logprobs is None
    assert chat(logprobs=False).logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 3},
        {"logprobs": False, "top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
    ],
)
def test_api_17_top_logprobs_need_logprobs_and_have_a_range(fields: dict[str, Any]) -> None:
    assert refused_field(chat, **fields) == "top_logprobs"


def test_completion_logprobs() -> None:
    assert completion(logprobs=0).logprobs == 0
    assert completion(logprobs=5).logprobs == 5
    assert refused_field(completion, logprobs=21) == "logprobs"
    assert refused_field(completion, logprobs=-1) == "logprobs"


def test_a_completion_has_no_tools() -> None:
    tool = Tool("function", ToolFunction("f"))
    assert refused_field(completion, tools=[tool]) == "tools"
    assert completion(tools=[tool], tool_choice="none") == completion()
    assert completion(tools=[], tool_choice="auto") == completion()
    assert refused_field(completion, tool_choice="required") == "tool_choice"
