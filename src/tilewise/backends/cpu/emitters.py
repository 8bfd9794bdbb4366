"""Which module emits which kind of kernel. Imported only when something must be compiled."""

from __future__ import annotations

from tilewise.backends.cpu import (
    backward,
    backward_matrix,
    decode_block,
    decode_stream,
    decode_tiles,
    double_backward,
    forward,
    forward_matrix,
    jvp,
    sweep,
)
from tilewise.backends.cpu.module import KernelModule
from tilewise.backends.cpu.spec import Kernel


def emit(kernel: Kernel, arch: str) -> str:
    """The kernel as LLVM IR text."""
    module: type[KernelModule]
    if kernel.kind == "decode":
        several = decode_tiles.TileDecode if kernel.matrix else decode_block.BlockDecode
        module = decode_stream.StreamDecode if kernel.tile.keys == 1 else several
    elif kernel.kind == "double_backward":
        module = double_backward.DoubleBackward
    elif kernel.kind == "sweep":
        module = sweep.Sweep
    elif kernel.kind == "jvp":
        module = jvp.Jvp
    elif kernel.kind == "forward":
        module = forward_matrix.MatrixForward if kernel.matrix else forward.Forward
    else:
        module = backward_matrix.MatrixBackward if kernel.matrix else backward.Backward
    return str(module(kernel, arch).unit.module)
