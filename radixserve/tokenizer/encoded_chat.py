"""A rendered conversation as token ids, and how many of these end before a place in its text."""

import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

import tokenizers

from radixserve.tokenizer.answer_turns import Piece
from radixserve.tokenizer.backend import encode_texts, encode_with_offsets


class EncodedChat(NamedTuple):
    """end_positions: for each place that was asked for, the number of leading tokens that end there or before."""

    token_ids: list[int]
    end_positions: list[int]


def encode_pieces(backend: tokenizers.Tokenizer, pieces: Sequence[Piece]) -> EncodedChat:
    """Return the ids of a conversation in pieces, and no positions."""
    encoded = iter(encode_texts(backend, _texts_to_encode(pieces), add_special_tokens=False))
    ids_of_pieces = [next(encoded) if ids is None else ids for _, ids in pieces]
    return EncodedChat([token_id for ids in ids_of_pieces for token_id in ids], [])


def encode_and_locate(backend: tokenizers.Tokenizer, pieces: Sequence[Piece], befores: Sequence[str]) -> EncodedChat:
    """Return the ids of a conversation in pieces, and for each text of befores how many of the ids end with it.

    befores: what stands before a place in the conversation. The template may have written something else there than in
    the conversation itself, as it can look at a whole message; only what both begin with counts.
    A token that reaches over a place is not counted: behind the same text something else may come another time.
    """
    encoded = iter(encode_with_offsets(backend, _texts_to_encode(pieces)))
    encodings = [next(encoded) if ids is None else None for _, ids in pieces]
    located = [
        _LocatedPiece(text, ids or (), None) if encoding is None else _LocatedPiece(text, encoding.ids, encoding)
        for (text, ids), encoding in zip(pieces, encodings, strict=True)
    ]
    text = "".join(piece.text for piece in pieces)
    starts = list(accumulate((len(piece.text) for piece in located), initial=0))
    num_before = list(accumulate((len(piece.token_ids) for piece in located), initial=0))
    positions: list[int] = []
    for before in befores:
        border = _num_common_characters(text, before)
        # The first piece that does not end before the border.
        index = bisect_left(starts, border, lo=1) - 1
        positions.append(num_before[index] + _num_tokens_until(backend, located[index], border - starts[index]))
    return EncodedChat([token_id for piece in located for token_id in piece.token_ids], positions)


class _LocatedPiece(NamedTuple):
    """A piece with its ids, and its encoding unless the ids were given."""

    text: str
    token_ids: Sequence[int]
    encoding: tokenizers.Encoding | None


def _texts_to_encode(pieces: Sequence[Piece]) -> list[str]:
    return [piece.text for piece in pieces if piece.token_ids is None]


def _num_tokens_until(backend: tokenizers.Tokenizer, piece: _LocatedPiece, border: int) -> int:
    """Return how many of a piece's tokens end at its character `border` or before."""
    if border == len(piece.text):
        return len(piece.token_ids)
    if piece.encoding is None:
        # An answer that is marked in its midst. Whatever tokens it shares with its beginning encoded end there.
        [begun] = encode_texts(backend, [piece.text[:border]], add_special_tokens=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(begun, piece.token_ids, strict=False)))
    border = _without_composition(piece.text, border)
    # Of several tokens that make up a character the first is told. A character may have none, so that the next tells.
    first_behind = map(piece.encoding.char_to_token, range(border, len(piece.text)))
    return next((token for token in first_behind if token is not None), len(piece.token_ids))


def _without_composition(text: str, border: int) -> int:
    """Return the last border up to this one over which a normalizer composes no character, such as e and an accent."""
    while 0 < border < len(text):
        left, right = text[border - 1], text[border]
        composed = unicodedata.normalize("NFKC", left + right)
        parts = unicodedata.normalize("NFKC", left) + unicodedata.normalize("NFKC", right)
        if composed == parts and not unicodedata.combining(right):
            break
        border -= 1
    return border


def _num_common_characters(text: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    if text.startswith(other):
        return len(other)
    shorter = min(len(text), len(other))
    return bisect_left(range(shorter), True, key=lambda index: text[: index + 1] != other[: index + 1])
