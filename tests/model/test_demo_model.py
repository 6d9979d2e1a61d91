from functools import cache

import pytest
import torch

from radixserve.model.config import ModelConfig, RopeConfig
from radixserve.model.decoder import Decoder
from radixserve.model.loader import load_model, read_model_config
from radixserve.model.precision import FLOAT32
from radixserve.model_path import resolve_model_path
from tests.demo_oracle import demo_transformers_model
from tests.model.paged_sequences import PagedSequences

# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
QUESTION = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
PARIS = 7042


@cache
def demo_decoder() -> Decoder:
    path = resolve_model_path(None)
    return load_model(path, read_model_config(path), precision=FLOAT32, device=torch.device("cpu"), show_progress=False)


def greedy(decoder: Decoder, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Return the answer, and the logits it was taken from."""
    sequences = PagedSequences(decoder, 1, len(prompt) + num_tokens)
    answer, logits, new = [], [], prompt
    for _ in range(num_tokens):
        logits.append(sequences.step({0: new})[0][-1])
        new = [int(logits[-1].argmax())]
        answer += new
    return answer, torch.stack(logits)


def test_the_shape_is_read_from_the_file() -> None:
    config = read_model_config(resolve_model_path(None))
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rms_norm_eps=config.rms_norm_eps,
        rope=RopeConfig(theta=100000.0),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
    )


def test_the_capital_of_france_is_paris() -> None:
    answer, _ = greedy(demo_decoder(), QUESTION, 6)
    assert PARIS in answer


@pytest.mark.slow
def test_logits_equal_those_of_transformers_along_a_greedy_answer() -> None:
    answer, logits = greedy(demo_decoder(), QUESTION, 32)
    with torch.no_grad():
        expected = demo_transformers_model()(torch.tensor([QUESTION + answer])).logits[0, len(QUESTION) - 1 : -1]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
