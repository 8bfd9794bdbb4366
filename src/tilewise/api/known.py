"""What is remembered of a call: its problem, who serves it, and a short way there for the next one like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Anywhere, Backend, Inputs, Launcher
from tilewise.ops import attend
from tilewise.problem import Problem

Like = Callable[[Tensor, Tensor, Tensor], bool]
Launch = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]


class Known:
    """`like(q, k, v)`: are these tensors as those were, in all that matters? Then `launch(q, k, v)` is the call.

    It does not look at addresses, settings, the gradient mode and active modes: they are the caller's to compare, addresses
    only if `aligned` says what they were like.
    """

    __slots__ = ("aligned", "launch", "like")

    def __init__(self, like: Like, launch: Launch, aligned: bool | None) -> None:
        self.like, self.launch, self.aligned = like, launch, aligned

    @classmethod
    def of(
        cls,
        problem: Problem,
        inputs: Inputs,
        chosen: Backend,
        given: tuple[Tensor, Tensor, Tensor],
        layout: str,
        backend: str,
    ) -> Known:
        """`given` are q, k, v as the user passed them, `inputs` the same inside; `backend` is the name asked for."""
        like = _likeness(given)
        where: bool | None = aligned(*given)
        # whoever comes before it has declined the best of addresses
        if where and isinstance(chosen, Anywhere) and chosen.any_address:
            where = None
        quick = None
        if isinstance(chosen, Launcher) and not problem.needs_grad and not problem.needs_lse:
            quick = chosen.launcher(problem, inputs)
        if quick is None:
            return cls(like, _launch(problem, chosen, layout, backend), where)
        return cls(like, quick if layout == "bhsd" else _transposed(quick), where)

    def expect(self, q: Tensor, k: Tensor, v: Tensor) -> Known:
        """The same call, known again by tensors like these, which may be an inference mode's or require gradients elsewhere.

        A new one, since others may hold this one under settings that make of such tensors another call.
        """
        if self.like(q, k, v) or q is k or k is v or v is q:
            return self
        return Known(_likeness((q, k, v)), self.launch, self.aligned)


def aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Do all three begin where sixteen bytes do? Some backends refuse other addresses."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0


def _launch(problem: Problem, chosen: Backend, layout: str, backend: str) -> Launch:
    def launch(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if layout == "bshd":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = attend(problem, Inputs(q, k, v), backend, chosen)
        if layout == "bshd":
            out = out.transpose(1, 2)
        return (out, lse) if problem.needs_lse else out

    return launch


def _transposed(quick: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Launch:
    return lambda q, k, v: quick(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _likeness(given: tuple[Tensor, Tensor, Tensor]) -> Like:
    """One question to torch instead of eighteen.

    What the compiler guards its code by: type, dtype, device, sizes, strides, requires_grad and the keys by which torch
    dispatches, among them those of autocast, functorch and lazy negation. It says no where two of the tensors are one.
    """
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards  # its stub lacks the tensors
        check: Like = make(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check
    except (AttributeError, TypeError, RuntimeError):  # another torch: calls are looked up by their shapes and strides
        return lambda q, k, v: False
