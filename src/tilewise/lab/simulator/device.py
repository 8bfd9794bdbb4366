"""One simulated run: the problem's tensors in HBM, an SRAM, and what happened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tilewise.errors import ArgumentError, PlanError
from tilewise.lab.simulator.memory import Array, Hbm, Sram
from tilewise.lab.simulator.softmax import Counts, ScoreTile
from tilewise.masks import TileClass, TileMap
from tilewise.model.schedules import Traffic, stat_size
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem


@dataclass(frozen=True)
class Visit:
    """One step of the tile walk, in the order the schedule takes it."""

    b: int
    h: int
    i: int
    j: int
    kind: TileClass
    moved: int
    """Bytes moved before it is computed."""


@dataclass
class Run:
    """The state of a simulation while it goes on."""

    problem: Problem
    tile: TilePlan
    hbm: Hbm
    sram: Sram
    counts: Counts = field(default_factory=Counts)
    walk: list[Visit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.map = TileMap(self.problem.program, self.problem.shape, self.tile.block_q, self.tile.block_k)
        self.size, self.stat = self.problem.itemsize, stat_size(self.problem)

    @cached_property
    def single_rows(self) -> TileMap:
        """The tile map row by row, for tiles that hold rows of several heads."""
        return TileMap(self.problem.program, self.problem.shape, 1, self.tile.block_k)

    def rows(self, i: int) -> tuple[int, int]:
        return i * self.tile.block_q, min((i + 1) * self.tile.block_q, self.problem.seqlen_q)

    def cols(self, j: int) -> tuple[int, int]:
        return j * self.tile.block_k, min((j + 1) * self.tile.block_k, self.problem.seqlen_k)

    def heads(self) -> Iterator[tuple[int, ...]]:
        """(b, h) of every query head."""
        return np.ndindex(self.problem.batch, self.problem.heads)

    def at(self, b: int, h: int, i: int, j: int, kind: TileClass) -> ScoreTile:
        """Note the visit and say where it is."""
        self.walk.append(Visit(b, h, i, j, kind, self.hbm.traffic.total))
        return ScoreTile(b, h, self.rows(i), self.cols(j), kind)

    def take(self, name: str, b: int, h: int, span: tuple[int, int], buffers: int = 1) -> Array:
        """Load rows [span) of head (b, h) into a buffer of its own (`buffers` of them where tiles are pipelined)."""
        value = self.hbm.load(name, (b, h, slice(*span)))
        self.sram.hold(name, value.size * buffers, self.hbm.sizes[name])
        return value

    def take_kv(self, b: int, kv: int, j: int) -> tuple[Array, Array]:
        """K [N, D] and V [N, Dv] of key tile `j`, pipelined."""
        k_tile, v_tile = (self.take(name, b, kv, self.cols(j), self.tile.stages) for name in "KV")
        return k_tile, v_tile

    def give(self, name: str, b: int, h: int, span: tuple[int, int], value: Array | float) -> None:
        self.hbm.store(name, (b, h, slice(*span)), value)


@dataclass(frozen=True)
class Simulation:
    """What a schedule computed and what it cost."""

    schedule: str
    form: str
    """Of the online softmax: `unnormalised` or `normalised`."""
    problem: Problem
    tile: TilePlan
    outputs: dict[str, Array]
    traffic: Traffic
    counts: Counts
    sram_peak: int
    sram_buffers: dict[str, int]
    walk: list[Visit]

    @property
    def label(self) -> str:
        """The schedule as it was asked for: `v1`, or `v1:normalised` in the other form of the softmax."""
        return self.schedule if self.form == "unnormalised" else f"{self.schedule}:{self.form}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "form": self.form,
            "tile": self.tile.to_dict(),
            "traffic": self.traffic.to_dict(),
            **asdict(self.counts),
            "sram_peak": self.sram_peak,
            "sram_buffers": dict(self.sram_buffers),
            "tiles": [[v.b, v.h, v.i, v.j, int(v.kind)] for v in self.walk],
        }


def random_inputs(problem: Problem, seed: int = 0) -> dict[str, Array]:
    """q, k, v, dO and the bias of a problem, standard normal."""
    generator = np.random.default_rng(seed)
    b, m, n = problem.batch, problem.seqlen_q, problem.seqlen_k
    shapes: dict[str, tuple[int, ...]] = {
        "Q": (b, problem.heads, m, problem.head_dim),
        "K": (b, problem.kv_heads, n, problem.head_dim),
        "V": (b, problem.kv_heads, n, problem.head_dim_v),
        "dO": (b, problem.heads, m, problem.head_dim_v),
    }
    if problem.bias is not None:
        shapes["bias"] = problem.bias
    return {name: generator.standard_normal(shape) for name, shape in shapes.items()}


def start(problem: Problem, tile: TilePlan, inputs: dict[str, Array]) -> Run:
    """A run with its inputs in HBM; raises for what the simulator does not know."""
    for feature in ("alibi", "sinks", "varlen"):
        if getattr(problem, feature):
            raise PlanError(f"{feature}: the simulator does not run it; take a problem without")
    if problem.dropout_p:
        raise PlanError(f"dropout_p: got {problem.dropout_p}; the simulator does not drop, take 0")
    hbm = Hbm()
    wanted = {name: array.shape for name, array in random_inputs(problem).items()}
    for name, array in inputs.items():
        if name in wanted and array.shape != wanted[name]:
            raise ArgumentError(f"{name}: got shape {array.shape}, the problem wants {wanted[name]}")
        hbm.place(name, np.asarray(array, dtype=np.float64), problem.itemsize)
    return Run(problem, tile, hbm, Sram())
