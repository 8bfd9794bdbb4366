"""Running sums in the dtype of the arithmetic."""

from __future__ import annotations

from torch import Tensor

from tilewise.backends.sequence import SequenceView
from tilewise.numerics.summation import Compensated
from tilewise.problem import Problem


class Plain:
    """A running sum in the dtype of the arithmetic; `Compensated` is its careful twin."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def add(self, x: Tensor) -> None:
        self.value = self.value + x

    def scale(self, factor: Tensor) -> None:
        self.value = self.value * factor

    def total(self) -> Tensor:
        return self.value


Sum = Plain | Compensated


def accumulator(zero: Tensor, problem: Problem) -> Sum:
    return (Compensated if problem.carries_errors else Plain)(zero)


def key_sums(seq: SequenceView) -> tuple[list[Sum], list[Sum]]:
    """Sums for dK and dV, one for each key block."""
    problem, inputs = seq.problem, seq.inputs
    dk, dv = [], []
    for j in range(seq.tiles.cols):
        start, end = seq.key_block(j)
        zero = inputs.k.new_zeros((seq.batch, seq.kv_heads, end - start, inputs.k.shape[-1]), dtype=seq.dtype)
        dk.append(accumulator(zero, problem))
        dv.append(accumulator(zero.new_zeros((*zero.shape[:3], inputs.v.shape[-1])), problem))
    return dk, dv
