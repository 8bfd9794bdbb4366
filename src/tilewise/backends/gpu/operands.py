"""How the numbers of a problem enter the matrix products of a GPU. Free of torch: plans ask it, too."""

from __future__ import annotations

from tilewise.problem import MAX_HEAD_DIM, Problem


def padded(dim: int) -> int:
    """A head dim inside a tile: a power of two, and no less than a matrix instruction takes."""
    return max(16, 1 << (dim - 1).bit_length())


def in_two(head_dim: int, first: int = MAX_HEAD_DIM) -> tuple[int, int]:
    """The columns of a query or key that is multiplied in two parts, each as wide as a tile has it; the second may be 0."""
    return (first, padded(head_dim - first)) if head_dim > first else (padded(head_dim), 0)


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
    either way. Pages stay as they are.
    """
    return problem.dtype == "float32" and problem.precision != "tf32" and not hip and not problem.page
