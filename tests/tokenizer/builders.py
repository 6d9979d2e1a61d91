"""Small tokenizers of each family, made on the spot."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

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


CORPUS = [
    "The capital of France is Paris. What is the capital of Germany? It is Berlin, they say.",
    "def f(x):\n    return x  # 1\n\n    indented code, and 12 345 numbers",
    "user assistant system tool You are a helpful assistant. naïve café 😀 你好世界",
    '{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Paris"}}}',
    "a < b > c </d> <unk> <s>",
]
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_backend(pre_tokenizer: pre_tokenizers.PreTokenizer | None = None) -> tokenizers.Tokenizer:
    """Byte-level BPE, trained on the corpus; words are GPT-2's unless a splitter is given."""
    backend = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre_tokenizer is None)
    backend.pre_tokenizer = (
        byte_level if pre_tokenizer is None else pre_tokenizers.Sequence([pre_tokenizer, byte_level])
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def llama3_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE with Llama 3's words, special tokens and bos in front."""
    backend = byte_level_backend(pre_tokenizers.Split(tokenizers.Regex(LLAMA3_WORDS), behavior="isolated"))
    backend.add_special_tokens(
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        special_tokens=[("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))],
    )
    return backend


def sentencepiece_backend(*, prepends_per_segment: bool) -> tokenizers.Tokenizer:
    """BPE with byte fallback and ▁ for spaces.

    prepends_per_segment: a space goes before the text after each special token, as in Llama 2; else only before the
    first, as in later files.
    """
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)]
    )
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([text.replace("😀", "").replace("你", "") for text in CORPUS], trainer)
    spec = msgspec.json.decode(trained.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]
    spec["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    backend = tokenizers.Tokenizer.from_str(msgspec.json.encode(spec).decode())
    if prepends_per_segment:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def unigram_backend() -> tokenizers.Tokenizer:
    """Unigram with a Metaspace decoder, its special tokens in the model's own vocabulary."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>"
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend
