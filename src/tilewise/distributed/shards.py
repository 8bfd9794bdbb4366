"""Which tokens each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewise.distributed.intervals import Ints
from tilewise.distributed.schedule import Chunk

SHARDS = ("balanced", "contiguous", "head_tail", "zigzag")


@dataclass(frozen=True, eq=False)
class Shards:
    """A partition of the tokens of all sequences, which stand on one axis one after another.

    bounds: where its pieces start, in order, and the number of tokens at the end; a piece lies in one sequence.
    rank: of each piece; neighbours of one sequence have different ranks.
    """

    lengths: tuple[int, ...]
    ranks: int
    bounds: Ints
    rank: Ints

    @property
    def starts(self) -> Ints:
        """Where each sequence starts on the axis."""
        return np.cumsum((0, *self.lengths))

    @property
    def tokens(self) -> Ints:
        """Tokens of each rank."""
        return np.bincount(self.rank, np.diff(self.bounds), self.ranks).astype(np.int64)

    def chunks(self, first: Ints, past: Ints) -> list[Chunk]:
        """Intervals of the axis as chunks of their sequences."""
        starts = self.starts
        sequence = np.searchsorted(starts, first, side="right") - 1
        at = starts[sequence]
        columns = (sequence, first - at, past - at)
        return [Chunk(*place) for place in zip(*(column.tolist() for column in columns), strict=True)]

    def of_rank(self) -> tuple[tuple[Chunk, ...], ...]:
        """The chunks of each rank, in the order of its shard."""
        held: list[list[Chunk]] = [[] for _ in range(self.ranks)]
        for rank, chunk in zip(self.rank.tolist(), self.chunks(self.bounds[:-1], self.bounds[1:]), strict=True):
            held[rank].append(chunk)
        return tuple(map(tuple, held))


def partition(lengths: Sequence[int], ranks: int, cuts: Ints, rank: Ints) -> Shards:
    """Shards from cuts (0 … tokens) and the rank of each piece between them; pieces are parted where sequences end."""
    starts = np.cumsum((0, *lengths))
    bounds = np.unique(np.concatenate([cuts, starts]))
    owner = rank[np.searchsorted(cuts, bounds[:-1], side="right") - 1]
    new = np.concatenate([[True], (owner[1:] != owner[:-1]) | np.isin(bounds[1:-1], starts)])[: len(owner)]
    return Shards(tuple(lengths), ranks, np.append(bounds[:-1][new], bounds[-1]), owner[new])


def contiguous(lengths: Sequence[int], ranks: int) -> Shards:
    """Equal parts, one after another."""
    cuts = np.arange(ranks + 1) * sum(lengths) // ranks
    return partition(lengths, ranks, cuts, np.arange(ranks))
