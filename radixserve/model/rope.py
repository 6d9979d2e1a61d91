"""Frequencies of the rotary position embedding."""

import math

import torch

from radixserve.attention.backend import Rotation
from radixserve.errors import ModelLoadError
from radixserve.model.config import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig, YarnScaling


class RotaryEmbedding:
    """Turns positions into rotations.

    frequency_factors: [head_dim / 2], divides the frequencies one by one; some GGUF files hold their scaling that way.
    Raises ModelLoadError if they are not as many.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, frequency_factors: torch.Tensor | None = None
    ) -> None:
        frequencies = _scaled_frequencies(config.rope, config.head_dim)
        if frequency_factors is not None:
            if frequency_factors.shape != frequencies.shape:
                raise ModelLoadError(
                    f"the model holds {frequency_factors.numel()} frequency factors; "
                    f"a head of {config.head_dim} elements takes {frequencies.numel()}"
                )
            frequencies = frequencies / frequency_factors
        scaling = config.rope.scaling
        self._frequencies = frequencies.to(device)
        self._attention_factor = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of each position of a step, [T]."""
        angles = positions.float().unsqueeze(1) * self._frequencies
        return Rotation(cos=angles.cos() * self._attention_factor, sin=angles.sin() * self._attention_factor)


def _scaled_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle that each pair of elements turns by a position, in radians: [head_dim / 2] float32."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling() as llama3:
            return _llama3_frequencies(frequencies, llama3)
        case YarnScaling() as yarn:
            kept = 1.0 - _yarn_ramp(rope.theta, head_dim, yarn)
            return frequencies / yarn.factor * (1.0 - kept) + frequencies * kept


def _llama3_frequencies(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    # How often a pair turns round over the original context: below low_freq_factor it is slow, above high_freq_factor
    # fast, and the share that is kept grows linearly between the two.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn_ramp(theta: float, head_dim: int, scaling: YarnScaling) -> torch.Tensor:
    """Return 0 for the pairs that stay as they are, 1 for those that are interpolated: [head_dim / 2]."""

    def pair_with_turns(turns: float) -> float:
        """Return which pair, as a real number, turns round that often over the original context."""
        period = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(theta))

    low, high = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
