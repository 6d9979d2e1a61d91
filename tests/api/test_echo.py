"""An echo reads as the prompt that was sent."""

from pathlib import Path

import pytest

from radixserve.api.echo import echo_of
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import START, load_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """<|start|> begins every text, as with tokenizers that put it there themselves."""
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = load_byte_tokenizer(directory)
    tokenizer.bos_token_id = START
    return tokenizer


def test_the_token_that_the_tokenizer_puts_before_a_text_is_not_shown(tokenizer: Tokenizer) -> None:
    echo = echo_of("ab", [START, 97, 98], tokenizer, is_continued=True)
    assert (echo.text, echo.text_offsets) == ("ab", [0, 0, 1])


def test_an_empty_text_is_echoed_as_nothing(tokenizer: Tokenizer) -> None:
    echo = echo_of("", [START], tokenizer, is_continued=True)
    assert (echo.text, echo.text_offsets) == ("", [0])


@pytest.mark.parametrize("prompt", ["<|start|>a", [START, 97]])
def test_one_that_the_caller_sent_is_shown(tokenizer: Tokenizer, prompt: str | list[int]) -> None:
    echo = echo_of(prompt, [START, 97], tokenizer, is_continued=True)
    assert (echo.text, echo.text_offsets) == ("<|start|>a", [0, 9])
