"""Results held to the float64 oracle: which tensors are outside their error bounds, and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.numerics.second_order import second_order
from tilewise.errors import LayoutError
from tilewise.numerics import bounds
from tilewise.numerics.oracle import Inputs, oracle, oracle_gradients, oracle_second
from tilewise.problem import Problem


class Excess(NamedTuple):
    """A tensor outside its bound, by its worst element."""

    name: str
    at: tuple[int, ...]
    actual: float
    exact: float
    bound: float
    outside: int
    elements: int

    def __str__(self) -> str:
        error = abs(self.actual - self.exact)
        return (
            f"{self.name}{list(self.at)} is {self.actual:.9g}, exactly {self.exact:.9g}: off by {error:.3g}, "
            f"{error / self.bound if self.bound else float('inf'):.3g} times the bound {self.bound:.3g} "
            f"({self.outside} of {self.elements} elements are outside theirs)"
        )


def check(actual: Tensor, exact: Tensor, bound: Tensor, name: str = "result") -> Excess | None:
    """None if every element is within its bound, else the worst one.

    Infinities and NaN must be where they are in `exact`, except that a value may overflow where its bound reaches the
    limit of its dtype.
    """
    if actual.shape != exact.shape:
        raise LayoutError(f"{name}: got shape {tuple(actual.shape)}, need the oracle's {tuple(exact.shape)}")
    ratio = bounds.ratios(actual, exact, bound)
    outside = int((ratio > 1).sum())
    if not outside:
        return None
    worst = int(ratio.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst, device="cpu"), actual.shape))
    return Excess(name, at, float(actual[at]), float(exact[at]), float(bound[at]), outside, actual.numel())


def check_forward(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor | None = None) -> list[Excess]:
    """Hold a forward to the oracle: the tensors that are outside their bounds."""
    with torch.no_grad():
        exact = oracle(problem, inputs)
    return _excesses(("out", "lse"), (out, lse), exact, bounds.forward(problem, inputs))


def check_backward(problem: Problem, inputs: Inputs, dout: Tensor, dlse: Tensor | None, grads: object) -> list[Excess]:
    """Hold gradients (attributes dq, dk, dv, dbias, dsinks; None is not checked) to the oracle."""
    exact, bound = oracle_gradients(problem, inputs, dout, dlse), bounds.backward(problem, inputs, dout, dlse)
    return _excesses(exact._fields, [getattr(grads, name) for name in exact._fields], exact, bound)


def check_second(
    problem: Problem, inputs: Inputs, upstream: tuple[Tensor, Tensor | None], tangents: Sequence[Tensor | None], found: object
) -> list[Excess]:
    """Hold out_t, lse_t and the derivative of the gradients (attributes as in Gradients; None is not checked) to the oracle."""
    out_t, lse_t, grads = oracle_second(problem, inputs, *upstream, tangents)
    bound = second_order(problem, inputs, *upstream, tangents)
    names = ("out_t", "lse_t", *grads._fields)
    exact, limits = (out_t, lse_t, *grads), (bound.out_t, bound.lse_t, *bound.grads)
    return _excesses(names, [getattr(found, name) for name in names], exact, limits)


def _excesses(names: Iterable[str], *tensors: Iterable[Tensor | None]) -> list[Excess]:
    """Of tensors, their exact values and their bounds; None is not checked."""
    excesses = []
    for name, actual, exact, bound in zip(names, *tensors, strict=True):
        if actual is not None:
            assert exact is not None and bound is not None, name
            excesses.append(check(actual, exact, bound, name))
    return [excess for excess in excesses if excess is not None]
