"""Tokens to text, whole and in pieces, in byte-level and SentencePiece vocabularies."""

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from radixserve.errors import ModelLoadError
from radixserve.tokenizer.token_text import TokenText
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.builders import (
    byte_level_backend,
    llama3_backend,
    sentencepiece_backend,
    unigram_backend,
    write_tokenizer,
)

BACKENDS = {
    "byte-level": byte_level_backend,
    "llama3": llama3_backend,
    "sentencepiece": lambda: sentencepiece_backend(prepends_per_segment=True),
    "sentencepiece-first": lambda: sentencepiece_backend(prepends_per_segment=False),
    "unigram": unigram_backend,
}
TEXTS = [
    "Hello world. It is  fine",
    " a leading space",
    "\n\n\nlines\n",
    "def f(x):\n    return x\n\n        deep",
    "The capital of France is Paris.",
]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return BACKENDS[request.param]()


@pytest.fixture(scope="module")
def tokenizer(backend: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("text"), backend))


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int]) -> str:
    stream = tokenizer.decode_stream(skip_special_tokens=True, prompt_token_ids=prompt)
    return "".join(stream.push([token_id]) for token_id in answer) + stream.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_st_3_an_answer_is_what_it_adds_to_the_prompts_text(
    tokenizer: Tokenizer, backend: tokenizers.Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    for cut in range(len(ids) + 1):
        prompt = tokenizer.decode(ids[:cut])
        whole = tokenizer.decode(ids)
        assert whole == backend.decode(ids)
        assert prompt + streamed(tokenizer, ids[:cut], ids[cut:]) == whole


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, backend: tokenizers.Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)


def test_bytes_of_tokens_make_up_the_text() -> None:
    text = TokenText(sentencepiece_backend(prepends_per_segment=True))
    backend = sentencepiece_backend(prepends_per_segment=True)
    ids = backend.encode("Paris 😀", add_special_tokens=False).ids
    assert b"".join(map(text.token_bytes, ids)) == " Paris 😀".encode()
    assert text.token_bytes(backend.token_to_id("<0xF0>")) == b"\xf0"
    assert text.token_bytes(backend.token_to_id("<s>")) == b"<s>"


def test_bytes_that_are_no_text_spoil_only_themselves() -> None:
    backend = sentencepiece_backend(prepends_per_segment=True)
    text = TokenText(backend)
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in [*"😀".encode(), 0xFF, *"é".encode()]]
    assert text.decode(ids, skip_special_tokens=True) == "😀\ufffdé"


def test_added_tokens_outside_the_byte_alphabet_are_text() -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<\uff5cend▁of▁it\uff5c>", "two words", "é"])
    text = TokenText(backend)
    for token in ("<\uff5cend▁of▁it\uff5c>", "two words", "é"):
        assert text.token_bytes(backend.token_to_id(token)) == token.encode()


def test_ids_that_name_no_token_add_nothing() -> None:
    text = TokenText(byte_level_backend())
    assert text.token_bytes(10**6) == text.token_bytes(-1) == b""
    assert text.decode([10**6, -1], skip_special_tokens=True) == ""


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC(), None])
def test_other_decoders_are_refused(decoder: decoders.Decoder | None) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ModelLoadError, match="decode"):
        TokenText(backend)


@given(ids=st.lists(st.integers(0, 299), max_size=20), data=st.data())
@settings(deadline=None, derandomize=True)
def test_any_ids_read_alike_in_pieces_and_whole(tokenizer: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    assert streamed(tokenizer, (), ids) == tokenizer.decode(ids)
    if tokenizer.decode(ids[:cut]).isascii():
        assert tokenizer.decode(ids[:cut]) + streamed(tokenizer, ids[:cut], ids[cut:]) == tokenizer.decode(ids)
