"""Token ids to bytes and text, all at once or one by one.

Both byte-level BPE and SentencePiece vocabularies name bytes, so an answer's text is the UTF-8 reading of its tokens'
bytes put together, each malformed stretch shown as U+FFFD. Read that way, text that arrives token by token is exactly
the text of all tokens at once, at a constant cost a token.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import islice
from typing import Any

import msgspec
import tokenizers

from radixserve.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# An unfinished UTF-8 character has at most three bytes, so at most three tokens that show any text.
_UNFINISHED_TOKENS = 3


class TokenText:
    """The bytes that each token of a vocabulary stands for. special_ids: those that are no part of a text.

    Raises ModelLoadError if the tokenizer's decoder is neither byte-level nor SentencePiece-like.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {
            token_id: token.content.encode() for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._is_byte_level = False
        self._has_byte_tokens = False
        self._replacements: list[tuple[str, str]] = []
        self._strips_first_space = False
        self._read_decoder(_decoder_steps(backend))
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token on its own; none for an id that names no token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_token(token_id)
        return known

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token_ids."""
        stream = self.stream((), skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> "DecodeStream":
        """Return a decoder of the tokens that follow prompt_token_ids."""
        return DecodeStream(self, prompt_token_ids, self.special_ids if skip_special_tokens else frozenset())

    @property
    def special_texts(self) -> frozenset[str]:
        """The texts of special tokens."""
        return frozenset(self._added[token_id].decode() for token_id in self.special_ids)

    @property
    def strips_first_space(self) -> bool:
        """Whether one space at the very beginning of a text is not shown, as SentencePiece put it there."""
        return self._strips_first_space

    def _read_token(self, token_id: int) -> bytes:
        if token_id in self.special_ids:
            return self._added[token_id]
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._is_byte_level:
            # A user-defined token is written as plain text, and so is a piece outside the byte alphabet.
            if token_id in self._added or not all(character in BYTE_OF_CHARACTER for character in token):
                return token.encode()
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()

    def _read_decoder(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    self._is_byte_level = True
                case {"type": "ByteFallback"}:
                    self._has_byte_tokens = True
                case {"type": "Fuse"}:
                    pass  # putting tokens together is all that decoding does here
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    self._replacements.append((old, new))
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                    self._strips_first_space = True
                case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}:
                    self._replacements.append((mark, " "))
                    self._strips_first_space = scheme != "never"
                case _:
                    raise ModelLoadError(
                        f"the tokenizer decodes with {step}, which is not supported; "
                        "byte-level and SentencePiece tokenizers are"
                    )


class DecodeStream:
    """Text of tokens as they arrive: only whole characters, and never one that later tokens change."""

    def __init__(self, text: TokenText, prompt_token_ids: Sequence[int], skipped_ids: frozenset[int]) -> None:
        self._text = text
        self._skipped_ids = skipped_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        shown = (text.token_bytes(token_id) for token_id in reversed(prompt_token_ids) if token_id not in skipped_ids)
        tail = list(islice(filter(None, shown), _UNFINISHED_TOKENS))
        self._is_at_start = text.strips_first_space and not tail
        # A prompt of token ids may end inside a character, which the answer then completes.
        self._utf8.decode(b"".join(reversed(tail)))

    def fork(self) -> "DecodeStream":
        """Return a decoder in the same state, for other tokens that follow the same ones."""
        other = copy(self)
        other._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        other._utf8.setstate(self._utf8.getstate())
        return other

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the characters that these tokens complete."""
        joined = b"".join(
            self._text.token_bytes(token_id) for token_id in token_ids if token_id not in self._skipped_ids
        )
        if self._is_at_start and joined:
            self._is_at_start = False
            joined = joined.removeprefix(b" ")
        return self._utf8.decode(joined)

    def flush(self) -> str:
        """Return what an unfinished character at the end shows as: U+FFFD, or nothing if there is none."""
        return self._utf8.decode(b"", final=True)


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        raise ModelLoadError("the tokenizer names no decoder, so its tokens cannot be turned into text")
    spec: dict[str, Any] = msgspec.json.decode(backend.decoder.__getstate__())
    return spec["decoders"] if spec["type"] == "Sequence" else [spec]


def _byte_of_character() -> dict[str, int]:
    """Map each character of the byte alphabet to its byte.

    Printable bytes stand for themselves, the others for the characters from U+0100 on, in order.
    Source: Radford et al. 2019 (GPT-2), the published encoder.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
