"""Log-probabilities in the shapes of chat and of completions."""

from collections.abc import Sequence

from radixserve.api.echo import Echo
from radixserve.api.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from radixserve.protocol import TokenLogprobs
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer

# JSON has no -Infinity; this is the number that OpenAI sends for a token that cannot come.
_LEAST_LOGPROB = -9999.0


def chat_logprobs(entries: list[TokenLogprobs], tokenizer: Tokenizer) -> ChatLogprobs:
    """Return tokens' log-probabilities as chat answers carry them."""
    return ChatLogprobs([_token_logprob(entry, tokenizer) for entry in entries])


def _token_logprob(entry: TokenLogprobs, tokenizer: Tokenizer) -> TokenLogprob:
    return TokenLogprob(
        token=_token_text(entry.token_id, tokenizer),
        logprob=_finite(entry.logprob),
        bytes=list(tokenizer.token_bytes(entry.token_id)),
        top_logprobs=[
            TopLogprob(_token_text(token_id, tokenizer), _finite(logprob), list(tokenizer.token_bytes(token_id)))
            for token_id, logprob in entry.top
        ],
    )


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], count: int, tokenizer: Tokenizer) -> PromptLogprobs:
    """Return what the field prompt_logprobs asks for, with count alternatives a token."""
    return [None if entry is None else _by_token_id(entry, count, tokenizer) for entry in entries]


def _by_token_id(entry: TokenLogprobs, count: int, tokenizer: Tokenizer) -> dict[int, PromptLogprob]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:count], start=1)]
    return {
        token_id: PromptLogprob(_finite(logprob), rank, _token_text(token_id, tokenizer))
        for token_id, logprob, rank in ranked
    }


class CompletionLogprobsWriter:
    """Writes the log-probabilities of one completion, piece by piece, and keeps count of its characters."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._num_top_logprobs = params.logprobs or 0
        self._stream = tokenizer.decode_stream(skip_special_tokens=params.skip_special_tokens, prompt_token_ids=prompt)
        self._num_characters = 0

    def write_echo(self, echo: Echo, entries: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """Return the prompt's log-probabilities, for an answer that begins with its text; before the first write."""
        self._num_characters = len(echo.text)
        return CompletionLogprobs(
            tokens=[_token_text(token_id, self._tokenizer) for token_id in echo.token_ids],
            token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in entries],
            top_logprobs=(
                [None if entry is None else self._top_logprobs(entry) for entry in entries]
                if self._num_top_logprobs
                else None
            ),
            text_offset=echo.text_offsets,
        )

    def write(self, entries: list[TokenLogprobs]) -> CompletionLogprobs:
        """Return the next tokens' log-probabilities.

        text_offset counts the characters that the tokens before complete; with logprobs 0 there are no top_logprobs.
        """
        offsets = []
        for entry in entries:
            offsets.append(self._num_characters)
            self._num_characters += len(self._stream.push([entry.token_id]))
        return CompletionLogprobs(
            tokens=[_token_text(entry.token_id, self._tokenizer) for entry in entries],
            token_logprobs=[_finite(entry.logprob) for entry in entries],
            top_logprobs=[self._top_logprobs(entry) for entry in entries] if self._num_top_logprobs else None,
            text_offset=offsets,
        )

    def _top_logprobs(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return text to log-probability, best first; the token's own is there even if it is not among the best."""
        top: dict[str, float] = {}
        for token_id, logprob in [*entry.top[: self._num_top_logprobs], (entry.token_id, entry.logprob)]:
            # Of tokens that look alike, parts of characters above all, the most likely one is told.
            top.setdefault(_token_text(token_id, self._tokenizer), _finite(logprob))
        return top


def join(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Return the log-probabilities of one piece of a completion and the next."""
    has_top_logprobs = first.top_logprobs is not None and second.top_logprobs is not None
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=[*(first.top_logprobs or ()), *(second.top_logprobs or ())] if has_top_logprobs else None,
        text_offset=first.text_offset + second.text_offset,
    )


def _token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token's text on its own, with a replacement mark for what is no whole character."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
