"""The time of persistent GPU kernels: programs that stay on their units, load by a warp of its own, and go from work tile to work
tile.

A step (one tile of scores) takes the products, what of the softmax no product hides, and a wait: for barriers and the ends of
products, which the other warpgroups fill in the forward, and of the warpgroups for one another in the backward. A work tile takes
its steps, and until products and softmax run side by side a wait that grows with the tile. Where dQ is added up in memory, each
step sends its part. Programs take work tiles in turns: equal ones in whole rounds, unequal ones in an order that leaves them
even.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tilewise.hardware.spec import DeviceSpec
from tilewise.model.cycles import FP32_LANES, PASS_COSTS, step, tile_flops
from tilewise.model.fitted import GpuFit, gpu_fit
from tilewise.model.gpu import Candidate
from tilewise.model.grid import even, grid_of
from tilewise.model.onchip import OnChip
from tilewise.model.schedules import stat_size
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

LATENCY_CLOCKS = 1000
"""From the request of a tile to its first product."""
SIDE = 128
"""Rows and keys of the tile whose waits are fitted."""
PORT_BYTES = 64
"""A clock, between a unit and L2."""
HELD = {"forward": ("Q",), "backward_dq": ("Q", "dO"), "backward": ("K", "V"), "backward_dkdv": ("K", "V")}
"""What a block holds while the other side streams past."""
NARROWEST = 64
"""Columns that the tensor cores' operands are padded to at least."""


def persistent(problem: Problem, spec: DeviceSpec, tile: TilePlan) -> Candidate:
    """What the model says of a persistent kernel's tile, which brings its own figures of the chip."""
    on_chip = OnChip(dict(tile.on_chip), tile.registers, tile.resident)
    if on_chip.sram_bytes > spec.sram_per_block:
        needed, most = on_chip.sram_bytes / 1024, spec.sram_per_block // 1024
        return Candidate(tile, on_chip, rejected=f"needs {needed:.0f} KiB of shared memory, a block has {most}")
    sizes, (d, dv) = even(problem), widths(problem)
    pipes = step(tile, d, dv, problem.itemsize, spec.flops(problem.dtype, problem.precision), on_chip, spec)
    pipes = replace(pipes, total=step_clocks(sizes, spec, tile, gpu_fit(spec)))
    waves = float(work_tiles(sizes, tile)[1].sum()) / spec.units
    return Candidate(tile, on_chip, pipes, persistent_seconds(problem, spec, tile), waves)


def persistent_seconds(problem: Problem, spec: DeviceSpec, tile: TilePlan) -> float:
    """The time of a kernel that computes scores."""
    problem, fit = even(problem), gpu_fit(spec)
    steps, tiles = longest_program(problem, spec, tile)
    clocks = steps * step_clocks(problem, spec, tile, fit) + tiles * tile_clocks(problem, spec, tile, fit)
    return clocks / spec.clock_hz + spec.launch_s


def around_seconds(problem: Problem, spec: DeviceSpec, tile: TilePlan, adds_up: bool) -> float:
    """The time of the kernels before and after: statistics and a dQ of zeros, or dQ from its sums; `adds_up`: there are such."""
    problem = even(problem)
    rows, stat = problem.batch * problem.heads * problem.seqlen_q, stat_size(problem)
    sums = problem.head_dim * stat if adds_up else 0
    if tile.pass_ == "backward_preprocess":
        row = 2 * problem.head_dim_v * problem.itemsize + 3 * stat + sums
    else:
        row = problem.head_dim * problem.itemsize + sums
    return rows * row / spec.dram_bandwidth + spec.launch_s


def longest_program(problem: Problem, spec: DeviceSpec, tile: TilePlan) -> tuple[float, float]:
    """Steps and work tiles of the program with most of them."""
    lengths, counts = work_tiles(problem, tile)
    total = float(counts.sum())
    if not total:
        return 0.0, 0.0
    if lengths.min() == lengths.max():
        rounds = float(-(-total // spec.units))
        return rounds * float(lengths[0]), rounds
    return max(float(lengths @ counts) / spec.units, float(lengths.max())), max(1.0, total / spec.units)


def work_tiles(problem: Problem, tile: TilePlan) -> tuple[Any, Any]:
    """Steps of each work tile that differs by its place in a head, and how many there are of it."""
    grid = grid_of(problem, tile.block_q, tile.block_k)
    found: list[tuple[Any, int]] = []
    if tile.holds_keys:
        for group, count in grid.kv_heads():
            found.append((sum(head.by_col * head.count for head in group), count))
    else:
        found = [(head.by_row, head.count) for head in grid.heads()]
    lengths = np.maximum(np.concatenate([steps for steps, _ in found]) if found else np.zeros(0), 1)
    counts = np.concatenate([np.full(len(steps), count) for steps, count in found]) if found else np.zeros(0)
    return lengths.astype(np.float64), counts.astype(np.float64)


def step_clocks(problem: Problem, spec: DeviceSpec, tile: TilePlan, fit: GpuFit) -> float:
    m, n, (d, dv) = tile.block_q, tile.block_k, widths(problem)
    per_unit = spec.units * spec.clock_hz
    products = tile_flops(tile.pass_, m, n, d, dv) / (spec.flops(problem.dtype, problem.precision) / per_unit)
    softmax = m * n * (per_unit / spec.exp_rate + PASS_COSTS[tile.pass_][2] / FP32_LANES)
    groups = 1 if tile.pass_.startswith("backward") else max(1, tile.warps // 4 - 1)  # one of them loads
    sums = m * d * stat_size(problem) / PORT_BYTES if tile.pass_ == "backward" else 0.0
    return products + softmax * fit.softmax + fit.step / groups + sums


def tile_clocks(problem: Problem, spec: DeviceSpec, tile: TilePlan, fit: GpuFit) -> float:
    """Of the wait for the first products a part grows with the scores they are for; what is held in one buffer only is waited
    for too."""
    rows, streamed = (tile.block_k, tile.block_q) if tile.holds_keys else (tile.block_q, tile.block_k)
    d, dv = widths(problem)
    sizes = {"Q": d, "K": d, "V": dv, "dO": dv}
    once = {name: rows * sizes[name] * problem.itemsize for name in HELD[tile.pass_]}
    buffers = dict(tile.on_chip)
    waited = sum(size for name, size in once.items() if buffers.get(name, 0) < 2 * size)
    first = LATENCY_CLOCKS * rows / SIDE * (3 + streamed / SIDE) / 4
    return fit.tile * (first + waited / (spec.l2_bandwidth / (spec.units * spec.clock_hz)))


def widths(problem: Problem) -> tuple[int, int]:
    """Columns of the operands."""
    d, dv = (max(NARROWEST, 1 << (dim - 1).bit_length()) for dim in (problem.head_dim, problem.head_dim_v))
    return d, dv
