"""What the bytes of a block depend on beside its tokens."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

from radixserve.errors import ModelLoadError

LAYOUT_VERSION = 1  # to be raised when the same settings begin to lay out or compute blocks differently
_CHUNK_BYTES = 16 << 20
_MAX_THREADS = 8


@dataclass(slots=True, frozen=True, kw_only=True)
class BlockFormat:
    """How a block's bytes come about. The dtypes by their names; layout: what the bytes' order depends on."""

    weights_dtype: str
    activation_dtype: str
    kv_dtype: str
    block_size: int
    block_bytes: int
    layout: str = ""


def build_identity(weights: bytes, block_format: BlockFormat) -> bytes:
    """Return the SHA-256 that two servers have in common if, and only if, one can use the other's blocks.

    weights: their digest.
    """
    fields = [str(LAYOUT_VERSION), *(str(value) for value in astuple(block_format))]
    return _digest_of([b"radixserve build", weights, *(value.encode() for value in fields)])


def weights_digest(path: Path, num_threads: int | None = None) -> bytes:
    """Return a SHA-256 of a model's content: a .gguf file, or a directory's config.json, *.safetensors and their index.

    In a directory the files' names count; what else lies there does not. Read in chunks, each hashed by itself, by as
    many threads as there are CPUs, at most 8, while other threads run. Raises ModelLoadError if a file cannot be read.
    """
    files = {"": path}
    if path.is_dir():
        paths = [path / "config.json", *path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")]
        files = {file.name: file for file in sorted(paths)}
    try:
        chunks = [
            (name, file, start)
            for name, file in files.items()
            for start in range(0, max(file.stat().st_size, 1), _CHUNK_BYTES)
        ]
        with ThreadPoolExecutor(num_threads or min(os.cpu_count() or 1, _MAX_THREADS)) as threads:
            digests = list(threads.map(lambda chunk: _chunk_digest(*chunk), chunks))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return _digest_of([b"radixserve weights", *digests])


def _chunk_digest(name: str, path: Path, start: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        content = bytearray(_CHUNK_BYTES)
        num_read = 0
        while (count := file.readinto(memoryview(content)[num_read:])) > 0:
            num_read += count
    return _digest_of([name.encode(), str(start).encode(), memoryview(content)[:num_read]])


def _digest_of(parts: Sequence[bytes | memoryview]) -> bytes:
    """Return the SHA-256 of parts, each after its length, so that no two lists are hashed alike."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
