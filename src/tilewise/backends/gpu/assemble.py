"""Which assembler Triton's kernels go through.

ptxas 12.8, with which Triton 3.6 and 3.7 assemble for sm_90, loses addresses of matrix products: kernels read the wrong shared
memory, or fault (docs/triton-notes.md has the cases; `tools/sassorigin.py` finds them in machine code). Beside it they bring 12.9
or 13.1 for newer GPUs, and these have no such fault.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from tilewise.backends.gpu.structs import Attention

FIXED = (12, 9)
MARK = "--opt-level=3"
"""What ptxas does anyway. As an option it keeps these kernels apart from older ones in Triton's cache on disk."""
_one_at_a_time = threading.Lock()


def proven(types: Any, attributes: Any, config: Any) -> bool:
    """Is a kernel among those whose tiles were measured with 12.8 and whose code under 12.8 `make compile-matrix` looks through?

    16-bit numbers, head dims of 64 or 128, rows at multiples of 16 bytes, bands or no mask, and nothing else. Newer assemblers
    spill some of their registers.
    """
    a = types[0]
    if not isinstance(a, Attention) or a.q.ptr not in ("*fp16", "*bf16") or (0, 0, 1) not in attributes:
        return False
    usual = config.D == config.DV == config.BLOCK_D == config.BLOCK_DV and config.D in (64, 128)
    more = (
        config.TERMS > 1
        or config.DROPOUT
        or not config.FOLD
        or config.SPLIT
        or config.PACK > 1
        or a.sinks_ptr != "constexpr"
    )
    return usual and not more and config.STRUCTURE in ("", "b")


@contextmanager
def sound_assembler(target: Any, needed: bool = True) -> Iterator[dict[str, str]]:
    """Inside, Triton assembles with its newer assembler where its own choice is 12.8; the options that go with it."""
    if not needed or target.backend != "cuda" or not 90 <= target.arch < 100:
        yield {}
        return
    from triton import knobs

    with _one_at_a_time:  # the choice is Triton's, for the whole process
        newer = getattr(knobs.nvidia, "ptxas_blackwell", None)
        chosen = "TRITON_PTXAS_PATH" in os.environ  # the user's own assembler
        if chosen or newer is None or _version(knobs.nvidia.ptxas) >= FIXED or _version(newer) < FIXED:
            yield {}
            return
        if not _runs(newer):
            yield {}
            return
        with knobs.nvidia.scope():
            knobs.nvidia.ptxas = newer.path
            yield {"ptx_options": MARK}


def _runs(tool: Any) -> bool:
    """Does this machine's driver, if it has one, run what the tool makes?"""
    driver, needed = driver_version(), _version(tool)[0]
    if driver is None or driver[0] >= needed:
        return True
    warnings.warn(
        f"this GPU's driver is for CUDA {driver[0]}.{driver[1]}; with one for CUDA {needed} tilewise would not have to use"
        " ptxas 12.8, which is known to miscompile some kernels. Update the driver, or install triton 3.6.",
        stacklevel=2,
    )
    return False


@cache
def driver_version() -> tuple[int, int] | None:
    """The CUDA version of the driver; None where there is none."""
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in tool.version.split("."))
