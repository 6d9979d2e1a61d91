"""What the scheduler promises, seen from outside: everyone is answered, nothing leaks, nobody's answer changes."""

import pytest

from radixserve.engine.core import MAX_FAILED_STEPS_IN_A_ROW
from tests.engine.harness import BLOCK_SIZE as B
from tests.engine.harness import MakeHarness, ids
from tests.stub import always


def test_sc_1_a_request_that_can_never_fit_is_refused_and_blocks_no_one(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=8, max_model_len=128)
    too_long = harness.add(ids(1, 200))
    short = harness.add(ids(2, 20))
    harness.run()
    assert harness.failures[too_long].kind == "invalid_request"
    assert "max_model_len is 128" in harness.failures[too_long].message
    assert len(harness.results[short].answers[0].token_ids) == 4


def test_sc_1_a_request_that_outgrows_the_pool_ends_by_length(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=8, max_model_len=128)
    result = harness.ask(ids(1, 100), max_tokens=200)
    assert result.answers[0].finish_reason == "length"
    assert len(result.answers[0].token_ids) == 28
    assert harness.stats.num_preemptions == 0


@pytest.mark.parametrize(
    "params", [{}, {"frequency_penalty": 1.5}, {"seed": 7, "temperature": 1.0}, {"min_tokens": 12}]
)
def test_sc_3_preemption_changes_no_answer(make_harness: MakeHarness, params: dict) -> None:
    def table(context):
        first = hash(tuple(context)) % 200
        return {first: 0.5, (first + 1) % 200: 0.3, context[-1]: 0.2}

    roomy = make_harness(num_blocks=64, table=table)
    tight = make_harness(num_blocks=6, max_model_len=6 * B, table=table)
    answers = []
    for harness in (roomy, tight):
        requests = [harness.add(ids(50 * i, 20), max_tokens=40, logprobs=1, **params) for i in range(3)]
        harness.run()
        answers.append([harness.results[request] for request in requests])
    assert roomy.stats.num_preemptions == 0
    assert tight.stats.num_preemptions > 0
    assert answers[0] == answers[1]


def test_sc_4_an_aborted_request_in_the_queue_costs_nothing(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=1)
    running = harness.add(ids(1, 20), max_tokens=10)
    queued = [harness.add(ids(100 + i, 20)) for i in range(2)]
    harness.step()
    harness.core.abort([*queued, "unknown"])
    harness.core.abort(queued)
    assert harness.stats.num_waiting == 0
    harness.run()
    last = harness.add(ids(3, 20))
    harness.run()
    assert harness.stats.num_computed_tokens == (20 + 9) + (20 + 3)
    assert len(harness.results[running].answers[0].token_ids) == 10
    assert len(harness.results[last].answers[0].token_ids) == 4


def test_an_aborted_running_request_frees_its_blocks_at_once(make_harness: MakeHarness) -> None:
    harness = make_harness()
    request = harness.add(ids(1, 40), max_tokens=100, n=3)
    for _ in range(5):
        harness.step()
    harness.core.abort([request])
    assert harness.stats.num_running == 0
    assert harness.stats.cache.num_in_use_blocks == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_sc_5_exactly_max_tokens_come_back_cold_and_on_a_hit(make_harness: MakeHarness, max_tokens: int) -> None:
    harness = make_harness(table=always(65))
    for _ in range(2):
        answer = harness.ask(ids(1, 2 * B), max_tokens=max_tokens).answers[0]
        assert answer.token_ids == [65] * max_tokens
        assert answer.text == "A" * max_tokens
        assert answer.finish_reason == "length"


def test_a_long_prompt_delays_no_token_of_a_running_answer(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_batched_tokens=20)
    running = harness.add(ids(1, 10), max_tokens=20)
    harness.step()
    harness.add(ids(100, 150))
    for num_tokens in range(2, 12):
        harness.step()
        assert len(harness.results[running].answers[0].token_ids) == num_tokens
    harness.run()


def test_the_choices_of_a_prompt_share_its_blocks_and_differ(make_harness: MakeHarness) -> None:
    def table(context):
        first = hash(tuple(context)) % 200
        return {first: 0.5, (first + 1) % 200: 0.5}

    harness = make_harness(table=table)
    request = harness.add(ids(1, 3 * B + 5), n=4, temperature=1.0, seed=3, max_tokens=20)
    harness.step()
    assert harness.stats.cache.num_in_use_blocks == 4
    harness.run()
    answers = [answer.token_ids for answer in harness.results[request].answers]
    assert all(len(answer) == 20 for answer in answers)
    assert len({tuple(answer) for answer in answers}) == 4
    again = harness.ask(ids(1, 3 * B + 5), n=4, temperature=1.0, seed=3, max_tokens=20)
    assert [answer.token_ids for answer in again.answers] == answers


def test_a_full_queue_refuses_and_takes_requests_again_later(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=1, max_queued_requests=2)
    requests = [harness.add(ids(i, 10)) for i in range(3)]
    harness.run()
    assert [harness.failures.get(request) is None for request in requests] == [True, True, False]
    assert harness.failures[requests[2]].kind == "queue_full"
    assert len(harness.ask(ids(9, 10)).answers[0].token_ids) == 4


def test_preempted_answers_take_no_place_in_the_queue(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=6, max_model_len=6 * B, max_queued_requests=1)
    requests = [harness.add(ids(1, 2 * B), n=6, max_tokens=40, temperature=1.0, seed=1)]
    while not harness.stats.num_preemptions:
        harness.step()
    requests += [harness.add(ids(50, 10)), harness.add(ids(90, 10))]
    harness.run()
    assert [harness.failures.get(request) is None for request in requests] == [True, True, False]
    aborted = harness.add(ids(50, 10))
    harness.core.abort([aborted])
    assert len(harness.ask(ids(50, 10)).answers[0].token_ids) == 4


def test_more_choices_than_can_run_at_once_are_refused(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=4)
    request = harness.add(ids(1, 10), n=5)
    harness.step()
    assert harness.failures[request].kind == "invalid_request"
    assert harness.failures[request].param == "n"
    assert "max_num_seqs" in harness.failures[request].message


def test_a_failed_step_ends_its_own_requests_with_an_error(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=1, fail_on=lambda context: context[0] == 66)
    bad = harness.add([66, *ids(1, 20)])
    good = harness.add(ids(1, 20))
    harness.run()
    assert harness.failures[bad].kind == "internal_error"
    assert len(harness.results[good].answers[0].token_ids) == 4


def test_an_engine_whose_steps_all_fail_gives_up_for_a_new_one(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=1, fail_on=lambda context: context[0] == 66)
    for _ in range(MAX_FAILED_STEPS_IN_A_ROW - 1):
        harness.add([66, 1])
    harness.add([65, 1])
    harness.run()
    for _ in range(MAX_FAILED_STEPS_IN_A_ROW):
        harness.add([66, 1])
    with pytest.raises(RuntimeError, match="told to fail"):
        harness.run()


def test_a_row_that_is_not_finite_ends_alone(make_harness: MakeHarness) -> None:
    harness = make_harness(poison=lambda context: context[0] == 66 and len(context) > 25)
    bad = harness.add([66, *ids(1, 20)], max_tokens=20)
    good = harness.add(ids(1, 20), max_tokens=20)
    harness.run()
    assert harness.failures[bad].kind == "internal_error"
    assert len(harness.results[good].answers[0].token_ids) == 20


def test_a_running_answer_gets_a_token_in_every_step_whoever_else_needs_room(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=6, max_model_len=6 * B, max_num_batched_tokens=128)
    first = harness.add(ids(1, 30), max_tokens=60)
    harness.add(ids(90, 30), max_tokens=60)
    for num_tokens in range(1, 61):
        harness.step()
        assert len(harness.results[first].answers[0].token_ids) == num_tokens
    assert harness.stats.num_preemptions > 0
    harness.run()


def test_a_preempted_request_resumes_before_later_ones_start(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=6, max_model_len=6 * B, max_num_seqs=2, max_num_batched_tokens=128)
    harness.add(ids(1, 30), max_tokens=60)
    preempted = harness.add(ids(90, 30), max_tokens=60)
    later = harness.add(ids(150, 5), max_tokens=60)
    while harness.stats.num_preemptions == 0:
        harness.step()
    num_tokens = len(harness.results[preempted].answers[0].token_ids)
    while not harness.results[later].answers[0].token_ids:
        harness.step()
    assert len(harness.results[preempted].answers[0].token_ids) > num_tokens
    harness.run()


def test_a_prompt_that_would_soon_be_preempted_waits(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=4, max_model_len=4 * B)
    harness.add(ids(1, B + 1), max_tokens=30)
    harness.add(ids(90, 2 * B), max_tokens=5)
    harness.run()
    assert harness.stats.num_preemptions == 0


def test_requests_that_wait_for_a_prefix_keep_their_place_in_the_queue(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=2, max_num_batched_tokens=40)
    harness.add(ids(1, 6 * B + 5), max_tokens=30)
    waits = harness.add([*ids(1, 6 * B), 9])
    harness.add(ids(100, 5), max_tokens=10)
    later = harness.add(ids(130, 5))
    while not harness.results[waits].answers[0].token_ids:
        harness.step()
        assert not harness.results[later].answers[0].token_ids
    harness.run()
    assert harness.results[waits].num_cached_tokens == 6 * B


def test_with_ignore_eos_an_end_token_may_come_before_min_tokens(make_harness: MakeHarness, tokenizer) -> None:
    end = min(tokenizer.eos_token_ids)
    harness = make_harness(table=lambda _: {end: 0.6, 65: 0.4})
    assert harness.ask(ids(1, 5), ignore_eos=True, min_tokens=3, max_tokens=5).answers[0].token_ids == [end] * 5


def test_a_request_that_fails_in_several_rows_fails_once(make_harness: MakeHarness) -> None:
    harness = make_harness(poison=lambda context: len(context) > 12)
    request = harness.add(ids(1, 10), n=3, max_tokens=20, temperature=1.0)
    deltas = []
    while harness.core.has_work:
        deltas += harness.core.step().deltas
    assert [delta.request_id for delta in deltas if delta.failure is not None] == [request]
    assert harness.stats.cache.num_in_use_blocks == 0


def test_end_tokens_and_stop_ids_end_an_answer_after_min_tokens(make_harness: MakeHarness, tokenizer) -> None:
    end = min(tokenizer.eos_token_ids)
    harness = make_harness(table=lambda _: {end: 0.6, 65: 0.3, 66: 0.1})
    assert harness.ask(ids(1, 5)).answers[0].token_ids == [end]
    answer = harness.ask(ids(1, 5), min_tokens=3, max_tokens=10).answers[0]
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([65, 65, 65, end], "AAA", "stop")
    assert harness.ask(ids(1, 5), ignore_eos=True, max_tokens=6).answers[0].finish_reason == "length"
    stopped = harness.ask(ids(1, 5), min_tokens=1, max_tokens=6, stop_token_ids=(65,)).answers[0]
    assert stopped.token_ids == [66, end]
    stopped = harness.ask(ids(1, 5), logit_bias={end: -100}, max_tokens=6, stop_token_ids=(65,)).answers[0]
    assert (stopped.token_ids, stopped.text, stopped.stop_reason) == ([65], "", 65)
