"""Write the demo model as a GGUF file in F16, for servers that read GGUF and should run radixserve's weights.

    python benchmarks/export_demo_gguf.py FILE.gguf [SOURCE.gguf]

Without SOURCE it is the demo model. Matrices are the dequantised ones, rounded to half precision as `--dtype auto`
rounds them; vectors (norms, biases, RoPE factors) stay in float32, as llama.cpp wants them. Names, the order of the
rows (which converters of llama models permute in q and k) and all metadata, tokenizer and chat template among it, are
the source's.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType

from radixserve.model.gguf_file import GGUFFile
from radixserve.model_path import resolve_model_path

# What the writer writes itself: the architecture, and where tensors begin.
_OWN_KEYS = (Keys.General.ARCHITECTURE, Keys.General.ALIGNMENT, Keys.General.FILE_TYPE)


def export(source: Path, target: Path) -> None:
    """Write the weights of source to target, and its metadata with the file's type changed to F16.

    Raises ModelLoadError if source cannot be read, ValueError if a weight is too large for half precision.
    """
    file = GGUFFile(source)
    writer = GGUFWriter(target, file.metadata[Keys.General.ARCHITECTURE])
    _copy_metadata(source, writer)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    for name in file.tensors:
        values = file.read(name)
        # ggml wants both sides of an element-wise product in float32.
        writer.add_tensor(name, values if values.ndim == 1 else _to_half(name, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _to_half(name: str, values: np.ndarray) -> np.ndarray:
    largest = np.abs(values).max()
    if largest > np.finfo(np.float16).max:
        raise ValueError(f"{name} holds {largest:g}; half precision ends at {np.finfo(np.float16).max}")
    return values.astype(np.float16)


def _copy_metadata(source: Path, writer: GGUFWriter) -> None:
    # radixserve's own reader leaves out the types, which llama.cpp checks.
    for field in GGUFReader(source).fields.values():
        if field.name.startswith("GGUF.") or field.name in _OWN_KEYS:
            continue
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if is_array else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="FILE.gguf")
    parser.add_argument("source", nargs="?", metavar="SOURCE.gguf")
    options = parser.parse_args(arguments)
    export(resolve_model_path(options.source), options.target)


if __name__ == "__main__":
    main()
