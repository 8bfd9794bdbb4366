"""Plan: the tile a problem runs with on a machine, what it moves, how long it should take, why, and beside which others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tilewise import hardware
from tilewise.display import Shown
from tilewise.errors import PlanError
from tilewise.hardware.spec import DeviceSpec
from tilewise.model import gpu
from tilewise.model.cpu import cpu_tile
from tilewise.model.evaluation import Evaluation, evaluate
from tilewise.model.tile import AS_FAST, PASSES, RESOLUTION, TilePlan
from tilewise.problem import Problem

FIELDS = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "dtype", "precision")


@dataclass(frozen=True)
class Alternative:
    """A tile that was considered: its predicted time, or why it was not taken whatever its time."""

    tile: TilePlan
    seconds: float | None
    """None where it cannot run, or where the model does not describe it."""
    sram_bytes: int
    registers: int
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "tile": self.tile.to_dict()}


@dataclass(frozen=True)
class Plan(Evaluation, Shown):
    """What one kernel runs with, evaluated, beside the tiles of the other kernels of the call."""

    backend: str | None = None
    """Who serves the call; None for the model's own choice, and where nobody does."""
    passes: tuple[TilePlan, ...] = ()
    """The tiles of all kernels of the call. () where the backend has no tile of ours: then all figures are the model's."""
    rivals: tuple[TilePlan, ...] = ()
    """Other tiles that the kernel has."""
    rejected: Mapping[TilePlan, str] | None = None
    """Tiles that do not run, with the reason."""
    usual: TilePlan | None = None
    """What would run had the user asked for no tile."""

    @property
    def figures_of(self) -> str:
        """Whose tile, bytes and time these are."""
        return self.backend if self.backend and self.passes else "model"

    @property
    def ceilings(self) -> str:
        """What the times rest on."""
        source = self.spec.sources.get("peak", "")
        return source if source.startswith("measured") else "theoretical ceilings"

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The tiles of the kernel, those that run by predicted time."""
        return tuple(_alternatives(self))

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        return tuple(_reasons(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        problem = self.problem
        return {
            "problem": {**{name: getattr(problem, name) for name in FIELDS}, "mask": problem.program.structure},
            "device": {"key": self.spec.key, "name": self.spec.name, "arch": self.spec.arch},
            "backend": self.backend,
            "figures_of": self.figures_of,
            "tile": self.tile.to_dict(),
            "passes": {tile.pass_: tile.to_dict() for tile in self.passes},
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
            "seconds": self.seconds if self.timed else None,
            "ceilings": self.ceilings,
            "useful_flops_per_second": self.flops_per_second if self.timed else None,
            "limits": dict(self.limits),
            "binding": self.binding,
            "reasons": list(self.reasons),
            "alternatives": [alternative.to_dict() for alternative in self.alternatives],
        }

    def content(self) -> Shown:
        from tilewise.model.show import show_plan

        return show_plan(self)


def planned(problem: Problem, spec: DeviceSpec, tile: TilePlan, **beside: Any) -> Plan:
    """The plan with a given tile; `beside` are the fields of a Plan that are not of its evaluation."""
    return Plan(**vars(evaluate(problem, spec, tile)), **beside)


def plan(problem: Problem, device: str | DeviceSpec | None = None, *, pass_: str = "auto") -> Plan:
    """The model's own plan for `problem` on `device` (a name, a DeviceSpec, or None for this machine), whoever serves it there.

    `pass_` is `auto` (decode for few queries on a GPU, else forward) or one of the kernels' passes.
    """
    spec = hardware.device(device)
    if pass_ == "auto":
        pass_ = "decode" if spec.is_gpu and problem.decodes else "forward"
    if pass_ not in PASSES:
        raise PlanError(f"pass_: got {pass_!r}, need auto, {', '.join(PASSES)}")
    if not spec.is_gpu:
        return planned(problem, spec, cpu_tile(spec, problem))
    best = _best_by_size(gpu.ranked(problem, spec, pass_, model_blocks=True))
    chosen, *others = (candidate.tile for candidate in best if not candidate.rejected)
    rejected = {candidate.tile: candidate.rejected for candidate in best if candidate.rejected}
    return planned(problem, spec, chosen, rivals=tuple(others), rejected=rejected)


def _best_by_size(candidates: Iterable[gpu.Candidate]) -> list[gpu.Candidate]:
    """The best candidate of each size, in the order given."""
    best: dict[tuple[int, int], gpu.Candidate] = {}
    for candidate in candidates:
        kept = best.setdefault(candidate.tile.sizes, candidate)
        if candidate.rejected and candidate.on_chip.registers < kept.on_chip.registers:
            best[candidate.tile.sizes] = candidate
    return list(best.values())


def _reasons(plan: Plan) -> Iterator[str]:
    tile, spec, step = plan.tile, plan.spec, plan.step
    if plan.usual is not None:
        yield f"yours: {_beside(plan, plan.usual)}"
    yield from tile.reasons
    if step is not None:
        yield (
            f"a step takes {step.total:.0f} clocks: products {max(step.tensor, step.shared):.0f}, "
            f"softmax {step.exp + step.fp32:.0f}, loads {step.load:.0f}"
        )
    if tile.splits > 1 and step is not None:
        blocks = round(plan.waves * spec.units * plan.resident)
        yield f"{tile.splits} splits over the keys make {blocks} blocks for {spec.units} units"
    elif step is not None:
        yield f"one wave, {plan.waves:.0%} of the places taken" if plan.waves < 1 else f"{plan.waves:.1f} waves"
    if plan.work.waste > 0.05:
        yield f"{plan.work.waste:.0%} of the multiplications fall on masked or padded scores"


def _beside(plan: Plan, usual: TilePlan) -> str:
    """The user's tile in words beside the one that would have been taken."""
    if usual.sizes == plan.tile.sizes:
        return "it would have been taken anyway"
    if not plan.timed:
        return f"{usual} would have been taken"
    more = plan.seconds / evaluate(plan.problem, plan.spec, usual).seconds - 1
    words = "as fast as" if abs(more) < 0.005 else f"{abs(more):.0%} {'slower' if more > 0 else 'faster'} than"
    return f"predicted {words} {usual}, which would have been taken"


def _alternatives(plan: Plan) -> Iterator[Alternative]:
    if not plan.timed:
        return
    tiles = dict.fromkeys([plan.tile, *([plan.usual] if plan.usual else []), *plan.rivals])
    found = [plan if tile is plan.tile else evaluate(plan.problem, plan.spec, tile) for tile in tiles]
    for one in sorted(found, key=lambda one: (one.seconds, one.on_chip_bytes)):
        if one.tile.fault and one is not plan:
            yield Alternative(one.tile, None, one.on_chip_bytes, one.registers, one.tile.fault)
            continue
        if one is plan:
            verdict = "yours" if plan.tile.source == "user" else "chosen"
        else:
            more = one.seconds / plan.seconds - 1
            verdict = AS_FAST if abs(more) < RESOLUTION else f"{more:+.0%}"
        yield Alternative(one.tile, one.seconds, one.on_chip_bytes, one.registers, verdict)
    for tile, reason in (plan.rejected or {}).items():
        judged = gpu.evaluate(plan.problem, plan.spec, tile)
        yield Alternative(tile, None, judged.on_chip.sram_bytes, judged.on_chip.registers, reason)
