"""Chat and completions, whole and streamed: the same answer, in the shapes that clients know."""

from typing import Any

import httpx
import pytest

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import alphabet, called, coin, error_of, events_of
from tests.byte_tokenizer import END
from tests.stub import always
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
# Both end with a token that is no letter, so that the alphabet begins at a.
INPUTS: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "hi "}}
BOTH = pytest.mark.parametrize("route", [CHAT, COMPLETIONS])


async def ask(client: httpx.AsyncClient, route: str, **fields: Any) -> dict[str, Any]:
    response = await client.post(route, json=INPUTS[route] | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def stream(client: httpx.AsyncClient, route: str, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(route, json=INPUTS[route] | fields | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def rebuild(chunks: list[dict[str, Any]]) -> dict[int, tuple[str, str]]:
    """Return text and finish_reason of each choice, and check what every stream must keep."""
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in reasons, "a chunk follows the one that closed its choice"
            if "delta" in choice:
                assert ("role" in choice["delta"]) == (index not in texts), "the role comes once, first"
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[index] = texts.get(index, "") + piece
            if choice["finish_reason"] is not None:
                assert choice["finish_reason"] in ("stop", "length")
                reasons[index] = choice["finish_reason"]
    assert texts.keys() == reasons.keys()
    return {index: (texts[index], reasons[index]) for index in texts}


@BOTH
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_sc_5_exactly_max_tokens_come(tokenizer: Tokenizer, route: str, max_tokens: int) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        for _ in ("cold", "on a hit"):
            body = await ask(client, route, max_tokens=max_tokens)
            [choice] = body["choices"]
            assert (text_of(choice), choice["finish_reason"]) == ("abc"[:max_tokens], "length")
            assert body["usage"]["completion_tokens"] == max_tokens
            chunks = await stream(client, route, max_tokens=max_tokens)
            assert rebuild(chunks) == {0: ("abc"[:max_tokens], "length")}
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_sc_5_max_tokens_hold_after_the_end_token_too(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, always(END))) as client:
        body = await ask(client, COMPLETIONS, max_tokens=3, ignore_eos=True)
        assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 3)


@BOTH
async def test_a_chat_runs_until_the_model_ends_and_a_completion_for_16_tokens(
    tokenizer: Tokenizer, route: str
) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        [choice] = (await ask(client, route))["choices"]
    expected = ("abcdefghijklmnopqrstuvwxyz", "stop") if route == CHAT else ("abcdefghijklmnop", "length")
    assert (text_of(choice), choice["finish_reason"]) == expected


@BOTH
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": False}])
async def test_st_4_usage_comes_only_when_asked_for(
    tokenizer: Tokenizer, route: str, n: int, options: dict[str, Any] | None
) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        chunks = await stream(client, route, n=n, max_tokens=4, stream_options=options)
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)


@BOTH
@pytest.mark.parametrize("n", [1, 2])
async def test_st_4_usage_is_the_last_chunk_and_equals_the_whole_answers(
    tokenizer: Tokenizer, route: str, n: int
) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        await ask(client, route, n=n, max_tokens=4)
        whole = await ask(client, route, n=n, max_tokens=4)
        *chunks, last = await stream(client, route, n=n, max_tokens=4, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@BOTH
@pytest.mark.parametrize("streams", [False, None])
async def test_st_4_stream_options_without_a_stream_are_refused(
    tokenizer: Tokenizer, route: str, streams: bool | None
) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        fields = {"stream": streams, "stream_options": {"include_usage": True}}
        response = await client.post(route, json=INPUTS[route] | fields)
    assert (response.status_code, error_of(response)["param"]) == (400, "stream_options")


@BOTH
@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"max_tokens": 30}, "abcdefghijklmnopqrstuvwxyz", "stop"),
        ({"max_tokens": 30, "stop": "def"}, "abc", "stop"),
        ({"max_tokens": 30, "stop": ["zz", "f"], "include_stop_str_in_output": True}, "abcdef", "stop"),
        ({"max_tokens": 4}, "abcd", "length"),
    ],
)
async def test_st_5_one_chunk_closes_a_choice_with_the_right_reason(
    tokenizer: Tokenizer, route: str, fields: dict[str, Any], text: str, reason: str
) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        assert rebuild(await stream(client, route, **fields)) == {0: (text, reason)}
        [choice] = (await ask(client, route, **fields))["choices"]
        assert (text_of(choice), choice["finish_reason"]) == (text, reason)


@BOTH
async def test_st_5_an_empty_answer_is_closed(tokenizer: Tokenizer, route: str) -> None:
    async with called(stub_engine(tokenizer, always(END))) as client:
        assert rebuild(await stream(client, route)) == {0: ("", "stop")}
        body = await ask(client, route)
    assert text_of(body["choices"][0]) == ""


@BOTH
async def test_st_5_st_6_each_of_several_choices_is_rebuilt_from_its_chunks(tokenizer: Tokenizer, route: str) -> None:
    async with called(stub_engine(tokenizer, coin)) as client:
        whole = await ask(client, route, n=3, seed=5, max_tokens=12)
        rebuilt = rebuild(await stream(client, route, n=3, seed=5, max_tokens=12))
    assert rebuilt == {choice["index"]: (text_of(choice), choice["finish_reason"]) for choice in whole["choices"]}
    assert rebuilt.keys() == {0, 1, 2}
    assert len({len(text) for text, _ in rebuilt.values()}) > 1, "choose a seed with answers of different lengths"


async def test_st_6_choices_of_a_list_of_prompts_lie_together(tokenizer: Tokenizer) -> None:
    fields = {"prompt": ["p", "x"], "n": 2, "max_tokens": 2}
    async with called(stub_engine(tokenizer, alphabet)) as client:
        whole = await ask(client, COMPLETIONS, **fields)
        rebuilt = rebuild(await stream(client, COMPLETIONS, **fields))
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (0, "qr"),
        (1, "qr"),
        (2, "yz"),
        (3, "yz"),
    ]
    assert {index: text for index, (text, _) in rebuilt.items()} == {0: "qr", 1: "qr", 2: "yz", 3: "yz"}


async def test_st_6_one_choice_has_index_0(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        chunks = await stream(client, CHAT, max_tokens=5)
    assert len(chunks) >= 5
    assert all(choice["index"] == 0 for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(
    ("fields", "num_prompt_tokens", "num_generated_tokens"),
    [({"prompt": "hello", "n": 3}, 5, 24), ({"prompt": ["hello", "goodbye"], "n": 2}, 12, 32)],
)
async def test_api_12_a_prompt_counts_once_and_all_answers_do(
    tokenizer: Tokenizer, fields: dict[str, Any], num_prompt_tokens: int, num_generated_tokens: int
) -> None:
    async with called(stub_engine(tokenizer, always(97))) as client:
        cached = []
        for _ in ("cold", "on a hit"):
            whole = (await ask(client, COMPLETIONS, **fields, max_tokens=8))["usage"]
            chunks = await stream(client, COMPLETIONS, **fields, max_tokens=8, stream_options={"include_usage": True})
            for usage in (whole, chunks[-1]["usage"]):
                cached.append(usage.pop("prompt_tokens_details")["cached_tokens"])
                assert usage == {
                    "prompt_tokens": num_prompt_tokens,
                    "completion_tokens": num_generated_tokens,
                    "total_tokens": num_prompt_tokens + num_generated_tokens,
                }
    num_prompts = num_prompt_tokens // 5
    assert cached == [0, *[num_prompt_tokens - num_prompts] * 3]


async def test_api_12_a_chats_prompt_counts_once_too(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, always(97))) as client:
        one, three = [(await ask(client, CHAT, n=n, max_tokens=8))["usage"] for n in (1, 3)]
        streamed = (await stream(client, CHAT, n=3, max_tokens=8, stream_options={"include_usage": True}))[-1]["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert (one["completion_tokens"], three["completion_tokens"]) == (8, 24)
    assert three["total_tokens"] == three["prompt_tokens"] + 24
    assert streamed == three


async def test_cached_tokens_are_always_told(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        cached = [
            (await ask(client, COMPLETIONS, prompt="x" * 40 + " ", max_tokens=1))["usage"]["prompt_tokens_details"]
            for _ in range(2)
        ]
    assert cached == [{"cached_tokens": 0}, {"cached_tokens": 40}]


@BOTH
async def test_return_token_ids(tokenizer: Tokenizer, route: str) -> None:
    fields = {"max_tokens": 30, "return_token_ids": True}
    async with called(stub_engine(tokenizer, alphabet)) as client:
        whole = await ask(client, route, **fields)
        chunks = await stream(client, route, **fields)
    answer = [*b"abcdefghijklmnopqrstuvwxyz", END]
    assert whole["choices"][0]["token_ids"] == answer
    assert [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]] == answer
    prompt = whole["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    assert chunks[0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


async def test_prompt_token_ids_of_a_list_are_a_list(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        body = await ask(client, COMPLETIONS, prompt=["a", "bc"], return_token_ids=True)
    assert body["prompt_token_ids"] == [[97], [98, 99]]


async def test_api_17_chat_logprobs_rebuild_the_text(tokenizer: Tokenizer) -> None:
    smile = "😊a".encode()

    def table(context: Any) -> dict[int, float]:
        num_said = len(context) - len(prompt)
        return {smile[num_said] if num_said < len(smile) else END: 0.75, ord("!"): 0.25}

    async with called(stub_engine(tokenizer, table)) as client:
        fields = {"temperature": 0, "logprobs": True, "max_tokens": 5, "return_token_ids": True}
        prompt = (await client.post("/tokenize", json={"messages": MESSAGES})).json()["tokens"]
        for top_logprobs in (None, 0, 3):
            whole = await ask(client, CHAT, **fields, top_logprobs=top_logprobs)
            [choice] = whole["choices"]
            content = choice["logprobs"]["content"]
            assert bytes(byte for token in content for byte in token["bytes"]) == smile
            assert choice["message"]["content"] == "😊a"
            assert [len(token["top_logprobs"]) for token in content] == [top_logprobs or 0] * 5
            chunks = await stream(client, CHAT, **fields, top_logprobs=top_logprobs)
            assert [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["content"]] == content
    assert content[0]["logprob"] == pytest.approx(-0.28768, abs=1e-4)
    assert content[0]["top_logprobs"][1]["token"] == "!"


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": False}, {"logprobs": None}])
@pytest.mark.parametrize("top_logprobs", [0, 3])
async def test_api_17_top_logprobs_need_logprobs(
    tokenizer: Tokenizer, logprobs: dict[str, Any], top_logprobs: int
) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        body = {"messages": MESSAGES, "top_logprobs": top_logprobs, **logprobs}
        response = await client.post(CHAT, json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, "top_logprobs")


async def test_completion_logprobs_are_the_same_streamed(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        whole = (await ask(client, COMPLETIONS, logprobs=2, max_tokens=4))["choices"][0]["logprobs"]
        pieces = [
            chunk["choices"][0]["logprobs"] for chunk in await stream(client, COMPLETIONS, logprobs=2, max_tokens=4)
        ]
    assert whole["tokens"] == ["a", "b", "c", "d"]
    assert whole["text_offset"] == [0, 1, 2, 3]
    assert [len(top) for top in whole["top_logprobs"]] == [2] * 4
    for name, values in whole.items():
        assert [value for piece in pieces for value in piece[name]] == values


@BOTH
async def test_stop_reason_tells_what_ended_the_answer(tokenizer: Tokenizer, route: str) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        for fields, expected in (
            ({"stop": ["d"]}, "d"),
            ({"stop_token_ids": [ord("d")]}, ord("d")),
            ({"max_tokens": 2}, None),
        ):
            [choice] = (await ask(client, route, **fields))["choices"]
            assert choice["stop_reason"] == expected
            assert (await stream(client, route, **fields))[-1]["choices"][0]["stop_reason"] == expected


async def test_tool_calls_of_earlier_answers_reach_the_template(tokenizer: Tokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": ""}]
    async with called(stub_engine(tokenizer, alphabet)) as client:
        body = await ask(client, CHAT, messages=history, max_tokens=1, return_token_ids=True)
    assert "None" not in tokenizer.decode(body["prompt_token_ids"])


async def test_pc_7_cache_salts_keep_prefixes_apart(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:

        async def cached(**fields: Any) -> int:
            body = await ask(client, COMPLETIONS, prompt="x" * 40 + " ", max_tokens=1, **fields)
            number: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            return number

        assert [await cached(), await cached()] == [0, 40]
        assert [await cached(cache_salt="s"), await cached(cache_salt="s"), await cached(cache_salt="t")] == [0, 40, 0]
        for salt in ("", "x" * 257, 5):
            response = await client.post(COMPLETIONS, json={"prompt": "a", "cache_salt": salt})
            assert (response.status_code, error_of(response)["param"]) == (400, "cache_salt")
