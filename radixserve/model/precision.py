"""The dtypes of a model's numbers."""

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class Precision:
    """In what a model's numbers are stored and computed.

    weights: of the projections and the embedding. activations: of everything that is computed, norms and biases too;
    logits are always float32. kv_cache: of the K/V blocks.
    """

    weights: torch.dtype
    activations: torch.dtype
    kv_cache: torch.dtype

    @classmethod
    def uniform(cls, dtype: torch.dtype) -> "Precision":
        """Return one dtype for all."""
        return cls(dtype, dtype, dtype)


FLOAT32 = Precision.uniform(torch.float32)
