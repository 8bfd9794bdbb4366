"""Bytes between memory and chip, by tensor and direction, of each schedule.

Every function counts what its schedule moves when each load and store goes to memory: these are tile bytes, what
leaves L2 towards the units. `passes.compulsory` is what no schedule can avoid, and `l2.dram` says what of the tile bytes
L2 lets through to memory. The simulator runs the same schedules literally and must find the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewise.errors import PlanError
from tilewise.model.grid import Grid, HeadTiles, Ints, grid_of
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem


@dataclass
class Traffic:
    """Bytes read and written, by tensor."""

    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)

    def read(self, tensor: str, size: int | np.integer[Any]) -> None:
        if size:
            self.reads[tensor] += int(size)

    def write(self, tensor: str, size: int | np.integer[Any]) -> None:
        if size:
            self.writes[tensor] += int(size)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.reads + other.reads, self.writes + other.writes)

    @property
    def total_read(self) -> int:
        return sum(self.reads.values())

    @property
    def total_written(self) -> int:
        return sum(self.writes.values())

    @property
    def total(self) -> int:
        return self.total_read + self.total_written

    def tensors(self) -> Iterator[tuple[str, int, int]]:
        """Name, bytes read, bytes written; inputs first, in the order of first use."""
        for name in dict.fromkeys([*self.reads, *self.writes]):
            yield name, self.reads[name], self.writes[name]

    def to_dict(self) -> dict[str, Any]:
        by_tensor = {name: {"read": read, "write": written} for name, read, written in self.tensors()}
        return {"read": self.total_read, "write": self.total_written, "total": self.total, "tensors": by_tensor}


def stat_size(problem: Problem) -> int:
    """Bytes of a statistic (m, l, LSE, delta) and of an accumulator's element in memory: fp32, fp64 for fp64."""
    return 8 if problem.dtype == "float64" else 4


def forward_compulsory(problem: Problem, tile: TilePlan) -> Traffic:
    """Each input that is used at all once, each output once. Keys are used tile by tile."""
    grid = grid_of(problem, tile.block_q, tile.block_k)
    problem = grid.problem
    size, stat, moved = problem.itemsize, stat_size(problem), Traffic()
    for group, count in grid.kv_heads():
        used = np.any([head.visited.any(axis=0) for head in group], axis=0) if grid.rows else np.zeros(grid.cols, bool)
        keys = int(grid.col_lengths[used].sum()) * count
        moved.read("K", keys * problem.head_dim * size)
        moved.read("V", keys * problem.head_dim_v * size)
    for head in grid.heads():
        seen = int(grid.row_lengths[head.visited.any(axis=1)].sum()) * head.count
        moved.read("Q", seen * problem.head_dim * size)
    rows = problem.batch * problem.heads * problem.seqlen_q
    if problem.bias is not None:
        moved.read("bias", int(np.prod(problem.bias)) * size)
    moved.write("O", rows * problem.head_dim_v * size)
    moved.write("LSE", rows * stat)
    return moved


def standard(problem: Problem, tile: TilePlan | None = None, *, kernels: int = 6) -> Traffic:
    """The textbook way, every step its own kernel: S, rowmax, exp, rowsum, P, O (6), or S, softmax, O (3).

    S and P have the problem's dtype, row statistics are fp32. The mask is applied to S where it is made; every score is
    computed whether visible or not.
    """
    if kernels not in (3, 6):
        raise PlanError(f"kernels: got {kernels}, need 3 (S, softmax, O) or 6 (S, rowmax, exp, rowsum, P, O)")
    whole = grid_of(problem, max(1, problem.seqlen_q), max(1, problem.seqlen_k))
    problem = whole.problem
    heads = problem.batch * problem.heads
    m, n, size, stat = problem.seqlen_q, problem.seqlen_k, problem.itemsize, stat_size(problem)
    scores, rows = heads * m * n * size, heads * m * stat
    moved = Traffic()
    if not (m and n and heads):
        moved.write("O", heads * m * problem.head_dim_v * size)
        return moved
    moved.read("Q", heads * m * problem.head_dim * size)
    moved.read("K", heads * n * problem.head_dim * size)
    moved.read("bias", heads * int(whole.bias_bytes().sum()))
    moved.read("mask", heads * int(whole.mask_bytes().sum()))
    moved.write("S", scores)
    if kernels == 6:
        moved.read("S", 2 * scores)  # for the maxima, for the exponentials
        moved.write("rowmax", rows)
        moved.read("rowmax", rows)
        moved.write("E", scores)
        moved.read("E", 2 * scores)  # for the sums, for the division
        moved.write("rowsum", rows)
        moved.read("rowsum", rows)
    else:
        moved.read("S", scores)
    moved.write("P", scores)
    moved.read("P", scores)
    moved.read("V", heads * n * problem.head_dim_v * size)
    moved.write("O", heads * m * problem.head_dim_v * size)
    return moved


def v1(problem: Problem, tile: TilePlan) -> Traffic:
    """K/V blocks outside, Q blocks inside: O, m and l live in memory and are read and written once per visited tile."""
    grid = grid_of(problem, tile.block_q, tile.block_k)
    problem = grid.problem
    d, dv, size, stat = problem.head_dim, problem.head_dim_v, problem.itemsize, stat_size(problem)
    moved = Traffic()
    for head in grid.heads():
        rows = int(head.by_row @ grid.row_lengths) * head.count
        keys = int(grid.col_lengths[head.visited.any(axis=0)].sum()) * head.count
        every = problem.seqlen_q * head.count
        moved.read("K", keys * d * size)
        moved.read("V", keys * dv * size)
        moved.read("Q", rows * d * size)
        # started at (0, −inf, 0), updated by every tile, divided by l at the end
        moved.write("acc", (every + rows) * dv * stat)
        moved.read("acc", (rows + every) * dv * stat)
        moved.write("m", (every + rows) * stat)
        moved.read("m", rows * stat)
        moved.write("l", (every + rows) * stat)
        moved.read("l", (rows + every) * stat)
        moved.write("O", every * dv * size)
        _read_extras(moved, grid, head)
    return moved


def v2(problem: Problem, tile: TilePlan) -> Traffic:
    """Q blocks outside, K/V blocks inside: Q once, O and LSE once, K and V once for each Q block that sees them."""
    grid = grid_of(problem, tile.block_q, tile.block_k)
    problem = grid.problem
    d, dv, size, stat = problem.head_dim, problem.head_dim_v, problem.itemsize, stat_size(problem)
    moved = Traffic()
    for head in grid.heads():
        keys = int(head.by_col @ grid.col_lengths) * head.count
        moved.read("Q", int(grid.row_lengths[head.visited.any(axis=1)].sum()) * head.count * d * size)
        moved.read("K", keys * d * size)
        moved.read("V", keys * dv * size)
        _read_extras(moved, grid, head)
        moved.write("O", problem.seqlen_q * head.count * dv * size)
        moved.write("LSE", problem.seqlen_q * head.count * stat)
    return moved


def decode(problem: Problem, tile: TilePlan) -> Traffic:
    """v2 with the keys in `splits` parts whose (O, LSE) are written in fp32 and merged by a second kernel.

    With `pack_gqa` the query heads of a key head share its tiles, so K and V are read once for all of them.
    """
    grid = grid_of(problem, tile.block_q, tile.block_k)
    problem = grid.problem
    d, dv, size, stat = problem.head_dim, problem.head_dim_v, problem.itemsize, stat_size(problem)
    per = -(-grid.cols // tile.splits) if grid.cols else 0
    moved = Traffic()
    for visited, row_lengths, heads in _decode_rows(problem, tile, grid):
        for split in range(tile.splits):
            part = visited[:, split * per : (split + 1) * per]
            lengths = grid.col_lengths[split * per : (split + 1) * per]
            keys = int(part.sum(axis=0, dtype=np.int64) @ lengths) * heads
            moved.read("Q", int(row_lengths[part.any(axis=1)].sum()) * heads * d * size)
            moved.read("K", keys * d * size)
            moved.read("V", keys * dv * size)
    if problem.bias is not None or problem.program.tensors:
        single = grid_of(problem, 1, tile.block_k)
        for head in single.heads():  # rows of a packed tile belong to several heads: each reads its own bias and mask
            _read_extras(moved, single, head)
    rows = problem.batch * problem.heads * problem.seqlen_q
    if tile.splits > 1:
        for name, width in (("partial O", dv), ("partial LSE", 1)):
            moved.write(name, tile.splits * rows * width * stat)
            moved.read(name, tile.splits * rows * width * stat)
    moved.write("O", rows * dv * size)
    moved.write("LSE", rows * stat)
    return moved


def _decode_rows(problem: Problem, tile: TilePlan, grid: Grid) -> Iterator[tuple[Any, Ints, int]]:
    """Visited tiles, lengths of the rows of tiles, and how many heads look alike."""
    if not tile.pack_gqa:
        for head in grid.heads():
            yield head.visited, grid.row_lengths, head.count
        return
    # rows of a packed tile are (query, head of the group), queries outermost
    single = grid_of(problem, 1, tile.block_k)
    packed = problem.seqlen_q * problem.group
    starts = np.arange(0, packed, tile.block_q, dtype=np.int64)
    ends = np.minimum(starts + tile.block_q, packed)
    for group, count in single.kv_heads():
        members = [head.visited for head in group for _ in range(head.count)]
        rows = np.stack(members, axis=1).reshape(packed, single.cols)
        visited = np.array([rows[a:b].any(axis=0) for a, b in zip(starts, ends, strict=True)], dtype=bool)
        yield visited.reshape(len(starts), single.cols), ends - starts, count


def _read_extras(moved: Traffic, grid: Grid, head: HeadTiles) -> None:
    """Bias of every visited tile, mask tensors of every PARTIAL one."""
    bias, mask = grid.extras(head)
    moved.read("bias", bias * head.count)
    moved.read("mask", mask * head.count)


Schedule = Callable[[Problem, TilePlan], Traffic]
