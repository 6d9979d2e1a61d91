"""Tokenizers inside GGUF files, on small files written here."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest

from radixserve.errors import ModelLoadError
from radixserve.tokenizer.pre_tokenizers import find_word_rules
from radixserve.tokenizer.token_text import BYTE_OF_CHARACTER
from radixserve.tokenizer.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
MERGES = ["Ġ Ġ", "1 2", "12 3", "123 4", "Ġ 1", "a b", "ab c", "' T", "Ã ©", "a B", "/ /"]


def write_gguf(file: Path, tokens: list[str], types: list[int] | None = None, **fields: Any) -> Path:
    """Write a GGUF file of metadata only. fields: by their names after tokenizer.ggml."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", types or [NORMAL] * len(tokens))
    for name, value in fields.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def write_byte_level(file: Path, *, merges: list[str] = MERGES, control: tuple[str, ...] = (), **fields: Any) -> Path:
    tokens = [*BYTE_OF_CHARACTER, *(merge.replace(" ", "") for merge in merges)]
    types = [NORMAL] * len(tokens) + [CONTROL] * len(control)
    return write_gguf(
        file, [*tokens, *control], types, **({"model": "gpt2", "pre": "gpt-2", "merges": merges} | fields)
    )


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("names", "text", "expected"),
    [
        (("gpt-2", "default", "phi-2", "mpt"), "1234", ["1234"]),
        (("smollm", "starcoder", "refact", "command-r", "deepseek-coder"), "123", ["1", "2", "3"]),
        (("qwen2", "deepseek-r1-qwen", "tekken"), "123", ["1", "2", "3"]),
        (("llama-bpe", "llama3", "llama-v3", "dbrx", "glm4", "chatglm-bpe"), "1234", ["123", "4"]),
        (("gpt-4o", "llama4", "deepseek-v3"), "1234", ["123", "4"]),
        (("gpt-2", "phi-2"), "a 1", ["a", " 1"]),
        (("smollm", "command-r", "llama-bpe", "qwen2", "gpt-4o", "tekken", "deepseek-v3"), "a 1", ["a", " ", "1"]),
        (("smollm", "starcoder"), "a  1", ["a", "  ", "1"]),
        (("gpt-2", "smollm"), "'T", ["'", "T"]),
        (("llama-bpe", "qwen2"), "'T", ["'T"]),
        (("gpt-2", "llama-bpe", "qwen2", "deepseek-v3"), "aB", ["aB"]),
        (("gpt-4o", "tekken"), "aB", ["a", "B"]),
        (("qwen2", "command-r", "mpt"), "e\u0301", ["é"]),
        (("smollm", "llama-bpe", "gpt-2"), "\u00e9", ["é"]),
        (("smollm", "llama-bpe", "gpt-2", "qwen2", "tekken", "deepseek-v3", "deepseek-coder"), "//", ["//"]),
    ],
)
def test_text_is_cut_as_the_file_says(tmp_path: Path, names: tuple[str, ...], text: str, expected: list[str]) -> None:
    for name in names:
        file = write_byte_level(tmp_path / f"{name}.gguf", pre=name, bos_token_id=0, add_bos_token=False)
        assert pieces(Tokenizer.load(file), text) == expected, name


def test_only_the_named_families_compose_characters(tmp_path: Path) -> None:
    for name in ("smollm", "llama-bpe", "gpt-2", "tekken"):
        tokenizer = Tokenizer.load(write_byte_level(tmp_path / f"{name}.gguf", pre=name))
        assert tokenizer.decode(tokenizer.encode("e\u0301")) == "e\u0301"


def test_llama_3_takes_whole_words_without_their_merges(tmp_path: Path) -> None:
    tokens = [*BYTE_OF_CHARACTER, "ab", "abcd"]
    for name, expected in (("llama-bpe", ["abcd"]), ("dbrx", ["ab", "c", "d"])):
        file = write_gguf(tmp_path / f"{name}.gguf", tokens, model="gpt2", pre=name, merges=["a b"])
        assert pieces(Tokenizer.load(file), "abcd") == expected


@pytest.mark.parametrize("name", ["unheard-of", "deepseek-llm", None])
def test_an_unknown_way_to_cut_text_is_refused_by_name(tmp_path: Path, name: str | None) -> None:
    file = write_byte_level(tmp_path / "m.gguf", pre=name)
    with pytest.raises(ModelLoadError, match=rf"m\.gguf.*{name}"):
        Tokenizer.load(file)


def test_every_named_way_to_cut_text_can_be_built(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        find_word_rules("none of them")
    names = str(caught.value).rpartition("one of ")[2].split(", ")
    text = "It's 12 o'clock,\n\n  don't 'T x_y 你好 naïve\t(1+2)==3?  \r\n"
    for name in names:
        tokenizer = Tokenizer.load(write_byte_level(tmp_path / f"{name}.gguf", pre=name))
        assert tokenizer.decode(tokenizer.encode(text)) == text


CONTROL_TOKENS = ("<s>", "</s>", "<|eot_id|>", "<|im_end|>", "<|eot|>")
BOS = len(BYTE_OF_CHARACTER) + len(MERGES)
EOS, EOT_ID, IM_END, EOT = range(BOS + 1, BOS + 5)


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path) -> None:
    def ends(**fields: Any) -> tuple[bool, bool]:
        fields = {"bos_token_id": BOS, "eos_token_id": EOS} | fields
        tokenizer = Tokenizer.load(write_byte_level(tmp_path / "m.gguf", control=CONTROL_TOKENS, **fields))
        ids = tokenizer.encode("abc")
        assert tokenizer.decode(ids) == "abc"
        return ids[0] == BOS, ids[-1] == EOS

    assert ends() == (False, False)
    assert ends(add_bos_token=True, add_eos_token=True) == (True, True)
    assert ends(pre="llama-bpe") == (True, False)
    assert ends(pre="llama-bpe", add_bos_token=False) == (False, False)


def test_every_end_of_a_turn_ends_an_answer(tmp_path: Path) -> None:
    file = write_byte_level(tmp_path / "m.gguf", control=CONTROL_TOKENS, eos_token_id=EOS, eot_token_id=EOT)
    tokenizer = Tokenizer.load(file)
    assert tokenizer.eos_token_ids == {EOS, EOT, EOT_ID, IM_END}
    assert tokenizer.bos_token_id is None


def test_ids_past_the_vocabulary_are_no_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path / "m.gguf", bos_token_id=10**6, eos_token_id=10**6))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, frozenset())


def test_the_files_template_is_used(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    fields = {"bos_token_id": BOS, "eos_token_id": EOS, "chat_template": template}
    tokenizer = Tokenizer.load(write_byte_level(tmp_path / "m.gguf", control=CONTROL_TOKENS, **fields))
    [abc] = tokenizer.encode("abc")
    assert tokenizer.encode_chat([{"role": "user", "content": "abc"}]) == [BOS, abc, EOS]
    assert not Tokenizer.load(write_byte_level(tmp_path / "n.gguf")).has_chat_template


def test_user_defined_tokens_are_whole_and_shown(tmp_path: Path) -> None:
    tokens = [*BYTE_OF_CHARACTER, "<think>", "two words", "ab"]
    types = [NORMAL] * 256 + [USER_DEFINED] * 2 + [NORMAL]
    tokenizer = Tokenizer.load(
        write_gguf(tmp_path / "m.gguf", tokens, types, model="gpt2", pre="gpt-2", merges=["a b"])
    )
    assert tokenizer.encode("<think>two words") == [256, 257]
    assert tokenizer.decode([256, 257]) == "<think>two words"


def spm_reference(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's BPE as its definition reads: merge the best-scored pair, again and again."""
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    result = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return result


def spm_vocabulary(seed: int) -> tuple[list[str], list[int], list[float]]:
    """Control tokens, byte tokens, characters, and random words of them, each with a score of its own."""
    randomness = random.Random(seed)
    words = {"".join(randomness.choices("abc▁", k=randomness.randint(2, 5))) for _ in range(80)}
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    normal = [*sorted(words), *"abc▁"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(normal)
    scores = [0.0] * len(head) + [-float(rank) for rank in randomness.sample(range(1000), len(normal))]
    return head + normal, types, scores


def write_spm(file: Path, seed: int, **fields: Any) -> Path:
    tokens, types, scores = spm_vocabulary(seed)
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return write_gguf(file, tokens, types, model="llama", scores=scores, **ids, **fields)


@pytest.mark.parametrize("seed", range(5))
def test_sentencepiece_merges_by_score(tmp_path: Path, seed: int) -> None:
    tokenizer = Tokenizer.load(write_spm(tmp_path / "m.gguf", seed, add_space_prefix=False))
    tokens, _, scores = spm_vocabulary(seed)
    ids = {token: i for i, token in enumerate(tokens)}
    randomness = random.Random(seed)
    for _ in range(200):
        text = "".join(randomness.choices("abc é", weights=[4, 4, 4, 2, 1], k=randomness.randint(1, 30)))
        assert tokenizer.encode(text, add_special_tokens=False) == spm_reference(text, ids, scores)


def test_sentencepiece_puts_a_space_and_bos_in_front_by_default(tmp_path: Path) -> None:
    text = "a b  c é"
    tokenizer = Tokenizer.load(write_spm(tmp_path / "m.gguf", 0))
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert b"".join(map(tokenizer.token_bytes, ids[1:])) == b" " + text.encode()
    assert tokenizer.decode(ids) == text
    bare = Tokenizer.load(write_spm(tmp_path / "n.gguf", 0, add_space_prefix=False, add_bos_token=False))
    assert b"".join(map(bare.token_bytes, bare.encode(text))) == text.encode()
    assert bare.decode(bare.encode(f" {text}")) == f" {text}"


def test_sentencepiece_text_that_looks_like_a_byte_token_is_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_spm(tmp_path / "m.gguf", 0))
    assert tokenizer.decode(tokenizer.encode("<0x41> a")) == "<0x41> a"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "bert"}, "'bert'"),
        ({"model": "t5"}, "'t5'"),
        ({"merges": ["x yz"]}, "damaged"),
    ],
)
def test_what_cannot_be_built_says_why(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.load(write_byte_level(tmp_path / "m.gguf", **fields))


def test_a_vocabulary_that_names_a_token_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="twice"):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", ["a", "a"], model="gpt2", pre="gpt-2", merges=["a a"]))


def test_a_file_cut_anywhere_in_its_metadata_is_refused(tmp_path: Path) -> None:
    whole = write_byte_level(tmp_path / "m.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    for length in [0, 1, 4, 8, 20, 30, len(whole) // 3, len(whole) // 2, len(whole) - 9]:
        file.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            Tokenizer.load(file)
    file.write_bytes(b"PK" + whole)
    with pytest.raises(ModelLoadError, match="GGUF"):
        Tokenizer.load(file)
