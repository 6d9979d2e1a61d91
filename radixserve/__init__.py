"""radixserve: an LLM serving engine for agents that computes each shared prompt prefix once."""

from radixserve.config import EngineConfig
from radixserve.errors import RadixServeError
from radixserve.sampling_params import SamplingParams
from radixserve.version import __version__

__all__ = ["EngineConfig", "RadixServeError", "SamplingParams", "__version__"]
