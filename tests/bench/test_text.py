import asyncio
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.bench.text import approximate_text, exact_text
from tests.fake_server import num_tokens_of


def test_text_depends_on_its_key_alone() -> None:
    assert approximate_text("a", 200) == approximate_text("a", 200)
    assert approximate_text("a", 200) != approximate_text("b", 200)


def test_a_shorter_text_is_the_beginning_of_a_longer_one() -> None:
    assert approximate_text("a", 300).startswith(approximate_text("a", 120))


def test_text_without_a_tokenizer_has_one_token_a_word_and_a_full_stop() -> None:
    assert len(re.findall(r"\w+|\.", approximate_text("a", 500))) == 500


async def count(text: str) -> int:
    return num_tokens_of(text)


@given(key=st.text(max_size=5), num_tokens=st.integers(1, 400))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_text_is_exact_for_a_tokenizer_that_splits_words(key: str, num_tokens: int) -> None:
    assert num_tokens_of(asyncio.run(exact_text(key, num_tokens, count))) == num_tokens


@pytest.mark.parametrize("tokens_per_piece", [0, 7])
def test_a_tokenizer_that_no_text_satisfies_ends_the_search(tokens_per_piece: int) -> None:
    async def strange_count(text: str) -> int:
        return tokens_per_piece * len(text.split())

    assert asyncio.run(exact_text("a", 20, strange_count))
