"""The time a CPU takes for a tile.

A task holds a block of query rows and walks along the keys, block by block: it packs K and V, multiplies strip by strip, and takes
the exponentials of the scores. The vector units do all of that, so its parts add up:

products        multiply-adds of the strips and keys that a mask visits, at a part of the FMA peak (of the matrix unit's, where the
                kernel uses one)
softmax         clocks for each vector of scores
rescaling       O read, scaled and written once for each strip and block of keys
packing         clocks for each element of K and V a task packs (and of dK and dV that it adds to, in the backward)

Decoding packs nothing: it waits for memory, or multiplies. Tasks go to threads in order, each to the first that is free.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np

from tilewise.hardware.spec import DeviceSpec
from tilewise.masks import visited_tiles
from tilewise.model.cpu import threads_for
from tilewise.model.fitted import CpuFit, cpu_fit
from tilewise.model.grid import even, grid_of
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

Floats = np.ndarray[Any, np.dtype[np.float64]]
BACKWARD_PRODUCTS = 0.945
"""Speed of the backward's products, where the forward's is 1: two of five read their operands by rows far apart."""
DECODE_PRODUCTS = 0.6
"""Speed of the products of decoding: lanes lie along the head dim, so that every score is a sum across lanes."""
BACKWARD_SOFTMAX = 1.5
"""Clocks of P and dS, where the softmax takes one: an exponential, the difference to delta, two products."""
AUTOGRAD_CALLS = 20
"""What autograd adds to a backward, in calls. (Neoverse N1: forward and backward of 16 queries take 307 µs, a forward 12.)"""
MANY_TASKS = 4096
"""From so many on threads end together anyway."""


class CpuTime(NamedTuple):
    """Seconds of a call, and of each resource alone."""

    seconds: float
    limits: dict[str, float]
    tasks: int


class Visits(NamedTuple):
    """What each query block [blocks] of one head visits."""

    pairs: Floats
    """Scores, of whole register tiles."""
    crossings: Floats
    """Strips by key blocks."""
    keys: Floats
    """Keys that are packed, or read."""
    rows: Floats


def cpu_time(problem: Problem, spec: DeviceSpec, tile: TilePlan) -> CpuTime:
    """The predicted time of a call's pass."""
    sizes, fit, threads = even(problem), cpu_fit(spec), threads_for(problem, spec)
    register = tile.register_tile or (16, 4)
    visits = _visits(sizes, tile, register)
    decodes = tile.pass_ == "decode"
    parts = _decode_clocks(sizes, spec, fit, visits) if decodes else _clocks(sizes, spec, tile, fit, visits)
    clocks = np.maximum.reduce(list(parts.values())) if decodes else np.sum(list(parts.values()), axis=0)
    tasks = max(1, sizes.batch * sizes.heads // max(1, tile.heads)) * tile.splits
    if len(clocks) and clocks[-1] > clocks[0]:
        clocks = clocks[::-1]  # the longest are started first
    busy = _makespan(np.repeat(clocks / tile.splits, tasks), threads) / spec.clock_hz
    limits = {name: float(part.sum()) * tasks / tile.splits / threads / spec.clock_hz for name, part in parts.items()}
    calls = 1 + AUTOGRAD_CALLS if tile.pass_ == "backward" else 1
    return CpuTime(busy + calls * fit.call, limits, tasks * len(clocks))


def _clocks(sizes: Problem, spec: DeviceSpec, tile: TilePlan, fit: CpuFit, visits: Visits) -> dict[str, Floats]:
    """Clocks of a task for each query block, by what they are spent on."""
    R, J = tile.register_tile or (16, 4)
    d, dv = (-(-dim // J) * J for dim in (sizes.head_dim, sizes.head_dim_v))
    matrix = bool(spec.matrix_unit) and sizes.dtype == "bfloat16" and not sizes.widened
    dtype = sizes.dtype if matrix else sizes.arithmetic
    rate = spec.flops(dtype) / 2 / spec.units / spec.clock_hz * (fit.matrix if matrix else fit.products)
    lanes = spec.lanes(8 if dtype == "float64" else 4)
    heads = tile.heads
    if tile.pass_ == "backward":
        macs, softmax, packed = 3 * d + 2 * dv, BACKWARD_SOFTMAX, 3 * d + 2 * dv
        rate *= BACKWARD_PRODUCTS
        rows = 3 * d + 3 * dv
        rescaled = d
        if sizes.widened:  # scores and dP once more before, for delta
            macs, softmax, packed = macs + d + dv, 2 * softmax, 2 * packed
    else:
        macs, softmax, packed, rows, rescaled = d + dv, 1.0, d + dv, d + dv, dv
    return {
        "FMA units" if not matrix else "matrix unit": heads * visits.pairs * macs / rate,
        "exponentials": heads * visits.pairs * softmax * fit.softmax / lanes,
        "rescaling": heads * visits.crossings * (R / lanes) * rescaled,
        "packing": (visits.keys * packed + heads * visits.rows * rows) * fit.pack,
    }


def _decode_clocks(sizes: Problem, spec: DeviceSpec, fit: CpuFit, visits: Visits) -> dict[str, Floats]:
    pair = sizes.head_dim + sizes.head_dim_v
    rate = spec.flops(sizes.arithmetic) / 2 / spec.units / spec.clock_hz
    return {
        "FMA units": visits.keys * sizes.group * pair / (rate * fit.products * DECODE_PRODUCTS),
        "DRAM bandwidth": visits.keys * pair * sizes.itemsize / fit.stream * spec.clock_hz,
    }


def _visits(sizes: Problem, tile: TilePlan, register: tuple[int, int]) -> Visits:
    m, n, (R, J) = sizes.seqlen_q, sizes.seqlen_k, register
    if tile.pass_ == "decode":
        R, J = 1, 1
    M, N = tile.block_q, tile.block_k
    terms = sizes.program.intervals(sizes.shape)
    starts = np.arange(0, -(-m // R), max(1, M // R))

    def by_block(strips: Any) -> Floats:
        return np.add.reduceat(strips, starts).astype(float) if len(starts) else np.zeros(0)

    rows = np.minimum(M, m - np.arange(0, m, M)).astype(float)
    pairs = by_block(visited_tiles(terms, m, n, R, J)) * (R * J)
    crossings = by_block(visited_tiles(terms, m, n, R, N))
    keys = visited_tiles(terms, m, n, M, J).astype(float) * J
    if sizes.program.tensors:  # bands alone say too much: what tensors hide is not visited
        grid = grid_of(sizes, M, N)
        heads = list(grid.heads())
        seen = sum(head.by_row * head.count for head in heads) / max(1, sum(head.count for head in heads))
        part = seen / np.maximum(1, visited_tiles(terms, m, n, M, N))
        pairs, crossings, keys = pairs * part, crossings * part, keys * part
    return Visits(pairs, crossings, keys, rows)


def _makespan(tasks: Floats, threads: int) -> float:
    """When the last of the threads is done, each taking the next task when it is free."""
    if not len(tasks) or threads == 1 or len(tasks) > MANY_TASKS:
        return float(tasks.sum()) / threads
    free = [0.0] * threads
    for task in tasks.tolist():
        heapq.heapreplace(free, free[0] + task)
    return max(free)
