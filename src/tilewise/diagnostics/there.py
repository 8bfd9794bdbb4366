"""Which backend would serve a call on a machine that is not this one, judged by what kind of machine it is."""

from __future__ import annotations

from tilewise import dispatch
from tilewise.backends.base import Verdict
from tilewise.hardware import DeviceSpec
from tilewise.problem import Problem

Answer = tuple[Verdict, str | None]
"""Can a backend serve the call, and why would it rather not."""


def answer_there(problem: Problem, spec: DeviceSpec, backward: bool, name: str) -> Answer:
    """What a backend would say on the machine `spec`; what it says of this machine does not count."""
    entry = dispatch.REGISTRY[name]
    obstacle = _unfit(name, spec)
    if problem.device not in entry.devices:
        obstacle = f"runs on {' and '.join(entry.devices)}, not on {problem.device}"
    if obstacle is not None:
        return Verdict(False, (obstacle,)), None
    try:
        backend = dispatch.get(name)
    except ImportError as error:
        return Verdict(False, (f"cannot be imported: {error}",)), None
    here = backend.usable(problem.device).reasons
    verdict = Verdict.of(*(r for r in backend.supports(problem, backward=backward).reasons if r not in here))
    if verdict.ok and name == "aten":
        return verdict, "chosen where torch's own kernel is faster, which depends on what the CPU has"
    return verdict, backend.declines(problem, backward=backward) if verdict.ok else None


def _unfit(name: str, spec: DeviceSpec) -> str | None:
    """What a kind of machine lacks for a backend."""
    if name == "hopper" and spec.capability != (9, 0):
        return f"needs compute capability 9.0; {spec.name} is {spec.arch}"
    if name == "triton" and not spec.is_gpu:
        return "runs on GPUs"
    if name == "triton" and spec.capability is not None and spec.capability < (8, 0):
        return f"needs compute capability 8.0 or newer; {spec.name} is {spec.arch}"
    return None
