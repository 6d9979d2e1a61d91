"""Load a model's shape and weights from whichever file format it comes in."""

from pathlib import Path

import torch

from radixserve.model.config import ModelConfig
from radixserve.model.cpp_decoder import CppDecoder, has_packed_layers
from radixserve.model.cpp_ops import CPP_OPS
from radixserve.model.decoder import Decoder
from radixserve.model.fused_weights import FusedWeights, TensorSource
from radixserve.model.gguf_config import read_gguf_config
from radixserve.model.gguf_source import GGUFSource
from radixserve.model.hf_config import read_hf_config
from radixserve.model.ops import TORCH_OPS, DecoderOps
from radixserve.model.precision import Precision
from radixserve.model.rope import RotaryEmbedding
from radixserve.model.safetensors_source import SafetensorsSource


def read_model_config(path: Path) -> ModelConfig:
    """Return the shape of the model in a Hugging Face directory or a .gguf file, reading no weights.

    Raises ModelLoadError for a file that is broken, or a model that this decoder would compute wrongly.
    """
    return read_hf_config(path) if path.is_dir() else read_gguf_config(path)


def load_model(
    path: Path,
    config: ModelConfig,
    *,
    precision: Precision,
    device: torch.device,
    show_progress: bool,
    ops: DecoderOps = TORCH_OPS,
) -> Decoder:
    """Return the decoder on device; config is read_model_config's of the same path.

    precision: weights may be in another dtype than activations only where choose_linear allows it. Shows a progress bar
    on stderr if asked to. ops: with CPP_OPS and float16 weights, all layers run in one call.
    Raises ModelLoadError naming the tensor that is missing, unexpected or of a shape that config does not say, and
    Float16RangeError for one that float16 would ruin.
    """
    source: TensorSource = SafetensorsSource(path) if path.is_dir() else GGUFSource(path, config)
    reader = FusedWeights(source, config, precision=precision, device=device)
    weights = reader.load(show_progress=show_progress)
    rotary = RotaryEmbedding(config, device, source.rope_frequency_factors())
    if ops is CPP_OPS and has_packed_layers(weights):
        return CppDecoder(config, weights, rotary)
    return Decoder(config, weights, rotary, ops)
