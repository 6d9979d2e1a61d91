"""A request body in a file, as commands take it."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from radixserve.errors import ConfigError


def read_request(name: str) -> dict[str, Any]:
    """Return the JSON object in a file, or on standard input for -. Raises ConfigError if there is none."""
    source = "standard input" if name == "-" else name
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return msgspec.json.decode(content, type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is no request body, a JSON object: {error}") from None
