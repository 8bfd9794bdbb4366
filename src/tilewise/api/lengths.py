"""Values of a mask that the shapes cannot vouch for: lengths and listed blocks must lie within the keys there are.

They are read where `ops.tensors.checks_values` says so, and never while a call is traced. Unread, what is out of range counts as
unseen, and nothing outside is touched.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import MaskError
from tilewise.masks import Mask, MaskShape
from tilewise.masks.algebra import KeyRanges, Selected
from tilewise.ops.tensors import PLAIN, checks_values


def readable(x: Tensor) -> bool:
    """Whether the values of a tensor are there to be looked at."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return checks_values(x.device)


def check_values(mask: Mask, shape: MaskShape, cu_q: Tensor | None, cu_k: Tensor | None) -> None:
    """Raise on lengths of `key_padding` and `prefix`, and on blocks of `selected`, that fit no sequence.

    `cu_q` and `cu_k` are a packed batch's cumulative lengths.
    """
    if torch.compiler.is_compiling():
        return
    for leaf in mask.leaves():
        if not isinstance(leaf, (KeyRanges, Selected)):
            continue
        keys = _lengths(shape.seqlen_k, cu_k)
        if keys is not None and isinstance(leaf, KeyRanges):
            _check(leaf, keys, shape.batch)
        elif keys is not None and isinstance(leaf, Selected):
            _check_lists(leaf, _lengths(shape.seqlen_q, cu_q) or [], keys)


def _lengths(length: int, cu: Tensor | None) -> list[int] | None:
    """Of each sequence, or the one of all; None where they are not to be read."""
    bounds = [0, length] if cu is None else _values(cu)
    return None if bounds is None else [max(0, end - start) for start, end in pairwise(bounds)]


def _check_lists(mask: Selected, queries: list[int], keys: list[int]) -> None:
    """Each list names blocks of its own sequence; one for several sequences, of the longest. Lists past the last query are no
    one's."""
    if isinstance(mask.indices, Tensor) and not readable(mask.indices):
        return
    lists, own = torch.as_tensor(mask.indices), len(keys) > 1 and mask.indices.ndim == 4 and mask.indices.shape[0] > 1
    for b in range(len(keys) if own else 1):
        most, rows = (keys[b], queries[b]) if own else (max(keys, default=0), max(queries, default=0))
        given = (lists[b] if own else lists)[..., : -(-rows // mask.size_q), :]
        blocks = -(-most // mask.size_k)
        if not given.numel() or (int(given.min()) >= -1 and int(given.max()) < blocks):
            continue
        at = ((given < -1) | (given >= blocks)).nonzero()[0].tolist()
        where = ", ".join(map(str, ([b] if own else []) + at))
        there = f"{f'sequence {b} has' if own else 'there are'} {most} keys, {blocks} blocks of {mask.size_k}"
        raise MaskError(
            f"selected: indices[{where}] is {int(given[tuple(at)])}, need 0 to {blocks - 1}, or -1 for none: {there}"
        )


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
