"""Grammars of requests as constraints on tokens, by llguidance.

Both processes use it: the API to refuse a bad grammar before anything runs, the engine to follow a good one. Source:
llguidance computes which tokens keep the text inside the grammar with an Earley parser over a lexer of regular
expressions whose derivatives it explores along the vocabulary's prefix tree.
"""

from collections.abc import Collection
from functools import cached_property, lru_cache
from typing import Self

import llguidance

from radixserve.errors import InvalidRequest
from radixserve.grammar import JSON_STYLE, Grammar
from radixserve.tokenizer.tokenizer import Tokenizer

MAX_GRAMMAR_LENGTH = 2**17
MAX_MESSAGE_LENGTH = 500
_NUM_CACHED_GRAMMARS = 64
# llguidance names a state of its own where a grammar fits no text: a rule or reference that only leads to itself, say.
_NO_TEXT = "NoExtensionBias"

# All this runs on the engine's thread, between two steps: within these limits the worst grammars found take 0.1 s to
# compile and 0.07 s a token, usual ones 1 ms and 0.2 ms. A thousand optional properties of one object still fit.
_LIMITS = llguidance.LLParserLimits(
    max_grammar_size=10_000,
    max_items_in_row=10_000,
    max_lexer_states=50_000,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=20_000,
    step_max_items=10_000,
    verbose_errors=False,
)


class GrammarConstraint:
    """Implements TokenConstraint with a matcher that stands behind one sequence's last token."""

    def __init__(self, matcher: llguidance.LLMatcher, allowed: bytes, only_end: bytes) -> None:
        self._matcher = matcher
        self._allowed = allowed
        self._only_end = only_end

    @property
    def is_complete(self) -> bool:
        """See TokenConstraint."""
        return self._allowed == self._only_end

    def allowed_tokens(self) -> bytes:
        """See TokenConstraint."""
        return self._allowed

    def accept(self, token_id: int) -> None:
        """See TokenConstraint. Raises InvalidRequest, param grammar, mostly for one that grows too complex here."""
        self._matcher.consume_token(token_id)
        # Now rather than when it is asked for: whoever schedules the next step cannot deal with an error.
        self._allowed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            reason = _shortened(self._matcher.get_error())
            raise InvalidRequest(f"the answer cannot go on within the grammar: {reason}", param="grammar")

    def fork(self) -> Self:
        """See TokenConstraint."""
        return type(self)(self._matcher.deep_copy(), self._allowed, self._only_end)


class GrammarCompiler:
    """Makes constraints of grammars for one vocabulary. Safe to use from several threads.

    end_token_ids: each of them may follow where the text may end. The first use takes a fifth of a second for a
    vocabulary of 50,000 tokens; the grammars used last are kept compiled.
    """

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._end_token_ids = sorted(token_id for token_id in end_token_ids if token_id < tokenizer.vocab_size)
        self._compiled = lru_cache(maxsize=_NUM_CACHED_GRAMMARS)(self._compile)

    def compile(self, grammar: Grammar) -> GrammarConstraint:
        """Return the constraint of a text that is yet to begin.

        Raises InvalidRequest, param grammar, if it is not valid, holds something that is not supported, accepts no
        text, or only the empty one where there is no end token, or is too large.
        """
        return self._compiled(grammar).fork()

    def _compile(self, grammar: Grammar) -> GrammarConstraint:
        if len(grammar.source) > MAX_GRAMMAR_LENGTH:
            raise InvalidRequest(
                f"the {grammar.kind} has {len(grammar.source)} characters; it may have {MAX_GRAMMAR_LENGTH}",
                param="grammar",
            )
        try:
            source = _to_llguidance(grammar)
        except ValueError as error:
            raise _invalid(grammar, str(error)) from None
        matcher = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            allowed = matcher.compute_bitmask()
        if matcher.is_error():
            raise _invalid(grammar, matcher.get_error())
        if not self._end_token_ids and allowed == self._only_end:
            raise _invalid(grammar, "it accepts only the empty text, and the model has no token that ends one")
        return GrammarConstraint(matcher, allowed, self._only_end)

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        return _Vocabulary(self._tokenizer, self._end_token_ids).build()

    @cached_property
    def _only_end(self) -> bytes:
        nothing_more = llguidance.LLMatcher.grammar_from_regex("")
        return llguidance.LLMatcher(self._vocabulary, nothing_more, log_level=0).compute_bitmask()


class _Vocabulary:
    """A Tokenizer in the form that llguidance's wrapper asks for."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._built: llguidance.LLTokenizer | None = None
        self._special_token_ids = tokenizer.special_token_ids
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(self._special_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        if not end_token_ids:
            # llguidance needs one: an id that no model draws. A text that can only end there is complete.
            end_token_ids = [len(self.tokens)]
            self.tokens.append(b"")
            self.special_token_ids.append(end_token_ids[0])
        self._end_token_ids = end_token_ids
        self.eos_token_id = end_token_ids[0]

    def build(self) -> llguidance.LLTokenizer:
        self._built = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), eos_token=self._end_token_ids)
        return self._built

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text that the grammar forces: as the model knows it, without special tokens."""
        token_ids = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        spelled = b"".join([self.tokens[token_id] for token_id in token_ids])
        if spelled == text and self._special_token_ids.isdisjoint(token_ids):
            return token_ids
        # SentencePiece puts a space before a text, and a text may hold the string of a special token.
        return [] if self._built is None else self._built.greedy_tokenize(text.decode())


def _to_llguidance(grammar: Grammar) -> str:
    """Return a grammar in llguidance's own form. Raises ValueError if a JSON schema is not a JSON object."""
    match grammar.kind:
        case "json_schema":
            # A keyword that would be ignored is an error, whatever the schema says of that.
            return llguidance.LLMatcher.grammar_from_json_schema(
                grammar.source,
                defaults={
                    "whitespace_flexible": JSON_STYLE["whitespace_flexible"],
                    "item_separator": JSON_STYLE["item_separator"],
                    "key_separator": JSON_STYLE["key_separator"],
                },
                overrides={"lenient": False},
            )
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(grammar.source)


def _invalid(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the {grammar.kind} cannot be used: {_shortened(reason)}", param="grammar")


def _shortened(message: str) -> str:
    """Return the part of an error of llguidance that says what is wrong, without the state of its parser."""
    text = message.partition("\n<")[0].strip()
    if text == _NO_TEXT:
        return "no text fits it; look for a rule or a $ref that only leads to itself, or an empty class of characters"
    return text if len(text) <= MAX_MESSAGE_LENGTH else f"{text[:MAX_MESSAGE_LENGTH]}..."
