"""Sample slots and draws for the tests of this folder."""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from radixserve.core.batch import SampleSlot
from radixserve.sampling.sampler import sample
from radixserve.sampling_params import SamplingParams


def slot(
    *,
    seed: int = 0,
    choice_index: int = 0,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    suppressed: Sequence[int] = (),
    **params: Any,
) -> SampleSlot:
    return SampleSlot(
        params=SamplingParams(**params),
        seed=seed,
        choice_index=choice_index,
        token_ids=array("i", [*prompt, *output]),
        num_prompt_tokens=len(prompt),
        suppressed_token_ids=tuple(suppressed),
    )


def draw_many(logits: Sequence[float] | torch.Tensor, num_draws: int, **params: Any) -> Counter[int]:
    """Draw num_draws times from one row of logits, as so many choices of one request."""
    row = torch.as_tensor(logits, dtype=torch.float32)
    slots = [slot(choice_index=index, **params) for index in range(num_draws)]
    return Counter(sample(row.expand(num_draws, -1), slots)[0])


def draw(logits: Sequence[float] | torch.Tensor, **params: Any) -> int:
    """Draw one token."""
    return sample(torch.as_tensor(logits, dtype=torch.float32)[None], [slot(**params)])[0][0]
