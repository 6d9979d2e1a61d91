"""Log-probabilities carry tokens' exact bytes, and offsets that fit the text."""

from pathlib import Path

import pytest

from radixserve.api.logprobs import CompletionLogprobsWriter, chat_logprobs
from radixserve.protocol import TokenLogprobs
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import END, load_byte_tokenizer

SMILE = list("😊".encode())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    return load_byte_tokenizer(path)


def entry(token_id: int, *top: tuple[int, float], logprob: float = -0.5) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, list(top))


def test_api_17_bytes_of_parts_of_a_character_are_exact(tokenizer: Tokenizer) -> None:
    content = chat_logprobs([entry(token_id) for token_id in [*SMILE, 97]], tokenizer).content
    assert [token.bytes for token in content] == [[240], [159], [152], [138], [97]]
    assert bytes(byte for token in content for byte in token.bytes).decode() == "😊a"
    assert content[-1].token == "a"
    assert all(token.top_logprobs == [] for token in content)


def test_api_17_alternatives_are_decoded_each_on_its_own(tokenizer: Tokenizer) -> None:
    [token] = chat_logprobs([entry(240, (159, -0.1), (97, -0.2))], tokenizer).content
    assert [(top.bytes, top.logprob) for top in token.top_logprobs] == [([159], -0.1), ([97], -0.2)]
    assert [top.token for top in token.top_logprobs] == ["\ufffd", "a"]


def test_a_probability_of_zero_is_a_number_that_json_has(tokenizer: Tokenizer) -> None:
    impossible = entry(97, (98, float("-inf")), logprob=float("-inf"))
    [token] = chat_logprobs([impossible], tokenizer).content
    assert (token.logprob, token.top_logprobs[0].logprob) == (-9999.0, -9999.0)


def test_text_offsets_count_the_characters_before_each_token(tokenizer: Tokenizer) -> None:
    writer = CompletionLogprobsWriter(tokenizer, [97], SamplingParams(logprobs=1))
    pieces = [writer.write([entry(98), entry(SMILE[0])]), writer.write([entry(byte) for byte in [*SMILE[1:], 99]])]
    assert [piece.text_offset for piece in pieces] == [[0, 1], [1, 1, 1, 2]]
    assert [piece.tokens for piece in pieces] == [["b", "\ufffd"], ["\ufffd"] * 3 + ["c"]]


def test_a_special_token_takes_room_only_where_it_is_shown(tokenizer: Tokenizer) -> None:
    for skips, offsets in ((True, [0, 1, 1]), (False, [0, 1, 8])):
        params = SamplingParams(logprobs=0, skip_special_tokens=skips)
        written = CompletionLogprobsWriter(tokenizer, [97], params).write([entry(97), entry(END), entry(98)])
        assert written.text_offset == offsets


def test_top_logprobs_of_a_completion_hold_the_tokens_own_too(tokenizer: Tokenizer) -> None:
    writer = CompletionLogprobsWriter(tokenizer, [97], SamplingParams(logprobs=1))
    written = writer.write([entry(97, (98, -0.1)), entry(98, (98, -0.5))])
    assert written.top_logprobs == [{"b": -0.1, "a": -0.5}, {"b": -0.5}]
    assert written.token_logprobs == [-0.5, -0.5]


def test_api_13_logprobs_0_reports_the_chosen_tokens_alone(tokenizer: Tokenizer) -> None:
    written = CompletionLogprobsWriter(tokenizer, [97], SamplingParams(logprobs=0)).write([entry(97)])
    assert (written.tokens, written.token_logprobs, written.top_logprobs) == (["a"], [-0.5], None)
