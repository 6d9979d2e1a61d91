"""Public prefixes: the ids of an entry are what every prompt that begins with it begins with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from radixserve.errors import ConfigError
from radixserve.model_path import resolve_model_path
from radixserve.tokenizer.public_prefixes import read_public_prefixes
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import load_byte_tokenizer
from tests.tokenizer.builders import byte_level_backend, llama3_backend, sentencepiece_backend, write_tokenizer

B = 16
SYSTEM = "You are a careful assistant. You answer in short sentences, and you never guess."
TURNS = [
    {"role": "user", "content": "Hello, what is the capital of France, and who told you so?"},
    {"role": "assistant", "content": "The capital of France is Paris, they say."},
]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
OTHER_TOOL = {"type": "function", "function": {"name": "x", "description": "d", "parameters": {"type": "object"}}}
QUESTIONS = ["hi", " spaced", "\n\nline", "9", "你好", "", "<|im_end|>"]
ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|start|>{{ message.content }}<|end|>{% endfor %}"
)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(resolve_model_path(None))


def read(directory: Path, tokenizer: Tokenizer, *entries: Any) -> list[list[int]]:
    file = directory / "prefixes.json"
    file.write_text(json.dumps(entries))
    return [prefix.tolist() for prefix in read_public_prefixes(file, tokenizer, B)]


def num_begun_with(prompt: list[int], prefixes: list[list[int]]) -> int:
    """How many tokens of the longest prefix a prompt begins with."""
    return max((len(prefix) for prefix in prefixes if prompt[: len(prefix)] == prefix), default=0)


def num_common(prompts: list[list[int]]) -> int:
    columns = enumerate(zip(*prompts, strict=False))
    return next((index for index, column in columns if len(set(column)) > 1), min(map(len, prompts)))


def questions(*beginning: dict[str, str]) -> list[list[dict[str, Any]]]:
    return [[*beginning, {"role": "user", "content": question}] for question in QUESTIONS]


@pytest.mark.parametrize("tools", [None, [WEATHER], [OTHER_TOOL, WEATHER]], ids=["none", "one tool", "two tools"])
def test_a_system_prompt_is_found_in_chats_with_and_without_tools(
    demo: Tokenizer, tmp_path: Path, tools: list[dict[str, Any]] | None
) -> None:
    prefixes = read(tmp_path, demo, SYSTEM)
    chats = questions({"role": "system", "content": SYSTEM})
    prompts = [demo.encode_chat(chat, tools=tools) for chat in chats]
    # At least the prompt's own text, in whole blocks.
    num_own = len(demo.encode(SYSTEM)) // B * B
    assert {num_begun_with(prompt, prefixes) >= num_own for prompt in prompts} == {True}
    if tools is None:
        assert num_begun_with(prompts[0], prefixes) == num_common(prompts) // B * B
    other = demo.encode_chat([{"role": "system", "content": SYSTEM.replace("careful", "careless")}], tools=tools)
    assert num_begun_with(other, prefixes) == 0


def test_the_beginning_of_a_chat_is_found_however_it_goes_on(demo: Tokenizer, tmp_path: Path) -> None:
    prefixes = read(tmp_path, demo, {"messages": TURNS})
    chats = [*questions(*TURNS), [*TURNS, {"role": "assistant", "content": "more"}], TURNS]
    prompts = [demo.encode_chat(chat) for chat in chats]
    # The template puts its own system prompt in front.
    assert demo.decode(prefixes[0]).startswith("system\nYou are a helpful AI assistant named SmolLM")
    assert {num_begun_with(prompt, prefixes) for prompt in prompts} == {num_common(prompts) // B * B}


def test_tools_of_an_entry_belong_to_it(demo: Tokenizer, tmp_path: Path) -> None:
    system = {"role": "system", "content": SYSTEM}
    prefixes = read(tmp_path, demo, {"messages": [system], "tools": [WEATHER]})
    found = [demo.encode_chat(chat, tools=[WEATHER | {}]) for chat in questions(system)]
    assert {num_begun_with(prompt, prefixes) for prompt in found} == {num_common(found) // B * B}
    for tools in (None, [OTHER_TOOL], [OTHER_TOOL, WEATHER]):
        assert num_begun_with(demo.encode_chat([system], tools=tools), prefixes) == 0


def test_results_of_tools_may_follow_calls(demo: Tokenizer, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    turns = [*TURNS[:1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    prefixes = read(tmp_path, demo, {"messages": turns, "tools": [WEATHER]})
    chat = [*turns, {"role": "tool", "content": "sunny"}]
    assert num_begun_with(demo.encode_chat(chat, tools=[WEATHER]), prefixes) == len(prefixes[0]) > 0


@pytest.mark.parametrize("end", ["", " ", "\n", ". hel"])
def test_a_text_is_found_however_it_goes_on(demo: Tokenizer, tmp_path: Path, end: str) -> None:
    text = SYSTEM + end
    prefixes = read(tmp_path, demo, {"prompt": text})
    prompts = [demo.encode(text + rest) for rest in ("", "Next", " next", "\n\nNext", "7", "你好")]
    assert {num_begun_with(prompt, prefixes) for prompt in prompts} == {num_common(prompts) // B * B}


@pytest.mark.parametrize(
    "backend",
    [byte_level_backend, llama3_backend, lambda: sentencepiece_backend(prepends_per_segment=True)],
    ids=["byte level", "llama 3", "sentencepiece"],
)
def test_a_text_is_found_with_every_family_of_tokenizers(
    tmp_path: Path, backend: Callable[[], tokenizers.Tokenizer]
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend()))
    (prefix,) = read(tmp_path, tokenizer, {"prompt": SYSTEM})
    for rest in ("", "Next", " next", "\nNext"):
        assert tokenizer.encode(SYSTEM + rest)[: len(prefix)] == prefix
    assert len(prefix) % B == 0


def test_a_template_that_wants_roles_to_alternate_decides_what_may_follow(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(tmp_path, chat_template=ALTERNATING)
    prefixes = read(tmp_path, tokenizer, {"messages": TURNS})
    prompts = [tokenizer.encode_chat(chat) for chat in questions(*TURNS)]
    assert {num_begun_with(prompt, prefixes) for prompt in prompts} == {num_common(prompts) // B * B}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "no list of prefixes"),
        ("\xff", "no list of prefixes"),
        ('{"prompt": "x"}', "Expected `array`"),
        ("[]", "empty list"),
        ('["x", 5]', r"\$\[1\]"),
        ('[{"messages": [{"role": 1}]}]', r"\$\[0\]\.messages\[0\]\.role"),
        ('[{"messages": [{"content": "x"}]}]', r"\$\[0\]\.messages\[0\]"),
        ('[{"messages": [{"role": "user", "content": "x", "mood": "y"}]}]', "`mood`"),
        ('[{"message": "x"}]', "`message`"),
        ('[{"messages": [{"role": "robot", "content": "x"}]}]', r"entry \[0\]: messages\[0\]\.role is 'robot'"),
        ('[{"messages": []}]', r"entry \[0\]: messages is empty"),
        ("[{}]", r"entry \[0\]: it must have messages or a prompt"),
        ('[{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}]', r"entry \[0\]: it must have messages"),
        ('[{"prompt": "x", "tools": []}]', r"entry \[0\]: tools go with messages"),
        ('[{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web"}]}]', r"entry \[0\]: tools\[0\]"),
        (
            '[{"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]}]',
            r"entry \[0\]: messages\[0\]\.content\[0\]\.cache_control",
        ),
        (
            '[{"prompt": "sixteen letters."}, {"prompt": "fifteen letters"}]',
            r"entry \[1\] gives prompts less than a block of 16 tokens",
        ),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "prefixes.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=words) as caught:
        read_public_prefixes(file, load_byte_tokenizer(tmp_path), B)
    assert str(caught.value).startswith(f"--public-prefixes {file}")


def test_a_chat_that_the_template_refuses_is_an_error_with_its_reason(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(tmp_path, chat_template=ALTERNATING)
    with pytest.raises(ConfigError, match=r"entry \[0\]: .*roles must alternate"):
        read(tmp_path, tokenizer, SYSTEM)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_public_prefixes(tmp_path / "nothing.json", load_byte_tokenizer(tmp_path), B)


def test_chats_need_a_chat_template_and_texts_do_not(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(tmp_path, chat_template=None)
    assert read(tmp_path, tokenizer, {"prompt": SYSTEM}) == [tokenizer.encode(SYSTEM)[: len(SYSTEM) // B * B]]
    with pytest.raises(ConfigError, match=r"entry \[0\]: this model has no chat template"):
        read(tmp_path, tokenizer, SYSTEM)
