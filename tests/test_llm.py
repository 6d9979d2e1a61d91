"""The engine for offline use: lists in, lists out."""

import asyncio
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from radixserve import LLM, BeamSearchParams, SamplingParams
from radixserve.errors import ConfigError, EngineUnavailable, InvalidRequest, ModelLoadError, PromptTooLong
from radixserve.grammar import Grammar
from tests.tiny_engine import write_tiny_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), num_kv_blocks=128, max_num_seqs=8, max_queued_requests=2) as llm:
        yield llm


def test_results_come_in_the_order_of_the_prompts_however_many_there_are(llm: LLM) -> None:
    prompts = [f"prompt number {i}" for i in range(20)]
    results = llm.generate(prompts, GREEDY, show_progress=False)
    assert [result.prompt_token_ids for result in results] == [llm.tokenizer.encode(prompt) for prompt in prompts]
    alone = [llm.generate(prompt, GREEDY, show_progress=False)[0] for prompt in prompts]
    assert [result.answers for result in results] == [result.answers for result in alone]
    assert all(result.answers[0].finish_reason == "length" for result in results)


def test_priorities_are_one_for_all_prompts_or_one_for_each(model: Path, llm: LLM) -> None:
    prompts = ["a", "b", "c"]
    with LLM(str(model), num_kv_blocks=128, max_num_seqs=1, schedule_policy="priority") as ordered:
        for priority in (2, [3, 1, 2]):
            results = ordered.generate(prompts, GREEDY, priority=priority, show_progress=False)
            assert [result.answers for result in results] == [
                result.answers for result in llm.generate(prompts, GREEDY)
            ]
        with pytest.raises(InvalidRequest, match="3 prompts have 2 priorities"):
            ordered.generate(prompts, GREEDY, priority=[1, 2])
    with pytest.raises(InvalidRequest, match="schedule policy is cache-aware"):
        llm.generate(prompts, GREEDY, priority=[0, 0, 1])


def test_text_token_ids_and_lists_of_either_are_prompts(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    answers = [llm.generate(prompts, GREEDY)[0].answers for prompts in ("hello", ids, ["hello"], [ids])]
    assert answers == [answers[0]] * 4
    assert llm.generate([], GREEDY) == []


def test_a_repeated_prompt_is_read_from_the_cache(llm: LLM) -> None:
    prompt = "a prompt that no other test sends"
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert second.num_cached_tokens == len(first.prompt_token_ids) - 1
    assert second.answers == first.answers


def test_what_was_cached_is_read_from_the_disk_after_a_restart(model: Path, tmp_path: Path) -> None:
    settings = {"num_kv_blocks": 64, "kv_cache_dir": str(tmp_path / "cache"), "dtype": "float32"}
    prompt = list(range(100))
    with LLM(str(model), **settings) as llm:
        (first,) = llm.generate([prompt], GREEDY, show_progress=False)
    with LLM(str(model), **settings) as llm:
        (again,) = llm.generate([prompt], GREEDY, show_progress=False)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 96)
    assert again.answers[0].token_ids == first.answers[0].token_ids


def test_public_prefixes_are_a_setting_here_too_and_change_no_answer(llm: LLM, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prefixes.json"
    common = "the beginning of all prompts, "
    prompts = [common + end for end in ("one", "two")]
    with pytest.raises(ConfigError, match=r"prefixes\.json cannot be read"):
        LLM(str(model), num_kv_blocks=32, public_prefixes=str(file))
    file.write_text('[{"prompt": "the beginning of all prompts"}]')
    with LLM(str(model), num_kv_blocks=32, max_num_seqs=8, public_prefixes=str(file)) as other:
        results = [other.generate(prompt, GREEDY, show_progress=False)[0] for prompt in (*prompts, prompts[0])]
    assert [result.num_cached_tokens for result in results] == [0, len(common), len(prompts[0]) - 1]
    for prompt, result in zip(prompts, results, strict=False):
        assert result.answers == llm.generate(prompt, GREEDY, show_progress=False)[0].answers


def test_pc_2_a_cached_prompt_scores_as_on_a_fresh_engine_and_as_transformers_does(model: Path) -> None:
    prompt = torch.randint(0, 256, (2 * 16 + 5,), generator=torch.Generator().manual_seed(2)).tolist()
    scoring = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
    settings = {"dtype": "float32", "num_kv_blocks": 32, "max_num_seqs": 8}
    with LLM(str(model), **settings) as llm:
        plain = llm.generate(prompt, GREEDY)[0]
        cached = llm.generate(prompt, scoring)[0]
        again = llm.generate(prompt, GREEDY)[0]
    assert again.answers == plain.answers
    with LLM(str(model), max_num_batched_tokens=10, **settings) as other:
        fresh = other.generate(prompt, scoring)[0]
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(dim=-1)[range(len(prompt) - 1), prompt[1:]].tolist()
    for result in (cached, fresh):
        assert result.num_cached_tokens == 0
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs[0] is None
        entries = [entry for entry in result.prompt_logprobs if entry is not None]
        assert [entry.token_id for entry in entries] == prompt[1:]
        assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=1e-4)


def test_n_answers_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate("abc", params)[0] for _ in range(2))
    assert [answer.index for answer in first.answers] == [0, 1, 2]
    assert len({answer.text for answer in first.answers}) == 3
    assert first.answers == second.answers


def test_answers_follow_a_grammar_and_one_that_is_wrong_raises(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=30, grammar=Grammar("regex", "(yes|no), [0-9]{3}"))
    for result in llm.generate(["abc", "abd"], params):
        assert all(re.fullmatch("(yes|no), [0-9]{3}", answer.text) for answer in result.answers)
        assert all(answer.finish_reason == "stop" for answer in result.answers)
    with pytest.raises(InvalidRequest) as caught:
        llm.generate("abc", SamplingParams(grammar=Grammar("regex", "(")))
    assert caught.value.param == "grammar"


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    one = llm.chat(conversation, GREEDY)
    several = llm.chat([conversation, [{"role": "user", "content": "ho"}]], GREEDY)
    assert one[0].prompt_token_ids == several[0].prompt_token_ids == llm.tokenizer.encode_chat(conversation)
    assert one[0].answers == several[0].answers
    with pytest.raises(InvalidRequest):
        llm.chat([], GREEDY)


def test_a_prompt_that_cannot_be_answered_raises_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        llm.generate(["fine", [1] * 5000], GREEDY)
    assert llm.generate("fine", GREEDY)[0].num_output_tokens == 5


def test_it_works_inside_a_running_event_loop(llm: LLM) -> None:
    async def notebook() -> int:
        return llm.generate("abc", GREEDY)[0].num_output_tokens

    assert asyncio.run(notebook()) == 5


def test_settings_that_are_wrong_or_a_servers_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="port"):
        LLM(str(model), port=1)
    with pytest.raises(ConfigError, match="2048"):
        LLM(str(model), max_model_len=5000)
    with pytest.raises(ModelLoadError):
        LLM(str(tmp_path / "nothing"))


def test_closing_frees_its_threads(model: Path) -> None:
    before = threading.active_count()
    with LLM(str(model), num_kv_blocks=16) as llm:
        llm.generate("abc", GREEDY)
    assert threading.active_count() <= before


def test_ctrl_c_ends_the_requests_of_the_call(model: Path) -> None:
    with LLM(str(model), num_kv_blocks=256) as llm:
        caller = threading.get_ident()

        def type_it() -> None:
            # No public sign says that the call's requests run.
            while llm._engine.stats is None or not llm._engine.stats.num_running:
                time.sleep(0.01)
            signal.pthread_kill(caller, signal.SIGINT)

        endless = SamplingParams(max_tokens=2000, ignore_eos=True)
        threading.Thread(target=type_it, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, i % 250] for i in range(300)], endless, show_progress=False)
        began = time.monotonic()
        assert llm.generate([[1, 2, 3]], GREEDY, show_progress=False)[0].answers[0].token_ids
        assert time.monotonic() - began < 30, "behind 600,000 tokens it waits for minutes"


def test_chat_checks_messages_as_the_http_api_does(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    plain = [{"role": "user", "content": "hi"}]
    assert llm.chat(parts, GREEDY)[0].prompt_token_ids == llm.chat(plain, GREEDY)[0].prompt_token_ids
    for wrong in ("hi", [[]], [{"role": "x", "content": "hi"}], [{"role": "user"}], [{"content": "hi"}], [3]):
        with pytest.raises(InvalidRequest) as caught:
            llm.chat(wrong, GREEDY)
        assert caught.value.param == "messages"
    marked = [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]
    with pytest.raises(InvalidRequest, match="cache_control is not supported by LLM"):
        llm.chat(marked, GREEDY)


@pytest.mark.parametrize("prompts", [[1.5], [[True]], [["a", 1]], [None], [3, "a"]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: list) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.param == "prompt"


def test_a_closed_llm_says_so(model: Path) -> None:
    llm = LLM(str(model), num_kv_blocks=16)
    llm.close()
    llm.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        llm.generate("abc", GREEDY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"dtype": "x"}, "dtype"), ({"num_kv_blocks": "x"}, "num_kv_blocks"), ({"kv_cache_memory": "x"}, "no size")],
)
def test_settings_of_a_wrong_type_are_a_config_error(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**settings)


def test_an_answer_of_chat_that_comes_back_as_text_is_the_ids_it_was_generated_as(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "a question that no other test asks"}]
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    first = llm.chat(conversation, params)[0]
    text = first.answers[0].text
    assert first.answers[0].token_ids != llm.tokenizer.encode(text)
    second = llm.chat([*conversation, {"role": "assistant", "content": text}, conversation[0]], params)[0]
    begin = first.prompt_token_ids + first.answers[0].token_ids
    assert second.prompt_token_ids[: len(begin)] == begin


def test_beam_search_returns_the_best_hypotheses_with_their_scores_and_blocks(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, n=2, max_tokens=6)
    prompts = ["one prompt of more than a block", "another one, as long as that"]
    results = llm.beam_search(prompts, params, show_progress=False)
    for prompt, result in zip(prompts, results, strict=True):
        first, second = result.answers
        assert first.beam.score >= second.beam.score
        assert first.token_ids != second.token_ids
        assert result.num_output_tokens == len(first.token_ids) + len(second.token_ids)
        assert 0 < result.beam_memory.peak_blocks < result.beam_memory.peak_blocks_without_sharing
        (alone,) = llm.beam_search(prompt, params, show_progress=False)
        assert [answer.text for answer in alone.answers] == [first.text, second.text]
    with pytest.raises(InvalidRequest, match="beam_width is 9; this server computes at most 8"):
        llm.beam_search("x", BeamSearchParams(beam_width=9))
