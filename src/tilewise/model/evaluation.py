"""`evaluate`: what a tile moves, multiplies and takes on a machine. Whoever shows a time asks here, so that it is one time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tilewise import model
from tilewise.errors import PlanError
from tilewise.hardware.spec import DeviceSpec
from tilewise.model import Roofline, TilePlan, Traffic, Work, gpu
from tilewise.model.cpu_time import cpu_time
from tilewise.model.cycles import StepClocks
from tilewise.model.gpu_time import around_seconds, persistent
from tilewise.model.grid import even
from tilewise.model.tile import PLAIN
from tilewise.problem import Problem

EVALUATED = ("forward", "decode", "backward", "backward_dkdv", "backward_dq")
"""Passes that compute scores; the others only pass once over what these leave."""
AROUND = ("backward_preprocess", "backward_postprocess")
"""Of those, the kernels before and after the gradients."""


@dataclass(frozen=True)
class Evaluation:
    """A tile and its consequences. Times are predictions of the model, in seconds."""

    problem: Problem
    spec: DeviceSpec
    tile: TilePlan
    on_chip: Mapping[str, int]
    """On-chip bytes by buffer, of one block."""
    registers: int
    """Registers a thread on a GPU, vector registers of the inner loop on a CPU."""
    resident: int
    """Blocks a unit holds at once."""
    waves: float
    compulsory: Traffic
    tile_traffic: Traffic
    dram: Traffic
    work: Work
    roofline: Roofline
    seconds: float
    limits: Mapping[str, float]
    """The time each resource alone would take."""
    binding: str
    step: StepClocks | None = None
    """On a GPU: the clocks of one step by pipe."""

    @property
    def timed(self) -> bool:
        """Is the time a prediction? Of plain torch it is only what the products and the bytes take at least."""
        return self.tile.kernel != PLAIN

    @property
    def on_chip_bytes(self) -> int:
        return sum(self.on_chip.values())

    @property
    def flops_per_second(self) -> float:
        """Useful FLOPs over predicted time."""
        return self.work.useful / self.seconds if self.seconds else 0.0

    @property
    def counters(self) -> dict[str, int]:
        """What hardware counters should read over the kernel: bytes between L2 and the units, and at the memory."""
        return {
            "l2_read": self.tile_traffic.total_read,
            "l2_write": self.tile_traffic.total_written,
            "dram_read": self.dram.total_read,
            "dram_write": self.dram.total_written,
        }


def evaluate(problem: Problem, spec: DeviceSpec, tile: TilePlan) -> Evaluation:
    """Bytes, FLOPs and time of `tile` on any machine; raises if it does not fit there."""
    if tile.pass_ not in EVALUATED:
        raise PlanError(
            f"pass_: {tile.pass_} moves each of its tensors once, and is not evaluated; need {', '.join(EVALUATED)}"
        )
    if tile.kernel == PLAIN:
        return _plain(problem, spec, tile)
    return (_on_gpu if spec.is_gpu else _on_cpu)(problem, spec, tile)


def _plain(problem: Problem, spec: DeviceSpec, tile: TilePlan) -> Evaluation:
    counts = _counts(problem, spec, tile, spec.units)
    rate = spec.flops(problem.dtype, problem.precision) or spec.flops("float32")
    limits = {"products": counts["work"].executed / rate, "DRAM bandwidth": counts["dram"].total / spec.dram_bandwidth}
    binding = max(limits, key=lambda name: limits[name])
    sizes: dict[str, Any] = {"on_chip": {}, "registers": 0, "resident": 1, "waves": 1.0}
    return Evaluation(**counts, **sizes, seconds=max(limits.values()), limits=limits, binding=binding)


def _on_gpu(problem: Problem, spec: DeviceSpec, tile: TilePlan) -> Evaluation:
    if not spec.flops(problem.dtype, problem.precision):
        raise PlanError(f"dtype: {spec.name} multiplies no {problem.dtype}, only {', '.join(spec.peak)}")
    judged = (persistent if tile.persistent else gpu.evaluate)(problem, spec, tile)
    if judged.rejected:
        raise PlanError(
            f"tile: {tile} with {tile.stages} stages and {tile.warps} warps does not run on {spec.name}: {judged.rejected}"
        )
    step, on_chip = judged.step, judged.on_chip
    assert step is not None
    counts = _counts(problem, spec, tile, spec.units * on_chip.blocks)
    work, moved, dram = counts["work"], counts["tile_traffic"], counts["dram"]
    steps = work.exps / (tile.block_q * tile.block_k)
    clocks = spec.units * spec.clock_hz
    limits = {
        "tensor cores": work.executed / spec.flops(problem.dtype, problem.precision),
        "shared memory": steps * step.shared / clocks,
        "exponentials": work.exps / spec.exp_rate,
        "fp32 units": steps * step.fp32 / clocks,
        "L2 bandwidth": moved.total / spec.l2_bandwidth,
        "DRAM bandwidth": dram.total / spec.dram_bandwidth,
    }
    seconds = max(judged.seconds, *limits.values())
    return Evaluation(
        **counts,
        on_chip=on_chip.sram,
        registers=on_chip.registers,
        resident=on_chip.blocks,
        waves=judged.waves,
        seconds=seconds,
        limits=limits,
        binding=_binding(limits, seconds),
        step=step,
    )


def call_seconds(problem: Problem, spec: DeviceSpec, tiles: Iterable[TilePlan]) -> float:
    """The predicted time of kernels that run one after another: a forward, or a whole backward."""
    tiles = tuple(tiles)
    adds_up = any(tile.pass_ == "backward" for tile in tiles)
    around = [tile for tile in tiles if tile.pass_ in AROUND]
    passes = sum(evaluate(problem, spec, tile).seconds for tile in tiles if tile.pass_ in EVALUATED)
    return passes + sum(around_seconds(problem, spec, tile, adds_up) for tile in around if spec.is_gpu)


def _on_cpu(problem: Problem, spec: DeviceSpec, tile: TilePlan) -> Evaluation:
    time = cpu_time(problem, spec, tile)
    return Evaluation(
        **_counts(problem, spec, tile, spec.units),
        on_chip=dict(tile.on_chip) or _strip(even(problem), tile),
        registers=tile.registers,
        resident=tile.resident or 1,
        waves=time.tasks / spec.workers,
        seconds=time.seconds,
        limits=time.limits,
        binding=_binding(time.limits, time.seconds),
    )


def _strip(problem: Problem, tile: TilePlan) -> dict[str, int]:
    """What a strip of rows, and the tile of K and V that it passes over, take where no kernel says more."""
    size = 8 if problem.dtype == "float64" else 4
    d, dv = problem.head_dim, problem.head_dim_v
    rows = tile.register_tile[0] if tile.register_tile else tile.block_q
    sides = {"Q": rows * d, "K": tile.block_k * d, "V": tile.block_k * dv, "S": rows * tile.block_k, "O": rows * dv}
    return {name: count * size for name, count in sides.items()}


def _counts(problem: Problem, spec: DeviceSpec, tile: TilePlan, slots: int) -> dict[str, Any]:
    """What is counted for a tile, by field; `slots` blocks are on the device at once."""
    work, moved = model.work(problem, tile), model.traffic(problem, tile)
    dram = model.dram(problem, tile, moved, spec, slots)
    return {
        "problem": problem,
        "spec": spec,
        "tile": tile,
        "compulsory": model.compulsory(problem, tile),
        "tile_traffic": moved,
        "dram": dram,
        "work": work,
        "roofline": model.roofline(work.useful, dram.total, problem.dtype, spec, problem.precision),
    }


def _binding(limits: Mapping[str, float], seconds: float) -> str:
    """The resource that takes longest; where none comes near the predicted time, latency does."""
    worst = max(limits, key=lambda name: limits[name])
    return worst if limits[worst] >= 0.4 * seconds else "latency"
