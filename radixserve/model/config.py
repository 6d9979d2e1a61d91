"""What the decoder must know of a model, whatever file said it."""

import math
from dataclasses import dataclass

from radixserve.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by factor, high ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """As Llama3Scaling, but the borders are counted in dimensions, and cos and sin are scaled by attention_factor.

    Source: Peng et al. 2023 (YaRN), section 3.4.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return the factor by which YaRN scales cos and sin to keep the attention's entropy.

    Source: Peng et al. 2023 (YaRN), equation 22.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, over the whole head. scaling: None where positions are used as they are."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only model.

    architecture: a key of registry.FAMILIES. attention_bias is that of the q, k and v projections.
    sliding_window: attention is exact up to that many tokens of context and wrong beyond, as no window is applied;
    whoever sets the maximum length must respect it. eos_token_ids: any of them ends an answer; may be empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise ModelLoadError(f"a head of {self.head_dim} elements cannot be rotated in pairs")
