"""A K/V cache that remembers what it was told of ended answers."""

from typing import NamedTuple

from radixserve.core.eviction.answer import Answer
from radixserve.core.kv_cache import KVCache
from radixserve.core.sequence import Sequence


class Told(NamedTuple):
    """An answer that ended, and whose it is."""

    request_id: str
    choice_index: int
    answer: Answer


def recording_cache() -> tuple[type[KVCache], list[Told]]:
    """Return a kind of cache, and the list of all that caches of this kind are told of answers."""
    told: list[Told] = []

    class RecordingCache(KVCache):
        def record_answer(self, sequence: Sequence, answer: Answer) -> None:
            told.append(Told(sequence.request.request_id, sequence.choice_index, answer))
            super().record_answer(sequence, answer)

    return RecordingCache, told
