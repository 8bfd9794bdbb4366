"""What the page's controls switch between: the IO model over a grid of problems, tiles and machines, computed beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from tilewise import model
from tilewise.diagnostics.plan import plan
from tilewise.hardware import DeviceSpec
from tilewise.lab.simulator.timeline import block_timeline
from tilewise.masks import Mask, causal, documents, full, prefix, window
from tilewise.model import Plan, TilePlan
from tilewise.model.grid import Grid
from tilewise.problem import Problem

LENGTHS = (1024, 4096, 8192)
HEAD_DIMS = (64, 128)
MASKS = ("full", "causal", "window", "prefix", "documents")
TILES: tuple[tuple[int, int] | None, ...] = (None, (64, 64), (128, 64), (128, 128))
"""None is the plan's own."""
SCHEDULES = ("standard", "v1", "v2")
HEADS = 8
HERE = "here"
"""The key of the live machine."""
STAGES = (1, 2, 3)
TIMELINE_TILES = 8


def key(device: str, length: int, dim: int, mask: str, tile: str) -> str:
    """What the page looks results up by: one position of the controls."""
    return f"{device}|{length}|{dim}|{mask}|{tile}"


@cache
def make_mask(name: str, length: int) -> Mask:
    """Masks that look the same at every length: a window of an eighth, a prefix of a quarter, four documents."""
    if name == "causal":
        return causal()
    if name == "window":
        return causal() & window(length // 8)
    if name == "prefix":
        return causal() | prefix(length // 4)
    if name == "documents":
        ends = np.array([0.4, 0.55, 0.85]) * length
        return causal() & documents(np.searchsorted(ends, np.arange(length), side="right").astype(np.int32))
    return full()


def tile_name(tile: tuple[int, int] | None) -> str:
    return "plan" if tile is None else f"{tile[0]}x{tile[1]}"


@cache
def problem_of(length: int, dim: int, mask: str, dtype: str) -> Problem:
    return Problem.of(heads=HEADS, head_dim=dim, seqlen=length, dtype=dtype, mask=make_mask(mask, length))


def dtype_on(spec: DeviceSpec) -> str:
    return "bfloat16" if spec.is_gpu else "float32"


@cache
def moved_by(schedule: str, length: int, dim: int, mask: str, dtype: str, sides: tuple[int, int]) -> model.Traffic:
    """Tile bytes, which machines with the same dtype have in common."""
    return model.traffic(problem_of(length, dim, mask, dtype), TilePlan(*sides), schedule)


@cache
def classes(length: int, mask: str, block_q: int, block_k: int) -> Any:
    """[Tr, Tc] of one head."""
    problem = Problem.of(heads=1, head_dim=64, seqlen=length, mask=make_mask(mask, length))
    return Grid(problem, block_q, block_k).classes(0, 0)


def results(devices: dict[str, DeviceSpec], lengths: tuple[int, ...] = LENGTHS) -> dict[str, dict[str, Any]]:
    """Every position of the controls: its traffic by schedule, its place under the roof of `devices`, its plan."""
    table = {}
    for device, length, dim, mask in product(devices, lengths, HEAD_DIMS, MASKS):
        problem = problem_of(length, dim, mask, dtype_on(devices[device]))
        chosen = plan(problem, None if device == HERE else device)  # as `explain` plans: one time for one problem
        for tile in TILES:
            table[key(device, length, dim, mask, tile_name(tile))] = position(chosen, mask, tile, devices[device])
    return table


def position(
    chosen: Plan, mask: str, wanted: tuple[int, int] | None = None, roof: DeviceSpec | None = None
) -> dict[str, Any]:
    """One position of the controls; `wanted` is the reader's own tile, `roof` the machine with the ceilings that are drawn."""
    problem, spec, useful = chosen.problem, roof or chosen.spec, chosen.work.useful
    tile = chosen.tile if wanted is None else TilePlan(*wanted, stages=chosen.tile.stages, warps=chosen.tile.warps)
    sides = (tile.block_q, tile.block_k)
    pair = 2 * problem.heads * (problem.head_dim + problem.head_dim_v)
    dense = pair * problem.seqlen_q * problem.seqlen_k
    executed = pair * int((classes(problem.seqlen_q, mask, *sides) > 0).sum()) * tile.block_q * tile.block_k
    at = (problem.seqlen_q, problem.head_dim, mask, problem.dtype, sides)
    # every tile from memory; of the plan's only those that the shared cache lets through
    schedules = {name: moved_by(name, *at) for name in SCHEDULES}
    slots = spec.units * max(1, chosen.resident)
    schedules["plan"] = chosen.dram if wanted is None else model.dram(problem, tile, schedules["v2"], spec, slots)
    multiplied = {"standard": dense}  # the standard way computes every score
    return {
        "tile": str(tile),
        "stages": tile.stages,
        "schedules": {
            name: _point(moved, useful, multiplied.get(name, executed), problem.dtype, spec)
            for name, moved in schedules.items()
        },
        "less": schedules["standard"].total / schedules["v2"].total,
        "predicted": chosen.seconds if wanted is None and chosen.timed else None,
        "useful": useful,
        "executed": executed,
        "compulsory": chosen.compulsory.total,
        "onChip": dict(chosen.on_chip) if wanted is None else _buffers(problem, tile, spec),
        "limit": spec.sram_per_block if spec.is_gpu else spec.l2_bytes,
        "binding": chosen.binding if wanted is None else None,
        "limits": dict(chosen.limits) if wanted is None else None,
        "reasons": list(chosen.reasons) if wanted is None else [],
    }


def _point(moved: model.Traffic, useful: int, multiplied: int, dtype: str, spec: DeviceSpec) -> dict[str, Any]:
    """A place under the roof. One kind of time for all of them: what the roof allows, the longer of products and bytes."""
    roof = model.roofline(useful, moved.total, dtype, spec)
    seconds = roof.seconds(multiplied, moved.total)
    return {
        "bytes": {name: [read, written] for name, read, written in moved.tensors()},
        "total": moved.total,
        "intensity": roof.intensity,
        "seconds": seconds,
        "rate": useful / seconds if seconds else 0.0,
    }


def _buffers(problem: Problem, tile: TilePlan, spec: DeviceSpec) -> dict[str, int]:
    d, dv, size = problem.head_dim, problem.head_dim_v, problem.itemsize
    if spec.is_gpu:
        return dict(model.kernel(tile, d, dv, size, spec).sram)
    m, n = tile.block_q, tile.block_k
    return {"Q": m * d * 4, "K": n * d * 4, "V": n * dv * 4, "S": m * n * 4, "O": m * dv * 4}


def tile_maps(lengths: tuple[int, ...], plans: dict[str, dict[str, Any]]) -> dict[str, list[list[int]]]:
    """The classes of every mask, length and tile size in use, row by row as runs: class, count, class, count, …"""
    sizes = {tuple(int(side) for side in result["tile"].split("×")) for result in plans.values()}
    maps = {}
    for length, mask, (m, n) in product(lengths, MASKS, sorted(sizes)):
        maps[f"{length}|{mask}|{m}×{n}"] = [list(_runs(row)) for row in classes(length, mask, m, n)]
    return maps


def _runs(row: Any) -> Iterator[int]:
    edges = np.flatnonzero(np.diff(row)) + 1
    for part in np.split(row, edges):
        yield int(part[0])
        yield len(part)


def timelines(devices: dict[str, DeviceSpec]) -> dict[str, list[dict[str, Any]]]:
    """One block's walk over a few key tiles with one, two and three buffers, by device, head dim and tile."""
    table = {}
    for (name, spec), dim, tile in product(devices.items(), HEAD_DIMS, [t for t in TILES if t is not None]):
        problem = problem_of(LENGTHS[0], dim, "full", dtype_on(spec))
        keys = [tile[1]] * TIMELINE_TILES
        table[f"{name}|{dim}|{tile_name(tile)}"] = [
            block_timeline(problem, TilePlan(*tile, stages=stages), keys, tile[0], spec).to_dict() for stages in STAGES
        ]
    return table


def memory(dim: int, itemsize: int = 2) -> dict[str, list[int]]:
    """Bytes of one head against its length: the inputs and outputs, and what each way keeps in memory beside them."""
    lengths = [2**power for power in range(9, 21)]
    return {
        "length": lengths,
        "io": [4 * n * dim * itemsize for n in lengths],
        "standard": [2 * n * n * itemsize for n in lengths],  # S and P
        "v1": [n * (4 * dim + 8) for n in lengths],  # fp32 accumulator, m and l
        "v2": [4 * n for n in lengths],  # LSE
    }
