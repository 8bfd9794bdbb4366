"""Speed over block sizes: every tile that a backend has for a case, timed in turns, beside the model's prediction."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tilewise import dispatch, hardware
from tilewise.backends import plans
from tilewise.backends.verdict import Verdict
from tilewise.diagnostics.plan import countable
from tilewise.errors import ArgumentError
from tilewise.lab.bench.cases import OURS, Case, Tensors
from tilewise.lab.bench.child import Attention, tilewise_call
from tilewise.lab.bench.engine import Result, judge_and_time, torch_threads
from tilewise.lab.bench.machine import require_device
from tilewise.lab.bench.peers import Contender
from tilewise.lab.bench.timing import Effort, Progress, Spread, ratio, silent
from tilewise.lab.bench.worker import compile_ahead
from tilewise.model import TilePlan, evaluate
from tilewise.model.evaluation import AROUND

SIZES = (
    "block_q",
    "block_k",
    "stages",
    "warps",
    "splits",
    "heads",
    "register_tile",
    "kernel",
    "source",
    "on_chip_bytes",
)
"""What a record keeps of a tile."""
FINALISTS = 4
"""Tiles that are timed a second time."""
NEAR = 1.05
"""The planner's tile may take this much of the time of the fastest one."""


@dataclass(frozen=True)
class TileResult:
    """A tile that ran, or why it did not, beside its predicted time."""

    tile: TilePlan
    predicted: float | None
    """None of plain torch, whose time is not modelled."""
    result: Result
    speed: Spread | None
    """In that of the planner's tile, round by round: what disturbs a round disturbs both. None if either did not run."""
    final: bool = True
    """Was it timed a second time, and may be called the fastest? All were, where there are few."""

    @property
    def seconds(self) -> float | None:
        return self.result.times.p50 if self.result.times else None

    def to_dict(self) -> dict[str, Any]:
        sizes = {name: getattr(self.tile, name) for name in SIZES}
        speed = self.speed._asdict() if self.speed else None
        result = {name: value for name, value in self.result.to_dict().items() if name not in ("contender", "errors")}
        return {"tile": sizes, "predicted": self.predicted, "speed": speed, "final": self.final, **result}


@dataclass(frozen=True)
class Sweep:
    """All tiles of one kernel on one case; the first is the planner's."""

    case: Case
    backend: str
    pass_: str
    tiles: tuple[TileResult, ...]

    @property
    def planned(self) -> TileResult:
        return self.tiles[0]

    @property
    def fastest(self) -> TileResult | None:
        """None if the planner's did not run."""
        ran = [tile for tile in self.tiles if tile.final and tile.speed is not None]
        return max(ran, key=lambda tile: tile.speed.p50 if tile.speed else 0.0, default=None)

    @property
    def ratio(self) -> float | None:
        """The time of the planner's tile in that of the fastest."""
        best = self.fastest
        return best.speed.p50 if best and best.speed else None

    @property
    def near(self) -> bool:
        """Is the planner's tile about as fast as the fastest?"""
        return self.ratio is not None and self.ratio <= NEAR

    @property
    def right(self) -> bool:
        return all(tile.result.status == "ok" for tile in self.tiles)

    def to_dict(self) -> dict[str, Any]:
        best = self.fastest
        return {
            "case": self.case.to_dict(),
            "words": self.case.words(),
            "backend": self.backend,
            "pass": self.pass_,
            "planned": str(self.planned.tile),
            "fastest": str(best.tile) if best else None,
            "ratio": self.ratio,
            "limit": NEAR,
            "passed": self.near,
            "tiles": [tile.to_dict() for tile in self.tiles],
        }


def with_tile(case: Case, pass_: str, tile: TilePlan) -> Case:
    return replace(case, tile=((pass_, tile.block_q, tile.block_k),))


def contender_with(pass_: str, tile: TilePlan | None) -> Callable[[Case, Tensors], Attention]:
    """tilewise with that tile, or with the planner's."""
    return lambda case, tensors: tilewise_call((with_tile(case, pass_, tile) if tile else case).options(tensors))


def passes_of(case: Case, backend: str) -> list[str]:
    """The kernels to sweep: that of the forward, or those of the backward as the case is timed, without those that have one tile
    beside others."""
    problem, spec = case.problem(), hardware.device(case.device)
    found = plans.tiles(backend, problem, spec)
    if not case.trains:
        return ["decode" if "decode" in found else "forward"] if found else []
    backward = [pass_ for pass_ in found if pass_.startswith("backward") and pass_ not in AROUND]
    return [pass_ for pass_ in backward if len(plans.choices(backend, problem, spec, pass_)) > 1] or backward


def timed_for(case: Case, pass_: str) -> Case:
    """The case with only what holds the kernel on the clock."""
    return replace(case, passes="backward" if pass_.startswith("backward") else "forward")


def tiles_for(case: Case, backend: str, pass_: str) -> list[tuple[TilePlan, float | None]]:
    """Every tile that the backend has for the pass, the planner's first, with its predicted time."""
    problem, spec = case.problem(), hardware.device(case.device)
    has = plans.choices(backend, problem, spec, pass_)
    if not has:
        kernels = ", ".join(plans.tiles(backend, problem, spec))
        kinds = f"it has {kernels}" if kernels else "it has no tile of ours; choose tiled, cpu, triton or hopper"
        raise ArgumentError(f"pass: {backend} has no kernel {pass_!r} for {case.name}; {kinds}")
    counted = countable(problem)
    by_size = {tile.sizes: tile for tile in reversed(has)}
    found = [evaluate(counted, spec, by_size[sizes]) for sizes in dict.fromkeys(tile.sizes for tile in has)]
    return [(one.tile, one.seconds if one.timed else None) for one in found]


def sweep(case: Case, backend: str, pass_: str, effort: Effort, on_progress: Progress = silent) -> Sweep:
    """Time every tile of a kernel, in turns. The planner's runs as a call without `tile` does."""
    case = replace(timed_for(case, pass_), backend=backend)
    with torch_threads(case.threads):
        tiles = tiles_for(case, backend, pass_)
    contenders = [
        Contender(str(tile), lambda case: Verdict(True), contender_with(pass_, tile if number else None))
        for number, (tile, _) in enumerate(tiles)
    ]
    results, samples = judge_and_time(case, contenders, effort, on_progress)
    planned = str(tiles[0][0])
    speeds = _speeds(samples, planned)
    # the fastest of many is partly the luckiest: those at the top are timed again beside the planner's, and that counts
    final = {planned, *sorted(speeds, key=lambda name: -speeds[name].p50)[:FINALISTS]}
    if len(speeds) > len(final):
        again = judge_and_time(case, [one for one in contenders if one.name in final], effort, on_progress)
        results, speeds = results | again.results, speeds | _speeds(again.samples, planned)
    timed = (
        TileResult(tile, predicted, results[str(tile)], speeds.get(str(tile)), str(tile) in final)
        for tile, predicted in tiles
    )
    return Sweep(case, backend, pass_, tuple(timed))


def _speeds(samples: dict[str, list[float]], planned: str) -> dict[str, Spread]:
    """In that of the planner's tile, round by round; {} if it did not run."""
    return {name: ratio(samples[planned], values) for name, values in samples.items()} if planned in samples else {}


class Job(NamedTuple):
    """A kernel to be swept on a case."""

    case: Case
    backend: str
    pass_: str


def jobs_for(cases: Sequence[Case], backend: str, pass_: str) -> list[Job]:
    """`pass_` "auto" takes the kernels that each case times, `backend` "auto" whoever serves it."""
    jobs: list[Job] = []
    for case in cases:
        require_device(case.device)
        trains = case.trains if pass_ == "auto" else pass_.startswith("backward")
        problem = timed_for(case, "backward" if trains else "forward").problem()
        name = case.backend if backend == "auto" else backend
        server = dispatch.select(problem, name=name, backward=trains).backend.name
        passes = [pass_] if pass_ != "auto" else passes_of(case, server) or ["forward"]
        jobs += [Job(replace(timed_for(case, one), backend=server), server, one) for one in passes]
    return jobs


def compile_tiles(jobs: Sequence[Job], workers: int, on_progress: Progress = silent) -> None:
    """Every kernel of the sweeps, compiled by several processes before anything is timed."""
    calls: list[tuple[Case, str, Path | None]] = []
    for case, backend, pass_ in jobs:
        _, *others = tiles_for(case, backend, pass_)
        calls += [(case, OURS, None), *((with_tile(case, pass_, tile), OURS, None) for tile, _ in others)]
    compile_ahead(calls, workers, lambda what: on_progress(what, 0.0))


def sweep_all(
    jobs: Sequence[Job],
    effort: Effort,
    workers: int = 0,
    limit: float | None = None,
    on_progress: Progress = silent,
    on_sweep: Callable[[Sweep], None] = lambda sweep: None,
) -> list[Sweep]:
    """The sweeps, with `workers` processes that compile first; `on_sweep` hears each as it ends.

    None is begun that would end after `limit` seconds if it took as long as the longest so far.
    """
    begin = time.monotonic()
    if workers:
        compile_tiles(jobs, workers, on_progress)
    sweeps: list[Sweep] = []
    longest = 0.0
    for number, job in enumerate(jobs):
        start = time.monotonic()
        if limit is not None and start - begin + longest > limit:
            break

        def tell(what: str, done: float, number: int = number) -> None:
            on_progress(what, (number + done) / len(jobs))

        sweeps.append(sweep(*job, effort, tell))
        longest = max(longest, time.monotonic() - start)
        on_sweep(sweeps[-1])
    return sweeps
