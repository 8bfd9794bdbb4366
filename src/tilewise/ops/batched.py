"""Gradients in a batch (`is_grads_batched`, vectorised Jacobians): torch hands them to an operator one at a time.

A batched tensor has no memory a kernel could read. torch slices it for operators it has no rule for, if tensors are all that
is batched among their arguments and none comes in a list. So this operator takes the upstream gradients alone; everything
else about the call waits in a table.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

Compute = Callable[[Tensor, Tensor | None], tuple[Tensor | None, ...]]

_LIBRARY = torch.library.Library("tilewise_batched", "DEF")
_LIBRARY.define("gradients(Tensor dout, Tensor? dlse, int call) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_WAITING: dict[int, Compute] = {}
_numbers = count()


def gradients(compute: Compute, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """`compute` of every gradient in the batch."""
    call, missing = next(_numbers), [False] * 5

    def run(dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = compute(dout, dlse)
        missing[:] = [grad is None for grad in grads]
        return grads

    _WAITING[call] = run
    try:
        grads = torch.ops.tilewise_batched.gradients(dout, dlse, call)
    finally:
        del _WAITING[call]
    return tuple(None if absent else grad for grad, absent in zip(grads, missing, strict=True))


def _gradients(dout: Tensor, dlse: Tensor | None, call: int) -> tuple[Tensor, ...]:
    return tuple(dout.new_empty(0) if grad is None else grad for grad in _WAITING[call](dout, dlse))


_LIBRARY.impl("gradients", _gradients, "CompositeExplicitAutograd")
