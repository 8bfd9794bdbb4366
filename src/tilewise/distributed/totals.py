"""What calls give for each token, put together: a token of one call keeps its result as it is, those of several are summed.

Which tokens these are is known from the plan, so sums in a wider dtype have room for those alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.backends import base
from tilewise.distributed.pieces import TOKENS, Pieces
from tilewise.distributed.schedule import Chunk
from tilewise.numerics.merge import NEG_INF, Partial, merge_into


class Split(NamedTuple):
    """Tokens by how many calls have them. once: one. others: none, or several."""

    chunks: tuple[Chunk, ...]
    once: tuple[Chunk, ...]
    others: tuple[Chunk, ...]

    @classmethod
    def of(cls, chunks: Sequence[Chunk], calls: Iterable[Chunk]) -> Split:
        """calls: what each of them has, of any tokens."""
        steps: defaultdict[tuple[int, int], int] = defaultdict(int)
        for chunk in calls:
            steps[chunk.sequence, chunk.start] += 1
            steps[chunk.sequence, chunk.end] -= 1
        for chunk in chunks:
            steps[chunk.sequence, chunk.start] += 0
            steps[chunk.sequence, chunk.end] += 0
        ends = sorted(steps)
        counts = list(accumulate(steps[end] for end in ends))
        places, once, others = iter(sorted(chunks)), list[Chunk](), list[Chunk]()
        own = next(places, None)
        for ((sequence, start), (_, end)), count in zip(pairwise(ends), counts, strict=False):
            while own is not None and (own.sequence, own.end) <= (sequence, start):
                own = next(places, None)
            if own is not None and own.sequence == sequence and own.start <= start < own.end:
                (once if count == 1 else others).append(Chunk(sequence, start, end))
        return cls(tuple(chunks), tuple(once), tuple(others))

    def summed(self) -> Split:
        """The same tokens, none of which keeps its result as it is."""
        return Split(self.chunks, (), self.chunks)


class Totals:
    """Sums for tokens of a rank: gradients."""

    def __init__(self, split: Split, like: Tensor, dtype: torch.dtype, real: torch.dtype) -> None:
        """like: (B, H, any, …), in whose order of strides results lie. dtype: of the results. real: of sums."""
        self.split = split
        self.sums = _fresh(like, split.others, real).zero_()
        self.whole = _fresh(like, split.chunks, dtype) if split.once else self.sums
        self.often = Pieces.of(split.others, self.sums)
        self.once = Pieces.of(split.chunks, self.whole).only(split.once)

    def add(self, chunks: Sequence[Chunk], x: Tensor) -> None:
        """What a call gives for some tokens; of others, nothing happens."""
        self._keep(chunks, x)
        self.often.add(chunks, x)

    def _keep(self, chunks: Sequence[Chunk], x: Tensor) -> None:
        for part in self.once.parts(chunks):
            if part.tokens == self.whole.shape[TOKENS] == x.shape[TOKENS] and x.dtype == self.whole.dtype:
                self.whole = x
            else:
                part.view.copy_(part.of(x))

    def total(self) -> Tensor:
        """The result of all tokens: of the sums' dtype if there is nothing else, else of the results'."""
        if not self.split.once:
            return self.sums
        for part in Pieces.of(self.split.chunks, self.whole).parts(self.split.others):
            part.view.copy_(part.of(self.sums))
        return self.whole


    def pieces(self) -> Pieces:
        """The same by chunk."""
        return Pieces.of(self.split.chunks, self.total())


class Merged:
    """Partial results (out, lse) of queries, merged."""

    def __init__(self, out: Totals, lse: Totals) -> None:
        self.out, self.lse = out, lse
        lse.sums.fill_(NEG_INF)

    def add(self, chunks: Sequence[Chunk], out: Tensor, lse: Tensor, first: bool) -> None:
        """One more partial result; the first one is taken as it is. Of other tokens, nothing happens."""
        self.out._keep(chunks, out)
        self.lse._keep(chunks, lse)
        for to_out, to_lse in zip(self.out.often.parts(chunks), self.lse.often.parts(chunks), strict=True):
            part = to_out.of(out), to_lse.of(lse)
            if first:
                to_out.view.copy_(part[0])
                to_lse.view.copy_(part[1])
            else:
                _merge((to_out.view, to_lse.view), part)


def _fresh(like: Tensor, chunks: Sequence[Chunk], dtype: torch.dtype) -> Tensor:
    """Memory for the tokens of chunks, heads before tokens or behind them as in `like`."""
    sides = [*like.shape[:TOKENS], sum(chunk.tokens for chunk in chunks), *like.shape[TOKENS + 1 :]]
    if like.stride(1) >= like.stride(TOKENS):
        return like.new_empty(sides, dtype=dtype)
    sides[1], sides[TOKENS] = sides[TOKENS], sides[1]
    return like.new_empty(sides, dtype=dtype).transpose(1, TOKENS)


def row_products(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """rowsum(dO ∘ O), by a kernel where there is one."""
    if _has_kernels(out.device.type, dtype):
        from tilewise.backends.triton import rows

        return rows.row_products(dout, out)
    return base.row_products(dout, out, dtype)


def _merge(into: Partial, part: Partial) -> None:
    if _has_kernels(into[0].device.type, into[0].dtype):
        from tilewise.backends.triton import rows

        rows.merge_rows(*into, *part)
    else:
        merge_into(into, part)


@cache
def _has_kernels(device: str, dtype: torch.dtype) -> bool:
    return device == "cuda" and dtype == torch.float32 and dispatch.usable("triton", device).ok
