"""A tiny random model with a byte tokenizer, on disk, for tests that need a real engine process."""

from pathlib import Path

from tests.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from tests.tiny_models import save_tiny_model


def write_tiny_engine(directory: Path) -> Path:
    """Write a random Llama of a few thousand weights that speaks bytes, and return its directory."""
    settings = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    save_tiny_model(directory, eos_token_id=256, **settings)
    return write_byte_tokenizer(directory)
