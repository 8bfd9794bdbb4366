"""Pages of keys and values as kernels read them; where no kernel does, their tokens gathered into packed rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import LayoutError

QUANTIZED = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Types that are multiplied by a scale, with the largest number each holds."""


WRITTEN = (torch.float16, torch.bfloat16, torch.float32)
"""Tokens that a backend may write into pages; torch writes others."""


class Turning(NamedTuple):
    """Rotary position embedding: cosines and sines by position."""

    cos: Tensor  # (positions, r / 2)
    sin: Tensor
    interleaved: bool  # pairs are neighbouring features
    positions: Tensor | None  # (T,) of q's tokens and of the new ones; None: they are the last of their sequence


class NewTokens(NamedTuple):
    """Queries to turn and tokens to write. What is packed has `cu`; `rows` are tokens of each sequence where that is known."""

    q: Tensor | None = None  # (T, Hq, D), to be turned
    k: Tensor | None = None  # (T, Hk, D)
    v: Tensor | None = None
    cu: Tensor | None = None
    q_rows: int = 0
    rows: int = 0
    turning: Turning | None = None
    slots: Tensor | None = None  # (T,) where tokens go; None: to their positions


class PagedPart(NamedTuple):
    """Attention of packed tokens, or of some of them, to some of their keys."""

    out: Tensor  # (parts, H, rows, Dv): one for each split of the keys
    lse: Tensor  # (parts, H, rows)
    place: Tensor | None = None  # int32, the row of each token, −1 for none; None: rows are tokens


class Pages(NamedTuple):
    """A batch of sequences in pages. Page `entries[starts[b] + p // page]` holds token p of sequence b at place p % page.

    `table` and `lengths` are the owner's tensors, who changes them between calls: `now` reads them.
    """

    k: Tensor  # (pages, page, Hk, D)
    v: Tensor  # (pages, page, Hk, Dv)
    table: Tensor  # (B, most), or, with `indptr`, the entries of all sequences
    indptr: Tensor | None
    lengths: Tensor  # (B,), tokens that are seen
    entries: Tensor  # int32, of all sequences
    starts: Tensor  # int32 (B,)
    counts: Tensor  # int32 (B,), pages of each sequence
    most: int  # pages of a sequence at most
    k_scale: Tensor | None = None  # float32 (pages, page, Hk)
    v_scale: Tensor | None = None
    latent: bool = False  # values are the first columns of the keys
    within: bool = False  # `lengths` are int32, one after the other, none below 0 nor beyond the pages: somebody has looked

    @property
    def page(self) -> int:
        return self.k.shape[1]

    @property
    def size(self) -> int:
        """Tokens that all pages hold."""
        return self.k.shape[0] * self.page

    @property
    def room(self) -> int:
        """Pages that all sequences have room for together, at most."""
        return min(self.entries.shape[0], self.starts.shape[0] * self.most)

    @classmethod
    def of(cls, k: Tensor, v: Tensor, table: Tensor, indptr: Tensor | None, lengths: Tensor, **rest: Any) -> Pages:
        if indptr is None:
            batch, most = table.shape
            starts = torch.arange(batch, dtype=torch.int32, device=k.device) * most
            return cls(k, v, table, None, lengths, _flat(table), starts, torch.full_like(starts, most), most, **rest)
        starts, counts = indptr[:-1].int().contiguous(), indptr.diff().int()
        return cls(k, v, table, indptr, lengths, _flat(table), starts, counts, table.shape[0], **rest)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a call reads, without scales."""
        return self.k, self.v, self.entries, self.lengths

    def now(self) -> Pages:
        """With the table as it is now. Raises if somebody has given it, or the lengths, another shape."""
        if not torch.compiler.is_compiling():
            self._check_shapes()
        if self.indptr is not None:
            starts, counts = self.indptr[:-1].int().contiguous(), self.indptr.diff().int()
            return self._replace(entries=_flat(self.table), starts=starts, counts=counts)
        taken = self.table.dtype == torch.int32 and self.table.is_contiguous()  # as it lies in memory
        if taken and (not has_memory(self.table) or self.table.data_ptr() == self.entries.data_ptr()):
            return self
        return self._replace(entries=_flat(self.table))

    def _check_shapes(self) -> None:
        batch, table = self.starts.shape[0], self.table if self.indptr is None else self.indptr
        made = (batch, self.most) if self.indptr is None else (batch + 1,)
        for name, x, shape in (("table", table, made), ("lengths", self.lengths, (batch,))):
            if x.shape != shape:
                raise LayoutError(f"{name}: shape {tuple(x.shape)}, and {shape} when the cache was made; make a new KVCache")

    @property
    def seen(self) -> Tensor:
        """int32 (B,) `lengths`, not below 0 nor beyond the pages there are."""
        if self.within:
            return self.lengths
        return self.lengths.int().clamp(min=0).minimum(self.counts * self.page)

    def of_sequences(self, at: Tensor) -> Pages:
        """Some sequences of the batch."""
        return self._replace(starts=self.starts[at], counts=self.counts[at], lengths=self.lengths[at])

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Tokens (T, Hk, D) to the places `slots` (T,); what lies outside is not written."""
        inside: Tensor | None = None
        if self.k.shape[0] == 0 or not slots.shape[0]:
            return
        if is_at_hand(slots):
            places = slots.numpy()
            there = (places >= 0) & (places < self.size)
            if not there.all():
                some = torch.from_numpy(there)
                k, v, places = k[some], v[some], places[there]
            at = (torch.from_numpy(places // self.page), torch.from_numpy(places % self.page))
        else:
            inside = (slots >= 0) & (slots < self.size)
            slots = torch.where(inside, slots, 0)
            at = (slots // self.page, slots % self.page)
        for pages, scale, x in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            if pages is self.k or not self.latent:
                _put(pages, scale, x, at, inside)


def has_memory(x: Tensor) -> bool:
    """Is the tensor one with numbers of its own, not one that traces or wraps others?"""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or type(x) is not Tensor
    return not traced and torch._C._functorch.peek_interpreter_stack() is None


def is_at_hand(x: Tensor) -> bool:
    """Are the tensor's numbers in the host's memory, so that sizes may depend on them and it costs nothing to look?"""
    return has_memory(x) and x.is_cpu and not x.is_neg()


def _flat(table: Tensor) -> Tensor:
    return table.int().reshape(-1).contiguous()


def _put(pages: Tensor, scale: Tensor | None, x: Tensor, at: tuple[Tensor, Tensor], inside: Tensor | None) -> None:
    if scale is not None:
        most = QUANTIZED[str(pages.dtype).removeprefix("torch.")]
        if scale.stride()[0] or scale.stride()[1]:  # of each token and head: it follows from the token
            own = (x.float().abs().amax(-1) / most).clamp(min=torch.finfo(torch.float32).tiny)
            _store(scale, own, at, inside)
            x = x.float() / own[..., None]
        else:
            x = x.float() / scale[0, 0][:, None]
        x = x.clamp(-most, most)
        x = x.round() if pages.dtype == torch.int8 else x
    _store(pages, x.to(pages.dtype), at, inside)


def _store(pages: Tensor, x: Tensor, at: tuple[Tensor, Tensor], inside: Tensor | None) -> None:
    """x to the places, where it has one; all have, if `inside` is None. Else no size depends on data: a token without a place
    writes what another token writes, or, if none has a place, what is there already."""
    raw = torch.uint8 if pages.dtype.itemsize == 1 else pages.dtype
    pages, x = pages.view(raw), x.view(raw)
    if inside is None:
        pages[at] = x
        return
    first = inside.to(torch.int8).argmax()
    index = torch.where(inside, torch.arange(len(inside), device=inside.device), first)
    to = at[0][index], at[1][index]
    pages[to] = torch.where(inside.any(), x[index], pages[to])


def slots_of(pages: Pages, cu: Tensor, tokens: int) -> Tensor:
    """(tokens,) places of the last cu[b + 1] − cu[b] tokens of each sequence; −1 for those before its first."""
    if not (is_at_hand(cu) and is_at_hand(pages.lengths) and is_at_hand(pages.entries)):
        return _slots(pages, *positions_of(cu, pages.lengths, tokens))
    # the same by numpy, which takes a fraction of torch's time for a few integers
    starts, counts, entries, ends, lengths = (x.numpy() for x in (pages.starts, pages.counts, pages.entries, cu, pages.lengths))
    sequence = np.repeat(np.arange(len(starts)), ends[1:] - ends[:-1])
    position = np.arange(tokens, dtype=np.int64) - ends[1:][sequence] + lengths[sequence]
    page = position // pages.page
    known = (position >= 0) & (page < counts[sequence])
    if not known.all():
        number = np.full(tokens, -1, dtype=np.int64)
        number[known] = entries[(starts[sequence] + page)[known]]
    else:
        number = entries[starts[sequence] + page].astype(np.int64)
    return torch.from_numpy(np.where(number >= 0, number * pages.page + position % pages.page, -1))


def positions_of(cu: Tensor, lengths: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each packed token and its position: those of a sequence are its last."""
    count = cu.diff()
    sequence = torch.repeat_interleave(torch.arange(count.shape[0], device=cu.device), count, output_size=tokens)
    position = torch.arange(tokens, device=cu.device) - cu[1:][sequence] + lengths[sequence]
    return sequence, position


def _slots(pages: Pages, sequence: Tensor, position: Tensor) -> Tensor:
    page = position // pages.page
    known = (position >= 0) & (page < pages.counts[sequence])
    at = torch.where(known, pages.starts[sequence] + page, 0)
    if not pages.entries.shape[0]:
        return torch.full_like(position, -1)
    number = pages.entries[at.clamp(0, pages.entries.shape[0] - 1)].long()
    return torch.where(known & (number >= 0), number * pages.page + position % pages.page, -1)


def gathered(pages: Pages, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """K and V as packed rows (1, Hk, tokens, D) in `dtype`, and cumulative lengths; `tokens` is at least their sum.

    What no entry of the table stands for becomes 0.
    """
    seen = pages.seen
    cu = torch.cat([seen.new_zeros(1), seen.cumsum(0, dtype=torch.int32)])
    place = torch.arange(tokens, device=cu.device)
    sequence = torch.searchsorted(cu[1:], place, right=True).clamp(max=max(0, len(seen) - 1))
    slots = _slots(pages, sequence, place - cu[:-1][sequence]) if len(seen) else torch.full_like(place, -1)
    there = (slots >= 0) & (slots < pages.size) & (place < cu[-1])
    slots = torch.where(there, slots, 0)
    at = (slots // pages.page, slots % pages.page)
    rows = []
    for x, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        if not x.shape[0]:
            rows.append(x.new_zeros((1, x.shape[2], tokens, x.shape[3]), dtype=dtype))
            continue
        raw = x.view(torch.uint8)[at].view(x.dtype) if x.dtype.itemsize == 1 else x[at]
        row = raw.to(dtype) if scale is None else (raw.float() * scale[at][..., None]).to(dtype)
        row = torch.where(there[:, None, None], row, 0.0)
        rows.append(row.transpose(0, 1)[None])
    return rows[0], rows[1], cu
