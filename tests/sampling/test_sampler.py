import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixserve.sampling import sampler
from radixserve.sampling.sampler import sample
from radixserve.sampling.uniform import uniforms
from tests.sampling.slots import draw, draw_many, slot

HALVES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def assert_drawn_from(drawn: Mapping[int, int], probabilities: torch.Tensor) -> None:
    """Chi-square at about 1 in 1,000; ids of probability 0 never."""
    total, statistic, freedom = sum(drawn.values()), 0.0, -1
    for token_id, probability in enumerate(probabilities.tolist()):
        if probability == 0:
            assert drawn.get(token_id, 0) == 0
            continue
        mean = total * probability
        statistic += (drawn.get(token_id, 0) - mean) ** 2 / mean
        freedom += 1
    assert statistic < freedom + 3.1 * (2 * freedom) ** 0.5 + 8


def test_a_beam_draws_nothing_and_the_others_draw_as_without_it() -> None:
    logits = random_logits(5, 50)
    beam = dataclasses.replace(slot(temperature=0, logprobs=1), num_candidates=4)
    others = [slot(seed=7, logprobs=2), slot(temperature=0), slot(seed=8, top_k=5)]
    alone = sample(logits[[1, 3, 4]], others)
    token_ids, logprobs = sample(logits, [beam, others[0], beam, *others[1:]])
    assert [token_ids[row] for row in (1, 3, 4)] == alone[0]
    assert [logprobs[row] for row in (1, 3, 4)] == alone[1]
    assert token_ids[0] == token_ids[2] == 0
    assert logprobs[0] is logprobs[2] is None
    assert sample(logits[:2], [beam, beam]) == ([0, 0], [None, None])


def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals() -> None:
    assert draw([0.0, 3.0, 1.0, 3.0], temperature=0) == 1
    assert draw(torch.zeros(1000), temperature=0) == 0
    assert draw([-5.0, -1.0, -1.0], temperature=0, top_p=0.1, logprobs=2) == 1


def test_greedy_ignores_the_seed() -> None:
    logits = random_logits(1, 100)[0]
    assert len({draw(logits, temperature=0, seed=seed) for seed in range(20)}) == 1


def test_no_slots_give_no_tokens() -> None:
    assert sample(torch.empty(0, 10), []) == ([], [])


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = random_logits(3, 50)
    before = logits.clone()
    settings: list[dict[str, Any]] = [
        {"temperature": 0, "logit_bias": {3: 5.0}},
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "prompt": [1, 2], "output": [2], "suppressed": [7]},
        {"top_p": 0.5, "logprobs": 3},
    ]
    sample(logits, [slot(**setting) for setting in settings])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = random_logits(1, 40)[0]
    drawn = draw_many(logits, 20_000, temperature=temperature, seed=3)
    assert_drawn_from(drawn, (logits.double() / temperature).softmax(-1))


def test_an_untruncated_draw_inverts_the_cumulative_distribution_in_order_of_ids() -> None:
    numbers = uniforms([9] * 500, range(500), [0] * 500)
    slots = [slot(seed=9, choice_index=index) for index in range(500)]
    token_ids, _ = sample(HALVES.expand(500, -1), slots)
    edges = torch.tensor([0.5, 0.75, 0.875, 0.9375])
    assert token_ids == torch.bucketize(torch.from_numpy(numbers), edges.double(), right=True).tolist()


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 5}, 5),
        ({"top_k": 99}, 5),
        ({"top_k": 0}, 5),
        ({"top_k": -1}, 5),
        ({"top_p": 1e-9}, 1),
        ({"top_p": 0.49}, 1),
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.74}, 2),
        ({"top_p": 0.76}, 3),
        ({"top_p": 0.88}, 4),
        ({"top_p": 0.95}, 5),
        ({"min_p": 0.13}, 3),
        ({"min_p": 0.24}, 3),
        ({"min_p": 0.26}, 2),
        ({"min_p": 1.0}, 1),
        # top_p is a share of what top_k kept: of 0.75, two thirds is reached by the first token.
        ({"top_k": 2, "top_p": 0.66}, 1),
        ({"top_k": 2, "top_p": 0.68}, 2),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.3}, 2),
    ],
)
def test_truncation_keeps_the_shortest_prefix_and_its_proportions(setting: dict[str, Any], kept: int) -> None:
    order = torch.tensor([3, 0, 4, 1, 2])  # the best token is not the first
    probabilities = torch.zeros(5, dtype=torch.float64)
    probabilities[order[:kept]] = HALVES[:kept].exp().double()
    logits = torch.empty(5).index_copy_(0, order, HALVES)
    assert_drawn_from(draw_many(logits, 4000, seed=1, **setting), probabilities / probabilities.sum())


def test_truncation_takes_the_lower_id_among_equals() -> None:
    tied = [1.0, 2.0, 2.0, 1.0, 2.0, 1.0]
    assert set(draw_many(tied, 400, top_k=2)) == {1, 2}
    assert set(draw_many(tied, 400, top_k=4)) == {0, 1, 2, 4}
    assert set(draw_many(torch.zeros(1000), 400, top_k=3)) == {0, 1, 2}
    assert set(draw_many(torch.zeros(1000), 2000, top_p=0.0095)) == set(range(10))


def test_min_p_keeps_all_equals() -> None:
    assert set(draw_many([1.0, 2.0, 2.0, 1.0, 2.0], 400, min_p=1.0)) == {1, 2, 4}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_top_k_of_one_is_greedy(temperature: float) -> None:
    logits = random_logits(64, 300).round()  # many ties
    greedy, _ = sample(logits, [slot(temperature=0)] * 64)
    drawn, _ = sample(logits, [slot(temperature=temperature, top_k=1, seed=seed) for seed in range(64)])
    assert drawn == greedy


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 1.7, "top_k": 12},
        {"temperature": 0.6, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.05},
        {"temperature": 1.9, "top_k": 20, "top_p": 0.7, "min_p": 0.08},
    ],
)
def test_truncation_equals_that_of_transformers(setting: dict[str, Any]) -> None:
    logits = random_logits(1, 50, seed=4)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(setting["temperature"])])
    if "top_k" in setting:
        warpers.append(TopKLogitsWarper(setting["top_k"]))
    if "top_p" in setting:
        warpers.append(TopPLogitsWarper(setting["top_p"]))
    if "min_p" in setting:
        warpers.append(MinPLogitsWarper(setting["min_p"]))
    warped = warpers(torch.zeros(1, 1, dtype=torch.int64), logits.clone())
    assert_drawn_from(draw_many(logits[0], 20_000, seed=2, **setting), warped[0].double().softmax(-1))


@pytest.mark.parametrize(
    ("scale", "setting"),
    [
        (0.0, {"top_p": 0.5}),
        (0.01, {"top_p": 0.999}),
        (0.01, {"min_p": 0.97}),
        (1.0, {"top_k": 3000}),
        (1.0, {"top_k": 4999}),
        (0.5, {"top_k": 2500, "top_p": 0.9}),
        (1.0, {"top_p": 0.98, "min_p": 0.001}),
    ],
)
def test_a_long_prefix_is_followed_as_far_as_it_goes(scale: float, setting: dict[str, Any]) -> None:
    """Against a plain definition over one full sort."""
    vocab_size, num_draws, seed = 5000, 200, 8
    logits = random_logits(1, vocab_size)[0] * scale
    values, order = logits.sort(descending=True, stable=True)
    weights = (values.double() - values[0].double()).exp()
    kept = min(setting.get("top_k", vocab_size), vocab_size)
    masses = weights.cumsum(0)
    if "top_p" in setting:
        kept = min(kept, int((masses - weights < setting["top_p"] * masses[kept - 1]).sum()))
    if "min_p" in setting:
        kept = min(kept, int((weights >= setting["min_p"]).sum()))
    numbers = torch.from_numpy(uniforms([seed] * num_draws, range(num_draws), [0] * num_draws))
    expected = order[torch.searchsorted(masses[:kept], numbers * masses[kept - 1], right=True)]
    slots = [slot(seed=seed, choice_index=index, **setting) for index in range(num_draws)]
    assert sample(logits.expand(num_draws, -1), slots)[0] == expected.tolist()


def mixed_slots() -> list[Any]:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 42},
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7, "top_p": 0.9},
        {"temperature": 1.3, "seed": -1, "top_k": 5, "output": [3, 4, 3], "frequency_penalty": 1.2},
        {"temperature": 0.7, "seed": 2**63 - 1, "min_p": 0.02, "logprobs": 4},
        {"temperature": 1.0, "seed": 0, "logit_bias": {5: 4.0}, "suppressed": [1, 2]},
        {"temperature": 0, "repetition_penalty": 1.3, "prompt": [1, 2, 3], "output": [4], "logprobs": 0},
        {"temperature": 1.0, "seed": 42, "choice_index": 2, "top_k": 700, "top_p": 0.99},
    ]
    return [slot(**setting) for setting in settings]


def test_api_15_a_seeded_draw_is_the_same_alone_in_any_batch_and_in_any_row() -> None:
    slots, logits = mixed_slots(), random_logits(8, 4000, seed=6)
    alone = [sample(logits[row : row + 1], [slots[row]]) for row in range(8)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        order = torch.randperm(8, generator=generator)[: 3 + int(torch.randint(6, (1,), generator=generator))].tolist()
        token_ids, logprobs = sample(logits[order], [slots[row] for row in order])
        assert [([a], [b]) for a, b in zip(token_ids, logprobs, strict=True)] == [alone[row] for row in order]


def test_api_15_choices_of_one_seed_differ_and_repeat_as_a_set() -> None:
    logits = random_logits(1, 5000)[0] * 0.1
    first, again = ([draw(logits, seed=42, choice_index=index) for index in range(3)] for _ in range(2))
    assert first == again
    assert len(set(first)) == 3


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
def test_api_15_any_seed_draws(seed: int) -> None:
    assert len(draw_many(torch.zeros(1000), 50, seed=seed)) > 30


def test_a_draw_depends_on_the_position_and_not_on_the_prompt() -> None:
    logits = torch.zeros(100_000)
    at = [draw(logits, seed=1, output=[5] * count) for count in range(20)]
    assert len(set(at)) == 20
    assert at[3] == draw(logits, seed=1, prompt=[1, 2, 3, 4], output=[9, 9, 9])


@pytest.mark.parametrize("setting", [{}, {"top_p": 0.99}, {"top_k": 5}])
def test_a_tiny_temperature_is_greedy_and_no_nan(setting: dict[str, Any]) -> None:
    assert set(draw_many([1e30, 3e38, -3e38, 0.0], 50, temperature=5e-324, **setting)) == {1}


def test_one_token_in_the_vocabulary_is_drawn() -> None:
    for setting in ({}, {"temperature": 0}, {"top_k": 1}, {"top_p": 0.1}):
        assert draw([0.3], **setting) == 0


def test_a_suppressed_token_is_never_drawn_even_where_truncation_would_reach_it() -> None:
    assert set(draw_many([5.0, 1.0, 0.0], 300, suppressed=[0], top_k=3)) == {1, 2}
    assert set(draw_many([5.0, 1.0, 0.0], 300, suppressed=[0, 1])) == {2}


@pytest.mark.parametrize("setting", [{}, {"top_p": 0.9}])
def test_the_ends_of_the_uniform_range_draw_tokens_that_may_be_drawn(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]
) -> None:
    monkeypatch.setattr(sampler, "uniforms", lambda *_: np.array([0.0, 1 - 2**-53]))
    logits = torch.tensor([0.0, 1.0, 3.0, 1.0, 0.0]).expand(2, -1)
    first, last = sample(logits, [slot(suppressed=[0, 4], **setting)] * 2)[0]
    assert (first, last) == ((2, 3) if setting else (1, 3))
