"""The directory of the disk tier.

    DIR/lock                    locked while a server uses DIR; holds its process id
    DIR/<build in hex>/000000.kv, 000001.kv, ...   one folder for each build, as only its own blocks mean anything to it

Keys and values tell what users have written, so folders and files are open to their owner alone, and a directory that
others could write to is refused.
"""

import contextlib
import fcntl
import os
import re
import stat
from pathlib import Path

from radixserve.errors import ConfigError
from radixserve.tiers.files import Files

_BUILD = re.compile(r"[0-9a-f]{64}")
_SEGMENT = re.compile(r"[0-9]{6}\.kv")
_PID_BYTES = 32


def check_directory(path: Path) -> None:
    """Raise ConfigError where CacheDirectory would, so that it is known before a model is loaded for nothing.

    Makes the directory if it is not there. What raises OSError there is nothing wrong here: the tier will be off.
    """
    with contextlib.suppress(OSError):
        _make_private(path)
        lock = Files().open(path / "lock")
        try:
            _lock(lock, path, Files())
        finally:
            os.close(lock)


class CacheDirectory:
    """A directory that this process alone uses, until close or its end, and the segments in it.

    Makes the directory if it is not there. Raises ConfigError if another server uses it, if it belongs to or can be
    written by other users, or is no directory; OSError if it cannot be made or written.
    """

    def __init__(self, path: Path, build: bytes, files: Files) -> None:
        self.path = path
        self._own = path / build.hex()
        self._files = files
        _make_private(path)
        self._lock = files.open(path / "lock")
        try:
            _lock(self._lock, path, files)
            self._write_process_id()
            self._own.mkdir(mode=0o700, exist_ok=True)
        except BaseException:
            files.close(self._lock)
            raise

    def segment_path(self, number: int) -> Path:
        """Return where the build's segment of that number belongs."""
        return self._own / f"{number:06}.kv"

    def segments(self) -> dict[int, Path]:
        """Return the build's segments by number. Raises OSError."""
        return {int(path.stem): path for path in _segments_in(self._own)}

    def num_other_bytes(self) -> int:
        """Return the size of all other builds' segments. Raises OSError."""
        return sum(path.stat().st_size for path in self._others())

    def remove_other(self) -> None:
        """Remove the segment of another build that was written to longest ago; there must be one. Raises OSError."""
        oldest = min(self._others(), key=lambda path: path.stat().st_mtime_ns)
        oldest.unlink()
        if not any(oldest.parent.iterdir()):
            oldest.parent.rmdir()

    def close(self) -> None:
        """Let another server use the directory."""
        self._files.close(self._lock)

    def _others(self) -> list[Path]:
        builds = [
            folder
            for folder in self.path.iterdir()
            if _BUILD.fullmatch(folder.name) and folder != self._own and folder.is_dir() and not folder.is_symlink()
        ]
        return [path for folder in builds for path in _segments_in(folder)]

    def _write_process_id(self) -> None:
        content = f"{os.getpid()}\n".encode()
        self._files.resize(self._lock, 0)
        self._files.write_at(self._lock, memoryview(content), 0)


def _lock(descriptor: int, path: Path, files: Files) -> None:
    """Lock the open lock of a directory until it is closed. Raises ConfigError if another server has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = bytearray(_PID_BYTES)
        files.read_at(descriptor, memoryview(pid), 0)
        owner = pid.rstrip(b"\0\n").decode("ascii", "replace")
        raise ConfigError(
            f"another server (process {owner}) uses {path}; give each server a --kv-cache-dir of its own"
        ) from error


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"--kv-cache-dir {path} is no directory, or lies in none") from error
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise ConfigError(f"--kv-cache-dir {path} belongs to another user; name a new directory inside of it")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"--kv-cache-dir {path} can be written by other users; chmod go-w it, or name a new directory inside of it"
        )


def _segments_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _SEGMENT.fullmatch(path.name))
