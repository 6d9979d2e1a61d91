"""Write the demo model as a Hugging Face directory in float32, for servers that read no GGUF.

    python benchmarks/export_demo_model.py DIRECTORY

The weights are the dequantised ones that radixserve computes with, and the tokenizer is the same, so that two servers
can be compared on one model.
"""

import sys
from pathlib import Path

import msgspec
from safetensors.torch import save_file

from radixserve.model.gguf_source import GGUFSource
from radixserve.model.loader import read_model_config
from radixserve.model_path import resolve_model_path
from radixserve.tokenizer.gguf_tokenizer import read_gguf_tokenizer


def export(directory: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into directory."""
    path = resolve_model_path(None)
    model = read_model_config(path)
    source = GGUFSource(path, model)
    tokenizer = read_gguf_tokenizer(path)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: source.read(name).contiguous() for name in sorted(source.names())},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    end_token_id = min(tokenizer.eos_token_ids)
    files = {
        "config.json": {
            "architectures": [model.architecture],
            "model_type": "llama",
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "rms_norm_eps": model.rms_norm_eps,
            "rope_theta": model.rope.theta,
            "max_position_embeddings": model.max_position_embeddings,
            "tie_word_embeddings": model.tie_word_embeddings,
            "hidden_act": "silu",
            "dtype": "float32",
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": end_token_id,
        },
        "generation_config.json": {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": end_token_id},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.backend.id_to_token(end_token_id),
            "chat_template": tokenizer.chat_templates["default"],
            "model_max_length": model.max_position_embeddings,
        },
    }
    for name, content in files.items():
        (directory / name).write_bytes(msgspec.json.encode(content))
    tokenizer.backend.save(str(directory / "tokenizer.json"))


if __name__ == "__main__":
    export(Path(sys.argv[1]))
