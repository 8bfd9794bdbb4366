"""Explanation: the facts about one call, as data, as text and as HTML."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tilewise.hardware import DeviceSpec
from tilewise.model import Plan
from tilewise.problem import Problem

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tilewise.diagnostics.measured import Measured


@dataclass(frozen=True)
class Choice:
    """One backend's answer: can it serve the call, was it taken, and if not, why."""

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
class Explanation:
    """What `explain` found.

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

    def __rich__(self) -> RenderableType:
        from tilewise.diagnostics.explain_show import render

        return render(self)

    def __str__(self) -> str:
        from tilewise.diagnostics.explain_show import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from tilewise.diagnostics.explain_show import as_html

        return as_html(self)
