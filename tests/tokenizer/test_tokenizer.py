"""What holds for every tokenizer."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from radixserve.errors import InvalidRequest
from tests.byte_tokenizer import load_byte_tokenizer


def test_loading_and_using_a_tokenizer_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    load_byte_tokenizer(tmp_path)
    program = (
        "import sys; from pathlib import Path; from radixserve.tokenizer.tokenizer import Tokenizer; "
        f"tokenizer = Tokenizer.load(Path({str(tmp_path)!r})); "
        "tokenizer.encode_chat([{'role': 'user', 'content': 'hi'}]); "
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(tmp_path)
    texts = [f"{i} <|end|> é" for i in range(64)]

    def encode(text: str) -> tuple[list[int], list[int]]:
        return tokenizer.encode(text), tokenizer.encode_chat([{"role": "user", "content": text}])

    alone = [encode(text) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(encode, texts)) == alone


def test_a_batch_is_its_texts_one_by_one(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(tmp_path)
    texts = ["", "a", "<|end|>é"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_half_a_surrogate_pair_is_the_requests_error(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": "a\ud83d"}])
