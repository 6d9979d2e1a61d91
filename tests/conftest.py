"""Fixtures that several folders of tests share."""

from pathlib import Path

import pytest

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import load_byte_tokenizer


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte b is token b; 256 is the end token."""
    directory: Path = tmp_path_factory.mktemp("byte_tokenizer")
    return load_byte_tokenizer(directory)
