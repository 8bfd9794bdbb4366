"""Bytes between memory and chip, by tensor and direction, of each schedule.

Every schedule counts what it moves when each load and store goes to memory: these are tile bytes, what leaves L2 towards
the units. `compulsory` is what no schedule can avoid, and `l2.dram` says what of the tile bytes L2 lets through to memory.
The simulator runs the same schedules literally and must count the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tilewise.errors import PlanError
from tilewise.model.grid import Grid, HeadTiles, Ints, even, grid_of
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
    """Bytes of a statistic (m, l, LSE, delta) and of an accumulator's element in memory: fp32 or fp64, as the arithmetic."""
    return 8 if problem.arithmetic == "float64" else 4


class _Rows:
    """Traffic counted in rows: a row of each tensor has a fixed size."""

    def __init__(self, problem: Problem) -> None:
        d, dv, size, stat = problem.head_dim, problem.head_dim_v, problem.itemsize, stat_size(problem)
        self.moved = Traffic()
        self.row_bytes = {
            **dict.fromkeys(("Q", "dQ", "dK"), d * size),
            **dict.fromkeys(("O", "dO", "dV"), dv * size),
            **{"K": d * problem.kv_itemsize, "V": dv * problem.kv_itemsize},
            **dict.fromkeys(("m", "l", "LSE", "delta", "rowmax", "rowsum", "partial LSE"), stat),
            **dict.fromkeys(("acc", "partial O"), dv * stat),
            **dict.fromkeys(("dQ acc", "dK acc"), d * stat),
            "dV acc": dv * stat,
            **dict.fromkeys(("S", "E", "P"), problem.seqlen_k * size),
        }

    def read(self, rows: int, *tensors: str) -> None:
        for name in tensors:
            self.moved.read(name, rows * self.row_bytes[name])

    def write(self, rows: int, *tensors: str) -> None:
        for name in tensors:
            self.moved.write(name, rows * self.row_bytes[name])

    def read_extras(self, grid: Grid, head: HeadTiles, heads: int = 1) -> None:
        """Bias of every visited tile, mask tensors of every PARTIAL one."""
        for name, size in zip(("bias", "mask"), grid.extras(head), strict=True):
            self.moved.read(name, size * head.count * heads)


def standard(problem: Problem, tile: TilePlan | None = None, *, kernels: int = 6) -> Traffic:
    """The textbook way, every step its own kernel: S, rowmax, exp, rowsum, P, O (6), or S, softmax, O (3).

    S and P have the problem's dtype, row statistics are fp32. The mask is applied to S where it is made; every score is
    computed whether visible or not.
    """
    if kernels not in (3, 6):
        raise PlanError(f"kernels: got {kernels}, need 3 (S, softmax, O) or 6 (S, rowmax, exp, rowsum, P, O)")
    whole = grid_of(problem, max(1, problem.seqlen_q), max(1, problem.seqlen_k))
    count = _Rows(whole.problem)
    heads = whole.problem.batch * whole.problem.heads
    rows, keys = heads * whole.problem.seqlen_q, heads * whole.problem.seqlen_k
    if rows and keys:
        count.read(rows, "Q")
        count.read(keys, "K")
        count.moved.read("bias", heads * int(whole.bias_bytes().sum()))
        count.moved.read("mask", heads * int(whole.mask_bytes().sum()))
        count.write(rows, "S")
        if kernels == 6:
            count.read(2 * rows, "S")  # for the maxima, for the exponentials
            count.write(rows, "rowmax", "E", "rowsum")
            count.read(rows, "rowmax")
            count.read(2 * rows, "E")  # for the sums, for the division
            count.read(rows, "rowsum")
        else:
            count.read(rows, "S")
        count.write(rows, "P")
        count.read(rows, "P")
        count.read(keys, "V")
    count.write(rows, "O")
    return count.moved


def v1(problem: Problem, tile: TilePlan) -> Traffic:
    """K/V blocks outside, Q blocks inside: O, m and l live in memory and are read and written once per visited tile."""
    grid = grid_of(problem, tile.block_q, tile.block_k)
    count = _Rows(grid.problem)
    for head in grid.heads():
        every, rows = grid.problem.seqlen_q * head.count, head.rows_by_tile * head.count
        count.read(grid.keys_used([head]) * head.count, "K", "V")
        # the state starts at (0, −inf, 0), every tile updates it, the end divides by l
        count.read(rows, "Q")
        count.write(every + rows, "acc", "m", "l")
        count.read(rows + every, "acc")
        count.read(rows, "m")
        count.read(rows + every, "l")
        count.write(every, "O")
        count.read_extras(grid, head)
    return count.moved


def v2(problem: Problem, tile: TilePlan) -> Traffic:
    """Q blocks outside, K/V blocks inside: Q once, O and LSE once, K and V once for each Q block that sees them."""
    return _queries_outside(problem, tile, ("Q",), ("O", "LSE"))


def backward_dq(problem: Problem, tile: TilePlan) -> Traffic:
    """One block per Q tile: Q, dO, LSE and delta stay, K and V pass by."""
    return _queries_outside(problem, tile, ("Q", "dO", "LSE", "delta"), ("dQ",))


def _queries_outside(problem: Problem, tile: TilePlan, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Traffic:
    grid = grid_of(problem, tile.block_q, tile.block_k)
    count = _Rows(grid.problem)
    for head in grid.heads():
        count.read(head.rows * head.count, *inputs)
        count.read(head.keys_by_tile * head.count // tile.sharing, "K", "V")  # once for all heads of a task
        count.read_extras(grid, head)
        count.write(grid.problem.seqlen_q * head.count, *outputs)
    return count.moved


def decode(problem: Problem, tile: TilePlan) -> Traffic:
    """v2 with the keys in `splits` parts whose (O, LSE) are written in fp32 and merged by a second kernel.

    With `pack_gqa` the query heads of a key head share its tiles, so K and V are read once for all of them.
    """
    grid = grid_of(problem, tile.block_q, tile.block_k)
    problem = grid.problem
    count = _Rows(problem)
    per = -(-grid.cols // tile.splits) if grid.cols else 0
    for visited, row_lengths, heads in _decode_rows(problem, tile, grid):
        for split in range(tile.splits):
            part = visited[:, split * per : (split + 1) * per]
            lengths = grid.col_lengths[split * per : (split + 1) * per]
            count.read(int(row_lengths[part.any(axis=1)].sum()) * heads, "Q")
            count.read(int(part.sum(axis=0, dtype=np.int64) @ lengths) * heads // tile.sharing, "K", "V")
    if problem.bias is not None or problem.program.tensors:
        single = grid_of(problem, 1, tile.block_k)
        for head in single.heads():  # rows of a packed tile belong to several heads: each reads its own bias and mask
            count.read_extras(single, head)
    rows = problem.batch * problem.heads * problem.seqlen_q
    if tile.splits > 1:
        count.write(tile.splits * rows, "partial O", "partial LSE")
        count.read(tile.splits * rows, "partial O", "partial LSE")
    count.write(rows, "O", "LSE")
    return count.moved


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


# The backward computes S and P again from Q, K and LSE, so no N × N matrix is ever stored.


def preprocess(problem: Problem) -> Traffic:
    """delta = rowsum(dO ∘ O), once for each row."""
    count, rows = _Rows(problem), problem.batch * problem.heads * problem.seqlen_q
    count.read(rows, "O", "dO")
    count.write(rows, "delta")
    return count.moved


def backward_dkdv(problem: Problem, tile: TilePlan) -> Traffic:
    """One block per K/V tile: K and V stay, the Q tiles of all query heads of the group that see it pass by."""
    grid = grid_of(problem, tile.block_q, tile.block_k)
    count = _Rows(grid.problem)
    for group, heads in grid.kv_heads():
        for head in group:
            count.read(head.rows_by_tile * head.count * heads, "Q", "dO", "LSE", "delta")
            count.read_extras(grid, head, heads)
        count.read(grid.keys_used(group) * heads, "K", "V")
        count.write(grid.problem.seqlen_k * heads, "dK", "dV")
    return count.moved


def backward(problem: Problem, tile: TilePlan, dq_tile: TilePlan | None = None) -> Traffic:
    """The whole backward in three kernels: delta, then dK and dV, then dQ."""
    return preprocess(problem) + backward_dkdv(problem, tile) + backward_dq(problem, dq_tile or tile)


def backward_kernel(problem: Problem, tile: TilePlan) -> Traffic:
    """The kernel that gives dQ, dK and dV in one pass over the tiles, between `preprocess` and the narrowing of what was added
    up: dQ where blocks hold keys, dK and dV where they hold queries."""
    grid = grid_of(problem, tile.block_q, tile.block_k)
    count = _Rows(grid.problem)
    if tile.outer == "queries":
        for head in grid.heads():
            count.read(head.keys_by_tile * head.count, "dK acc", "dV acc")
            count.write(head.keys_by_tile * head.count, "dK acc", "dV acc")
        return backward_dq(problem, tile) + count.moved
    for head in grid.heads():
        count.write(head.rows_by_tile * head.count, "dQ acc")  # a reduction travels one way: the memory side adds
    return backward_dkdv(problem, tile) + count.moved


def backward_fused(problem: Problem, tile: TilePlan) -> Traffic:
    """The backward with one pass over the tiles: each adds to dQ in an fp32 buffer, narrowed at the end."""
    return preprocess(problem) + backward_kernel(problem, replace(tile, outer="keys")) + postprocess(problem)


def postprocess(problem: Problem) -> Traffic:
    """dQ's fp32 buffer, zeroed before and narrowed after the kernel that adds to it."""
    count, rows = _Rows(problem), problem.batch * problem.heads * problem.seqlen_q
    count.write(rows, "dQ acc")
    count.read(rows, "dQ acc")
    count.write(rows, "dQ")
    return count.moved


SCHEDULES: dict[str, Callable[[Problem, TilePlan], Traffic]] = {
    schedule.__name__: schedule
    for schedule in (standard, v1, v2, decode, backward, backward_kernel, backward_fused, backward_dkdv, backward_dq)
}


def traffic(problem: Problem, tile: TilePlan, schedule: str = "") -> Traffic:
    """Tile bytes of a schedule, by tensor and direction; without a name, of the schedule that the tile's pass runs."""
    schedule = schedule or {"forward": "v2", "backward": "backward_kernel"}.get(tile.pass_, tile.pass_)
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule: got {schedule!r}, need one of {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule](problem, tile)


def compulsory(problem: Problem, tile: TilePlan) -> Traffic:
    """What the pass of `tile` cannot avoid: each input that is used at all once, each output once. Keys are used by tile."""
    problem = even(problem)
    if tile.pass_ in ("forward", "decode"):
        grid = grid_of(problem, tile.block_q, tile.block_k)
        count, rows = _Rows(problem), problem.batch * problem.heads * problem.seqlen_q
        for group, heads in grid.kv_heads():
            count.read(grid.keys_used(group) * heads, "K", "V")
        for head in grid.heads():
            count.read(head.rows * head.count, "Q")
        count.write(rows, "O", "LSE")
        moved = count.moved
    else:
        moved = traffic(problem, replace(tile, block_q=max(1, problem.seqlen_q), block_k=max(1, problem.seqlen_k)))
        if (
            "K" in moved.reads and not tile.holds_keys
        ):  # one Q tile a head still reads K and V for each query head of a group
            for name in ("K", "V"):
                moved.reads[name] //= problem.group
    if problem.bias is not None:
        moved.reads["bias"] = math.prod(problem.bias) * problem.itemsize
    return moved
