"""The demo model against transformers in float32, along transformers' own greedy tokens.

Each engine is asked for the next token after every prefix of an answer (teacher forcing), so one early difference does
not excuse the rest. A different token is right only where transformers itself is at a near tie.
"""

from dataclasses import dataclass

import pytest
import torch

from radixserve import SamplingParams
from radixserve.llm import LLM
from tests.demo_oracle import demo_transformers_model

NUM_TOKENS = 32
NEAR_TIE = 1e-3
MAX_TIES = 0.01
TEXT = (
    "The kitchen of the old house looked out over the harbour, where three boats lay on the mud and waited for the "
    "tide. Anna counted them every morning: the blue one, the one with the broken mast, and the one that nobody owned. "
    "On 14 March 1987 there were only two. She put down her cup and ran outside, def count(boats): return len(boats), "
    "as she used to say when people asked what she did for a living. Twelve gulls, 3.5 metres of water, a letter. "
)
PROMPT_LENGTHS = [1, 2, 5, 15, 16, 17, 33, 64, 100, 150, 223, 300]


@dataclass
class Teacher:
    """A prompt, transformers' greedy answer to it, and at each of its tokens transformers' choice and its lead."""

    prompt: list[int]
    answer: list[int]
    expected: list[int]
    margins: list[float]

    def prefixes(self) -> list[list[int]]:
        return [self.prompt + self.answer[:length] for length in range(NUM_TOKENS)]


@pytest.fixture(scope="module")
def teachers() -> list[Teacher]:
    model = demo_transformers_model()
    found = []
    with LLM(num_kv_blocks=64) as llm:
        ids = llm.tokenizer.encode(TEXT * 4)
    for offset, length in enumerate(PROMPT_LENGTHS):
        prompt = ids[7 * offset : 7 * offset + length]
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, length, dtype=torch.int64),
                do_sample=False,
                min_new_tokens=NUM_TOKENS,
                max_new_tokens=NUM_TOKENS,
                eos_token_id=None,
            )
            logits = model(output).logits[0, length - 1 : -1]
        best = logits.topk(2, dim=-1)
        answer = output[0, length:].tolist()
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        found.append(Teacher(prompt, answer, best.indices[:, 0].tolist(), margins))
    return found


def compare(teachers: list[Teacher], given: list[list[int]]) -> None:
    num_ties = 0
    for teacher, tokens in zip(teachers, given, strict=True):
        for expected, token, margin in zip(teacher.expected, tokens, teacher.margins, strict=True):
            if token != expected:
                assert margin < NEAR_TIE, f"{token} instead of {expected}, which leads by {margin}"
                num_ties += 1
    assert num_ties <= MAX_TIES * len(teachers) * NUM_TOKENS


PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def next_tokens(llm: LLM, prompts: list[list[int]]) -> list[int]:
    results = llm.generate(prompts, PARAMS, show_progress=False)
    return [result.answers[0].token_ids[0] for result in results]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"no_prefix_cache": True}, {"no_prefix_cache": True, "max_num_batched_tokens": 37, "max_num_seqs": 4}],
    ids=["cold", "chunked"],
)
def test_each_prefix_alone_gives_transformers_token(teachers: list[Teacher], settings: dict) -> None:
    with LLM(dtype="float32", num_kv_blocks=512, **settings) as llm:
        given = [[next_tokens(llm, [prefix])[0] for prefix in teacher.prefixes()] for teacher in teachers]
    compare(teachers, given)


@pytest.mark.slow
def test_each_prefix_on_a_hit_gives_transformers_token(teachers: list[Teacher]) -> None:
    with LLM(dtype="float32", num_kv_blocks=512) as llm:
        given = []
        for teacher in teachers:
            results = [llm.generate([prefix], PARAMS, show_progress=False)[0] for prefix in teacher.prefixes()]
            assert all(result.num_cached_tokens >= len(teacher.prompt) - 1 for result in results[1:])
            given.append([result.answers[0].token_ids[0] for result in results])
    compare(teachers, given)


@pytest.mark.slow
def test_sixteen_prefixes_at_once_give_transformers_tokens(teachers: list[Teacher]) -> None:
    prefixes = [prefix for teacher in teachers for prefix in teacher.prefixes()]
    with LLM(dtype="float32", num_kv_blocks=1024, max_num_seqs=16, no_prefix_cache=True) as llm:
        tokens = next_tokens(llm, prefixes)
    given = [tokens[start : start + NUM_TOKENS] for start in range(0, len(tokens), NUM_TOKENS)]
    compare(teachers, given)
