"""A backend that computes nothing: what is left of a call is what tilewise adds to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from tilewise import dispatch
from tilewise.backends.base import Backend, BackwardInputs, Grads, Inputs, Verdict, empty_lse, empty_out
from tilewise.problem import Problem


class NullBackend(Backend):
    name = "null"

    def usable(self, device: str) -> Verdict:
        return Verdict(True)

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        return Verdict(True)

    def declines(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> str | None:
        return "computes nothing"

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q)

    def backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        return Grads(inputs.q, inputs.k, inputs.v)


backend = NullBackend()


@contextmanager
def null_backend() -> Iterator[str]:
    """Registers it for a while, by the name this gives."""
    dispatch.register(backend.name, dispatch.Entry(__name__, ("cpu", "cuda")))
    try:
        yield backend.name
    finally:
        del dispatch.REGISTRY[backend.name]
