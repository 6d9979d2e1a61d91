"""Fixtures of the engine's tests."""

import pytest

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.engine.harness import Harness, MakeHarness
from tests.stub import counting


@pytest.fixture
def make_harness(tokenizer: Tokenizer) -> MakeHarness:
    """Make harnesses over a table, which is one that depends on the whole context unless another is given."""
    return lambda **options: Harness(tokenizer, options.pop("table", counting(200)), **options)
