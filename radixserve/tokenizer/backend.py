"""What a tokenizer is made of, whichever files it was read from, and how its backend is set and called."""

from collections.abc import Callable
from dataclasses import dataclass, field

import tokenizers
from tokenizers.processors import TemplateProcessing

from radixserve.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The parts of a Tokenizer.

    special_tokens: strings that a chat template may read, by their names there: bos_token, eos_token and so on.
    eos_token_ids: every id that ends an answer.
    chat_templates: Jinja sources by name; "default", and sometimes "tool_use" for requests that bring tools.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    chat_templates: dict[str, str] = field(default_factory=dict)


def set_added_ends(backend: tokenizers.Tokenizer, bos_token: str | None, eos_token: str | None) -> None:
    """Make encoding begin with bos_token and end with eos_token, where given, and add nothing else."""
    ends = [token for token in (bos_token, eos_token) if token is not None]
    backend.post_processor = TemplateProcessing(
        single=[token for token in (bos_token, "$A", eos_token) if token is not None],
        special_tokens=[(token, backend.token_to_id(token)) for token in ends],
    )


def encode_texts(backend: tokenizers.Tokenizer, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Return the ids of each text. Raises InvalidRequest for a text that is not Unicode.

    Encoding one text on its own would hold the GIL; a batch, of one too, does not.
    """
    return [encoding.ids for encoding in _encodings(backend.encode_batch_fast, texts, add_special_tokens)]


def encode_with_offsets(backend: tokenizers.Tokenizer, texts: list[str]) -> list[tokenizers.Encoding]:
    """Return the encodings of texts, which know what each token is of, without special tokens around them.

    Raises InvalidRequest for a text that is not Unicode.
    """
    return _encodings(backend.encode_batch, texts, add_special_tokens=False)


def _encodings(
    encode: Callable[..., list[tokenizers.Encoding]], texts: list[str], add_special_tokens: bool
) -> list[tokenizers.Encoding]:
    try:
        return encode(texts, add_special_tokens=add_special_tokens)
    except TypeError as error:
        raise InvalidRequest("the text holds half of a surrogate pair, which is no character") from error
