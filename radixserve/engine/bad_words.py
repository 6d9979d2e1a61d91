"""Bad words as the tokens that a model writes them with."""

from collections.abc import Iterable

from radixserve.core.bad_words import BadWords
from radixserve.tokenizer.tokenizer import Tokenizer


def encode_bad_words(words: Iterable[str], tokenizer: Tokenizer) -> BadWords:
    """Return the spellings of words, at the beginning of a text and behind a space.

    The second counts where the space becomes part of the first token. Where it is a token of its own, banning the
    word behind it would ban only what the first spelling bans already.
    Source: the meaning of vLLM's bad_words.
    """
    spellings: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if plain:
            spellings.append(plain)
        if plain and spaced[0] != plain[0] and len(spaced) == len(plain):
            spellings.append(spaced)
    return tuple(dict.fromkeys(spellings))
