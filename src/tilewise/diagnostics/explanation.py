"""Explanation: the facts about one call, as data and as people read them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tilewise.display import (
    Cell,
    Group,
    Panel,
    Shown,
    Table,
    bars,
    bullets,
    facts,
    format_bytes,
    format_count,
    format_seconds,
)
from tilewise.hardware import DeviceSpec
from tilewise.model import Plan
from tilewise.model.show import describe_problem, describe_roofline, resource_table, traffic_table
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.diagnostics.measured import Measured

_OTHERS_FIGURES = {
    "hopper": "the model's for this GPU; the hopper kernels choose tiles of their own",
    "aten": "those of the cpu backend; torch's own kernel chooses its tiles itself",
}
_NO_FIGURES = {
    "tiled": "plain torch visits tiles in an order of its own",
    "reference": "it computes all scores at once, in O(N²) memory, without tiles",
    "triton": "the interpreter is for tests",
    None: "nobody serves the call",
}


@dataclass(frozen=True)
class Choice:
    """One backend's answer: can it serve the call, was it chosen, and if not, why."""

    name: str
    serves: bool
    chosen: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Tiles:
    """Tiles of the plan over all heads: FULL ones are visited without masking, PARTIAL ones with, EMPTY ones never."""

    block_q: int
    block_k: int
    full: int
    masked: int
    skipped: int

    @property
    def visited(self) -> int:
        return self.full + self.masked

    @property
    def total(self) -> int:
        return self.visited + self.skipped


@dataclass(frozen=True)
class Explanation(Shown):
    """The answer of `explain`.

    `chosen` is None where the device is not this machine or no backend serves the call; `there` is the backend that would
    serve it on that other machine. The plan, and with it every figure of tiles, bytes and time, is that of `figures_of`.
    """

    problem: Problem
    spec: DeviceSpec
    live: bool
    chosen: str | None
    choices: tuple[Choice, ...]
    plan: Plan
    tiles: Tiles
    there: str | None = None
    asked: str = "auto"
    measured: Measured | None = None
    notes: tuple[str, ...] = ()

    @property
    def binding(self) -> str:
        """The resource that takes longest."""
        return self.plan.binding

    @property
    def server(self) -> str | None:
        """The backend that serves the call, here or there."""
        return self.chosen if self.live else self.there

    @property
    def figures_of(self) -> str:
        """Whose the plan is: our CPU kernels', Triton's, or the model's for GPUs."""
        return "cpu" if not self.spec.is_gpu else "triton" if self.server == "triton" else "model"

    @property
    def planned(self) -> bool:
        """Whether the figures say something about what serves the call: plain torch and nobody have no plan."""
        return self.server in (("hopper", "triton") if self.spec.is_gpu else ("cpu", "aten"))

    def to_dict(self) -> dict[str, Any]:
        plan = self.plan.to_dict()
        problem = self.problem
        features = {
            name: getattr(problem, name)
            for name in ("scale", "softcap", "alibi", "sinks", "dropout_p", "varlen", "deterministic", "needs_grad")
        }
        bias = None if problem.bias is None else list(problem.bias)
        return {
            "problem": {**plan.pop("problem"), **features, "bias": bias},
            "device": {**plan.pop("device"), "live": self.live},
            "backend": self.chosen,
            "backend_there": self.there,
            "figures_of": self.figures_of,
            "backends": {
                c.name: {"serves": c.serves, "chosen": c.chosen, "reasons": list(c.reasons)} for c in self.choices
            },
            **plan,
            "tiles": {**asdict(self.tiles), "visited": self.tiles.visited, "total": self.tiles.total},
            "measured": None if self.measured is None else self.measured.to_dict(),
            "notes": list(self.notes),
        }

    def content(self) -> Shown:
        blocks: list[Shown] = [Panel("explain", facts(self._headline())), self._backends()]
        if self.planned:
            blocks += [traffic_table(self.plan), resource_table(self.plan)]
            if self.measured is not None:
                blocks.append(self._losses(self.measured))
        reasons = (*(self.plan.reasons if self.planned else ()), *self.notes)
        return Group(*blocks, *([bullets("why", reasons)] if reasons else []))

    def _headline(self) -> list[tuple[str, Cell]]:
        plan, tiles = self.plan, self.tiles
        rows: list[tuple[str, Cell]] = [
            ("problem", describe_problem(self.problem)),
            ("device", f"{self.spec.name}{'' if self.live else ' (not this machine)'}"),
            ("backend", (self._server(), "bold cyan")),
        ]
        if source := self._figures_source():
            rows.append(("figures", source))
        useful = f"{format_count(plan.work.useful, 'FLOP')} useful"
        if self.planned:
            part = tiles.skipped / tiles.total if tiles.total else 0.0
            visited = f"{tiles.visited:,} visited, {tiles.masked:,} of them masked; {tiles.skipped:,} skipped ({part:.0%})"
            moved = f"{format_bytes(plan.dram.total)}; {format_bytes(plan.tile_traffic.total)} between cache and units"
            rate = format_count(plan.flops_per_second, "FLOP/s")
            rows += [
                ("tile", f"{plan.tile}, {format_bytes(plan.on_chip_bytes)} on chip"),
                ("tiles", visited),
                ("work", f"{useful}, {format_count(plan.work.executed, 'FLOP')} executed"),
                ("HBM", moved),
                ("roofline", describe_roofline(plan)),
                ("predicted", (f"{format_seconds(plan.seconds)}, {rate}, bound by {plan.binding}", "green")),
            ]
        else:
            rows.append(("work", useful))
        if self.measured is not None:
            run = self.measured
            rate = format_count(plan.work.useful / run.seconds if run.seconds else 0.0, "FLOP/s")
            result = f"{format_seconds(run.seconds)}, {rate}: {run.of_ceiling:.0%} of the ceiling"
            result += f"; largest loss: {run.loss}" if self.planned else ""
            rows.append(("measured", (result, "bold green")))
        return rows

    def _server(self) -> str:
        if self.server is not None:
            return self.server if self.live else f"{self.server} would serve it there"
        return f"none: {self.asked} was asked for and cannot" if self.asked != "auto" else "none can"

    def _figures_source(self) -> str | None:
        """Whose the figures are, where they are not those of the backend that serves the call."""
        if self.planned:
            return _OTHERS_FIGURES.get(str(self.server))
        instead = "the model's for GPUs" if self.spec.is_gpu else "the cpu backend's"
        why = _NO_FIGURES.get(self.server, f"{self.server} has no plan")
        return f"none: {why}; tilewise plan shows {instead}"

    def _backends(self) -> Table:
        rows: list[list[Cell]] = []
        for choice in self.choices:
            mark = ("✓", "bold green") if choice.chosen else ("·", "cyan") if choice.serves else ("✗", "dim")
            chosen = "chosen" if self.live else "would serve it there"
            reason = chosen if choice.chosen else "; ".join(choice.reasons)
            rows.append([mark, (choice.name, "bold" if choice.chosen else ""), reason])
        return Table("backends", ("", "", ""), rows, left=2, wraps=(2,))

    def _losses(self, run: Measured) -> Table:
        times = {"the roof allows": run.ideal, **run.losses}
        styles = {"": "red", "the roof allows": "green"}
        return bars("where the time went", ("", "time", "of the measured time"), times, run.seconds, styles)
