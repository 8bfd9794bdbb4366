"""Bytes of the backward pass: S and P are computed again from Q, K and LSE, so no N × N matrix is ever stored."""

from __future__ import annotations

import numpy as np

from tilewise.model.grid import grid_of
from tilewise.model.schedules import Traffic, stat_size
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem


def preprocess(problem: Problem) -> Traffic:
    """delta = rowsum(dO ∘ O), once for each row."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    moved = Traffic()
    moved.read("O", rows * problem.head_dim_v * problem.itemsize)
    moved.read("dO", rows * problem.head_dim_v * problem.itemsize)
    moved.write("delta", rows * stat_size(problem))
    return moved


def dkdv(problem: Problem, tile: TilePlan) -> Traffic:
    """One block per K/V tile: K and V stay, the Q tiles of all query heads of the group that see it pass by."""
    grid = grid_of(problem, tile.block_q, tile.block_k)
    problem = grid.problem
    d, dv, size, stat = problem.head_dim, problem.head_dim_v, problem.itemsize, stat_size(problem)
    moved = Traffic()
    for group, count in grid.kv_heads():
        used = np.zeros(grid.cols, dtype=bool)
        for head in group:
            used |= head.visited.any(axis=0)
            rows = int(head.by_row @ grid.row_lengths) * head.count * count
            moved.read("Q", rows * d * size)
            moved.read("dO", rows * dv * size)
            moved.read("LSE", rows * stat)
            moved.read("delta", rows * stat)
            bias, mask = grid.extras(head)
            moved.read("bias", bias * head.count * count)
            moved.read("mask", mask * head.count * count)
        keys = int(grid.col_lengths[used].sum()) * count
        moved.read("K", keys * d * size)
        moved.read("V", keys * dv * size)
        moved.write("dK", problem.seqlen_k * count * d * size)
        moved.write("dV", problem.seqlen_k * count * dv * size)
    return moved


def dq(problem: Problem, tile: TilePlan) -> Traffic:
    """One block per Q tile: Q, dO, LSE and delta stay, K and V pass by."""
    grid = grid_of(problem, tile.block_q, tile.block_k)
    problem = grid.problem
    d, dv, size, stat = problem.head_dim, problem.head_dim_v, problem.itemsize, stat_size(problem)
    moved = Traffic()
    for head in grid.heads():
        rows = int(grid.row_lengths[head.visited.any(axis=1)].sum()) * head.count
        keys = int(head.by_col @ grid.col_lengths) * head.count
        moved.read("Q", rows * d * size)
        moved.read("dO", rows * dv * size)
        moved.read("LSE", rows * stat)
        moved.read("delta", rows * stat)
        moved.read("K", keys * d * size)
        moved.read("V", keys * dv * size)
        bias, mask = grid.extras(head)
        moved.read("bias", bias * head.count)
        moved.read("mask", mask * head.count)
        moved.write("dQ", problem.seqlen_q * head.count * d * size)
    return moved


def separate(problem: Problem, tile: TilePlan, dq_tile: TilePlan | None = None) -> Traffic:
    """The whole backward in three kernels: delta, then dK and dV, then dQ."""
    return preprocess(problem) + dkdv(problem, tile) + dq(problem, dq_tile or tile)


def fused(problem: Problem, tile: TilePlan) -> Traffic:
    """The backward with one pass over the tiles: each adds its share of dQ to an fp32 buffer, narrowed at the end."""
    moved = preprocess(problem) + dkdv(problem, tile)
    grid = grid_of(problem, tile.block_q, tile.block_k)
    problem = grid.problem
    d, stat = problem.head_dim, stat_size(problem)
    every = problem.batch * problem.heads * problem.seqlen_q
    moved.write("dQ acc", every * d * stat)  # zeroed
    for head in grid.heads():
        rows = int(head.by_row @ grid.row_lengths) * head.count
        moved.write("dQ acc", rows * d * stat)  # a reduction travels one way: the memory side adds
    moved.read("dQ acc", every * d * stat)
    moved.write("dQ", every * d * problem.itemsize)
    return moved
