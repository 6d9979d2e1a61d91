"""The files beside tokenizer.json."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from radixserve.errors import ModelLoadError
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.builders import byte_level_backend, llama3_backend, write_tokenizer

USER = [{"role": "user", "content": "hi"}]


def write_json(file: Path, value: Any) -> None:
    file.write_bytes(msgspec.json.encode(value))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    [result] = tokenizer.encode(token, add_special_tokens=False)
    return result


def test_every_file_may_name_ends(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, llama3_backend(), bos_token="<|begin_of_text|>", eos_token={"content": "<|eot_id|>"})
    write_json(tmp_path / "config.json", {"eos_token_id": 7})
    tokenizer = Tokenizer.load(tmp_path)
    eot, end = token_id(tokenizer, "<|eot_id|>"), token_id(tokenizer, "<|end_of_text|>")
    assert tokenizer.bos_token_id == token_id(tokenizer, "<|begin_of_text|>")
    assert tokenizer.eos_token_ids == {eot, 7}
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [end, eot]})
    assert Tokenizer.load(tmp_path).eos_token_ids == {eot, end}
    write_json(tmp_path / "generation_config.json", {"eos_token_id": end})
    assert Tokenizer.load(tmp_path).eos_token_ids == {eot, end}


def test_special_tokens_map_fills_what_the_config_leaves_out(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, llama3_backend())
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "<|eot_id|>"})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == {token_id(tokenizer, "<|eot_id|>")}
    assert tokenizer.bos_token_id is None


def test_text_is_encoded_as_tokenizer_json_says_unless_the_config_decides(tmp_path: Path) -> None:
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}

    def ends(**config: Any) -> tuple[bool, bool]:
        tokenizer = Tokenizer.load(write_tokenizer(tmp_path, llama3_backend(), **names, **config))
        ids = tokenizer.encode("hi")
        assert tokenizer.decode(ids) == "hi"
        return ids[0] == tokenizer.bos_token_id, ids[-1] in tokenizer.eos_token_ids

    assert ends() == (True, False)
    assert ends(add_bos_token=True) == (True, False)
    assert ends(add_bos_token=False) == (False, False)
    assert ends(add_eos_token=True, add_bos_token=True) == (True, True)


def test_padding_and_truncation_of_training_are_off(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("a long text")) == "a long text"
    assert len(tokenizer.encode("a")) == 1


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    backend = byte_level_backend()
    new = backend.get_vocab_size()
    entry = {"content": "<|new|>", "special": True, "lstrip": False, "__type": "AddedToken"}
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend, added_tokens_decoder={str(new): entry}))
    assert tokenizer.encode("a<|new|>")[-1] == new
    assert tokenizer.vocab_size == new + 1
    assert tokenizer.decode([new]) == ""
    write_tokenizer(tmp_path, backend, added_tokens_decoder={str(new + 3): entry})
    with pytest.raises(ModelLoadError, match="different models"):
        Tokenizer.load(tmp_path)


def test_a_token_with_a_role_is_special(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<|stop|>"])
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend, eos_token="<|stop|>"))
    assert tokenizer.decode([*tokenizer.eos_token_ids]) == ""


def test_templates_come_from_the_file_beside_then_the_config(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level_backend(), chat_template=named))
    assert tokenizer.decode(tokenizer.encode_chat(USER)) == "plain"
    assert tokenizer.decode(tokenizer.encode_chat(USER, tools=[{"type": "function"}])) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(USER, tools=[{"type": "function"}])) == "file"


def test_a_directory_without_tokenizer_json_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("config", [{"chat_template": 1}, {"eos_token": 2}, {"added_tokens_decoder": {"x": {}}}])
def test_a_field_of_the_wrong_type_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=next(iter(config))):
        Tokenizer.load(write_tokenizer(tmp_path, byte_level_backend(), **config))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    write_tokenizer(tmp_path, byte_level_backend())
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.load(tmp_path)
