"""How much memory a device has left."""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import torch

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(slots=True, frozen=True)
class DeviceMemory:
    """Bytes of a device. available: what this process could still take without swapping or failing."""

    total: int
    available: int


def device_memory(device: torch.device) -> DeviceMemory:
    """Measure a device's memory now. A container's limit counts as the machine's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total=total, available=free)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    left = [value for value in (_machine_available(), cgroup_available(_CGROUP_ROOT)) if value is not None]
    return DeviceMemory(total=total, available=min(left, default=total))


def return_free_memory() -> None:
    """Give memory that is free inside this process back to the machine, where the C library can: glibc.

    Loading frees a copy of each weight between others that stay, so the heap cannot shrink by itself.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _machine_available() -> int | None:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return None


def cgroup_available(root: Path) -> int | None:
    """Return what the control group mounted at root leaves this process; None if it sets no limit.

    File pages that the kernel can drop are not counted as used. Reads version 2, else version 1.
    """
    for folder, limit_file, usage_file, droppable in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if (folder / limit_file).exists():
            limit = (folder / limit_file).read_text().strip()
            if limit == "max":
                return None
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / usage_file).read_text()) - int(statistics.get(droppable, 0))
            return max(0, int(limit) - used)
    return None
