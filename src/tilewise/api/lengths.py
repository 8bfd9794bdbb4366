"""Values of a mask that the shapes cannot vouch for: lengths must lie within the keys there are.

They are read on a CPU always, on a GPU only with TILEWISE_CHECK=1, since reading waits for the device, and never while a call
is traced. Unread, what is out of range counts as unseen, and nothing outside is touched.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import MaskError
from tilewise.masks import Mask, MaskShape
from tilewise.masks.algebra import KeyRanges
from tilewise.ops.tensors import PLAIN


def readable(x: Tensor) -> bool:
    """Whether the values of a tensor are there to be looked at."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return x.device.type == "cpu" or (x.device.type == "cuda" and os.environ.get("TILEWISE_CHECK") == "1")


def check_lengths(mask: Mask, shape: MaskShape, cu_k: Tensor | None) -> None:
    """Raise on lengths of `key_padding` and `prefix` that fit no sequence; `cu_k` are a packed batch's cumulative lengths."""
    if torch.compiler.is_compiling():
        return
    for leaf in mask.leaves():
        if isinstance(leaf, KeyRanges):
            bounds = [0, shape.seqlen_k] if cu_k is None else _values(cu_k)
            if bounds is not None:
                _check(leaf, [max(0, end - start) for start, end in pairwise(bounds)], shape.batch)


def _values(x: Any) -> list[int] | None:
    """The integers of a list, array or tensor; None where they are not to be read."""
    if isinstance(x, list):
        return x
    if isinstance(x, Tensor) and not readable(x):
        return None
    values = x.tolist()
    return values if isinstance(values, list) else [values]


def _check(mask: KeyRanges, keys: list[int], batch: int) -> None:
    lengths, starts = _values(mask.lengths), [0] if mask.start is None else _values(mask.start)
    if lengths is None or starts is None:
        return
    for b in range(min(batch, max(len(lengths), len(starts), len(keys)))):
        i, j, most = b % len(lengths), b % len(starts), keys[b % len(keys)]
        length, start = lengths[i], starts[j]
        if start >= 0 and length >= 0 and (start + length <= most or mask.maker == "prefix"):
            continue
        there = f"{f'sequence {b} has' if len(keys) > 1 else 'there are'} {most} keys"
        if mask.maker == "prefix":
            raise MaskError(f"prefix: n[{i}] is {length}, need at least 0")
        if not 0 <= length <= most:
            raise MaskError(f"key_padding: lengths[{i}] is {length}, need 0 to {most}: {there}")
        if not 0 <= start <= most:
            raise MaskError(f"key_padding: start[{j}] is {start}, need 0 to {most}: {there}")
        raise MaskError(
            f"key_padding: start[{j}] + lengths[{i}] is {start + length}, but {there}; `lengths` counts from `start` on"
        )
