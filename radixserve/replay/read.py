"""Read a trace file of any of the known formats."""

import gzip
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from radixserve.errors import ConfigError
from radixserve.model_path import resolve_model_path
from radixserve.replay.coding_sessions import CodingSession, read_coding_sessions
from radixserve.replay.conversations import Trajectory, read_conversations
from radixserve.replay.mooncake import MooncakeRequest, read_mooncake
from radixserve.replay.trace import Trace
from radixserve.tokenizer.tokenizer import Tokenizer

_GZIP_MAGIC = b"\x1f\x8b"

Line = TypeVar("Line")


def read_trace(file: Path, num_slots: int) -> Trace:
    """Read a trace, plain or gzipped: what is in it tells the format.

    num_slots: how many sessions go on side by side, where the trace has sessions. Conversations in text are encoded by
    the demo model's tokenizer. Raises ConfigError if the file cannot be read, or holds none of the formats or nothing.
    """
    content = _read(file)
    name = file.name
    if content.startswith(b"["):
        tokenizer = Tokenizer.load(resolve_model_path(None))
        trace = read_conversations(name, _decode(file, content, list[Trajectory]), tokenizer, num_slots)
    else:
        first, *_ = content.split(b"\n", maxsplit=1)
        if b'"timestamp"' in first:
            trace = read_mooncake(name, _decode_lines(file, content, MooncakeRequest))
        else:
            trace = read_coding_sessions(name, _decode_lines(file, content, CodingSession), num_slots)
    if not trace.requests:
        raise ConfigError(f"{file} holds no request that can be replayed")
    return trace


def _read(file: Path) -> bytes:
    try:
        content = file.read_bytes()
        return (gzip.decompress(content) if content.startswith(_GZIP_MAGIC) else content).strip()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None


def _decode(file: Path, content: bytes, kind: type[Line]) -> Line:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} is no trace of a known format: {error}") from None


def _decode_lines(file: Path, content: bytes, kind: type[Line]) -> list[Line]:
    decoder = msgspec.json.Decoder(kind)
    lines = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            lines.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ConfigError(f"line {number} of {file} is no trace of a known format: {error}") from None
    return lines
