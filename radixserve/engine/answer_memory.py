"""Remembers as which ids answers were generated, for when their text comes back in a conversation."""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from radixserve.engine.answer import Answer
from radixserve.protocol import Delta
from radixserve.tokenizer.answer_turns import AnswerLookup
from radixserve.tokenizer.tokenizer import Tokenizer

MAX_NAMESPACES = 64
MAX_ANSWERS = 4096
MAX_BYTES = 4 * 2**20

# What an entry costs beside its text and ids: two objects and their places in a dict, about.
_ENTRY_BYTES = 256


class AnswerMemory:
    """Maps the text of an answer to its generated ids, for each namespace apart. Safe to use from several threads.

    The least recently used goes first: of a namespace's answers beyond max_answers or max_bytes, and of the namespaces
    beyond max_namespaces. Of two answers with one text the later counts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_namespaces: int = MAX_NAMESPACES,
        max_answers: int = MAX_ANSWERS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_namespaces = max_namespaces
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._namespaces: OrderedDict[bytes, _Answers] = OrderedDict()
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """About how much memory all answers take."""
        with self._lock:
            return sum(answers.num_bytes for answers in self._namespaces.values())

    def remember(self, namespace: bytes, prompt_token_ids: Sequence[int], answer: Answer) -> None:
        """Remember an answer to this prompt, unless its text is not that of its ids, or one is a control token.

        What follows the text, an end token or the tokens of a stop string, is left out. One that is over max_bytes by
        itself is not remembered, and takes no other's place.
        """
        token_ids = self._token_ids_of_text(prompt_token_ids, answer)
        if token_ids is None or _num_bytes(answer.text, token_ids) > self._max_bytes:
            return
        with self._lock:
            answers = self._namespaces.setdefault(namespace, _Answers())
            self._namespaces.move_to_end(namespace)
            answers.put(answer.text, token_ids)
            answers.shrink(self._max_answers, self._max_bytes)
            while len(self._namespaces) > self._max_namespaces:
                self._namespaces.popitem(last=False)

    def lookup(self, namespace: bytes) -> AnswerLookup:
        """Return a function that finds the answers of this namespace."""

        def find(text: str) -> Sequence[int] | None:
            with self._lock:
                answers = self._namespaces.get(namespace)
                if answers is None:
                    return None
                self._namespaces.move_to_end(namespace)
                return answers.get(text)

        return find

    def _token_ids_of_text(self, prompt_token_ids: Sequence[int], answer: Answer) -> "array[int] | None":
        """Return the ids that make up an answer's text; None if none do."""
        text = answer.text
        stream = self._tokenizer.decode_stream(skip_special_tokens=False, prompt_token_ids=prompt_token_ids)
        shown: list[str] = []
        num_missing = len(text)
        token_ids = array("i")
        for token_id in answer.token_ids:
            if num_missing <= 0:
                break
            token_ids.append(token_id)
            shown.append(stream.push((token_id,)))
            num_missing -= len(shown[-1])
        is_exact = text != "" and "".join(shown) + stream.flush() == text
        return token_ids if is_exact and self._tokenizer.control_token_ids.isdisjoint(token_ids) else None


class AnswerRecorder:
    """Puts the answers to one prompt into a memory as they finish."""

    def __init__(self, memory: AnswerMemory, namespace: bytes, prompt_token_ids: Sequence[int]) -> None:
        self._memory = memory
        self._namespace = namespace
        self._prompt_token_ids = prompt_token_ids
        self._answers: dict[int, Answer] = {}

    def add(self, delta: Delta) -> None:
        """Take in the next delta of the request."""
        answer = self._answers.setdefault(delta.index, Answer(delta.index))
        answer.add(delta)
        if delta.finish_reason is not None:
            self._memory.remember(self._namespace, self._prompt_token_ids, answer)


class _Answers:
    """The answers of one namespace, the least recently used first."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._token_ids: OrderedDict[str, array[int]] = OrderedDict()

    def get(self, text: str) -> "array[int] | None":
        token_ids = self._token_ids.get(text)
        if token_ids is not None:
            self._token_ids.move_to_end(text)
        return token_ids

    def put(self, text: str, token_ids: "array[int]") -> None:
        known = self._token_ids.pop(text, None)
        if known is not None:
            self.num_bytes -= _num_bytes(text, known)
        self._token_ids[text] = token_ids
        self.num_bytes += _num_bytes(text, token_ids)

    def shrink(self, max_answers: int, max_bytes: int) -> None:
        while len(self._token_ids) > max_answers or self.num_bytes > max_bytes:
            text, token_ids = self._token_ids.popitem(last=False)
            self.num_bytes -= _num_bytes(text, token_ids)


def _num_bytes(text: str, token_ids: "array[int]") -> int:
    return sys.getsizeof(text) + token_ids.itemsize * len(token_ids) + _ENTRY_BYTES
