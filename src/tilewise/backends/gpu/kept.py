"""What is made from a mask's tensors or from `cu_seqlens` is kept with the problem, which the call cache keeps: lists, converted
tensors, the order of a packed batch.

It is taken again with the same versions of the program's tensors, the same `cu_seqlens` and on the same stream; masks whose own
tensors have changed come with another problem. Tensors that count no versions (inference mode, numpy) keep nothing. Nor does a
CUDA graph while it is captured, so that a replay reads what the tensors hold then. A write through `.data` counts no version, for
torch's own checks neither, nor does what a graph's replay or a kernel of someone else writes: after one, build the mask anew. For
an order of a packed batch that is not needed, see `hopper/packed_order.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import is_
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.gpu import record
from tilewise.backends.gpu.compiled import is_collecting
from tilewise.problem import Problem

KEPT = 32
"""Things kept with one problem, or one leaf of a mask: three passes of some masks and lengths. When there are more, all are
dropped."""
T = TypeVar("T")


def kept(problem: Problem, q: Tensor, what: Hashable, make: Callable[[], T], cu: tuple[Tensor, ...] = ()) -> T:
    """What `make` gives from the mask, and from cumulative lengths `cu`, kept with the problem under `what`, where q is."""
    if capturing(q):
        return make()
    stream = record.current_stream(q.device.index) if q.is_cuda else 0
    try:
        versions = [x._version for x in (*problem.program.tensors, *cu)]
    except (AttributeError, RuntimeError):  # arrays count none, nor do tensors of inference mode
        return make()
    memory: dict[Hashable, tuple[Any, list[ref[Tensor]]]] = problem.memory.setdefault("kept", {})
    key = (what, q.device, stream, *versions)
    found = memory.get(key)
    if found is not None and all(map(is_, [x() for x in found[1]], cu)):
        return found[0]  # type: ignore[no-any-return]
    value = make()
    if len(memory) >= KEPT:
        memory.clear()
    memory[key] = value, [ref(x) for x in cu]  # weakly: they belong to a call
    return value


def lengths_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """The cumulative lengths of a packed batch; () where there are none."""
    return () if inputs.cu_q is None or inputs.cu_k is None else (inputs.cu_q, inputs.cu_k)


def capturing(q: Tensor) -> bool:
    """Is the current stream of q's device being captured, or is nothing launched that would fill what is made?"""
    return is_collecting() or (q.is_cuda and torch.cuda.is_current_stream_capturing())


def version(x: Any) -> int | None:
    """None for what counts none: arrays, and tensors of inference mode."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else None
