"""What a request asks to keep: by marks on content parts, and as a whole."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import CHAT, COMPLETIONS, alphabet, ask, called, error_of, refusal_of, stream
from tests.clock import FakeClock
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

# Tokens of the template's own: "<|start|>", the role and a line end; then "<|end|>" and a line end.
SYSTEM_OPENING = 1 + len("system\n")
EPHEMERAL = {"type": "ephemeral"}
EXPLICIT = {"mode": "explicit"}
MINUTE, HOUR = 60.0, 3600.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def client(tokenizer: Tokenizer, clock: FakeClock) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig(max_pinned_share=0.5)
    engine = stub_engine(tokenizer, alphabet, config=config, num_blocks=64, max_model_len=900, clock=clock)
    async with called(engine) as client:
        yield client


def part(text: str, **marks: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **marks}


def chat(*parts: dict[str, Any], question: str = "Why?") -> dict[str, Any]:
    """Return the fields of a chat whose system message has these parts."""
    messages = [{"role": "system", "content": list(parts)}, {"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": 1}


async def flood(client: httpx.AsyncClient) -> None:
    for letter in "abcdefgh":
        await ask(client, COMPLETIONS, prompt=letter * 400, max_tokens=1)


async def num_cached(client: httpx.AsyncClient, route: str = CHAT, **fields: Any) -> int:
    usage = (await ask(client, route, **fields))["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


async def num_kept(client: httpx.AsyncClient) -> int:
    """Return how many blocks are kept, after a step, which sees what time it is."""
    await ask(client, COMPLETIONS, prompt="~", max_tokens=1)
    pinned: int = (await client.get("/v1/cache")).json()["blocks"]["pinned"]
    return pinned


async def lasts(client: httpx.AsyncClient, clock: FakeClock, seconds: float) -> None:
    """Assert that something is kept for so long, to the second."""
    clock.seconds += seconds - 1
    assert await num_kept(client) > 0
    clock.seconds += 1.5
    assert await num_kept(client) == 0


@pytest.mark.parametrize("mark", [{"cache_control": EPHEMERAL}, {"prompt_cache_breakpoint": EXPLICIT}])
async def test_the_prompt_is_kept_up_to_and_with_a_marked_part(client: httpx.AsyncClient, mark: dict[str, Any]) -> None:
    await ask(client, CHAT, **chat(part("Be kind. " * 8), part("Be brief. " * 8, **mark), part("Be bold. " * 8)))
    await flood(client)
    other = chat(part("Be kind. " * 8), part("Be brief. " * 8), part("Shut up."))
    assert await num_cached(client, **other) == SYSTEM_OPENING + len("Be kind. " * 8) + len("Be brief. " * 8)


async def test_each_of_several_marked_parts_is_kept_for_its_own_time(
    client: httpx.AsyncClient, clock: FakeClock
) -> None:
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    parts = [part("Be kind. " * 8, **hour), part("Be brief. " * 8, cache_control=EPHEMERAL)]
    await ask(client, CHAT, **chat(*parts))
    clock.seconds += 6 * MINUTE
    await flood(client)
    assert await num_cached(client, **chat(part("Be kind. " * 8), part("Be brief. " * 8))) == SYSTEM_OPENING + 72


@pytest.mark.parametrize(
    ("mark", "seconds"),
    [
        ({"cache_control": EPHEMERAL}, 5 * MINUTE),
        ({"cache_control": {"type": "ephemeral", "ttl": None}}, 5 * MINUTE),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, 5 * MINUTE),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, HOUR),
        ({"prompt_cache_breakpoint": EXPLICIT}, 30 * MINUTE),
        ({"prompt_cache_breakpoint": EXPLICIT | {"ttl": "30m"}}, 30 * MINUTE),
        ({"prompt_cache_breakpoint": EXPLICIT | {"ttl": "12h"}}, 12 * HOUR),
        ({"cache_control": EPHEMERAL, "prompt_cache_breakpoint": EXPLICIT}, 30 * MINUTE),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}, "prompt_cache_breakpoint": EXPLICIT}, HOUR),
    ],
)
async def test_a_mark_keeps_for_the_time_that_it_names(
    client: httpx.AsyncClient, clock: FakeClock, mark: dict[str, Any], seconds: float
) -> None:
    await ask(client, CHAT, **chat(part("Be kind.", **mark)))
    await lasts(client, clock, seconds)


async def test_where_parts_end_together_the_longest_time_counts(client: httpx.AsyncClient, clock: FakeClock) -> None:
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    await ask(client, CHAT, **chat(part("Be kind.", **hour), part("", cache_control=EPHEMERAL)))
    await lasts(client, clock, HOUR)


@pytest.mark.parametrize(
    ("options", "mark", "seconds"),
    [
        ({"ttl": "12h", "mode": "explicit"}, EXPLICIT, 12 * HOUR),
        ({"ttl": "12h", "mode": "explicit"}, EXPLICIT | {"ttl": "30m"}, 30 * MINUTE),
        ({"mode": "explicit"}, EXPLICIT, 30 * MINUTE),
        ({"ttl": "12h"}, None, 12 * HOUR),
        ({"mode": "implicit"}, None, 30 * MINUTE),
    ],
)
async def test_options_name_the_time_of_breakpoints_and_of_the_whole_prompt(
    client: httpx.AsyncClient, clock: FakeClock, options: dict[str, Any], mark: Any, seconds: float
) -> None:
    await ask(client, CHAT, **chat(part("Be kind.", prompt_cache_breakpoint=mark)), prompt_cache_options=options)
    await lasts(client, clock, seconds)


@pytest.mark.parametrize("fields", [{"prompt_cache_options": {"mode": "explicit"}}, {"prompt_cache_options": None}])
async def test_explicit_options_without_a_mark_keep_nothing(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    await ask(client, CHAT, **chat(part("Be kind.")), **fields)
    assert await num_kept(client) == 0


async def test_each_use_begins_the_time_anew(client: httpx.AsyncClient, clock: FakeClock) -> None:
    marked = chat(part("Be kind.", cache_control=EPHEMERAL))
    for question in ("Why?", "How?", "When?"):
        marked["messages"][1]["content"] = question
        await ask(client, CHAT, **marked)
        assert await num_kept(client) == 1
        clock.seconds += 4 * MINUTE
    clock.seconds += MINUTE - 1
    assert await num_kept(client) == 1
    clock.seconds += 2
    assert await num_kept(client) == 0


async def test_marks_in_any_message_keep_the_conversation_up_to_there(client: httpx.AsyncClient) -> None:
    messages = [
        {"role": "user", "content": "Tell me of trees. " * 4},
        {"role": "assistant", "content": [part("Trees are tall. " * 4, cache_control=EPHEMERAL)]},
        {"role": "user", "content": "And?"},
    ]
    await ask(client, CHAT, messages=messages, max_tokens=1)
    await flood(client)
    turns = (1 + len("user\n") + 72 + 2) + (1 + len("assistant\n") + 64)
    shorter = [*messages[:1], {"role": "assistant", "content": "Trees are tall. " * 4}]
    assert await num_cached(client, messages=shorter, max_tokens=1) >= turns
    assert await num_kept(client) == -(-turns // 16)


async def test_four_parts_may_have_cache_control_and_no_more(client: httpx.AsyncClient) -> None:
    parts = [part(f"Rule {number}.", cache_control=EPHEMERAL) for number in range(5)]
    await ask(client, CHAT, **chat(*parts[:4]))
    error = await refusal_of(client, CHAT, **chat(*parts))
    assert error["param"] == "messages"
    assert "messages[0].content[4].cache_control" in error["message"]


async def test_of_many_breakpoints_the_latest_four_count(client: httpx.AsyncClient, clock: FakeClock) -> None:
    day = EXPLICIT | {"ttl": "12h"}
    marks: list[dict[str, Any]] = [day] * 2 + [EXPLICIT] * 4
    await ask(client, CHAT, **chat(*(part("Be kind. " * 4, prompt_cache_breakpoint=mark) for mark in marks)))
    await lasts(client, clock, 30 * MINUTE)


@pytest.mark.parametrize(
    "mark",
    [
        {"cache_control": {}},
        {"cache_control": {"type": "persistent"}},
        {"cache_control": {"type": "ephemeral", "ttl": "24h"}},
        {"cache_control": {"type": "ephemeral", "ttl": 300}},
        {"cache_control": {"type": "ephemeral", "scope": "global"}},
        {"cache_control": True},
        {"cache_control": "ephemeral"},
        {"prompt_cache_breakpoint": {}},
        {"prompt_cache_breakpoint": {"mode": "implicit"}},
        {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "5m"}},
        {"prompt_cache_breakpoint": True},
    ],
)
async def test_other_marks_are_refused_by_their_path_with_what_is_allowed(
    client: httpx.AsyncClient, mark: dict[str, Any]
) -> None:
    error = await refusal_of(client, CHAT, **chat(part("Be kind."), part("Be brief.", **mark)))
    [name] = mark
    assert error["param"] == "messages"
    assert f"messages[0].content[1].{name} must be" in error["message"]
    assert ("ephemeral" if name == "cache_control" else "explicit") in error["message"]


@pytest.mark.parametrize("name", ["cache_control", "prompt_cache_breakpoint"])
async def test_a_mark_elsewhere_is_told_where_it_belongs(client: httpx.AsyncClient, name: str) -> None:
    mark = {name: EPHEMERAL}
    function = {"name": "f"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    user = {"role": "user", "content": "a"}
    for param, fields in (
        (name, {"messages": [user], **mark}),
        ("messages", {"messages": [user | mark]}),
        ("messages", {"messages": [{"role": "assistant", "tool_calls": [call | mark]}]}),
        ("tools", {"messages": [user], "tools": [{"type": "function", "function": function} | mark]}),
        ("tools", {"messages": [user], "tools": [{"type": "function", "function": function | mark}]}),
    ):
        error = await refusal_of(client, CHAT, **fields)
        assert error["param"] == param
        assert "content part" in error["message"]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_a_retention_of_a_day_keeps_all_of_the_prompt(
    client: httpx.AsyncClient, clock: FakeClock, route: str
) -> None:
    fields: dict[str, Any] = chat(part("Be kind. " * 8)) if route == CHAT else {"prompt": "x" * 90, "max_tokens": 1}
    usage = (await ask(client, route, **fields, prompt_cache_retention="24h"))["usage"]
    await flood(client)
    assert await num_cached(client, route, **fields) == usage["prompt_tokens"] - 1
    await lasts(client, clock, 24 * HOUR)


@pytest.mark.parametrize("value", ["in_memory", "in-memory", None])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_a_retention_in_memory_is_that_of_any_request(
    client: httpx.AsyncClient, route: str, value: str | None
) -> None:
    fields: dict[str, Any] = chat(part("a")) if route == CHAT else {"prompt": "x", "max_tokens": 1}
    await ask(client, route, **fields, prompt_cache_retention=value)
    assert await num_kept(client) == 0


@pytest.mark.parametrize("value", ["12h", "", "24H", 24, True, {}])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_another_retention_is_refused(client: httpx.AsyncClient, route: str, value: Any) -> None:
    fields: dict[str, Any] = chat(part("a")) if route == CHAT else {"prompt": "x", "max_tokens": 1}
    error = await refusal_of(client, route, **fields, prompt_cache_retention=value)
    assert error["param"] == "prompt_cache_retention"


@pytest.mark.parametrize("value", ["30m", {"ttl": "5m"}, {"mode": "auto"}, {"size": 1}, 30, [], True])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_other_options_are_refused(client: httpx.AsyncClient, route: str, value: Any) -> None:
    fields: dict[str, Any] = chat(part("a")) if route == CHAT else {"prompt": "x", "max_tokens": 1}
    assert (await refusal_of(client, route, **fields, prompt_cache_options=value))["param"] == "prompt_cache_options"


async def test_each_of_several_prompts_is_kept(client: httpx.AsyncClient) -> None:
    await ask(client, COMPLETIONS, prompt=["x" * 32, "y" * 48], max_tokens=1, n=2, prompt_cache_retention="24h")
    assert await num_kept(client) == 5


async def test_of_several_prompts_that_are_too_many_none_is_kept(client: httpx.AsyncClient) -> None:
    prompts = [letter * 96 for letter in "abcdefgh"]
    answer = await client.post(COMPLETIONS, json={"prompt": prompts, "max_tokens": 1, "prompt_cache_retention": "24h"})
    assert (answer.status_code, error_of(answer)["code"]) == (409, "pin_budget_exceeded")
    assert await num_kept(client) == 0
    await ask(client, COMPLETIONS, prompt=prompts[:2], max_tokens=1, prompt_cache_retention="24h")
    assert await num_kept(client) == 12


async def test_a_stream_and_several_answers_keep_the_prompt_once(client: httpx.AsyncClient) -> None:
    await stream(client, CHAT, **chat(part("Be kind.", cache_control=EPHEMERAL)), n=3)
    assert await num_kept(client) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_over_the_budget_a_request_is_refused_before_it_is_computed(
    client: httpx.AsyncClient, is_streamed: bool
) -> None:
    marked = chat(part("x" * 600, cache_control=EPHEMERAL))
    answer = await client.post(CHAT, json=marked | {"stream": is_streamed})
    assert (answer.status_code, error_of(answer)["code"]) == (409, "pin_budget_exceeded")
    blocks = (await client.get("/v1/cache")).json()["blocks"]
    assert (blocks["free"], blocks["pinned"]) == (64, 0)
    marked["messages"][0]["content"][0].pop("cache_control")
    await ask(client, CHAT, **marked)


async def test_a_mark_changes_no_token_of_the_prompt(client: httpx.AsyncClient) -> None:
    plain = chat(part("Be kind. "), part("Be brief."))
    marked = chat(part("Be kind. ", cache_control=EPHEMERAL), part("Be brief.", prompt_cache_breakpoint=EXPLICIT))
    counted = [await ask(client, "/tokenize", messages=fields["messages"]) for fields in (plain, marked)]
    answered = [await ask(client, CHAT, **fields, return_token_ids=True) for fields in (plain, marked)]
    assert counted[0] == counted[1]
    assert answered[0]["prompt_token_ids"] == answered[1]["prompt_token_ids"] == counted[0]["tokens"]


BEAMS = {"use_beam_search": True, "n": 2}
MARKED = chat(part("a", cache_control=EPHEMERAL))


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, MARKED | BEAMS, "messages"),
        (CHAT, chat(part("a")) | BEAMS | {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        (CHAT, chat(part("a")) | BEAMS | {"prompt_cache_options": {}}, "prompt_cache_options"),
        (CHAT, MARKED | {"truncate_prompt_tokens": 5}, "messages"),
        (COMPLETIONS, BEAMS | {"prompt": "a", "prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ("/v1/beam_search", {"messages": MARKED["messages"], "beam_width": 2}, "messages"),
        (
            "/v1/beam_search",
            {"prompt": "a", "beam_width": 2, "prompt_cache_retention": "24h"},
            "prompt_cache_retention",
        ),
    ],
)
async def test_what_cannot_be_kept_is_refused(
    client: httpx.AsyncClient, route: str, fields: dict[str, Any], param: str
) -> None:
    assert (await refusal_of(client, route, **fields))["param"] == param


async def test_a_beam_search_takes_a_retention_in_memory(client: httpx.AsyncClient) -> None:
    await ask(client, COMPLETIONS, prompt="a", max_tokens=2, prompt_cache_retention="in_memory", **BEAMS)


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, MARKED, "messages"),
        (CHAT, chat(part("a")) | {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        (COMPLETIONS, {"prompt": "a", "prompt_cache_options": {"ttl": "30m"}}, "prompt_cache_options"),
    ],
)
async def test_a_server_without_a_prefix_cache_says_that_it_keeps_nothing(
    tokenizer: Tokenizer, route: str, fields: dict[str, Any], param: str
) -> None:
    async with called(stub_engine(tokenizer, alphabet, config=EngineConfig(no_prefix_cache=True))) as client:
        error = await refusal_of(client, route, **fields)
        assert error["param"] == param
        assert "--no-prefix-cache" in error["message"]
        await ask(client, CHAT, **chat(part("a")), prompt_cache_retention="in_memory")
