"""Fixtures that several folders of tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from radixserve.kernels.cpu import library
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


@pytest.fixture
def cpp_kernels() -> None:
    """Skip a test where the C++ kernels cannot run; whether they should is asked by their own tests."""
    obstacle = library.obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)


@pytest.fixture
def keeps_threads() -> Iterator[None]:
    """Give torch its number of threads back after a test that changes it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
