"""Tokens that lie in several tensors: a rank's shard, or what came from other ranks, found by chunk."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.distributed.schedule import Chunk

TOKENS = 2
"""The side of a tensor (B, H, S, …) that counts tokens."""


class Part(NamedTuple):
    """A part of some chunks that lies in one tensor without a gap: where among their tokens, and where in the tensor."""

    at: slice
    tensor: Tensor
    first: int

    @property
    def tokens(self) -> int:
        return int(self.at.stop - self.at.start)

    @property
    def view(self) -> Tensor:
        if self.tokens == self.tensor.shape[TOKENS]:
            return self.tensor
        return self.tensor.narrow(TOKENS, self.first, self.tokens)

    def of(self, x: Tensor) -> Tensor:
        """The same part of another tensor that has the chunks' tokens."""
        return x if self.tokens == x.shape[TOKENS] else x[:, :, self.at]


class Held(NamedTuple):
    """A chunk, the tensor (B, H, tokens, …) that has it, and where it begins there."""

    chunk: Chunk
    tensor: Tensor
    first: int

    @property
    def view(self) -> Tensor:
        return self.tensor.narrow(TOKENS, self.first, self.chunk.tokens)


class Pieces:
    """Chunks that do not overlap and the tensors that hold them."""

    def __init__(self, held: Iterable[Held] = ()) -> None:
        self.held = sorted(held, key=lambda one: one.chunk)
        self.starts = [one.chunk[:2] for one in self.held]

    @classmethod
    def of(cls, chunks: Sequence[Chunk], x: Tensor) -> Pieces:
        """A tensor that holds the chunks one after another."""
        held, first = [], 0
        for chunk in chunks:
            held.append(Held(chunk, x, first))
            first += chunk.tokens
        return cls(held)

    @classmethod
    def apart(cls, chunks: Iterable[Chunk], tensors: Iterable[Tensor]) -> Pieces:
        """Chunks that have a tensor each."""
        return cls(Held(chunk, x, 0) for chunk, x in zip(chunks, tensors, strict=True))

    def only(self, chunks: Sequence[Chunk]) -> Pieces:
        """Of these chunks, each of which is a part of one that is here."""
        return Pieces(Held(chunk, part.tensor, part.first) for chunk in chunks for part in self.parts((chunk,)))

    def __or__(self, others: Pieces) -> Pieces:
        """All chunks of both."""
        return Pieces((*self.held, *others.held)) if others.held else self

    def parts(self, chunks: Sequence[Chunk]) -> Iterator[Part]:
        """Where chunks lie, as far as they are here, in their order; what follows each other in one tensor is one part."""
        last: Part | None = None
        for at, one, first, past in self._found(chunks):
            if last and last.tensor is one.tensor and (last.at.stop, last.first + last.tokens) == (at, first):
                last = last._replace(at=slice(last.at.start, at + past - first))
                continue
            if last is not None:
                yield last
            last = Part(slice(at, at + past - first), one.tensor, first)
        if last is not None:
            yield last

    def _found(self, chunks: Sequence[Chunk]) -> Iterator[tuple[int, Held, int, int]]:
        """Each stretch: where among the chunks' tokens it begins, and what holds it, from where to where."""
        done = 0
        for chunk in chunks:
            before = bisect_right(self.starts, chunk[:2]) - 1
            past = bisect_left(self.starts, (chunk.sequence, chunk.end))
            for one in self.held[max(before, 0) : past]:
                start, end = max(one.chunk.start, chunk.start), min(one.chunk.end, chunk.end)
                if one.chunk.sequence == chunk.sequence and start < end:
                    offset = one.first - one.chunk.start
                    yield done + start - chunk.start, one, start + offset, end + offset
            done += chunk.tokens

    def take(self, chunks: Sequence[Chunk]) -> Tensor:
        """The tokens of the chunks: a view where they lie in one tensor without a gap."""
        views = [part.view for part in self.parts(chunks)]
        return views[0] if len(views) == 1 else torch.cat(views, TOKENS)

    def add(self, chunks: Sequence[Chunk], x: Tensor) -> None:
        """Add to the tokens of the chunks, in place."""
        for part in self.parts(chunks):
            part.view.add_(part.of(x))
