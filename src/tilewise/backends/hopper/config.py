"""What the kernel is compiled for, and the table of tiles: for each pair of head dims what fits registers and shared memory."""

from __future__ import annotations

from typing import NamedTuple

SHARED_BYTES = 227 * 1024
"""Shared memory one program may have on compute capability 9.0."""
REGISTERS = 512
"""Registers of a multiprocessor for each of a warpgroup's 128 threads: what all warpgroups share."""
BARRIER_BYTES = 1024
"""Room for the barriers and the alignment of the tiles."""
WIDTHS = (64, 128, 256)
"""Head dims of tiles; others are padded by the loads with zeros to the next."""


class Config(NamedTuple):
    """One constexpr: everything a kernel is compiled for. No length is among it."""

    WARPGROUPS: int  # that compute, 64 queries each
    BLOCK_N: int
    BLOCK_D: int  # of q and k, padded
    BLOCK_DV: int
    STAGES: int
    REGISTERS: tuple[int, int]  # of a thread that computes, and of one that loads
    PINGPONG: bool  # the two warpgroups take turns at the tensor cores
    QUERIES: int  # tiles of queries in shared memory: 2 where the next one finds room
    OUT_WIDTH: int  # columns of the output that leave at a time
    Q_HELD: int = 0  # columns of the queries in registers; the others are read from shared memory for every tile of keys
    Q_EARLY: bool = False  # their place is given back when the last scores are there: a barrier more for every tile of keys
    LATE: bool = True  # the output is rescaled while the next scores are computed, by warps that have to; else before, by all
    TERMS: int = 0  # of the mask
    BAND: bool = False  # may a row's keys end before the sequence does?
    LEFT: bool = False  # may they begin after key 0?
    TAIL: bool = False  # without a mask: is the last tile of keys cut short?
    UNSEEN: bool = False  # may there be keys that no query sees?
    SCORES: str = "fold"  # "fold" the scale into exp2, "scale" first (it is not positive), or "softcap"
    VARLEN: bool = False
    BOTTOM: bool = False  # bands of packed sequences count from the bottom right corner

    @property
    def BLOCK_M(self) -> int:
        return 64 * self.WARPGROUPS

    @property
    def shared_bytes(self) -> int:
        """Of 16-bit tiles and barriers."""
        queries = self.QUERIES * self.BLOCK_M * self.BLOCK_D
        keys = self.STAGES * self.BLOCK_N * (self.BLOCK_D + self.BLOCK_DV)
        staged = self.BLOCK_M * self.OUT_WIDTH
        return 2 * (queries + keys + staged) + BARRIER_BYTES

    @property
    def most_unseen(self) -> int:
        """Tiles of keys at the edge of a mask that the first warpgroup passes by: fewer than STAGES, for it waits for the next
        with the last values still in hand."""
        return -(-(self.BLOCK_M - 64) // self.BLOCK_N)

    @property
    def registers(self) -> int:
        return self.WARPGROUPS * self.REGISTERS[0] + self.REGISTERS[1]

    @property
    def accumulators(self) -> int:
        """Registers a computing thread holds for the output, the scores, the weights and its part of the queries."""
        return (self.BLOCK_DV + self.BLOCK_N) // 2 + (self.BLOCK_N + self.Q_HELD) // 4


TABLE: dict[tuple[int, int], Config] = {
    (64, 64): Config(3, 128, 64, 64, 2, (160, 32), False, 2, 64),
    (64, 128): Config(2, 128, 64, 128, 2, (232, 40), True, 2, 128),
    (64, 256): Config(2, 64, 64, 256, 2, (232, 40), False, 2, 256),
    (128, 64): Config(2, 128, 128, 64, 2, (232, 40), True, 2, 64),
    (128, 128): Config(2, 128, 128, 128, 2, (232, 40), True, 2, 128),
    (128, 256): Config(2, 64, 128, 256, 2, (232, 40), False, 2, 256),
    (256, 64): Config(2, 64, 256, 64, 2, (232, 40), False, 2, 64),
    (256, 128): Config(2, 64, 256, 128, 2, (232, 40), False, 1, 128),
    (256, 256): Config(2, 64, 256, 256, 2, (232, 40), False, 1, 128, 64),
}
"""By padded head dims of keys and values. Why each: docs/hopper-notes.md."""
NARROW = Config(2, 128, 64, 64, 2, (232, 40), False, 2, 64)
"""Head dim 64 with 128 queries, where 192 fit the length or the mask badly."""


def padded(dim: int) -> int:
    """The tile's head dim."""
    return next(width for width in WIDTHS if dim <= width)


def tiles_for(head_dim: int, head_dim_v: int) -> tuple[Config, ...]:
    """The tiles to choose from for head dims up to 256; the first serves everything, the second has more queries."""
    d, dv = padded(head_dim), padded(head_dim_v)
    return (NARROW, TABLE[d, dv]) if (d, dv) == (64, 64) else (TABLE[d, dv],)


def shortened(tile: Config) -> Config:
    """The tile with half the keys: it follows the edge of a mask more closely, in steps that cost more for each key."""
    return tile._replace(BLOCK_N=64, STAGES=2 * tile.STAGES, PINGPONG=False) if tile.BLOCK_N == 128 else tile
