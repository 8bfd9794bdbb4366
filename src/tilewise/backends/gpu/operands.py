"""How the numbers of a problem enter the matrix products of a GPU. Free of torch: plans ask it, too."""

from __future__ import annotations

from tilewise.problem import Problem


def padded(dim: int) -> int:
    """A head dim inside a tile: a power of two, and no less than a matrix instruction takes."""
    return max(16, 1 << (dim - 1).bit_length())


def dot_precision(problem: Problem, hip: bool) -> str:
    """How products of fp32 tiles are formed; 16-bit tiles know one way only."""
    if problem.dtype != "float32":
        return "ieee"
    if problem.precision == "tf32":
        return "tf32"
    return "ieee" if hip else "tf32x3"


def splits_fp32(problem: Problem, hip: bool) -> bool:
    """Are fp32 operands split into two fp16 parts?

    Three products of fp16 cost half of what three of tf32 do, need half the registers of a thread, and their operands may lie
    either way.
    """
    return problem.dtype == "float32" and problem.precision != "tf32" and not hip
