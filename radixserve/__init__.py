"""radixserve: an LLM serving engine for agents that computes each shared prompt prefix once."""

import importlib
from typing import TYPE_CHECKING, Any

from radixserve.beam_search_params import BeamSearchParams
from radixserve.config import EngineConfig
from radixserve.errors import RadixServeError
from radixserve.sampling_params import SamplingParams
from radixserve.version import __version__

if TYPE_CHECKING:
    from radixserve.engine.async_engine import AsyncEngine
    from radixserve.llm import LLM

__all__ = ["LLM", "AsyncEngine", "EngineConfig", "RadixServeError", "SamplingParams", "BeamSearchParams", "__version__"]

# Imported at first use: whoever needs only the settings, the API process for one, must not load torch.
_LAZY = {"LLM": "radixserve.llm", "AsyncEngine": "radixserve.engine.async_engine"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'radixserve' has no attribute {name!r}")
