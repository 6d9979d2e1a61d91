"""English-like text of a wanted number of tokens, from a seed."""

import random
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice

# Words that byte-pair vocabularies hold whole, with a space before them, so that a piece of text is a token.
_OPENING_TEXT = """
The A In When This Each If After On For With Some Every Our Their That Most Many It We They Before While
As At By There Here Now Then"""
_WORD_TEXT = """
time people year way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information back
parent face level office door health person art war history party result change morning reason research girl moment
air teacher force education is was has had can may will would could should must makes takes gives keeps finds shows
tells asks works needs moves turns starts runs holds brings writes sits stands loses pays meets includes continues
sets learns changes leads understands watches follows stops creates speaks reads allows adds spends grows opens walks
wins offers remembers loves considers appears buys waits serves sends expects builds stays falls cuts reaches remains
good new first last long great little own other old big high different small large next early young important few
public same able the of to in for on with at from up about into over after and but or as if when than because where
so then how only also very often still never always quickly slowly near far here there"""
_OPENINGS = _OPENING_TEXT.split()
_WORDS = _WORD_TEXT.split()
_FILLER = " and"
_MAX_ROUNDS = 20

CountTokens = Callable[[str], Awaitable[int]]


def pieces(key: str) -> Iterator[str]:
    """Yield words with the space before them, and full stops, without end; the same for the same key."""
    random_source = random.Random(key)
    is_start = True
    while True:
        yield ("" if is_start else " ") + random_source.choice(_OPENINGS)
        is_start = False
        for _ in range(random_source.randint(5, 14)):
            yield " " + random_source.choice(_WORDS)
        yield "."


def approximate_text(key: str, num_tokens: int) -> str:
    """Return text of num_tokens pieces, by the rule that a word is one token, and so is a full stop.

    Exact for the vocabularies of the GPT, Llama 3, Qwen and SmolLM families.
    """
    return "".join(islice(pieces(key), num_tokens))


async def exact_text(key: str, num_tokens: int, count_tokens: CountTokens) -> str:
    """Return text that count_tokens counts as num_tokens tokens, or as close to it as words come.

    Starts from approximate_text, so that all servers get the same text where its rule holds.
    """
    too_few, too_many = 0, None
    num_pieces = num_tokens
    for _ in range(_MAX_ROUNDS):
        text = approximate_text(key, num_pieces)
        excess = await count_tokens(text) - num_tokens
        if excess == 0:
            return text
        if excess < 0:
            too_few = num_pieces
        else:
            too_many = num_pieces
        num_pieces = max(num_pieces - excess, too_few + 1)
        if too_many is not None:
            if too_many - too_few == 1:
                break
            num_pieces = min(num_pieces, too_many - 1)
    text = approximate_text(key, too_few)
    return text + _FILLER * (num_tokens - await count_tokens(text))
