"""`plan`: the tile for a problem on a machine, what it moves, how long it should take, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilewise import hardware, model
from tilewise.display import Shown
from tilewise.errors import PlanError
from tilewise.hardware.spec import DeviceSpec
from tilewise.model import Roofline, TilePlan, Traffic, Work, gpu
from tilewise.model.cpu import cpu_tile
from tilewise.model.cpu_time import cpu_time
from tilewise.model.grid import band_of, even
from tilewise.model.tile import PASSES
from tilewise.model.tuned import lookup_tuned
from tilewise.problem import Problem


@dataclass(frozen=True)
class Alternative:
    """A tile that was considered: its predicted time, or why it cannot run."""

    tile: TilePlan
    seconds: float | None
    sram_bytes: int
    registers: int
    blocks: int
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "tile": self.tile.to_dict()}


@dataclass(frozen=True)
class Plan(Shown):
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
    reasons: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()

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

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        problem = self.problem
        fields = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "dtype", "precision")
        return {
            "problem": {**{name: getattr(problem, name) for name in fields}, "mask": problem.program.structure},
            "device": {"key": self.spec.key, "name": self.spec.name, "arch": self.spec.arch},
            "tile": self.tile.to_dict(),
            "on_chip": {"bytes": self.on_chip_bytes, "buffers": dict(self.on_chip), "registers": self.registers},
            "resident_blocks": self.resident,
            "waves": self.waves,
            "traffic": {
                "compulsory": self.compulsory.to_dict(),
                "tile": self.tile_traffic.to_dict(),
                "dram": self.dram.to_dict(),
            },
            "counters": self.counters,
            "flops": {"useful": self.work.useful, "executed": self.work.executed, "waste": self.work.waste},
            "tiles": self.work.tiles,
            "exponentials": self.work.exps,
            "roofline": self.roofline.to_dict(),
            "seconds": self.seconds,
            "useful_flops_per_second": self.flops_per_second,
            "limits": dict(self.limits),
            "binding": self.binding,
            "reasons": list(self.reasons),
            "alternatives": [alternative.to_dict() for alternative in self.alternatives],
        }

    def content(self) -> Shown:
        from tilewise.model.show import show_plan

        return show_plan(self)


def plan(
    problem: Problem,
    device: str | DeviceSpec | None = None,
    *,
    pass_: str = "auto",
    tile: TilePlan | tuple[int, int] | None = None,
    kernels: str = "",
) -> Plan:
    """The plan for `problem` on `device` (a name, a DeviceSpec, or None for this machine).

    `pass_` is `auto` (decode for few queries, else forward) or one of the kernels' passes. A given `tile` is taken as it
    is, raises if it cannot run, and is shown beside what would have been chosen. With `kernels` (a backend's name) what was
    measured of them wins over the model; without, it is told.
    """
    spec = hardware.device(device)
    if pass_ == "auto":
        pass_ = "decode" if spec.is_gpu and problem.decodes else "forward"
    if pass_ not in PASSES:
        raise PlanError(f"pass_: got {pass_!r}, need auto, {', '.join(PASSES)}")
    return _gpu_plan(problem, spec, pass_, tile, kernels) if spec.is_gpu else _cpu_plan(problem, spec, tile)


def _gpu_plan(
    problem: Problem, spec: DeviceSpec, pass_: str, wanted: TilePlan | tuple[int, int] | None, kernels: str
) -> Plan:
    candidates = gpu.ranked(problem, spec, pass_, model_blocks=True)
    chosen = candidates[0]
    reasons: tuple[str, ...] = ()
    tuned = lookup_tuned(problem, spec, pass_, kernels or "triton")
    if tuned is not None:
        evidence = f"{tuned.measured} on {tuned.device}, {tuned.date} ({tuned.evidence})"
        if kernels:
            chosen = gpu.evaluate(problem, spec, tuned.tile)
            reasons = (f"tuned: {evidence}",)
        else:
            reasons = (f"the {tuned.kernels} kernels take {tuned.tile} instead: {evidence}",)
    if wanted is not None:
        given = _given(wanted, pass_, problem, spec, candidates)
        more = given.seconds / chosen.seconds - 1
        beside = "as fast as" if abs(more) < 0.005 else f"{abs(more):.0%} {'slower' if more > 0 else 'faster'} than"
        reasons = (f"yours: predicted {beside} {chosen.tile}, which the model prefers", *reasons)
        chosen = given
    step, on_chip = chosen.step, chosen.on_chip
    assert step is not None
    tile = chosen.tile
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
    seconds = max(_thinned(chosen.seconds, problem, work, tile, spec), *limits.values())
    return Plan(
        **counts,
        on_chip=on_chip.sram,
        registers=on_chip.registers,
        resident=on_chip.blocks,
        waves=chosen.waves,
        seconds=seconds,
        limits=limits,
        binding=_binding(limits, seconds),
        reasons=(*reasons, *_reasons(chosen, spec, work)),
        alternatives=_alternatives(candidates, chosen),
    )


def _counts(problem: Problem, spec: DeviceSpec, tile: TilePlan, slots: int) -> dict[str, Any]:
    """What a plan counts for its tile, by field; `slots` blocks are on the device at once."""
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


def _thinned(seconds: float, problem: Problem, work: Work, tile: TilePlan, spec: DeviceSpec) -> float:
    """The time with the tiles the mask really visits; ranking takes all of them for a mask that is not one band."""
    sizes = even(problem)
    if band_of(problem) is not None or tile.pass_ == "decode":
        return seconds
    rows, cols = -(-sizes.seqlen_q // tile.block_q), -(-sizes.seqlen_k // tile.block_k)
    every = max(1, sizes.batch * sizes.heads * rows * cols)
    return spec.launch_s + (seconds - spec.launch_s) * work.tiles / every


def _given(
    wanted: TilePlan | tuple[int, int], pass_: str, problem: Problem, spec: DeviceSpec, known: list[gpu.Candidate]
) -> gpu.Candidate:
    """The user's tile, completed (stages, warps, splits) by the best candidate of its size; raises if it cannot run."""
    if isinstance(wanted, TilePlan):
        tile = replace(wanted, pass_=pass_, source="user")
    else:
        m, n = wanted
        for name, size in (("block_q", m), ("block_k", n)):
            if size < 16 or size % 16:
                raise PlanError(f"{name}: got {size}, need a multiple of 16 (what the tensor cores multiply)")
        same = [c for c in known if (c.tile.block_q, c.tile.block_k) == (m, n) and not c.rejected]
        tile = replace(same[0].tile if same else TilePlan(m, n, pass_=pass_), source="user")
    candidate = gpu.evaluate(problem, spec, tile)
    if candidate.rejected:
        raise PlanError(
            f"tile: {tile} with {tile.stages} stages and {tile.warps} warps does not run on {spec.name}: "
            f"{candidate.rejected}; the model would take {known[0].tile}"
        )
    return candidate


def _reasons(chosen: gpu.Candidate, spec: DeviceSpec, work: Work) -> tuple[str, ...]:
    tile, on_chip, step = chosen.tile, chosen.on_chip, chosen.step
    assert step is not None
    reasons = [
        f"{on_chip.sram_bytes / 1024:.0f} of {spec.sram_per_block // 1024} KiB shared memory, {on_chip.registers} of "
        f"{spec.max_registers} registers, {on_chip.blocks} block{'s' * (on_chip.blocks > 1)} a unit",
        f"a step takes {step.total:.0f} clocks: products {max(step.tensor, step.shared):.0f}, "
        f"softmax {step.exp + step.fp32:.0f}, loads {step.load:.0f}",
    ]
    if tile.splits > 1:
        blocks = round(chosen.waves * spec.units * on_chip.blocks)
        reasons.append(f"{tile.splits} splits over the keys make {blocks} blocks for {spec.units} units")
    elif chosen.waves < 1:
        reasons.append(f"one wave, {chosen.waves:.0%} of the places taken")
    else:
        reasons.append(f"{chosen.waves:.1f} waves")
    if work.waste > 0.05:
        reasons.append(f"{work.waste:.0%} of the multiplications fall on masked or padded scores")
    return tuple(reasons)


def _alternatives(candidates: list[gpu.Candidate], chosen: gpu.Candidate) -> tuple[Alternative, ...]:
    """The best candidate of each size: those that run by time, then those that do not with the reason."""

    def rank(candidate: gpu.Candidate) -> tuple[float, int]:
        """By time; those that do not run by registers."""
        return candidate.seconds, candidate.on_chip.registers

    best: dict[tuple[int, int], gpu.Candidate] = {}
    for candidate in candidates:
        key = (candidate.tile.block_q, candidate.tile.block_k)
        if key not in best or rank(candidate) < rank(best[key]):
            best[key] = candidate
    if chosen.tile.source == "user" or chosen.tile not in [candidate.tile for candidate in best.values()]:
        best[chosen.tile.block_q, chosen.tile.block_k] = chosen

    def verdict(candidate: gpu.Candidate) -> str:
        if candidate.rejected:
            return candidate.rejected
        if candidate.tile == chosen.tile:
            return "yours" if chosen.tile.source == "user" else "chosen"
        return f"{candidate.seconds / chosen.seconds - 1:+.0%}" + _why_not(candidate.tile)

    return tuple(
        Alternative(
            c.tile,
            None if c.rejected else c.seconds,
            c.on_chip.sram_bytes,
            c.on_chip.registers,
            c.on_chip.blocks,
            verdict(c),
        )
        for c in sorted(best.values(), key=lambda c: (bool(c.rejected), c.seconds, c.on_chip.sram_bytes))
    )


def _why_not(tile: TilePlan) -> str:
    """Why a tile of a lower tier is not taken even where the model thinks it is fast."""
    if gpu.tier(tile) == 0:
        return ""
    if 192 in (tile.block_q, tile.block_k):
        return ", no power of two"
    if min(tile.block_q, tile.block_k) < 64:
        return ", narrow"
    if tile.stages < 2:
        return ", one buffer: loads are not hidden"
    if max(tile.block_k, tile.block_q) > 128:
        return ", crowds the registers"
    return ", warps share rows"


def _binding(limits: Mapping[str, float], seconds: float) -> str:
    """The resource that takes longest; where none comes near the predicted time, latency does."""
    worst = max(limits, key=lambda name: limits[name])
    return worst if limits[worst] >= 0.4 * seconds else "latency"


def _cpu_plan(problem: Problem, spec: DeviceSpec, wanted: TilePlan | tuple[int, int] | None) -> Plan:
    tile = cpu_tile(spec, problem)
    reasons = tile.reasons
    if isinstance(wanted, TilePlan):
        tile, reasons = wanted, wanted.reasons
    elif wanted is not None:
        (m, n), (rows, keys) = wanted, tile.register_tile or (1, 1)
        if m < 1 or m % rows or n < 1 or n % keys:
            raise PlanError(
                f"tile: got {m} × {n}, need a multiple of {rows} rows and of {keys} keys (the register tile of {spec.isa})"
            )
        reasons = (f"yours: the model would take {tile}", *reasons)
        tile = replace(tile, block_q=m, block_k=n, source="user")
    counts = _counts(problem, spec, tile, spec.units)
    time = cpu_time(problem, spec, tile)
    return Plan(
        **counts,
        on_chip=dict(tile.on_chip),
        registers=tile.registers,
        resident=1,
        waves=time.tasks / spec.workers,
        seconds=time.seconds,
        limits=time.limits,
        binding=_binding(time.limits, time.seconds),
        reasons=reasons,
    )
