"""Tokens that lie in several tensors: a rank's shard, or what came from other ranks, found by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.distributed.schedule import Chunk

TOKENS = 2
"""The side of a tensor (B, H, S, …) that counts tokens."""


class Part(NamedTuple):
    """A part of a chunk that lies in one tensor: where in the chunk, and the tensor's view."""

    at: slice
    view: Tensor

    def of(self, x: Tensor) -> Tensor:
        """The same part of another tensor that has the chunk's tokens."""
        return x[:, :, self.at]


class Pieces:
    """Chunks and the tensors (B, H, tokens, …) that hold them."""

    def __init__(self, chunks: Iterable[Chunk], tensors: Iterable[Tensor]) -> None:
        self.held = sorted(zip(chunks, tensors, strict=True), key=lambda pair: pair[0])

    @classmethod
    def of(cls, chunks: Sequence[Chunk], x: Tensor) -> Pieces:
        """A tensor that holds the chunks one after another."""
        return cls(chunks, x.split([chunk.tokens for chunk in chunks], TOKENS))

    def parts(self, chunk: Chunk) -> Iterator[Part]:
        """Where the chunk lies, in order."""
        for own, x in self.held:
            start, end = max(own.start, chunk.start), min(own.end, chunk.end)
            if own.sequence == chunk.sequence and start < end:
                view = x[:, :, start - own.start : end - own.start]
                yield Part(slice(start - chunk.start, end - chunk.start), view)

    def take(self, chunk: Chunk) -> Tensor:
        """The tokens of the chunk: a view where they lie in one tensor."""
        views = [part.view for part in self.parts(chunk)]
        return views[0] if len(views) == 1 else torch.cat(views, TOKENS)

    def add(self, chunk: Chunk, x: Tensor) -> None:
        """Add to the tokens of the chunk, in place."""
        for part in self.parts(chunk):
            part.view.add_(part.of(x))
