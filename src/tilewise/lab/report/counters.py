"""Hardware counters beside the model: which ncu metrics are read, how its CSV is understood, and what should be in it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tilewise import model
from tilewise.errors import ArgumentError
from tilewise.hardware import DeviceSpec
from tilewise.masks import parse
from tilewise.model import TilePlan
from tilewise.model.schedules import postprocess, preprocess
from tilewise.model.show import describe_problem
from tilewise.problem import Problem

L2_READ = "l1tex__m_xbar2l1tex_read_bytes.sum"
"""Bytes that arrived at the SMs from L2."""
L2_LOOKUP = "lts__t_sectors_srcunit_tex_op_read.sum"
"""Sectors of 32 bytes that L2 looked up for them. Neighbouring SMs that ask for the same line at the same time share one lookup,
so this may be half of what arrives, and less."""
DRAM_READ = "dram__bytes_read.sum"
METRICS = (L2_READ, L2_LOOKUP, DRAM_READ)
SECTOR = 32
LIMITS = {"L2 to SMs": 0.02, "DRAM reads": 0.05}
"""How far measured bytes may be from predicted ones."""
RUNS = 2
"""Of each case."""
FIRST = "forward_kernel"
"""With it every run of a case begins."""
KERNELS = (
    FIRST,
    *("prepare_kernel", "preprocess_kernel", "keys_kernel", "split_kernel", "queries_kernel", "postprocess_kernel"),
)
"""Names of kernels that are counted; others are not."""

Launch = tuple[str, dict[str, float]]
"""A kernel's name and its metrics."""


@dataclass(frozen=True)
class TrafficCase:
    """One problem whose kernels are counted, forward and backward."""

    seqlen: int = 4096
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"
    mask: str = ""
    deterministic: bool = False
    backend: str = "auto"

    def problem(self) -> Problem:
        shape = {name: value for name, value in asdict(self).items() if name not in ("mask", "backend")}
        return Problem.of(mask=parse(self.mask) if self.mask else None, device="cuda", **shape)

    def describe(self) -> str:
        return describe_problem(self.problem())


@dataclass(frozen=True)
class Level:
    """Measured beside predicted bytes, at one place of the memory hierarchy."""

    level: str
    measured: int
    predicted: int
    limit: float

    @property
    def off(self) -> float:
        return self.measured / self.predicted - 1 if self.predicted else float("inf")

    @property
    def ok(self) -> bool:
        return abs(self.off) <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


@dataclass(frozen=True)
class KernelTraffic:
    """One launch of one kernel."""

    name: str
    case: TrafficCase
    tile: str
    levels: tuple[Level, ...]
    looked_up: int
    """Bytes L2 looked up for what it gave the SMs."""

    @property
    def ok(self) -> bool:
        return all(level.ok for level in self.levels)

    def to_dict(self) -> dict[str, Any]:
        levels = [level.to_dict() for level in self.levels]
        names = {"name": self.name, "case": asdict(self.case), "tile": self.tile}
        return {**names, "levels": levels, "looked_up": self.looked_up, "ok": self.ok}


def launches(text: str) -> Iterator[Launch]:
    """Kernel name and metrics of each launch in what `ncu --csv --page raw --print-units base` prints.

    Before the table stand ncu's and the program's own lines; below its header stands a row of units.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ArgumentError("ncu: its output holds no table; is the CSV of `--csv --page raw` there?")
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if not (row.get("ID") or "").strip().isdigit():
            continue  # the units
        counted = {metric: float(row[metric].replace(",", "")) for metric in METRICS if row.get(metric)}
        missing = [metric for metric in METRICS if metric not in counted]
        if missing:
            raise ArgumentError(f"ncu: no column {', '.join(missing)}; this ncu does not know the metric")
        yield _plain(row["Kernel Name"]), counted


def _plain(name: str) -> str:
    """The function's own name; mangled or specialised names hold it."""
    return next((known for known in KERNELS if re.search(rf"(^|\W|_){known}", name)), name)


def runs_of(counted: Iterable[Launch]) -> list[list[Launch]]:
    """Launches by the run they belong to."""
    runs: list[list[Launch]] = []
    for name, metrics in counted:
        if name == FIRST:
            runs.append([])
        if runs:
            runs[-1].append((name, metrics))
    return runs


def predict(problem: Problem, tile: TilePlan, spec: DeviceSpec) -> dict[str, int]:
    """Bytes L2 gives the SMs and bytes DRAM gives L2, by the model."""
    if tile.pass_ == "backward_preprocess":
        moved = through = preprocess(problem)
    elif tile.pass_ == "backward_postprocess":
        moved = through = postprocess(problem)
    else:
        moved = model.traffic(problem, tile)
        dims = problem.head_dim, problem.head_dim_v, problem.itemsize
        blocks = tile.resident or max(1, model.kernel(tile, *dims, spec).blocks)
        through = model.dram(problem, tile, moved, spec, spec.units * blocks)
    return {"L2 to SMs": moved.total_read, "DRAM reads": through.total_read}


def compare(
    case: TrafficCase, tiles: Mapping[str, TilePlan], runs: list[list[Launch]], spec: DeviceSpec
) -> list[KernelTraffic]:
    """Each counted kernel of ours beside what the model says for the tile it ran with.

    Of several runs the least counts: whatever else the GPU does adds to a count.
    """
    kernels, problem = [], case.problem()
    by_name = {tile.kernel: tile for tile in tiles.values()}
    for name, tile in by_name.items():
        found = [metrics for run in runs for launched, metrics in run if launched == name]
        if not found:
            continue
        least = {metric: min(metrics[metric] for metrics in found) for metric in METRICS}
        measured = {"L2 to SMs": round(least[L2_READ]), "DRAM reads": round(least[DRAM_READ])}
        expected = predict(problem, tile, spec)
        levels = tuple(Level(level, measured[level], expected[level], limit) for level, limit in LIMITS.items())
        kernels.append(KernelTraffic(name, case, str(tile), levels, round(least[L2_LOOKUP] * SECTOR)))
    return kernels
