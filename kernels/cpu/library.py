"""The C++ kernels as a library. Whoever calls them goes through the launchers beside this file, which check first."""

import ctypes
import functools
import importlib.machinery
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path

# Before the library: it brings an OpenMP runtime of its own, and the first one that is loaded is used by both. Two of
# them would keep two sets of threads, which wait for work on the same cores.
import torch

# Of radixserve_cpu.h. A library of another version takes its arguments otherwise.
ABI_VERSION = 3
# Less than this is done before a second thread has woken up.
_ELEMENTS_OF_A_THREAD = 2**14

_SIGNATURES: dict[str, tuple[Sequence[type], type | None]] = {
    "radixserve_abi_version": ((), c_int32),
    "radixserve_is_supported": ((), c_int32),
    "radixserve_paged_attention": ((c_void_p, c_void_p, c_int32, c_int32), c_int32),
    "radixserve_write_kv": ((c_void_p, c_int32, c_int32), None),
    "radixserve_rms_norm": ((c_void_p, c_int32), None),
    "radixserve_has_avx512": ((), c_int32),
    "radixserve_pack_weight": ((c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int32), None),
    "radixserve_linear": ((c_void_p, c_void_p, c_int32, c_int32), None),
    "radixserve_decoder_layers": ((c_void_p, c_void_p, c_int32, c_int32), c_int32),
    "radixserve_silu_mul": ((c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32), None),
}


class CpuKernelsUnavailableError(Exception):
    """The C++ kernels cannot run here. The message says why, as a sentence without its full stop."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, loaded once; a call of it lets other threads of Python run.

    A call costs 1 microsecond more than one of an extension module would, 0.15 ms in a decode step of 30 layers; for
    that it needs no header of Python's to be built. Raises CpuKernelsUnavailableError.
    """
    names = (f"native{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    path = next((path for name in names if (path := Path(__file__).with_name(name)).exists()), None)
    if path is None:
        raise CpuKernelsUnavailableError(
            "the C++ kernels are not built: they need Linux on x86-64, and g++ when radixserve is installed"
        )
    return load(path)


def obstacle() -> str | None:
    """Return why the C++ kernels cannot run here, a sentence without its full stop; None if they can."""
    try:
        library()
    except CpuKernelsUnavailableError as error:
        return str(error)
    return None


def load(path: Path) -> ctypes.CDLL:
    """Load the library at path. Raises CpuKernelsUnavailableError."""
    try:
        loaded = ctypes.CDLL(str(path))
        version = loaded.radixserve_abi_version()
    except (OSError, AttributeError) as error:
        raise CpuKernelsUnavailableError(f"the C++ kernels cannot be loaded: {error}") from error
    if version != ABI_VERSION:
        raise CpuKernelsUnavailableError("the C++ kernels are of another version; install radixserve again")
    if not loaded.radixserve_is_supported():
        raise CpuKernelsUnavailableError("this CPU lacks AVX2, FMA or F16C, which the C++ kernels need")
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(loaded, name)  # which remembers it, as loaded[name] does not
        function.argtypes, function.restype = list(arguments), result
    return loaded


def threads_for(num_elements: int) -> int:
    """Return how many of torch's threads should share a pass over so many elements."""
    return max(1, min(torch.get_num_threads(), num_elements // _ELEMENTS_OF_A_THREAD))
