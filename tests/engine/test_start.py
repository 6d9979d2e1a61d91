"""An engine put together from its settings."""

from array import array
from pathlib import Path

import pytest

from radixserve.config import EngineConfig
from radixserve.engine import start
from radixserve.engine.start import start_engine
from radixserve.errors import ConfigError
from radixserve.tiers.disk_store import DiskStore
from tests.byte_tokenizer import write_byte_tokenizer
from tests.tiny_engine import write_tiny_engine


def test_a_broken_chat_template_of_the_model_can_be_replaced(tmp_path: Path) -> None:
    model = write_byte_tokenizer(write_tiny_engine(tmp_path / "model"), chat_template="{% for %}")
    template = tmp_path / "good.jinja"
    template.write_text("{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="chat template"):
        start_engine(EngineConfig(model=str(model), num_kv_blocks=16), show_progress=False)
    config = EngineConfig(model=str(model), num_kv_blocks=16, chat_template=str(template))
    assert start_engine(config, show_progress=False).ready.num_blocks == 16


def test_public_prefixes_that_no_prompt_can_begin_with_are_told(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_tiny_engine(tmp_path)), num_kv_blocks=4)
    prefixes = [array("i", range(16 * num_blocks)) for num_blocks in (3, 4, 5)]
    ready = start_engine(config, public_prefixes=prefixes, show_progress=False).ready
    assert "2 public prefixes leave no room in max_model_len, so no prompt begins with them" in ready.notices


@pytest.mark.parametrize("obstacle", ["a file", "open to all", "in use"])
def test_a_directory_that_cannot_be_used_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(start, "start_executor", load)
    directory, store = tmp_path / "cache", None
    if obstacle == "a file":
        directory.touch()
    elif obstacle == "open to all":
        directory.mkdir()
        directory.chmod(0o777)
    else:
        store = DiskStore(directory, 64, 1 << 20, bytes(32))
    config = EngineConfig(model=str(write_tiny_engine(tmp_path / "model")), kv_cache_dir=str(directory))
    with pytest.raises(ConfigError, match=str(directory)):
        start_engine(config, show_progress=False)
    if store is not None:
        store.close(30)
        with pytest.raises(AssertionError):
            start_engine(config, show_progress=False)
