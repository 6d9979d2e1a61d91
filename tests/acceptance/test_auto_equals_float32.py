"""The demo model as --dtype auto runs it on a CPU, with weights and K/V in float16, against float32, on real text."""

import re
from pathlib import Path

import pytest
import torch

from radixserve import SamplingParams
from radixserve.config import EngineConfig
from radixserve.llm import LLM
from radixserve.model.linear import has_float16_linear
from radixserve.model.loader import load_model, read_model_config
from radixserve.model.precision import FLOAT32, Precision
from radixserve.model_path import resolve_model_path
from radixserve.runner.attention import choose_attention
from radixserve.runner.precision import choose_precision
from tests.model.paged_sequences import PagedSequences

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_float16_linear(), reason="torch has no float16 projections on this CPU"),
]

DOCS = Path(__file__).parents[2] / "docs"
CPU = torch.device("cpu")
NUM_TEXTS, TEXT_LENGTH = 4, 500
MAX_MEAN_DIVERGENCE = 1e-4
NUM_PROMPTS, NUM_TOKENS = 50, 32
# In log-probability. Rounding moves the demo model's logits by about a hundredth.
NEAR_TIE = 0.05


def pages() -> list[str]:
    """Return the documentation's pages, without tables and code."""
    texts = []
    for path in sorted(DOCS.glob("*.md")):
        lines = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL).splitlines()
        texts.append("\n".join(line for line in lines if not line.startswith(("|", "    "))))
    return texts


@torch.inference_mode()
def log_probabilities(precision: Precision, texts: list[list[int]]) -> torch.Tensor:
    """Return the next token's log-probabilities at each token of the texts, [num_tokens, vocab_size]."""
    path = resolve_model_path(None)
    config = read_model_config(path)
    attention = choose_attention(EngineConfig(), config, dtype=precision.activations, device=CPU)
    decoder = load_model(path, config, precision=precision, device=CPU, show_progress=False, ops=attention.ops)
    sequences = PagedSequences(decoder, len(texts), TEXT_LENGTH, dtype=precision.kv_cache, attention=attention.backend)
    rows = [sequences.step({row: text})[row] for row, text in enumerate(texts)]
    return torch.cat(rows).log_softmax(dim=-1)


def test_the_mean_divergence_from_float32_is_a_ten_thousandth_at_most() -> None:
    with LLM(num_kv_blocks=64) as llm:
        encoded = [llm.tokenizer.encode(page) for page in pages()]
    texts = [ids[:TEXT_LENGTH] for ids in encoded if len(ids) >= TEXT_LENGTH][:NUM_TEXTS]
    assert len(texts) == NUM_TEXTS
    auto, notices = choose_precision(EngineConfig(device="cpu"), CPU)
    assert (auto.weights, auto.kv_cache, notices) == (torch.float16, torch.float16, [])
    exact, rounded = log_probabilities(FLOAT32, texts), log_probabilities(auto, texts)
    divergence = (exact.exp() * (exact - rounded)).sum(dim=-1)  # [num_tokens]
    agreement = (exact.argmax(dim=-1) == rounded.argmax(dim=-1)).double().mean()
    print(f"mean {divergence.mean():.2e}, largest {divergence.max():.2e}, same best token {agreement:.2%}")
    assert 0 < divergence.mean() <= MAX_MEAN_DIVERGENCE
    assert agreement > 0.99


def test_greedy_answers_differ_from_float32_only_at_near_ties() -> None:
    paragraphs = [part for page in pages() for part in page.split("\n\n") if 200 < len(part) < 2000]
    prompts = paragraphs[:: len(paragraphs) // NUM_PROMPTS][:NUM_PROMPTS]
    assert len(prompts) == NUM_PROMPTS
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    answers = {}
    for dtype in ("float32", "auto"):
        with LLM(dtype=dtype, device="cpu", num_kv_blocks=2048) as llm:
            answers[dtype] = [result.answers[0] for result in llm.generate(prompts, params, show_progress=False)]
    gaps = []
    for exact, rounded in zip(answers["float32"], answers["auto"], strict=True):
        pairs = zip(exact.token_ids, rounded.token_ids, strict=True)
        first = next((index for index, (token, other) in enumerate(pairs) if token != other), None)
        if first is not None:
            (best, best_score), (second, second_score) = exact.logprobs[first].top
            assert (exact.token_ids[first], rounded.token_ids[first]) == (best, second)
            gaps.append(best_score - second_score)
    print(f"{len(gaps)} of {NUM_PROMPTS} answers differ; gaps of float32's best two there: {sorted(gaps)}")
    assert max(gaps, default=0.0) < NEAR_TIE
    assert len(gaps) < NUM_PROMPTS / 4
