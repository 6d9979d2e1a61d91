import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from radixserve.config import EvictionPolicy
from radixserve.core.eviction.answer import Answer
from radixserve.core.kv_cache import KVCache, Match
from radixserve.core.sequence import Sequence as CachedSequence
from radixserve.errors import ConfigError
from radixserve.replay import replay as replay_module
from radixserve.replay.optimum import look_ahead
from radixserve.replay.replay import POLICIES, replay
from radixserve.replay.report import measure
from radixserve.replay.trace import EndedAnswer, Trace
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import load_byte_tokenizer
from tests.engine.harness import Harness
from tests.replay.traces import random_prompts, trace_of
from tests.stub import counting


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_byte_tokenizer(Path(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [24, 40, 4000])
@pytest.mark.parametrize("num_batched_tokens", [8, 64])
def test_the_engine_and_the_replay_count_the_same_hits(
    tokenizer: Tokenizer, policy: EvictionPolicy, num_blocks: int, num_batched_tokens: int
) -> None:
    prompts = random_prompts(random.Random(num_blocks), count=150, max_length=20, num_ids=2)
    prompts += [prompts[i] for i in range(0, 150, 3)]
    # Each answer is a token long, and has ended before the next request comes.
    ended = [EndedAnswer(Answer(False, 1), number + 1) for number in range(len(prompts))]
    trace = with_answers(trace_of(prompts, tokens_per_id=1, namespaces=2), ended)
    harness = Harness(
        tokenizer,
        counting(tokenizer.vocab_size),
        num_blocks=num_blocks,
        block_size=1,
        eviction_policy=policy,
        max_model_len=22,
        max_num_batched_tokens=num_batched_tokens,
    )
    num_hits = [
        harness.ask(list(request.ids), namespace=request.namespace, max_tokens=1).num_cached_tokens
        for request in trace.requests
    ]
    assert replay(trace, num_blocks, policy) == num_hits
    assert harness.stats.cache.num_hit_tokens == sum(num_hits)
    assert (harness.stats.cache.num_evicted_tokens > 0) == (num_blocks < 4000)


def with_answers(trace: Trace, ended: Sequence[EndedAnswer | None]) -> Trace:
    requests = [request._replace(ended=answer) for request, answer in zip(trace.requests, ended, strict=True)]
    return replace(trace, requests=requests)


def test_the_last_token_of_a_prompt_is_no_hit_but_an_id_of_many_tokens_can_be() -> None:
    prompts = [[1, 2, 3], [1, 2, 3]]
    assert replay(trace_of(prompts, tokens_per_id=1), 8, "lru") == [0, 2]
    assert replay(trace_of(prompts, tokens_per_id=64), 8, "lru") == [0, 3]
    assert measure_hit_rates(prompts, tokens_per_id=1) == pytest.approx((2 / 6, 2 / 6, 2 / 6))
    assert measure_hit_rates(prompts, tokens_per_id=64) == pytest.approx((3 / 6, 3 / 6, 3 / 6))


def measure_hit_rates(prompts: list[list[int]], *, tokens_per_id: int) -> tuple[float, float, float]:
    trace = trace_of(prompts, tokens_per_id=tokens_per_id)
    (figures,) = measure(trace, look_ahead(trace), policies=["lru"], capacity_tokens=8 * tokens_per_id)
    return figures.hit_rate, figures.optimum_hit_rate, figures.infinite_hit_rate


def test_a_replay_changes_nothing_in_its_trace() -> None:
    prompts = random_prompts(random.Random(3), count=30, max_length=8, num_ids=2)
    trace = trace_of(prompts)
    assert replay(trace, 12, "lru") == replay(trace, 12, "lru")
    assert [list(request.ids) for request in trace.requests] == prompts


def test_the_figures_compare_misses_with_the_optimum_and_with_a_cache_without_end() -> None:
    # 30 ids: lru hits none, the optimum 14, a cache without end 27.
    trace = trace_of([[1], [2], [3]] * 10, tokens_per_id=512)
    (figures,) = measure(trace, look_ahead(trace), policies=["lru"], capacity_tokens=2 * 512 + 511)
    assert (figures.hit_rate, figures.optimum_hit_rate, figures.infinite_hit_rate) == pytest.approx((0, 14 / 30, 0.9))
    assert figures.miss_amplification == pytest.approx(30 / 16)
    assert figures.prefill_amplification == pytest.approx(30 / 3)
    assert (figures.trace, figures.capacity_tokens, figures.sessions) == ("made up", 1535, None)


def test_a_request_that_does_not_fit_is_an_error_that_says_how_much_must() -> None:
    trace = trace_of([[1], [1, 2, 3]], tokens_per_id=512)
    with pytest.raises(ConfigError, match=r"--capacity-tokens is 1535; .* has 1536 tokens"):
        list(measure(trace, look_ahead(trace), policies=["lru"], capacity_tokens=1535))


def test_the_cache_is_told_of_an_answer_when_it_has_ended_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Recorder(KVCache):
        def match(self, sequence: CachedSequence, known: Match | None = None) -> Match:
            events.append(f"{sequence.request.request_id} starts")
            return super().match(sequence, known)

        def record_answer(self, sequence: CachedSequence, answer: Answer) -> None:
            events.append(f"{sequence.request.request_id} ended with {answer.num_tokens}")
            super().record_answer(sequence, answer)

    monkeypatch.setattr(replay_module, "KVCache", Recorder)
    # The first ends after the third has begun, others before the next one; nothing comes after the last one's end.
    ended = [
        EndedAnswer(Answer(True, 7), 3),
        None,
        EndedAnswer(Answer(None, 3), 3),
        EndedAnswer(Answer(False, 0), 4),
        EndedAnswer(Answer(True, 9), 5),
    ]
    replay(with_answers(trace_of([[1], [2], [3], [4], [5]]), ended), 8, "lru")
    expected = "0 starts, 1 starts, 2 starts, 0 ended with 7, 2 ended with 3, 3 starts, 3 ended with 0, 4 starts"
    assert ", ".join(events) == expected
