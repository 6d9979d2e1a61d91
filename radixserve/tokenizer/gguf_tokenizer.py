"""The tokenizer inside a GGUF file."""

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from radixserve.errors import ModelLoadError
from radixserve.gguf_header import read_gguf_header
from radixserve.tokenizer.backend import TokenizerSource, set_added_ends
from radixserve.tokenizer.pre_tokenizers import find_word_rules

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "▁"
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Files made before there was a key for the end of a turn name only the end of a document.
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"})


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The fields of the file's tokenizer. types: by id, as tokens. unk_token: what a model without bytes falls to."""

    tokens: list[str]
    types: list[int]
    fields: dict[str, Any]
    unk_token: str | None

    def of_type(self, *types: _TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def adds(self, end: str, *, default: bool) -> bool:
        """Whether encoding puts the bos or eos token around a text."""
        return bool(self.fields.get(f"add_{end}_token", default))


def read_gguf_tokenizer(path: Path) -> TokenizerSource:
    """Read the tokenizer of a GGUF file. Raises ModelLoadError if it is damaged or of a kind that is not supported."""
    metadata = read_gguf_header(path).metadata
    fields = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    tokens = fields.get("tokens") or []
    types = fields.get("token_type") or [int(_TokenType.NORMAL)] * len(tokens)
    if not tokens or len(set(tokens)) < len(tokens) or len(types) != len(tokens):
        raise ModelLoadError(
            f"{path} holds no tokenizer, or one that names a token twice or not every token's type; "
            "use the model's Hugging Face directory"
        )
    special_tokens = {
        name: tokens[token_id]
        for name, role in _ROLES.items()
        if (token_id := fields.get(f"{role}_token_id")) is not None and token_id < len(tokens)
    }
    vocabulary = _Vocabulary(tokens, types, fields, special_tokens.get("unk_token"))
    eos_token_ids = {fields[key] for key in _END_KEYS if fields.get(key, len(tokens)) < len(tokens)}
    eos_token_ids |= {
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token in _TURN_ENDS and kind == _TokenType.CONTROL
    }
    try:
        backend = _build(vocabulary, special_tokens)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    except Exception as error:  # the only type that the tokenizers library raises
        raise ModelLoadError(f"{path} is damaged: its tokenizer cannot be built: {error}") from error
    return TokenizerSource(
        backend=backend,
        special_tokens=special_tokens,
        bos_token_id=fields["bos_token_id"] if "bos_token" in special_tokens else None,
        eos_token_ids=frozenset(eos_token_ids),
        chat_templates=_chat_templates(metadata),
    )


def _build(vocabulary: _Vocabulary, special_tokens: dict[str, str]) -> tokenizers.Tokenizer:
    match vocabulary.fields.get("model"):
        case "gpt2":
            backend, adds_bos = _byte_level(vocabulary)
        case "llama":
            backend, adds_bos = _sentencepiece(vocabulary), True
        case kind:
            raise ModelLoadError(
                f"its tokenizer is of the kind {kind!r}; gpt2 (byte-level) and llama (SentencePiece) are supported; "
                "use the model's Hugging Face directory"
            )
    special = [*vocabulary.of_type(_TokenType.CONTROL, _TokenType.UNKNOWN), *special_tokens.values()]
    backend.add_special_tokens([_added(token, special=True) for token in dict.fromkeys(special)])
    backend.add_tokens([_added(token, special=False) for token in vocabulary.of_type(_TokenType.USER_DEFINED)])
    set_added_ends(
        backend,
        special_tokens.get("bos_token") if vocabulary.adds("bos", default=adds_bos) else None,
        special_tokens.get("eos_token") if vocabulary.adds("eos", default=False) else None,
    )
    return backend


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Return byte-level BPE, and whether models of its family begin a text with bos."""
    rules = find_word_rules(vocabulary.fields.get("pre"))
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.fields["merges"])]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=_ids(vocabulary.tokens), merges=merges, ignore_merges=rules.ignore_merges)
    )
    rules.apply_to(backend)
    backend.decoder = decoders.ByteLevel()
    return backend, rules.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Return SentencePiece's BPE: of all pairs of neighbours, the one that makes the best-scored token merges first."""
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=_ids(vocabulary.tokens),
            merges=_merges_by_score(vocabulary),
            unk_token=vocabulary.unk_token,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = bool(vocabulary.fields.get("add_space_prefix", True))
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if adds_space else []), normalizers.Replace(" ", _SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if adds_space else []),
        ]
    )
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    ids = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == _TokenType.NORMAL
    }
    merges = []
    for token, token_id in ids.items():
        score = -vocabulary.fields["scores"][token_id]
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in ids and right in ids:
                merges.append((score, ids[left], ids[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _added(token: str, *, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token, special=special, normalized=False)


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    templates = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")
    }
    return {name: text for name, text in templates.items() if isinstance(text, str)}
