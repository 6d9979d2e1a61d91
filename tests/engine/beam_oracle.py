"""Settings for beam searches drawn at random, and what transformers' generate makes of them."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

VOCAB_SIZE = 160


@dataclass
class Case:
    """One search. params are BeamSearchParams'; end_token_ids are the model's."""

    prompt: list[int]
    end_token_ids: list[int]
    params: dict[str, Any] = field(default_factory=dict)


def random_case(seed: int) -> Case:
    numbers = random.Random(seed)
    max_tokens = numbers.randint(1, 24)
    beam_width = numbers.randint(1, 6)
    params: dict[str, Any] = {
        "beam_width": beam_width,
        "n": numbers.randint(1, beam_width),
        "max_tokens": max_tokens,
        "min_tokens": numbers.choice([0, 0, numbers.randint(0, max_tokens)]),
        "length_penalty": numbers.choice([1.0, 0.0, -1.0, 0.7, 2.0]),
        "early_stopping": numbers.choice([False, True, "never"]),
        # transformers applies it to logits where there is one beam, and to log-probabilities where there are more.
        "repetition_penalty": numbers.choice([1.0, 1.0, 1.3, 0.8]) if beam_width > 1 else 1.0,
    }
    # Many end tokens, so that hypotheses of all lengths finish.
    end_token_ids = numbers.sample(range(VOCAB_SIZE), numbers.choice([1, 2, 5, 20]))
    if numbers.random() < 0.4:
        favoured = {token_id: numbers.uniform(0, 4) for token_id in end_token_ids}
        others = {numbers.randrange(VOCAB_SIZE): numbers.uniform(-5, 3) for _ in range(10)}
        params["logit_bias"] = others | favoured
    prompt = [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randint(1, 40))]
    return Case(prompt, end_token_ids, params)


def transformers_beams(model: PreTrainedModel, case: Case) -> tuple[list[list[int]], list[float]]:
    """Return the generated tokens and the scores of each hypothesis, best first."""
    params = case.params
    config = GenerationConfig(
        num_beams=params["beam_width"],
        num_return_sequences=params["n"],
        max_new_tokens=params["max_tokens"],
        min_new_tokens=params["min_tokens"] or None,
        length_penalty=params["length_penalty"],
        early_stopping=params["early_stopping"],
        repetition_penalty=params["repetition_penalty"],
        sequence_bias=[[[token_id], bias] for token_id, bias in params.get("logit_bias", {}).items()] or None,
        eos_token_id=case.end_token_ids,
        pad_token_id=VOCAB_SIZE,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    prompt = torch.tensor([case.prompt])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    rows = output.sequences[:, len(case.prompt) :].tolist()
    tokens = [[token_id for token_id in row if token_id != VOCAB_SIZE] for row in rows]
    if params["beam_width"] == 1:
        return tokens, []
    return tokens, output.sequences_scores.tolist()
