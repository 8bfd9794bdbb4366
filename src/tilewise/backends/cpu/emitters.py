"""Which module emits which kind of kernel. Imported only when something must be compiled."""

from __future__ import annotations

from tilewise.backends.cpu import backward, decode, forward
from tilewise.backends.cpu.spec import Kernel


def emit(kernel: Kernel, arch: str) -> str:
    """The kernel as LLVM IR text."""
    return {"forward": forward.emit, "backward": backward.emit, "decode": decode.emit}[kernel.kind](kernel, arch)
