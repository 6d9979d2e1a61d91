"""Small tokenizers of each family, made on the spot."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models

from radixserve.tokenizer.token_text import BYTE_OF_CHARACTER
from radixserve.tokenizer.tokenizer import Tokenizer


def write_tokenizer(directory: Path, backend: tokenizers.Tokenizer, **config: object) -> Path:
    """Write a model directory's tokenizer files and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    return directory


@dataclass(frozen=True)
class WordPieces:
    """A tokenizer with tokens of the test's own choosing."""

    tokenizer: Tokenizer
    id_of_piece: dict[str, int]

    def ids(self, *pieces: str) -> list[int]:
        return [self.id_of_piece[piece] for piece in pieces]


def write_word_pieces(directory: Path, pieces: list[str]) -> WordPieces:
    """Write and load a byte-level tokenizer of all bytes and these pieces."""
    vocabulary = dict(BYTE_OF_CHARACTER)
    for piece in pieces:
        vocabulary.setdefault(piece, len(vocabulary))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return WordPieces(Tokenizer.load(write_tokenizer(directory, backend)), vocabulary)
