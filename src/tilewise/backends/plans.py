"""The backends by name, and which of them would serve a problem on a machine that may be another one.

Free of torch: a backend's plan module answers for a DeviceSpec, so that an H200 can be planned for on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.backends.verdict import Verdict
from tilewise.errors import ArgumentError
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.hardware.spec import DeviceSpec
    from tilewise.model.tile import TilePlan


class Entry(NamedTuple):
    """A backend by name. Its module is imported only for a device it can serve, so a CPU call never imports triton."""

    module: str
    devices: tuple[str, ...]
    plan: str = ""
    """The module with its `supports`, `declines`, `tiles` and `choices`; "" for a backend that plans nothing."""


def _ours(name: str, *devices: str) -> Entry:
    return Entry(f"tilewise.backends.{name}.backend", devices, f"tilewise.backends.{name}.plan")


REGISTRY: dict[str, Entry] = {
    "hopper": _ours("hopper", "cuda"),
    "aten": _ours("aten", "cpu"),
    "cpu": _ours("cpu", "cpu"),
    "triton": _ours("triton", "cpu", "cuda"),
    "tiled": _ours("tiled", "cpu", "cuda"),
    "reference": _ours("reference", "cpu", "cuda"),
}
"""In order of preference."""


class Choice(NamedTuple):
    """One backend's answer: can it serve the problem, was it chosen, and if not, why."""

    name: str
    serves: bool
    chosen: bool
    reasons: tuple[str, ...]


Answer = tuple[Verdict, str | None]
"""Can a backend serve the problem, and why would it rather not."""


VARIES = "has no invariant=True: the bits of a row depend on the batch around it"
"""Why a backend whose plan does not say INVARIANT refuses `Problem.invariant`."""


def check_name(name: str, *others: str) -> None:
    """Raise unless the name is registered, or one of the others."""
    if not isinstance(name, str) or (name not in REGISTRY and name not in others):
        raise ArgumentError(f"backend: got {name!r}, need 'auto' or one of {', '.join(REGISTRY)}")


@cache
def _load(module: str) -> Any:
    return import_module(module)


def plan_of(name: str) -> Any:
    """The plan module of a backend; None where it has none."""
    check_name(name)
    module = REGISTRY[name].plan
    return _load(module) if module else None


def answer_there(name: str, problem: Problem, spec: DeviceSpec, *, backward: bool = False) -> Answer:
    """What a backend would say on the machine `spec`."""
    kind, plan = "cuda" if spec.is_gpu else "cpu", plan_of(name)
    if kind not in REGISTRY[name].devices:
        return Verdict(False, (f"runs on {' and '.join(REGISTRY[name].devices)}, not on {kind}",)), None
    if plan is None:
        return Verdict(False, ("says nothing of other machines",)), None
    if problem.invariant and not getattr(plan, "INVARIANT", False):
        return Verdict(False, (VARIES,)), None
    verdict: Verdict = plan.supports(problem, spec, backward=backward)
    return verdict, plan.declines(problem, spec, backward=backward) if verdict.ok else None


def choose(answers: Callable[[str], Answer], name: str = "auto") -> tuple[Choice, ...]:
    """Every backend's answer, in order of preference; the first that can and would is chosen."""
    check_name(name, "auto")
    choices: list[Choice] = []
    server = None
    for candidate in REGISTRY:
        verdict, declined = answers(candidate)
        reasons = verdict.reasons
        if verdict.ok:
            if name not in ("auto", candidate):
                reasons = (f"{name} was asked for",)
            elif name == "auto" and declined is not None:
                reasons = (declined,)
            elif server is not None:
                reasons = (f"could serve it too; {server} comes first",)
            else:
                server = candidate
        choices.append(Choice(candidate, verdict.ok, candidate == server, reasons))
    return tuple(choices)


def serving(problem: Problem, spec: DeviceSpec, name: str = "auto", *, backward: bool = False) -> tuple[Choice, ...]:
    """Who would serve the problem on the machine `spec`, and why not the others."""
    return choose(lambda candidate: answer_there(candidate, problem, spec, backward=backward), name)


def tiles(name: str, problem: Problem, spec: DeviceSpec) -> dict[str, TilePlan]:
    """What a backend runs on the machine `spec`, by pass; {} where it has no tile of ours."""
    plan = plan_of(name)
    return plan.tiles(problem, spec) if plan is not None else {}


def choices(name: str, problem: Problem, spec: DeviceSpec, pass_: str) -> list[TilePlan]:
    """Every tile that a backend has for a pass there, the planned one first."""
    plan = plan_of(name)
    return plan.choices(problem, spec, pass_) if plan is not None else []
