"""What the page's controls switch between: the IO model over a grid of problems, tiles and machines, computed beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from tilewise import model
from tilewise.diagnostics.plan import plan
from tilewise.errors import PlanError
from tilewise.hardware import DeviceSpec
from tilewise.lab.report.panels import budget
from tilewise.lab.simulator.timeline import block_timeline
from tilewise.masks import Mask, causal, documents, full, prefix, window
from tilewise.model import Plan, TilePlan
from tilewise.model.grid import Grid
from tilewise.problem import Problem

LENGTHS = (1024, 4096, 8192)
HEAD_DIMS = (64, 128)
MASKS = ("full", "causal", "window", "prefix", "documents")
TILES: tuple[tuple[int, int] | None, ...] = (None, (64, 64), (128, 64), (128, 128))
"""None is the one that runs."""
HERE = "here"
"""The key of the live machine."""
SCHEDULES = ("standard", "v1", "v2")
HEADS = 8
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
    """Every position of the controls: its traffic by schedule, its place under the roof, the tile that runs there."""
    table = {}
    for device, length, dim, mask in product(devices, lengths, HEAD_DIMS, MASKS):
        spec = devices[device]
        problem = problem_of(length, dim, mask, dtype_on(spec))
        for tile in TILES:
            table[key(device, length, dim, mask, tile_name(tile))] = position(problem, mask, device, spec, tile)
    return table


def position(
    problem: Problem, mask: str, device: str, spec: DeviceSpec, wanted: tuple[int, int] | None
) -> dict[str, Any]:
    """One position of the controls: the tile that the backend runs, or the reader's own, which perhaps nobody runs.

    Tile and predicted time are those of `tilewise.plan`. `spec` is the machine with its roof as measured. A tile that plain
    torch alone has, because the kernels' register tile does not divide it, runs and has no predicted time.
    """
    runs = planned(problem, device, spec, None)
    assert isinstance(runs, Plan)
    given = planned(problem, device, spec, wanted)
    refused = given if isinstance(given, str) else ""
    shown = runs if isinstance(given, str) else given
    tile = TilePlan(*wanted, stages=runs.tile.stages) if refused and wanted else shown.tile
    work = model.work(problem, tile) if refused else shown.work
    at = (problem.seqlen_q, problem.head_dim, mask, problem.dtype, (tile.block_q, tile.block_k))
    # every tile from memory; of the plan's only those that the shared cache lets through
    moved = {name: moved_by(name, *at) for name in SCHEDULES}
    slots = spec.units * max(1, shown.resident)
    moved["plan"] = model.dram(problem, tile, moved["v2"], spec, slots) if refused else shown.dram
    pair = 2 * problem.heads * (problem.head_dim + problem.head_dim_v)
    multiplied = {"standard": pair * problem.seqlen_q * problem.seqlen_k}  # it computes every score, and pads no tile
    return {
        "tile": str(tile),
        "runs": str(runs.tile),
        "by": runs.figures_of,
        "own": shown.figures_of,
        "passes": {one.pass_: str(one) for one in shown.passes},
        "refused": refused,
        "schedules": {
            name: _point(bytes_, work.useful, multiplied.get(name, work.executed), problem.dtype, spec)
            for name, bytes_ in moved.items()
        },
        "less": moved["standard"].total / moved["v2"].total,
        "predicted": None if refused or not shown.timed else shown.seconds,
        "useful": work.useful,
        "compulsory": shown.compulsory.total,
        "onChip": {} if refused else dict(shown.on_chip),
        "budget": budget(shown),
        "binding": None if refused else shown.binding,
        "limits": None if refused else dict(shown.limits),
        "reasons": [refused] if refused else list(shown.reasons),
    }


@cache
def planned(problem: Problem, device: str, spec: DeviceSpec, wanted: tuple[int, int] | None) -> Plan | str:
    """What `tilewise.plan` says, or why nobody runs the tile. The live machine is planned for as a call on it is."""
    live = None if spec.is_gpu else "cpu"  # a page about the processor of a machine with a GPU too
    try:
        return plan(problem, live if device == HERE else spec, tile=wanted)
    except PlanError as error:
        if wanted is None:
            raise
        return str(error)


def _point(moved: model.Traffic, useful: int, multiplied: int, dtype: str, spec: DeviceSpec) -> dict[str, Any]:
    """A place under the roof. One kind of time for all of them: what the roof allows, the longer of products and bytes."""
    roof = model.roofline(useful, moved.total, dtype, spec)
    seconds = roof.seconds(multiplied, moved.total)
    return {
        "bytes": {name: [read, written] for name, read, written in moved.tensors()},
        "total": moved.total,
        "executed": multiplied,
        "intensity": roof.intensity,
        "seconds": seconds,
        "rate": useful / seconds if seconds else 0.0,
    }


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


def timelines(devices: dict[str, DeviceSpec], plans: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """One block's walk over a few key tiles with one, two and three buffers, by device, head dim and every tile in use."""
    table = {}
    for name, result in plans.items():
        device, _, dim, *_ = name.split("|")
        at = f"{device}|{dim}|{result['tile']}"
        if at in table:
            continue
        rows, keys = (int(side) for side in result["tile"].split("×"))
        spec = devices[device]
        problem = problem_of(LENGTHS[0], int(dim), "full", dtype_on(spec))
        table[at] = [
            block_timeline(problem, TilePlan(rows, keys, stages=stages), [keys] * TIMELINE_TILES, rows, spec).to_dict()
            for stages in STAGES
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
