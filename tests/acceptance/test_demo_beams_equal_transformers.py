"""Beam search on the demo model against transformers in float32.

Two engines add up the same numbers in different orders, so where two hypotheses tie within NEAR_TIE either may win;
then each rank must still be worth what it is worth in transformers.
"""

from collections.abc import Iterator

import pytest
import torch

from radixserve import LLM, BeamSearchParams
from tests.demo_oracle import demo_transformers_model

NUM_TOKENS = 16
NEAR_TIE = 1e-3
END = 2
PROMPTS = [
    "The capital of France is",
    "The sea is",
    "Once upon a time there was a",
    "def count(boats):\n    return",
    "Water boils at a temperature of",
    "1, 2, 3, 5, 8,",
    "Dear neighbour, would you be so kind as to",
    "The opposite of warm is",
    "Anna counted the boats every morning: the blue one, the one with the broken mast, and",
    "Q: Who wrote Hamlet?\nA:",
    "In the year 1987 on 14 March",
    "To repair a flat tyre you need",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", num_kv_blocks=512) as llm:
        yield llm


def expected_hypotheses(prompt: list[int], beam_width: int) -> tuple[list[list[int]], list[float]]:
    output = demo_transformers_model().generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=beam_width,
        num_return_sequences=beam_width,
        max_new_tokens=NUM_TOKENS,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=END,
    )
    rows = output.sequences[:, len(prompt) :].tolist()
    tokens = [row[: row.index(END) + 1] if END in row else row for row in rows]
    return tokens, output.sequences_scores.tolist()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("beam_width", [2, 4, 8])
def test_the_demo_models_beams_equal_transformers(llm: LLM, beam_width: int) -> None:
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    results = llm.beam_search(prompts, BeamSearchParams(beam_width=beam_width, max_tokens=NUM_TOKENS))
    num_ties = 0
    for prompt, result in zip(prompts, results, strict=True):
        tokens, scores = expected_hypotheses(prompt, beam_width)
        assert [answer.beam.score for answer in result.answers] == pytest.approx(scores, abs=NEAR_TIE), prompt
        num_ties += [answer.token_ids for answer in result.answers] != tokens
    assert num_ties <= 1
