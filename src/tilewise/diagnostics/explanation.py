"""Explanation: the facts about one call, as data and as people read them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tilewise.backends.plans import Choice
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
from tilewise.model.show import (
    describe_problem,
    describe_tile,
    figure_facts,
    pass_table,
    resource_table,
    time_facts,
    traffic_table,
)
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.diagnostics.measured import Measured


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
    """The answer of `explain`. The plan, and with it every figure of tiles, bytes and time, is that of `plan.figures_of`."""

    problem: Problem
    spec: DeviceSpec
    live: bool
    server: str | None
    """The backend that serves the call, or would on a machine that is not this one."""
    choices: tuple[Choice, ...]
    plan: Plan
    tiles: Tiles
    gradients: str | None = None
    """Who computes the gradients."""
    asked: str = "auto"
    measured: Measured | None = None
    notes: tuple[str, ...] = ()

    @property
    def binding(self) -> str:
        """The resource that takes longest."""
        return self.plan.binding

    @property
    def chosen(self) -> str | None:
        """The backend that serves the call here; None where the device is not this machine or nobody does."""
        return self.server if self.live else None

    @property
    def there(self) -> str | None:
        """The backend that would serve the call on another machine."""
        return None if self.live else self.server

    @property
    def figures_of(self) -> str:
        return self.plan.figures_of

    @property
    def timed(self) -> bool:
        """Whether bytes and times are shown: those of nobody, or of plain torch, are not."""
        return self.server is not None and self.plan.timed

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
            **plan,
            "backend": self.chosen,
            "backend_there": self.there,
            "gradients": self.gradients,
            "backends": {
                c.name: {"serves": c.serves, "chosen": c.chosen, "reasons": list(c.reasons)} for c in self.choices
            },
            "tiles": {**asdict(self.tiles), "visited": self.tiles.visited, "total": self.tiles.total},
            "measured": None if self.measured is None else self.measured.to_dict(),
            "notes": list(self.notes),
        }

    def content(self) -> Shown:
        blocks: list[Shown] = [Panel("explain", facts(self._headline())), self._backends()]
        if self.plan.passes:
            blocks.append(pass_table(self.plan.passes))
        if self.timed:
            blocks += [traffic_table(self.plan), resource_table(self.plan)]
            if self.measured is not None:
                blocks.append(self._losses(self.measured))
        reasons = (*(self.plan.reasons if self.server else ()), *self.notes)
        return Group(*blocks, *([bullets("why", reasons)] if reasons else []))

    def _headline(self) -> list[tuple[str, Cell]]:
        plan, tiles = self.plan, self.tiles
        rows: list[tuple[str, Cell]] = [
            ("problem", describe_problem(self.problem)),
            ("device", f"{self.spec.name}{'' if self.live else ' (not this machine)'}"),
            ("backend", (self._server(), "bold cyan")),
        ]
        if self.gradients != self.server and self.gradients is not None:
            rows.append(("gradients", self.gradients))
        rows += figure_facts(plan) if self.server else [("figures", "none: nobody serves the call")]
        useful = f"{format_count(plan.work.useful, 'FLOP')} useful"
        if self.server is not None:
            part = tiles.skipped / tiles.total if tiles.total else 0.0
            visited = f"{tiles.visited:,} visited, {tiles.masked:,} of them masked; {tiles.skipped:,} skipped ({part:.0%})"
            size = f"  {format_bytes(plan.on_chip_bytes)} on chip" if self.timed else ""
            rows += [
                ("tile", [(f"{plan.tile}", "bold cyan"), f"{size}  {describe_tile(plan)}"]),
                ("tiles", visited),
                ("work", f"{useful}, {format_count(plan.work.executed, 'FLOP')} executed"),
            ]
        else:
            rows.append(("work", useful))
        if self.timed:
            moved = f"{format_bytes(plan.dram.total)}; {format_bytes(plan.tile_traffic.total)} between cache and units"
            rows += [("HBM", moved), *time_facts(plan)]
        if self.measured is not None:
            run = self.measured
            rate = format_count(plan.work.useful / run.seconds if run.seconds else 0.0, "FLOP/s")
            result = f"{format_seconds(run.seconds)}, {rate}: {run.of_ceiling:.0%} of the ceiling ({run.ceilings})"
            result += f"; largest loss: {run.loss}" if self.timed else ""
            rows.append(("measured", (result, "bold green")))
        return rows

    def _server(self) -> str:
        if self.server is not None:
            return self.server if self.live else f"{self.server} would serve it there"
        return f"none: {self.asked} was asked for and cannot" if self.asked != "auto" else "none can"

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
