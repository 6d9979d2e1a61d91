from pathlib import Path

import pytest

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import END, START, VOCAB_SIZE, load_byte_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_byte_tokenizer(tmp_path)


def test_ids_are_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    text = "naïve 😀\n\0 end"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert [tokenizer.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]


def test_the_end_token_ends_an_answer_and_is_not_shown(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.eos_token_ids == {END}
    assert tokenizer.bos_token_id is None
    assert tokenizer.token_bytes(END) == b"<|end|>"
    assert tokenizer.decode([*b"hi", END]) == "hi"
    assert tokenizer.decode([*b"hi", END], skip_special_tokens=False) == "hi<|end|>"


def test_a_chat_is_turns_between_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [START, *b"user\nhi", END, *b"\n", START, *b"assistant\n"]
