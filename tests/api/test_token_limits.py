"""allowed_token_ids and bad_words over HTTP."""

from typing import Any

import pytest

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import BOTH, CHAT, INPUTS, alphabet, ask, called, refusal_of, text_of
from tests.byte_tokenizer import VOCAB_SIZE
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio


@BOTH
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"allowed_token_ids": list(b"xyz")}, "xyzx"),
        ({"allowed_token_ids": None, "bad_words": []}, "abcd"),
        ({"bad_words": ["bc"]}, "ab\0a"),
        ({"bad_words": ["b"], "allowed_token_ids": list(b"abz")}, "aaaa"),
    ],
)
async def test_answers_keep_to_their_limits(
    tokenizer: Tokenizer, route: str, fields: dict[str, Any], text: str
) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        body = await ask(client, route, **INPUTS[route], **fields, temperature=0, max_tokens=4)
    assert text_of(body["choices"]) == text


@BOTH
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [97, VOCAB_SIZE]),
        ("allowed_token_ids", ["a"]),
        ("allowed_token_ids", 97),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("bad_words", [5]),
    ],
)
async def test_what_is_no_limit_is_refused_by_name(tokenizer: Tokenizer, route: str, name: str, value: Any) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        assert (await refusal_of(client, route, **INPUTS[route], **{name: value}))["param"] == name


async def test_allowed_tokens_cannot_be_combined_with_a_format(tokenizer: Tokenizer) -> None:
    fields = {"allowed_token_ids": [97], "response_format": {"type": "json_object"}}
    async with called(stub_engine(tokenizer, alphabet)) as client:
        assert (await refusal_of(client, CHAT, **INPUTS[CHAT], **fields))["param"] == "allowed_token_ids"
