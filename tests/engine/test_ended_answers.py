"""What the cache is told of answers that have ended, and of those that have not."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from radixserve.core.eviction.answer import Answer
from radixserve.grammar import Grammar
from radixserve.sampling_params import SamplingParams
from tests.byte_tokenizer import END
from tests.engine.harness import Harness, MakeHarness, ids
from tests.recording_cache import Told, recording_cache
from tests.stub import Table, always, counting

BEGIN = "<tool_call>"
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
PROMPT = ids(1, 20)


def says(*texts: str) -> Table:
    """A model that says one of the texts, each as likely, and ends."""
    spoken = [[*text.encode(), END] for text in texts]

    def table(context: Sequence[int]) -> Mapping[int, float]:
        said = list(context[len(PROMPT) :])
        following = {text[len(said)] for text in spoken if text[: len(said)] == said and len(text) > len(said)}
        return dict.fromkeys(following or {END}, 1 / max(len(following), 1))

    return table


def told_by(make_harness: MakeHarness, table: Table, **options: Any) -> tuple[Harness, list[Told]]:
    cache_type, told = recording_cache()
    return make_harness(table=table, cache_type=cache_type, **options), told


def ask(harness: Harness, *, tool_call_begin: str | None = None, **params: Any) -> str:
    settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 200, **params})
    request_id = harness.submit(PROMPT, settings, tool_call_begin=tool_call_begin)
    harness.run()
    return request_id


@pytest.mark.parametrize(
    ("text", "tool_call_begin", "calls_tool"),
    [
        (CALL, BEGIN, True),
        ("Let me see.\n" + CALL + "\n" + CALL, BEGIN, True),
        ("I need no tool.", BEGIN, False),
        ("<tool_cal", BEGIN, False),
        ("", BEGIN, False),
        (CALL, None, False),
        ("[CALLS]add", "[CALLS]", True),
    ],
)
def test_an_answer_calls_a_tool_if_it_may_and_begins_a_call(
    make_harness: MakeHarness, text: str, tool_call_begin: str | None, calls_tool: bool
) -> None:
    harness, told = told_by(make_harness, says(text))
    request_id = ask(harness, tool_call_begin=tool_call_begin)
    assert told == [Told(request_id, 0, Answer(calls_tool, len(text) + 1))]


def test_a_stop_string_that_ends_a_call_ends_an_answer_that_calls(make_harness: MakeHarness) -> None:
    harness, told = told_by(make_harness, says(CALL + " and more"))
    ask(harness, tool_call_begin=BEGIN, stop=("</tool_call>",))
    assert [one.answer for one in told] == [Answer(True, len(CALL))]


def test_a_grammar_of_calls_makes_the_answer_one(make_harness: MakeHarness) -> None:
    grammar = Grammar("lark", f'start: "{BEGIN}" /[a-z]{{3}}/')
    harness, told = told_by(make_harness, lambda _: dict.fromkeys(range(257), 1 / 257))
    ask(harness, tool_call_begin=BEGIN, grammar=grammar)
    assert [one.answer for one in told] == [Answer(True, len(BEGIN) + 3)]


def test_a_marker_that_is_a_special_token_is_seen_though_the_text_leaves_it_out(make_harness: MakeHarness) -> None:
    harness, told = told_by(make_harness, lambda context: {257 if len(context) == len(PROMPT) else END: 1.0})
    ask(harness, tool_call_begin="<|start|>")
    assert [one.answer for one in told] == [Answer(True, 2)]


def test_an_answer_cut_off_at_its_limit_has_ended_but_calls_nothing(make_harness: MakeHarness) -> None:
    harness, told = told_by(make_harness, says(CALL))
    ask(harness, tool_call_begin=BEGIN, max_tokens=len(CALL) - 1)
    ask(harness, max_tokens=0)
    assert [one.answer for one in told] == [Answer(False, len(CALL) - 1), Answer(False, 0)]


def test_each_choice_is_an_answer_of_its_own(make_harness: MakeHarness) -> None:
    harness, told = told_by(make_harness, says(CALL, "No."))
    request_id = ask(harness, tool_call_begin=BEGIN, n=6, temperature=1.0, seed=1)
    texts = {answer.index: answer.text for answer in harness.results[request_id].answers}
    assert set(texts.values()) == {CALL, "No."}
    answers = [Told(request_id, index, Answer(text == CALL, len(text) + 1)) for index, text in texts.items()]
    assert sorted(told) == sorted(answers)


def test_the_beams_of_a_finished_search_are_answers_that_call_nothing(make_harness: MakeHarness) -> None:
    harness, told = told_by(make_harness, lambda _: {ord("a"): 0.5, ord("b"): 0.5})
    harness.search(PROMPT, beam_width=3, max_tokens=5)
    assert len(told) == 3
    assert {one.answer.calls_tool for one in told} == {False}


def test_an_aborted_request_is_no_answer_but_its_finished_choices_are(make_harness: MakeHarness) -> None:
    harness, told = told_by(make_harness, says("Yes.", "No, that is not so."))
    settings = SamplingParams(n=6, seed=1, max_tokens=100)
    request_id = harness.submit(PROMPT, settings)
    for _ in range(8):
        harness.step()
    harness.core.abort([request_id])
    harness.run()
    finished = {answer.index for answer in harness.results[request_id].answers if answer.finish_reason is not None}
    assert 0 < len(finished) < 6
    assert {one.choice_index for one in told} == finished


def test_a_preemption_is_no_answer(make_harness: MakeHarness) -> None:
    harness, told = told_by(make_harness, counting(200), num_blocks=8, max_model_len=100)
    request_ids = [harness.add(ids(start, 20), max_tokens=40) for start in (1, 2, 3)]
    harness.run()
    assert harness.stats.num_preemptions > 0
    assert sorted(told) == [Told(request_id, 0, Answer(False, 40)) for request_id in request_ids]


def test_a_failed_request_is_no_answer(make_harness: MakeHarness) -> None:
    for failing in ({"fail_on": lambda _: True}, {"poison": lambda _: True}):
        harness, told = told_by(make_harness, always(7), **failing)
        request_id = harness.add(PROMPT)
        harness.run()
        assert request_id in harness.failures
        assert told == []
