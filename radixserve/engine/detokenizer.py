"""Text of one answer as its tokens arrive, and the stop strings that end it."""

from collections.abc import Sequence
from copy import copy
from typing import Self

from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Text of one growing answer.

    Text is held back only while it is half a character, or may be the beginning of a stop string. Of several stop
    strings the one that is complete first ends the answer, the longest if several end together; so what is found
    depends on the text alone, not on how tokens cut it or how many arrive at once.

    stopped_by: the stop string that ended the answer; after it there is no more text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.stopped_by: str | None = None
        self._stream = tokenizer.decode_stream(
            skip_special_tokens=params.skip_special_tokens, prompt_token_ids=prompt_token_ids
        )
        self._stops = [_StopString(string) for string in params.stop]
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""

    def fork(self) -> Self:
        """Return a detokenizer in the same state, for another answer that begins as this one."""
        other = copy(self)
        other._stream = self._stream.fork()
        other._stops = [copy(stop) for stop in self._stops]
        return other

    def push(self, token_ids: list[int], *, is_end_token: bool = False) -> str:
        """Return the text that these tokens make safe to send.

        is_end_token: the last of them is an end token or a stop token id; it ends the answer, and its own text is
        left out unless the caller wants stops in the output. What was held back is returned too.
        A stop string that is complete before min_tokens tokens is ordinary text.
        """
        if is_end_token and not self._includes_stop:
            token_ids = token_ids[:-1]
        if not self._stops:
            text = self._stream.push(token_ids)
        else:
            text = "".join([self._push_one(token_id) for token_id in token_ids])
        return text + self.flush() if is_end_token else text

    def flush(self) -> str:
        """Return the rest of the text: the answer ends here for another reason than a stop string."""
        if self.stopped_by is not None:
            return ""
        held, self._held = self._held, ""
        return held + self._stream.flush()

    def _push_one(self, token_id: int) -> str:
        if self.stopped_by is not None:
            return ""
        self._num_tokens += 1
        new_text = self._stream.push((token_id,))
        text = self._held + new_text
        for end in range(len(self._held) + 1, len(text) + 1):
            complete = [stop for stop in self._stops if stop.advance(text[end - 1])]
            if complete and self._num_tokens >= self._min_tokens:
                self.stopped_by = max((stop.string for stop in complete), key=len)
                self._held = ""
                return text[: end if self._includes_stop else end - len(self.stopped_by)]
        num_safe = len(text) - max(stop.num_matched for stop in self._stops)
        self._held = text[num_safe:]
        return text[:num_safe]


class _StopString:
    """How much of a stop string the text so far ends with.

    Constant amortised time a character. Source: Knuth, Morris, Pratt 1977.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        # _shorter[n - 1]: length of the longest proper beginning of the string that its first n characters end with.
        self._shorter = [0]
        for character in string[1:]:
            self._shorter.append(self._next(self._shorter[-1], character))

    def advance(self, character: str) -> bool:
        """Take the next character of the text; say whether it completes the string."""
        self.num_matched = self._next(self.num_matched, character)
        if self.num_matched < len(self.string):
            return False
        self.num_matched = self._shorter[-1]
        return True

    def _next(self, num_matched: int, character: str) -> int:
        while num_matched and self.string[num_matched] != character:
            num_matched = self._shorter[num_matched - 1]
        return num_matched + 1 if self.string[num_matched] == character else 0
