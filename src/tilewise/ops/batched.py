"""Tensors in a batch of `is_grads_batched` and vectorised Jacobians: torch hands them to an operator one at a time.

A batched tensor has no memory a kernel could read. torch slices it for operators it has no rule for, if tensors are all that
is batched among their arguments and none comes in a list. So this operator takes tensors alone, the upstream gradients and
tangents; everything else about the call waits in a table. `torch.func.vmap` has other tensors, and rules (`ops.vmap`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor

Compute = Callable[..., Sequence[Tensor | None]]

TAKES, GIVES = 9, 5
is_batched = torch._C._functorch.is_legacy_batchedtensor
_LIBRARY = torch.library.Library("tilewise_batched", "DEF")
_TAKEN, _GIVEN = ", ".join(f"Tensor? x{i}" for i in range(TAKES)), ", ".join(["Tensor"] * GIVES)
_LIBRARY.define(f"each({_TAKEN}, int call) -> ({_GIVEN})")
_WAITING: dict[int, Compute] = {}
_numbers = count()


def each(compute: Compute, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """What `compute` gives for every one in the batch, at most GIVES results."""
    call, missing = next(_numbers), [False] * GIVES
    results: list[int] = []

    def run(*tensors: Tensor | None) -> Sequence[Tensor | None]:
        found = compute(*tensors[: len(given)])
        results[:] = [len(found)]
        missing[: len(found)] = [x is None for x in found]
        return found

    given = tensors
    _WAITING[call] = run
    try:
        found = torch.ops.tilewise_batched.each(*tensors, *[None] * (TAKES - len(tensors)), call)
    finally:
        del _WAITING[call]
    return tuple(None if absent else x for x, absent in zip(found, missing, strict=True))[: results[0]]


def _each(*args: Tensor | None) -> tuple[Tensor, ...]:
    *tensors, call = args
    like = next(x for x in tensors if x is not None)
    found = _WAITING[int(call)](*tensors)  # type: ignore[arg-type]
    return tuple(like.new_empty(0) if x is None else x for x in (*found, *[None] * (GIVES - len(found))))


_LIBRARY.impl("each", _each, "CompositeExplicitAutograd")
