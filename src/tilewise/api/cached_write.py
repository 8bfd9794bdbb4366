"""New tokens into the pages of a cache: what is refused of them, and who writes them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.api.lengths import readable
from tilewise.api.rotary import RotaryTable
from tilewise.backends.gpu.captured import is_capturing, keep_if_captured
from tilewise.backends.pages import WRITTEN, NewTokens, Pages, positions_of, slots_of
from tilewise.errors import ArgumentError
from tilewise.ops.tensors import PLAIN

KEPT_STEPS = 64
_kept_steps: dict[tuple[int, int, torch.device], Tensor] = {}


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether operators are wanted: by torch.compile, a dispatch mode, a subclass or a device without memory."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return any(x is not None and (type(x) not in PLAIN or x.is_meta) for x in tensors)


def even_steps(batch: int, rows: int, device: torch.device) -> Tensor:
    """Where sequences of `rows` tokens begin: kept, as it takes two launches on a GPU."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    kept = None if traced else _kept_steps.get((batch, rows, device))
    if kept is not None:
        return keep_if_captured(kept)
    steps = torch.arange(batch + 1, dtype=torch.int32, device=device) * rows
    if not traced and not is_capturing():  # what a graph makes is its own
        if len(_kept_steps) >= KEPT_STEPS:
            _kept_steps.clear()
        _kept_steps[batch, rows, device] = steps
    return steps


def write(pages: Pages, new: NewTokens, backend: str = "auto") -> Tensor | None:
    """Write new tokens, after all that may be refused of them; the queries, turned. Tokens are the last of their sequence, unless
    `slots` says where they go."""
    if is_traced(*pages.tensors, new.q, new.k, new.v):
        from tilewise.api import cached_operators  # operators take a while to define, and a plain call needs none

        return cached_operators.write(pages, new, backend)
    q, k, v, turning = new.q, new.k, new.v, new.turning
    cu_new = new.cu if not new.rows else even_steps(pages.starts.shape[0], new.rows, pages.k.device)
    _check(pages, new, cu_new)
    writer = dispatch.pages_writer(pages.k.device.type, backend)
    if writer is not None and all(x is None or x.dtype in WRITTEN for x in (q, k, v)):
        return writer.append(pages, new)
    if turning is not None:
        table = RotaryTable(*turning)
        if q is not None and new.cu is not None:
            q = table.apply(q, _positions(pages, new, new.cu, q.shape[0]), q.dtype)
        if k is not None and cu_new is not None:
            stored = torch.float32 if pages.k_scale is not None else pages.k.dtype
            k = table.apply(k, _positions(pages, new, cu_new, k.shape[0]), stored)
    if k is not None and v is not None:
        slots = new.slots
        if slots is None:
            assert cu_new is not None, "tokens without a sequence"
            slots = slots_of(pages, cu_new, k.shape[0])
        pages.write(k, v, slots)
    return q


def _positions(pages: Pages, new: NewTokens, cu: Tensor, tokens: int) -> Tensor:
    given = None if new.turning is None else new.turning.positions
    return positions_of(cu, pages.lengths, tokens)[1] if given is None else given


def _check(pages: Pages, new: NewTokens, cu_new: Tensor | None) -> None:
    """Raise on what may not be written, before anything is."""
    if new.turning is not None:
        given = new.turning.positions
        at = pages.lengths - 1 if given is None and readable(pages.lengths) else given  # the last positions are the largest
        for x in (new.q, new.k):
            if x is not None:
                RotaryTable(*new.turning).check(x, at)
    if new.k is None or not new.k.shape[0]:
        return
    if new.slots is not None:
        if readable(new.slots):
            _check_slots(new.slots, pages.size)
    elif cu_new is not None and readable(pages.lengths):
        check_appended(pages, cu_new)


def check_appended(pages: Pages, cu: Tensor) -> None:
    """Raise on lengths that do not count the new tokens of each sequence, or that do not fit the pages."""
    check_lengths(pages)
    for b, (n, length) in enumerate(zip(cu.diff().tolist(), pages.lengths.tolist(), strict=True)):
        if n > length:
            raise ArgumentError(
                f"append: {n} tokens for sequence {b}, whose lengths[{b}] is {length}; `lengths` counts new tokens too"
            )


def check_lengths(pages: Pages) -> None:
    """Raise on lengths beyond the pages, and on a table that is none."""
    if pages.indptr is not None:
        values = pages.indptr.tolist()
        if not is_cumulative(values, None) or values[-1] > pages.entries.shape[0]:
            raise ArgumentError(
                f"table: indptr must start with 0, never fall and end at most at {pages.entries.shape[0]}, got {values[:8]}"
            )
    lengths = pages.lengths.cpu().numpy()
    room = pages.page * (pages.most if pages.indptr is None else pages.counts.cpu().numpy())
    if not lengths.size or (lengths.min() >= 0 and (lengths <= room).all()):
        return
    for b, (length, count) in enumerate(zip(lengths.tolist(), pages.counts.tolist(), strict=True)):
        if not 0 <= length <= count * pages.page:
            raise ArgumentError(
                f"lengths[{b}] is {length}, need 0 to {count * pages.page}: the table lists {count} pages of {pages.page}"
            )


def is_cumulative(values: list[int], end: int | None) -> bool:
    steps = all(a <= b for a, b in pairwise(values))
    return values[0] == 0 and steps and (end is None or values[-1] == end)


def _check_slots(slots: Tensor, size: int) -> None:
    used = [slot for slot in slots.tolist() if slot != -1]
    for slot in used:
        if not 0 <= slot < size:
            raise ArgumentError(f"slots: {slot} is no place, need 0 to {size - 1}, or −1 to write nothing")
    if len(set(used)) != len(used):
        twice = next(slot for slot in used if used.count(slot) > 1)
        raise ArgumentError(f"slots: {twice} is there twice; a place holds one token")
