"""Prompts are scored as teacher forcing scores them, by the same step that computes them."""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from radixserve.core.batch import ScheduledRow
from radixserve.protocol import TokenLogprobs
from radixserve.runner.prompt_scoring import score_prompts
from tests.runner.tiny_executor import greedy, sampled_row, tiny_executor

TABLE = list(range(40))
PROMPT = torch.randint(0, 160, (150,), generator=torch.Generator().manual_seed(4)).tolist()


def scored_row(tokens: Sequence[int], start: int, end: int, *, num_top: int = 3) -> ScheduledRow:
    """Tokens start to end - 1 of a prompt, each to score the one behind it; the last draws too."""
    return ScheduledRow(
        token_ids=array("i", tokens[start:end]),
        num_computed_tokens=start,
        block_table=array("i", TABLE),
        samples=(greedy(tokens),) if end == len(tokens) else (),
        num_prompt_logprobs=num_top,
        prompt_targets=array("i", tokens[start + 1 : end + 1]),
    )


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> torch.Tensor:
    """Log-probabilities of every token at every position, [len(PROMPT), vocab], by transformers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([PROMPT])).logits[0].log_softmax(dim=-1)
    return logprobs


def assert_teacher_forced(entries: list[TokenLogprobs], expected: torch.Tensor) -> None:
    assert [entry.token_id for entry in entries] == PROMPT[1 : len(entries) + 1]
    for entry, logprobs in zip(entries, expected, strict=False):
        assert entry.logprob == pytest.approx(logprobs[entry.token_id].item(), abs=1e-4)
        best = logprobs.topk(3)
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert entry.rank == 1 + int((logprobs > logprobs[entry.token_id]).sum())


@pytest.mark.parametrize("borders", [[0, 150], [0, 1, 65, 149, 150], [0, 64, 128, 150]])
def test_pc_2_scores_equal_teacher_forcing_in_any_chunks(
    tiny_model: Path, expected: torch.Tensor, borders: list[int]
) -> None:
    tiny = tiny_executor(tiny_model)
    entries: list[TokenLogprobs] = []
    for start, end in pairwise(borders):
        answer = tiny.run(scored_row(PROMPT, start, end))
        entries += answer.prompt_logprobs.get(0, [])
    assert len(entries) == len(PROMPT) - 1
    assert_teacher_forced(entries, expected)
    assert len(answer.token_ids) == 1


def test_rows_that_score_and_rows_that_do_not_share_a_batch(tiny_model: Path, expected: torch.Tensor) -> None:
    tiny = tiny_executor(tiny_model)
    alone = tiny_executor(tiny_model).run(sampled_row(PROMPT[:9], [0, 1, 2]))
    together = tiny.run(sampled_row(PROMPT[:9], [45, 46, 47]), scored_row(PROMPT[:20], 0, 20))
    assert together.prompt_logprobs.keys() == {1}
    assert_teacher_forced(together.prompt_logprobs[1], expected)
    assert together.token_ids[0] == alone.token_ids[0]


def test_logits_are_made_for_a_few_positions_at_a_time() -> None:
    sizes: list[int] = []

    def to_logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden

    rows = [scored_row(PROMPT[:100], 0, 100), scored_row(PROMPT[:50], 0, 50)]
    scores = score_prompts(rows, torch.randn(150, 160), to_logits)
    assert max(sizes) <= 64
    assert [len(scores[index] or []) for index in range(2)] == [99, 49]


def test_a_bad_number_at_a_scored_position_spoils_that_row_only() -> None:
    hidden = torch.randn(30, 160)
    hidden[12, 5] = torch.inf
    hidden[25, 7] = torch.nan
    rows = [scored_row(PROMPT[:10], 0, 10), scored_row(PROMPT[:10], 0, 10), scored_row(PROMPT[:10], 0, 10)]
    scores = score_prompts(rows, hidden, lambda states: states)
    assert [scores[index] is None for index in range(3)] == [False, True, True]
