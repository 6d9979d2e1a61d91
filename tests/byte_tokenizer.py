"""A tokenizer whose ids are bytes, for tests that need no model: id b is byte b, then a few special tokens."""

from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from radixserve.tokenizer.token_text import BYTE_OF_CHARACTER
from radixserve.tokenizer.tokenizer import Tokenizer

END = 256
START = 257
PAD = 258
SPECIAL_TOKENS = {"<|end|>": END, "<|start|>": START, "<|pad|>": PAD}
VOCAB_SIZE = 259
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content or '' }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_byte_tokenizer(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write tokenizer.json and tokenizer_config.json into directory and return it. <|end|> is the end token.

    Encoding adds nothing around a text. chat_template None leaves it out.
    """
    backend = tokenizers.Tokenizer(models.BPE(vocab=BYTE_OF_CHARACTER, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    return directory


def load_byte_tokenizer(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """Write the byte tokenizer into directory and load it."""
    return Tokenizer.load(write_byte_tokenizer(directory, chat_template=chat_template))
