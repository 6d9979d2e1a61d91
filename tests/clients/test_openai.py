"""The openai package's clients against a server on the loopback interface: what each of their calls gives back."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import alphabet
from tests.background import served_in_background
from tests.clients.speaker import speaker
from tests.stub_engine import stub_engine

REPLIES = {
    "Count.": "one two three",
    "Who are you?": "I am a stub, naïve 😊.",
    "As JSON?": '{"number": 42, "words": ["forty", "two"]}',
    "Plus?": '<tool_call>\n{"name": "plus", "arguments": {"a": 1, "b": 20}}\n</tool_call>',
    "Aloud?": 'I add.\n<tool_call>\n{"name": "plus", "arguments": {"a": 1, "b": 20}}\n</tool_call>',
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "plus",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class Answer(BaseModel):
    """A number, also in words."""

    number: int = Field(description="the number")
    words: list[str]


class Sum(BaseModel):
    """Two numbers to add."""

    a: int
    b: int


@pytest.fixture(scope="module")
def base_url(tokenizer: Tokenizer) -> Iterator[str]:
    config = EngineConfig(tool_call_parser="hermes", max_num_batched_tokens=4096)
    engine = stub_engine(tokenizer, speaker(REPLIES), config=config, num_blocks=512, max_model_len=4096)
    with served_in_background(engine) as url:
        yield url


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def completions(tokenizer: Tokenizer) -> Iterator[openai.OpenAI]:
    """The client of a server whose model says the alphabet."""
    with (
        served_in_background(stub_engine(tokenizer, alphabet)) as url,
        openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client,
    ):
        yield client


@pytest.fixture
async def async_client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client


def asked(question: str, **fields: Any) -> Any:
    return {"model": "stub", "messages": [{"role": "user", "content": question}], **fields}


def test_a_chat_whole_streamed_and_by_the_streaming_helper_is_one_and_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**asked("Who are you?"))
    assert whole.choices[0].message.content == REPLIES["Who are you?"]
    with client.chat.completions.create(**asked("Who are you?", stream=True)) as chunks:
        assert (
            "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            == REPLIES["Who are you?"]
        )
    with client.chat.completions.stream(**asked("Who are you?", stream_options={"include_usage": True})) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == REPLIES["Who are you?"]
    assert [event.content for event in events if event.type == "content.done"] == [REPLIES["Who are you?"]]
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens


def test_a_stream_may_be_left_before_its_end(client: openai.OpenAI) -> None:
    with client.chat.completions.create(**asked("Count.", stream=True)) as chunks:
        next(iter(chunks))
    assert client.chat.completions.create(**asked("Count.")).choices[0].message.content == "one two three"


def test_several_choices_come_in_their_order_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**asked("Count.", n=3))
    assert [(choice.index, choice.message.content) for choice in whole.choices] == [
        (index, "one two three") for index in range(3)
    ]
    with client.chat.completions.stream(**asked("Count.", n=3)) as stream:
        streamed = stream.get_final_completion()
    assert [choice.message.content for choice in streamed.choices] == ["one two three"] * 3


def parsed(client: openai.OpenAI, *, is_streamed: bool, **fields: Any) -> Any:
    """Return a completion parsed by the client, from a whole answer or a stream."""
    if not is_streamed:
        return client.chat.completions.parse(**fields)
    with client.chat.completions.stream(**fields) as stream:
        return stream.get_final_completion()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI, is_streamed: bool) -> None:
    completion = parsed(client, is_streamed=is_streamed, **asked("As JSON?", response_format=Answer))
    assert completion.choices[0].message.parsed == Answer(number=42, words=["forty", "two"])


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tc_7_an_answer_that_was_cut_off_is_not_parsed(client: openai.OpenAI, is_streamed: bool) -> None:
    fields = asked("As JSON?", response_format=Answer, max_completion_tokens=10)
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        parsed(client, is_streamed=is_streamed, **fields)
    assert caught.value.completion.choices[0].message.content == REPLIES["As JSON?"][:10]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_arguments_of_a_strict_tool_are_parsed(client: openai.OpenAI, is_streamed: bool) -> None:
    tools = [openai.pydantic_function_tool(Sum, name="plus")]
    fields = asked("Plus?", tools=tools, tool_choice="required")
    [call] = parsed(client, is_streamed=is_streamed, **fields).choices[0].message.tool_calls
    assert call.function.parsed_arguments == Sum(a=1, b=20)


@pytest.mark.parametrize(
    ("question", "choice"),
    [
        ("Aloud?", "auto"),
        ("Plus?", "required"),
        ("Plus?", {"type": "function", "function": {"name": "plus"}}),
    ],
)
def test_a_call_whole_and_streamed_is_the_same(client: openai.OpenAI, question: str, choice: Any) -> None:
    fields = asked(question, tools=[TOOL], tool_choice=choice)
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        events = list(stream)
        streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert whole.message.content == streamed.message.content
    [call] = whole.message.tool_calls or []
    [streamed_call] = streamed.message.tool_calls or []
    assert call.type == "function"
    assert streamed_call.function.arguments == call.function.arguments == '{"a": 1, "b": 20}'
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.arguments) == ("plus", '{"a": 1, "b": 20}')


def test_completions_score_their_prompt(completions: openai.OpenAI) -> None:
    completion = completions.completions.create(model="stub", prompt="abd", echo=True, logprobs=1, max_tokens=2)
    [choice] = completion.choices
    assert choice.text == "abdef"
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens == list("abdef")
    assert scores.text_offset == [0, 1, 2, 3, 4]
    assert scores.token_logprobs is not None
    first, second, third, *others = scores.token_logprobs
    # The model is sure that c follows b.
    assert (first, second, others) == (None, 0.0, [0.0, 0.0])
    assert third is not None
    assert third < -1000
    assert scores.top_logprobs is not None
    assert scores.top_logprobs[2]["c"] == 0.0


def test_completions_of_several_prompts_whole_and_streamed(completions: openai.OpenAI) -> None:
    fields: Any = {"model": "stub", "prompt": ["abc", "f", "y"], "n": 2, "max_tokens": 20, "stop": "k"}
    whole = completions.completions.create(**fields)
    texts = [choice.text for choice in whole.choices]
    assert texts == ["defghij", "defghij", "ghij", "ghij", "z", "z"]
    streamed = [""] * len(texts)
    with completions.completions.create(**fields, stream=True) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
    assert streamed == texts


@pytest.mark.anyio
async def test_the_async_client_gives_what_the_other_one_gives(async_client: openai.AsyncOpenAI) -> None:
    create = async_client.chat.completions.create
    assert (await create(**asked("Count."))).choices[0].message.content == "one two three"
    pieces = [
        choice.delta.content or ""
        async for chunk in await create(**asked("Count.", stream=True))
        for choice in chunk.choices
    ]
    assert "".join(pieces) == "one two three"
    async with async_client.chat.completions.stream(**asked("As JSON?", response_format=Answer)) as stream:
        completion = await stream.get_final_completion()
    assert completion.choices[0].message.parsed == Answer(number=42, words=["forty", "two"])
