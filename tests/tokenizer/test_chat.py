"""Conversations to ids: equal to transformers' for ordinary text, and safe from typed special tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from radixserve.errors import ConfigError, InvalidRequest
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import END, START, load_byte_tokenizer, write_byte_tokenizer
from tests.tokenizer.builders import (
    byte_level_backend,
    llama3_backend,
    sentencepiece_backend,
    unigram_backend,
    write_tokenizer,
)

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- (tool_call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- (message['content'] or '') | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{% if message['role'] in ('user', 'system') %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{{ ' ' + (message['content'] or '') | trim + ' ' + eos_token }}{% endif %}
{% endfor %}
"""
PHI3 = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + (message['content'] or '') + '<|end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
"""


def chatml() -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken(token, special=False) for token in ("<tool_call>", "</tool_call>", "<think>")])
    return backend


def phi3() -> tokenizers.Tokenizer:
    backend = sentencepiece_backend(prepends_per_segment=False)
    backend.add_special_tokens(
        [AddedToken(f"<|{name}|>", rstrip=True) for name in ("user", "assistant", "system", "end")]
    )
    return backend


@dataclass(frozen=True)
class Family:
    backend: Callable[[], tokenizers.Tokenizer]
    template: str
    bos_token: str | None
    eos_token: str
    turn_end: str


FAMILIES = {
    "chatml": Family(chatml, CHATML, None, "<|im_end|>", "<|im_end|>"),
    "llama3": Family(llama3_backend, LLAMA3, "<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>"),
    "mistral": Family(lambda: sentencepiece_backend(prepends_per_segment=True), MISTRAL, "<s>", "</s>", "</s>"),
    "mistral-first": Family(lambda: sentencepiece_backend(prepends_per_segment=False), MISTRAL, "<s>", "</s>", "</s>"),
    "phi3": Family(phi3, PHI3, "<s>", "</s>", "<|end|>"),
    "unigram": Family(unigram_backend, MISTRAL, "<s>", "</s>", "</s>"),
}


@dataclass(frozen=True)
class Pair:
    """A tokenizer of ours and transformers' for the same files."""

    tokenizer: Tokenizer
    reference: PreTrainedTokenizerFast
    family: Family


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family = FAMILIES[request.param]
    config = {"bos_token": family.bos_token, "eos_token": family.eos_token, "chat_template": family.template}
    directory = write_tokenizer(tmp_path_factory.mktemp("family"), family.backend(), **config)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **config)
    return Pair(Tokenizer.load(directory), reference, family)


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


CHATS = {
    "one turn": [{"role": "user", "content": "What is the capital of France?"}],
    "turns": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "  spaces   and\n\n\tlines  "},
        {"role": "assistant", "content": "Paris.\n"},
        {"role": "user", "content": "naïve café 你好 😀 e\u0301"},
    ],
    "code": [{"role": "user", "content": "def f(x):\n    return x  # 1\n<tag> [x] {y} <| |> < "}],
    "thought": [
        {"role": "user", "content": "12"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n345"},
        {"role": "user", "content": ""},
    ],
}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
def test_ids_of_ordinary_chats_equal_transformers(pair: Pair, chat: str, add_generation_prompt: bool) -> None:
    expected = pair.reference.apply_chat_template(
        CHATS[chat], add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert pair.tokenizer.encode_chat(CHATS[chat], add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.parametrize("content", ["The answer is", "The answer is ", " a\n", "x 1"])
def test_an_open_last_message_equals_transformers(pair: Pair, content: str) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    expected = pair.reference.apply_chat_template(chat, continue_final_message=True, return_dict=False)
    actual = pair.tokenizer.encode_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert actual == expected


def special_ids(pair: Pair, ids: list[int]) -> list[int]:
    special = {i for i, token in pair.reference.added_tokens_decoder.items() if token.special}
    return [i for i in ids if i in special]


def test_typed_special_tokens_stay_text(pair: Pair) -> None:
    names = [token.content for token in pair.reference.added_tokens_decoder.values() if token.special]
    typed = [
        "x ".join(names),
        "".join(names),
        f"{pair.family.turn_end}\n",
        f"a{pair.family.turn_end}{pair.family.turn_end}b",
        pair.family.turn_end[:-1] + pair.family.turn_end,
    ]
    for content in typed:
        chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}] * 2
        plain = [{**message, "content": "hi"} for message in chat]
        ids = pair.tokenizer.encode_chat(chat)
        assert special_ids(pair, ids) == special_ids(pair, pair.tokenizer.encode_chat(plain))
        assert content.strip() in pair.tokenizer.decode(ids)


@given(
    contents=st.lists(
        st.lists(
            st.sampled_from(["<|end|>", "<|start|>", "<|pad|>", "<|", "end", "|>", "<", ">", "|", " ", "\n", "é", "1"])
        ).map("".join),
        min_size=1,
        max_size=4,
    )
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_whatever_is_typed_only_the_template_writes_special_tokens(
    bytes_tokenizer: Tokenizer, contents: list[str]
) -> None:
    expected: list[int] = []
    for content in contents:
        expected += [START, *b"user\n", *content.encode(), END, *b"\n"]
    messages = [{"role": "user", "content": content} for content in contents]
    assert bytes_tokenizer.encode_chat(messages, add_generation_prompt=False) == expected


def test_a_special_token_put_together_from_two_messages_stays_text(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(
        tmp_path, chat_template="{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    for cut in range(1, len("<|end|>")):
        parts = ["<|end|>"[:cut], "<|end|>"[cut:]]
        ids = tokenizer.encode_chat([{"role": "user", "content": part} for part in parts])
        assert ids == list(b"<|end|>")


def test_tools_and_calls_are_protected_too(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(
        tmp_path, chat_template="{{ tools | tojson }}{{ messages[0].tool_calls | tojson(ensure_ascii=True) }}{{ who }}"
    )
    tools = [{"type": "function", "function": {"name": "f", "description": "<|end|>", "parameters": {"<|end|>": 1}}}]
    calls = [{"id": "1", "function": {"name": "<|start|>", "arguments": '{"x": "<|pad|>"}'}}]
    ids = tokenizer.encode_chat(
        [{"role": "assistant", "content": None, "tool_calls": calls}],
        tools=tools,
        template_kwargs={"who": "<|end|>"},
    )
    assert max(ids) < END
    assert bytes(ids).decode().count("<|end|>") == 3


def test_added_tokens_that_are_not_special_keep_their_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, chatml(), chat_template=CHATML))
    [think] = tokenizer.encode("<think>")
    assert think in tokenizer.encode_chat([{"role": "user", "content": "a<think>b"}])


def test_merges_do_not_lead_to_a_control_token(tmp_path: Path) -> None:
    vocabulary = {piece: i for i, piece in enumerate(["<", "s", ">", "<s", "<s>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("<", "s"), ("<s", ">")]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    template = "<s>{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend, chat_template=template))
    assert tokenizer.encode_chat([{"role": "user", "content": "<s><s>"}]) == [4, 3, 2, 3, 2]


def test_turn_borders_that_are_not_marked_special_are_protected_too(tmp_path: Path) -> None:
    border = "<\uff5cUser\uff5c>"
    backend = byte_level_backend()
    backend.add_tokens([border])
    template = f"{{% for message in messages %}}{border}{{{{ message.content }}}}{{% endfor %}}"
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend, chat_template=template))
    ids = tokenizer.encode_chat([{"role": "user", "content": f"a{border}b"}])
    assert ids.count(backend.token_to_id(border)) == 1
    assert tokenizer.decode(ids) == f"{border}a{border}b"


def test_tools_and_template_arguments_equal_transformers(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path, chatml(), chat_template=CHATML, eos_token="<|im_end|>")
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), chat_template=CHATML, eos_token="<|im_end|>"
    )
    chat = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "é"}}}],
        },
        {"role": "tool", "content": "sunny & <warm>"},
    ]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "naïve <b>"}}}]
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.encode_chat(
        chat, tools=tools, template_kwargs={"enable_thinking": False}
    ) == reference.apply_chat_template(
        chat, tools=tools, enable_thinking=False, add_generation_prompt=True, return_dict=False
    )


def chat_error(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode_chat(messages, **options)
    return caught.value.message


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content.strip() }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_is_the_requests_error(tmp_path: Path, template: str) -> None:
    tokenizer = load_byte_tokenizer(tmp_path, chat_template=template)
    assert "chat template" in chat_error(tokenizer, [USER])


def test_an_error_shows_what_the_user_wrote(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(tmp_path, chat_template="{{ raise_exception('bad ' + messages[0].content) }}")
    assert "bad <|end|>!" in chat_error(tokenizer, [{"role": "user", "content": "<|end|>!"}])


def test_templates_can_use_what_transformers_offers(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "  {% generation %}{{ m.content }}{% endgeneration %}\n"
        "{% endfor %}{{ {'a': 'é<'} | tojson(indent=1) }}{{ strftime_now('%%') }}{{ eos_token }}"
    )
    tokenizer = load_byte_tokenizer(tmp_path, chat_template=template)
    assert tokenizer.encode_chat([USER, USER]) == [*'hi{\n "a": "é<"\n}%'.encode(), END]


def test_no_template_says_how_to_give_one(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(tmp_path, chat_template=None)
    assert not tokenizer.has_chat_template
    assert "--chat-template" in chat_error(tokenizer, [USER])


def test_a_broken_template_fails_at_load_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 2.*--chat-template"):
        load_byte_tokenizer(tmp_path, chat_template="ok\n{% for %}")


def test_a_template_file_replaces_the_models_own(tmp_path: Path) -> None:
    directory = write_byte_tokenizer(tmp_path, chat_template="{% broken")
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}<|end|>")
    assert Tokenizer.load(directory, chat_template=file).encode_chat([USER]) == [*b"hi", END]
    file.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"mine\.jinja"):
        Tokenizer.load(directory, chat_template=file)
    with pytest.raises(ConfigError, match=r"none\.jinja"):
        Tokenizer.load(directory, chat_template=tmp_path / "none.jinja")


def test_an_answer_cannot_be_begun_and_continued_at_once(tmp_path: Path) -> None:
    chat = [USER, {"role": "assistant", "content": "It"}]
    tokenizer = load_byte_tokenizer(tmp_path)
    assert "contradict" in chat_error(tokenizer, chat, add_generation_prompt=True, continue_final_message=True)
    ids = tokenizer.encode_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert ids == [START, *b"user\nhi", END, *b"\n", START, *b"assistant\nIt"]


@pytest.mark.parametrize(
    "messages", [[], [USER], [{"role": "assistant", "content": None}], [{"role": "assistant", "tool_calls": []}]]
)
def test_only_an_assistants_text_can_be_continued(tmp_path: Path, messages: list[dict[str, Any]]) -> None:
    error = chat_error(
        load_byte_tokenizer(tmp_path), messages, add_generation_prompt=False, continue_final_message=True
    )
    assert "continue_final_message" in error


def test_a_template_that_drops_the_last_message_cannot_continue_it(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(tmp_path, chat_template="{{ messages[0].content }}")
    chat = [USER, {"role": "assistant", "content": "It"}]
    assert "does not show" in chat_error(tokenizer, chat, add_generation_prompt=False, continue_final_message=True)


def test_messages_nested_too_deeply_are_the_requests_error(tmp_path: Path) -> None:
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"properties": nested}
    assert "nested" in chat_error(load_byte_tokenizer(tmp_path), [USER], tools=[nested])


def test_messages_are_left_as_they_were(tmp_path: Path) -> None:
    chat = [USER, {"role": "assistant", "content": "It <|end|>", "tool_calls": None}]
    before = [dict(message) for message in chat]
    load_byte_tokenizer(tmp_path).encode_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert chat == before
