"""An engine put together from its settings."""

from pathlib import Path

import pytest

from radixserve.config import EngineConfig
from radixserve.engine.start import start_engine
from radixserve.errors import ConfigError
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
