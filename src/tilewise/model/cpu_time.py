"""The time a CPU takes for a tile.

A task holds a block of query rows and walks along the keys, block by block: it packs K and V, multiplies strip by strip, and
takes the exponentials of the scores. The vector units do all of that, so its parts add up:

products        multiply-adds of the strips and keys that a mask visits, at a part of the FMA peak (of the matrix unit's, where
                the kernel uses one)
softmax         clocks for each vector of scores
joining         sums read, scaled and written once for each strip and block of keys
packing         clocks for each element of K and V a task packs (and of dK and dV that it adds to, in the backward)

Decoding packs nothing: it waits for memory, or multiplies. Tasks go to threads in order, each to the first that is free.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np

from tilewise.hardware.spec import DeviceSpec
from tilewise.model.cpu import tall_rows, threads_for
from tilewise.model.cpu_visits import REGISTER_TILE, Visits, visits_of
from tilewise.model.fitted import CpuFit, cpu_fit
from tilewise.model.grid import even
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

Floats = np.ndarray[Any, np.dtype[np.float64]]
BACKWARD_PRODUCTS = 0.945
"""Speed of the backward's products, where the forward's is 1: two of five read their operands by rows far apart."""
DECODE_PRODUCTS = 0.57
"""Speed of the products of decoding: lanes lie along the head dim, so that every score is a sum across lanes."""
ROW_PASSES = 5
"""Times that a row of Q and one of O is packed, cleared or written out, once a task."""
L3_PART = 4
"""The part of the last cache in which K and V of the call before are still found: others use it too."""
JOIN = 2.6
"""Clocks of each vector of a strip's sums that are joined to those of earlier blocks: two loads, a product and a store, and what
is done once for every strip and block. (Neoverse N1, 2026-11-16, sweep of d 128, 512 rows: 16 keys 69.0 ms, 32 65.3, 64 63.7, 128
62.4, 256 62.4.)"""
KEYS = {False: 150.0, True: 75.0}
"""Keys of a block beyond which crowding costs more than fewer joins bring; in the backward, where there are two sorts of scores,
half. (The same sweep; backward of d 64, 256 rows: 16 keys 86.6 ms, 32 84.7, 64 83.3, 128 83.7.)"""
SOFTMAX = 10.8
"""Clocks of a vector of scores: the exponential's sixteen operations, maximum, sum and rescaling, on two pipes."""
BACKWARD_SOFTMAX = 1.5
"""Clocks of P and dS, where the softmax takes one: an exponential, the difference to delta, two products."""
AUTOGRAD_CALLS = 30
"""What autograd adds to a backward, in calls. (Neoverse N1: forward and backward of 16 queries take 307 µs, a forward 12.)"""
WAKE = 0.3
"""What waking a further thread takes, in calls."""
UNEVEN = 1.5
"""Where cores slow each other down they do not run at one pace: for so many times that part of a task the last is waited for."""
MANY_TASKS = 4096
"""From so many on threads end together anyway."""


class CpuTime(NamedTuple):
    """Seconds of a call, and of each resource alone."""

    seconds: float
    limits: dict[str, float]
    tasks: int


def cpu_time(problem: Problem, spec: DeviceSpec, tile: TilePlan) -> CpuTime:
    """The predicted time of a call's pass."""
    sizes, fit, threads = even(problem), cpu_fit(spec), threads_for(problem, spec)
    visits = visits_of(sizes, tile)
    decodes = tile.pass_ == "decode"
    parts = _decode_clocks(sizes, spec, fit, visits, threads) if decodes else _clocks(sizes, spec, tile, fit, visits)
    clocks = np.maximum.reduce(list(parts.values())) if decodes else np.sum(list(parts.values()), axis=0)
    clocks = (clocks / tile.splits + _row_clocks(sizes, tile, fit, visits)) * tile.groups
    count = max(1, sizes.batch * sizes.heads // (tile.heads * tile.groups)) * tile.splits
    if len(clocks) and clocks[-1] > clocks[0]:
        clocks = clocks[::-1]  # the longest are started first
    slower = 1.0 if decodes else 1 + (fit.together - 1) * (threads - 1) / max(1, spec.units - 1)
    tasks = np.repeat(clocks, count)
    waiting = 0.0 if decodes or not len(tasks) else UNEVEN * (fit.together - 1) * (1 - 1 / threads) * float(tasks.mean())
    busy = (_makespan(tasks, threads) + waiting) * slower / spec.clock_hz
    alone = count * slower / tile.splits / threads / spec.clock_hz
    calls = 1 + WAKE * (threads - 1) + (AUTOGRAD_CALLS if tile.pass_ == "backward" else 0)
    limits = {name: float(part.sum()) * alone for name, part in parts.items()}
    return CpuTime(busy + calls * fit.call, limits, count * len(clocks))


def _clocks(sizes: Problem, spec: DeviceSpec, tile: TilePlan, fit: CpuFit, visits: Visits) -> dict[str, Floats]:
    """Clocks of a task for each query block, by what they are spent on; all splits together."""
    R, J = tile.register_tile or REGISTER_TILE
    d, dv = (-(-dim // J) * J for dim in (sizes.head_dim, sizes.head_dim_v))
    matrix = bool(spec.matrix_unit) and tile.kernel.endswith(spec.matrix_unit)
    backward, heads = tile.pass_ == "backward", tile.heads
    rate = _macs_per_clock(sizes, spec, matrix) * (fit.matrix if matrix else fit.products)
    lanes = spec.lanes(8 if sizes.arithmetic == "float64" else 4)
    macs, softmax, packed, joined = d + dv, 1.0, d + dv, dv
    if backward:  # strips lie along the head dim in the products of dK and dV
        along = sum(-(-dim // R) * R for dim in (sizes.head_dim, sizes.head_dim_v))
        macs, softmax, packed, joined = 2 * d + dv + along, BACKWARD_SOFTMAX, 2 * d + dv, d
        rate *= BACKWARD_PRODUCTS
        if sizes.widened:  # scores and dP once more before, for delta
            macs, softmax, packed = macs + d + dv, 2 * softmax, 2 * packed
    # sums are joined once a block of keys, where a strip's scores crowd L1 if it is long; K and V are packed once a block of
    # rows, where Q and O crowd L2 if it is tall
    long = 1 + (tile.block_k / (KEYS[backward] * (2 if matrix else 1))) ** 2
    tall = 1 + (heads * tile.block_q / tall_rows(spec, backward)) ** 3
    return {
        "matrix unit" if matrix else "FMA units": heads * visits.pairs * macs / rate,
        "exponentials": heads * visits.pairs * softmax * SOFTMAX / fit.products / lanes,
        "joining": heads * visits.crossings * (R / lanes) * joined * JOIN * long,
        "packing": visits.keys * packed * tall * fit.pack,
    }


def _macs_per_clock(sizes: Problem, spec: DeviceSpec, matrix: bool) -> float:
    """Nominal multiply-adds of one core."""
    dtype = sizes.dtype if matrix else sizes.arithmetic
    return spec.flops(dtype) / 2 / spec.units / spec.clock_hz


def _row_clocks(sizes: Problem, tile: TilePlan, fit: CpuFit, visits: Visits) -> Floats:
    """Clocks of a task's rows beside their keys; with splits, of leaving and merging its sums too."""
    passes = ROW_PASSES * (2 if tile.splits > 1 else 1)
    clocks = tile.heads * visits.rows * (sizes.head_dim + sizes.head_dim_v) * passes * fit.pack
    return np.asarray(clocks)


def _decode_clocks(sizes: Problem, spec: DeviceSpec, fit: CpuFit, visits: Visits, threads: int) -> dict[str, Floats]:
    """Clocks of reading K and V once, and of multiplying with them; the longer of the two hides the other."""
    pair = sizes.head_dim + sizes.head_dim_v
    rate = _macs_per_clock(sizes, spec, False) * fit.products * DECODE_PRODUCTS
    cached = sizes.batch * sizes.kv_heads * sizes.seqlen_k * pair * sizes.kv_itemsize <= spec.l3_bytes // L3_PART
    stream = min(fit.stream, spec.dram_bandwidth / (threads if cached else spec.units))
    return {
        "FMA units": visits.keys * sizes.group * pair / rate,
        "DRAM bandwidth": visits.keys * pair * sizes.kv_itemsize / stream * spec.clock_hz,
    }


def _makespan(tasks: Floats, threads: int) -> float:
    """When the last of the threads is done, each taking the next task when it is free."""
    if not len(tasks) or threads == 1 or len(tasks) > MANY_TASKS:
        return float(tasks.sum()) / threads
    free = [0.0] * threads
    for task in tasks.tolist():
        heapq.heapreplace(free, free[0] + task)
    return max(free)
