"""Which assembler Triton's kernels go through.

ptxas 12.8, with which Triton 3.6 and 3.7 assemble for sm_90, loses addresses of matrix products: kernels read the wrong shared
memory, or fault (docs/experiments/triton.md has the cases; `sass.py` finds them in machine code). Beside it they bring 12.9 or
13.1 for newer GPUs, and these have no such fault.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from tilewise.backends.gpu.sass import disassembled, lost_addresses
from tilewise.backends.gpu.structs import Attention, Gradients
from tilewise.errors import KernelError

FIXED = (12, 9)
MARK = "--opt-level=3"
"""What ptxas does anyway. As an option it keeps these kernels apart from older ones in Triton's cache on disk."""
_one_at_a_time = threading.Lock()


def one_at_a_time() -> threading.Lock:
    """What a kernel is compiled under: which assembler runs is Triton's choice for the whole process, and may be changed here."""
    return _one_at_a_time


def _forget_lock() -> None:
    """In a child of fork, where nobody may be left to release it."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def proven(types: Any, attributes: Any, config: Any) -> bool:
    """Is a kernel among those whose tiles were measured with 12.8 and whose code under 12.8 `make compile-matrix` looks through?

    16-bit numbers, head dims of 64 or 128, rows at multiples of 16 bytes, bands or no mask, and nothing else. Newer assemblers
    spill some of their registers.
    """
    a = types[0]
    if not isinstance(a, Attention) or a.q.ptr not in ("*fp16", "*bf16") or (0, 0, 1) not in attributes:
        return False
    if not isinstance(types[1], (str, Gradients)):  # neither forward nor backward
        return False
    usual = config.D == config.DV == config.BLOCK_D == config.BLOCK_DV and config.D in (64, 128)
    more = (
        config.FP16_SPLIT
        or config.LISTED
        or config.PAGED
        or config.DROPOUT
        or not config.FOLD
        or config.SPLIT
        or config.PACK > 1
        or a.sinks_ptr != "constexpr"
    )
    literals = [literal for term in config.MASK.terms for literal in term.literals]
    band = len(literals) == 1 and literals[0].kind.is_bottom_right
    return usual and not more and (band or not literals)


def compile_soundly(target: Any, needed: bool, build: Callable[[dict[str, str]], Any]) -> Any:
    """What `build` compiles, given options: with Triton's newer assembler where its own choice is 12.8.

    Where there is no other, because the driver is too old for it or the user has chosen, 12.8's code is checked, and
    refused if an address is lost. If one assembler crashes on a kernel, the other one assembles it.
    """
    if target.backend != "cuda" or not 90 <= target.arch < 100:
        return build({})
    from triton import knobs
    from triton.runtime.errors import PTXASError

    with one_at_a_time():
        own: Any = knobs.nvidia.ptxas
        newer: Any = getattr(knobs.nvidia, "ptxas_blackwell", None)

        def by_own() -> Any:
            compiled = build({})
            if needed and _version(own) < FIXED:
                refuse_lost(compiled.asm["cubin"], own.version)
            return compiled

        def by_newer() -> Any:
            with knobs.nvidia.scope():
                knobs.nvidia.ptxas = newer.path
                return build({"ptx_options": MARK})

        chosen = "TRITON_PTXAS_PATH" in os.environ
        if chosen or newer is None or _version(newer) < FIXED or not _runs(newer):
            return by_own()
        own_first = not needed or _version(own) >= FIXED
        first, second = (by_own, by_newer) if own_first else (by_newer, by_own)
        try:
            return first()
        except PTXASError:
            return second()


def refuse_lost(cubin: bytes, version: str) -> None:
    """Raise for a kernel whose products may read the wrong memory."""
    if lost_addresses(disassembled(cubin)):
        raise KernelError(
            f"kernel: ptxas {version} has a fault, and made code for this one whose results would be wrong; update the GPU's"
            " driver to one for CUDA 13, or let TRITON_PTXAS_PATH name a ptxas of version 12.9 or later, or use backend='tiled'"
        )


def _runs(tool: Any) -> bool:
    """Does this machine's driver, if it has one, run what the tool makes?"""
    driver = driver_version()
    return driver is None or driver[0] >= _version(tool)[0]


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
