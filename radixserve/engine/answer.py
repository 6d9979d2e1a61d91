"""Answers put together from the deltas of a stream."""

from dataclasses import dataclass, field

from radixserve.protocol import BeamMemory, BeamScore, Delta, FinishReason, TokenLogprobs


@dataclass(slots=True)
class Answer:
    """One of a request's answers. finish_reason is None while it grows; logprobs is empty unless asked for.

    prompt_logprobs: of a request's first answer, if they were asked for: one entry a prompt token, None for the first.
    beam: what it is worth, if it comes from a beam search.
    """

    index: int
    text_pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    beam: BeamScore | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.text_pieces)

    def add(self, delta: Delta) -> None:
        """Take in the next delta of this answer."""
        self.text_pieces.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.beam = delta.beam


@dataclass(slots=True)
class GenerationResult:
    """All answers to one prompt, in the order of their index.

    num_cached_tokens: prompt tokens whose K/V were read from the cache. beam_memory: the blocks of a beam search.
    """

    prompt_token_ids: list[int]
    answers: list[Answer]
    num_cached_tokens: int = 0
    beam_memory: BeamMemory | None = None

    @classmethod
    def empty(cls, prompt_token_ids: list[int], num_answers: int) -> "GenerationResult":
        """Return the result of a request that has no tokens yet."""
        return cls(prompt_token_ids, [Answer(index) for index in range(num_answers)])

    def add(self, delta: Delta) -> None:
        """Take in the next delta of the request."""
        self.answers[delta.index].add(delta)
        self.num_cached_tokens = delta.num_cached_tokens
        self.beam_memory = delta.beam_memory

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry a prompt token, None for the first; None if they were not asked for, or have not come yet."""
        return self.answers[0].prompt_logprobs

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens of all answers together."""
        return sum(len(answer.token_ids) for answer in self.answers)
