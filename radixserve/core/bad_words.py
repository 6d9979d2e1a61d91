"""Words that an answer may not contain, as token ids."""

from array import array

# The spellings of all words, each the tokens that it is written with.
BadWords = tuple[tuple[int, ...], ...]


def banned_token_ids(bad_words: BadWords, token_ids: "array[int]", num_prompt_tokens: int) -> tuple[int, ...]:
    """Return the tokens that would complete a bad word in the answer, which begins behind the prompt's tokens."""
    longest = max(map(len, bad_words), default=1)
    tail = tuple(token_ids[max(num_prompt_tokens, len(token_ids) - longest + 1) :])
    return tuple(
        word[-1] for word in bad_words if len(word) <= len(tail) + 1 and tail[len(tail) + 1 - len(word) :] == word[:-1]
    )
