"""Hardware counters beside the model: which ncu metrics are read, how its CSV is understood, and what should be in it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tilewise import model
from tilewise.errors import ArgumentError
from tilewise.hardware import DeviceSpec
from tilewise.masks import parse
from tilewise.model import TilePlan, Traffic
from tilewise.model.schedules import preprocess
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
LIMITS = {"L2 to SMs": 0.05, "DRAM reads": 0.10}
"""How far measured bytes may be from predicted ones."""
PASSES = {
    "forward_kernel": ("forward",),
    "prepare_kernel": ("preprocess",),
    "preprocess_kernel": ("preprocess",),
    "keys_kernel": ("backward_dkdv", "backward_fused"),
    "split_kernel": ("backward_dkdv", "backward_fused"),
    "queries_kernel": ("backward_dq",),
    "postprocess_kernel": ("postprocess",),
}
"""Kernels by the pass they do, which may be either of two; others are not counted."""
EDGES = ("preprocess", "postprocess")
"""Passes without tiles."""
_SCHEDULES = {"forward": "v2", "backward_fused": "backward_dkdv"}
"""Of passes that are not named like theirs."""


@dataclass(frozen=True)
class TrafficCase:
    """One problem whose kernels are counted, forward and backward."""

    seqlen: int = 4096
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"
    mask: str = ""
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


def launches(text: str) -> Iterator[tuple[str, dict[str, float]]]:
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
    return next((known for known in PASSES if re.search(rf"(^|\W|_){known}", name)), name)


def predict(problem: Problem, pass_: str, tile: TilePlan, spec: DeviceSpec) -> dict[str, int]:
    """Bytes L2 gives the SMs and bytes DRAM gives L2, by the model."""
    if pass_ == "preprocess":
        moved = through = preprocess(problem)
    elif pass_ == "postprocess":
        moved = through = Traffic()
        moved.read("dQ acc", accumulated(problem))
    else:
        moved = model.traffic(problem, tile, _SCHEDULES.get(pass_, pass_))
        blocks = max(1, model.kernel(tile, problem.head_dim, problem.head_dim_v, problem.itemsize, spec).blocks)
        through = model.dram(problem, tile, moved, spec, spec.units * blocks)
    # what is added up in memory comes from DRAM to L2, where it is added, and no further
    acc = accumulated(problem) if pass_ == "backward_fused" else 0
    return {"L2 to SMs": moved.total_read, "DRAM reads": through.total_read + acc}


def accumulated(problem: Problem) -> int:
    """Bytes of dQ while it is added up in fp32."""
    return 4 * problem.batch * problem.heads * problem.seqlen_q * problem.head_dim


def compare(
    case: TrafficCase, tiles: dict[str, TilePlan], counted: Iterable[tuple[str, dict[str, float]]], spec: DeviceSpec
) -> list[KernelTraffic]:
    """Each counted kernel of ours beside what the model says for the tile it ran with."""
    kernels, problem = [], case.problem()
    for name, metrics in counted:
        pass_ = next((p for p in PASSES.get(name, ()) if p in tiles or p in EDGES), None)
        if pass_ is None:
            continue
        tile = tiles.get(pass_, TilePlan(64, 16))
        measured = {"L2 to SMs": round(metrics[L2_READ]), "DRAM reads": round(metrics[DRAM_READ])}
        expected = predict(problem, pass_, tile, spec)
        levels = tuple(Level(level, measured[level], expected[level], limit) for level, limit in LIMITS.items())
        looked_up = round(metrics[L2_LOOKUP] * SECTOR)
        kernels.append(KernelTraffic(name, case, "" if pass_ in EDGES else str(tile), levels, looked_up))
    return kernels
