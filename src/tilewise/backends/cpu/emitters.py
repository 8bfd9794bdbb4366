"""Which module emits which kind of kernel. Imported only when something must be compiled."""

from __future__ import annotations

from tilewise.backends.cpu.backward import Backward
from tilewise.backends.cpu.backward_matrix import MatrixBackward
from tilewise.backends.cpu.decode_block import BlockDecode
from tilewise.backends.cpu.decode_stream import StreamDecode
from tilewise.backends.cpu.forward import Forward
from tilewise.backends.cpu.forward_matrix import MatrixForward
from tilewise.backends.cpu.module import KernelModule
from tilewise.backends.cpu.spec import Kernel


def emit(kernel: Kernel, arch: str) -> str:
    """The kernel as LLVM IR text."""
    decode = StreamDecode if kernel.tile.keys == 1 else BlockDecode
    backward = MatrixBackward if kernel.matrix else Backward
    forward = MatrixForward if kernel.matrix else Forward
    kinds: dict[str, type[KernelModule]] = {"forward": forward, "backward": backward, "decode": decode}
    return str(kinds[kernel.kind](kernel, arch).unit.module)
