"""Multiplications and exponentials: those the answer needs, those a schedule does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewise.masks import allowed, visited_tiles
from tilewise.model.cpu_visits import visits_of
from tilewise.model.cycles import tile_flops
from tilewise.model.grid import grid_of
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem


@dataclass(frozen=True)
class Work:
    """FLOPs of the matrix products of a pass."""

    pairs: int
    """Visible (query, key) pairs over all heads."""
    useful: int
    """FLOPs for the visible pairs alone."""
    visited: int
    """FLOPs for every pair of the visited tiles, visible or not."""
    executed: int
    """FLOPs with ragged tiles padded to their full size, as tensor cores do them; on a CPU those of the strips that see a key."""
    exps: int
    """Exponentials, of padded tiles."""
    tiles: int
    """Visited tiles: one update of the online softmax each."""

    @property
    def waste(self) -> float:
        """The part of the executed FLOPs that masks and padding throw away."""
        return 1 - self.useful / self.executed if self.executed else 0.0


def work(problem: Problem, tile: TilePlan) -> Work:
    """What `tile.pass_` multiplies."""
    grid = grid_of(problem, tile.block_q, tile.block_k)
    problem = grid.problem
    d, dv = problem.head_dim, problem.head_dim_v
    tiles, area = 0, 0
    for head in grid.heads():
        tiles += int(head.by_row.sum()) * head.count
        area += grid.area(head) * head.count
    pairs = visible_pairs(problem)
    per_pair = tile_flops(tile.pass_, 1, 1, d, dv)
    padded = tiles * tile.block_q * tile.block_k
    if tile.pack_gqa:  # the heads of a group fill the rows of one tile
        packed = -(-problem.seqlen_q * problem.group // tile.block_q)
        padded = -(-padded // (problem.group * max(1, grid.rows))) * packed
    if tile.register_tile is not None:  # a CPU's strips are masked and skipped one by one
        padded = round(float(visits_of(problem, tile).pairs.sum()) * problem.batch * problem.heads)
        area = min(area, padded)
    return Work(pairs, pairs * per_pair, area * per_pair, padded * per_pair, padded, tiles)


def visible_pairs(problem: Problem) -> int:
    """Pairs the mask lets through, over all sequences and query heads."""
    m, n, heads = problem.seqlen_q, problem.seqlen_k, problem.batch * problem.heads
    program = problem.program
    if not program.tensors:
        return heads * int(visited_tiles(program.intervals(problem.shape), m, n, 1, 1).sum())
    grid = grid_of(problem, 128, 128)
    total = 0
    for head in grid.heads():
        full = int(((head.classes == 2) * np.outer(grid.row_lengths, grid.col_lengths)).sum())
        total += (
            full + sum(_pairs_of(problem, head.b, head.h, i, j) for i, j in np.argwhere(head.partial))
        ) * head.count
    return total


def _pairs_of(problem: Problem, b: int, h: int, i: int, j: int) -> int:
    q = (int(i) * 128, min(int(i + 1) * 128, problem.seqlen_q))
    k = (int(j) * 128, min(int(j + 1) * 128, problem.seqlen_k))
    tile = allowed(problem.program, problem.shape, q, k, np.arange)
    shape = (problem.batch, problem.heads, q[1] - q[0], k[1] - k[0])
    return int(np.count_nonzero(np.broadcast_to(tile, shape)[b, h]))
