"""How a tensor lies in memory. What lies between its numbers is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

NAN = float("nan")
SHARED = {"one for the batch": (0,), "one for the second axis": (1,), "one number": (0, 1, 2, 3)}
"""Kinds that repeat one slice along axes by strides of 0."""
KINDS = ("swapped", "reversed", "margins", "every other", "odd address", "negated", *SHARED)


def shared(x: Tensor, kind: str) -> Tensor:
    """The values a tensor can have if it lies so: of booleans, what holds for all that share a slice."""
    one = x
    for axis in _axes(x, kind):
        one = one.all(axis, keepdim=True) if x.dtype == torch.bool else one.narrow(axis, 0, 1)
    return one.expand(x.shape)


def _axes(x: Tensor, kind: str) -> list[int]:
    return [axis for axis in SHARED.get(kind, ()) if axis < x.ndim and x.shape[axis]]


def laid(x: Tensor, kind: str) -> Tensor:
    """The same values, lying as `kind` says."""
    if kind == "swapped" and x.ndim >= 3:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "reversed":
        axes = list(range(x.ndim))[::-1]
        return x.permute(axes).contiguous().permute(axes)
    if kind == "margins":
        memory = x.new_full([size + 2 for size in x.shape], NAN)
        for axis, size in enumerate(x.shape):
            memory = memory.narrow(axis, 1, size)
        return memory.copy_(x)
    if kind == "every other":
        memory = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), NAN)[..., ::2]
        return memory.copy_(x)
    if kind == "odd address":
        memory = x.new_full((x.numel() + 1,), NAN)[1:]
        return memory.view(x.shape).copy_(x)
    if kind == "negated":
        return torch._neg_view(x.neg().contiguous())
    axes = _axes(x, kind)
    one = x
    for axis in axes:
        one = one.narrow(axis, 0, 1)
    return one.clone(memory_format=torch.contiguous_format).expand(x.shape)
