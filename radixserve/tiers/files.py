"""What the disk tier asks of the operating system."""

import os
from pathlib import Path


class Files:
    """Files that are read and written at offsets; a disk that fails or hangs can stand in for it.

    All methods raise OSError. Reading and writing let other threads run meanwhile.
    """

    def open(self, path: Path) -> int:
        """Open a file for reading and writing, made if it is not there, for its owner alone. No link is followed."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def size(self, descriptor: int) -> int:
        """Return a file's size."""
        return os.fstat(descriptor).st_size

    def is_deleted(self, descriptor: int) -> bool:
        """Return whether no folder has the file any more, so that nobody finds it once it is closed."""
        return os.fstat(descriptor).st_nlink == 0

    def resize(self, descriptor: int, size: int) -> None:
        """Cut a file off or let it end in a hole, which takes no room on the disk until it is written to."""
        os.ftruncate(descriptor, size)

    def read_at(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Fill a buffer; return the number of bytes read, which is less where the file ends."""
        num_read = 0
        while num_read < len(buffer):
            count = os.preadv(descriptor, [buffer[num_read:]], offset + num_read)
            if count == 0:
                break
            num_read += count
        return num_read

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Write all of data."""
        num_written = 0
        while num_written < len(data):
            num_written += os.pwrite(descriptor, data[num_written:], offset + num_written)

    def sync(self, descriptor: int) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(descriptor)
