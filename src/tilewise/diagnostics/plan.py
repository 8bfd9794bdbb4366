"""`tilewise.plan`: what the backend that serves a problem runs it with. Imports torch only to plan for the live machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tilewise import hardware
from tilewise.backends import plans
from tilewise.backends.plans import Choice
from tilewise.errors import PlanError
from tilewise.hardware import DeviceSpec
from tilewise.masks import Lowered, MaskProgram
from tilewise.model import Plan, TilePlan
from tilewise.model import plan as model_plan
from tilewise.model.decide import planned
from tilewise.problem import PASSES, Problem, tile_request

TileArgument = TilePlan | tuple[int, int] | Mapping[str, tuple[int, int]]


def plan(
    problem: Problem,
    device: str | DeviceSpec | None = None,
    *,
    backend: str = "auto",
    tile: TileArgument | None = None,
    pass_: str = "auto",
) -> Plan:
    """Tile, splits, on-chip bytes, predicted traffic and time of a problem on a device, with reasons.

    They are those that the backend which would serve the problem there runs with.

    problem: what is to be computed, made by `Problem.of`.
    device: a name such as "h200" or "a100", a DeviceSpec, or None for this machine.
    backend: "auto", or one by name.
    tile: your own tile, (queries, keys), or such a pair for each pass that a dict names; it is kept and its cost shown.
    pass_: the kernel whose figures are wanted: "auto", "forward", "decode", "backward", "backward_dkdv", "backward_dq", …

    >>> problem = tw.Problem.of(heads=32, kv_heads=8, seqlen=8192, head_dim=128, mask=tw.causal())
    >>> print(tw.plan(problem, "h200"))
    """
    spec, live = machine(device)
    problem = asked(problem, spec, tile, pass_)
    serving = servers(problem, spec, live, backend)
    if backend != "auto" and serving.name(pass_) is None:
        raise PlanError(serving.refusal(pass_, spec))
    return plan_of(problem, spec, serving, pass_)


def machine(device: str | DeviceSpec | None) -> tuple[DeviceSpec, bool]:
    """The machine that is meant, and whether it is this one."""
    live = device is None or (isinstance(device, str) and device.partition(":")[0] in ("cpu", "cuda", "hip"))
    if live:
        import torch  # noqa: F401  # it knows with how many threads a call runs
    return hardware.device(device), live


def asked(problem: Problem, spec: DeviceSpec, tile: TileArgument | None, pass_: str = "auto") -> Problem:
    """The problem on that machine, with the user's tile; a pair is for the pass that is asked for, or for the forward."""
    if pass_ not in ("auto", *PASSES):
        raise PlanError(f"pass_: got {pass_!r}, need auto, {', '.join(PASSES)}")
    problem = replace(problem, device="cuda" if spec.is_gpu else "cpu")
    if tile is None:
        return problem
    wanted: Any = tile.sizes if isinstance(tile, TilePlan) else tile
    if not isinstance(wanted, Mapping) and pass_ != "auto":
        wanted = {pass_: wanted}
    return replace(problem, tile=tile_request(wanted))


class Servers(NamedTuple):
    """Every backend's answer for the forward and for the gradients."""

    asked: str
    forward: tuple[Choice, ...]
    backward: tuple[Choice, ...]

    def choices(self, pass_: str) -> tuple[Choice, ...]:
        return self.backward if pass_.startswith("backward") else self.forward

    def name(self, pass_: str) -> str | None:
        """Who serves a pass."""
        return next((choice.name for choice in self.choices(pass_) if choice.chosen), None)

    def refusal(self, pass_: str, spec: DeviceSpec) -> str:
        """Why nobody serves a pass there."""
        reasons = {choice.name: "; ".join(choice.reasons) for choice in self.choices(pass_)}
        if self.asked != "auto":
            return f"backend {self.asked!r} cannot serve this problem on {spec.name}: {reasons[self.asked]}"
        lines = "".join(f"\n  {name}: {why}" for name, why in reasons.items())
        return f"no backend serves this problem on {spec.name}:{lines}"


def servers(problem: Problem, spec: DeviceSpec, live: bool, backend: str = "auto", inputs: Any = None) -> Servers:
    """Who serves a problem: on this machine as the call itself is served, on another one as the backends' plans say."""

    def here(name: str, backward: bool) -> plans.Answer:
        from tilewise import dispatch

        verdict = dispatch.judge(name, problem, inputs, backward=backward)
        return verdict, dispatch.get(name).declines(problem, inputs, backward=backward) if verdict.ok else None

    def there(name: str, backward: bool) -> plans.Answer:
        return plans.answer_there(name, problem, spec, backward=backward)

    answer = here if live else there
    return Servers(backend, *(plans.choose(partial(answer, backward=backward), backend) for backward in (False, True)))


def plan_of(problem: Problem, spec: DeviceSpec, serving: Servers, pass_: str = "auto") -> Plan:
    """The plan of one kernel, beside the tiles of all kernels of the call; the model's where the backend has no tile of ours.

    Raises if nobody has the tile that was asked for, or the kernel.
    """
    server = serving.name(pass_)
    if server is None and problem.tile:
        raise PlanError(serving.refusal(pass_, spec))
    counted, tiles = countable(problem), tiles_of(problem, spec, serving)
    if server is None or not any(serving.name(name) == server for name in tiles):
        return replace(model_plan(counted, spec, pass_=pass_), backend=server)
    if pass_ == "auto":
        pass_ = "decode" if "decode" in tiles else "forward"
    if pass_ not in tiles:
        raise PlanError(f"pass_: {server} has no kernel {pass_!r} for this problem, only {', '.join(tiles)}")
    tile, usual = tiles[pass_], None
    if tile.source == "user":
        usual = plans.tiles(server, replace(problem, tile=()), spec).get(pass_)
    rivals = (rival for rival in plans.choices(server, problem, spec, pass_) if rival.sizes != tile.sizes)
    beside = {"backend": server, "passes": tuple(tiles.values()), "usual": usual, "rivals": tuple(rivals)}
    return planned(counted, spec, tile, **beside)


def tiles_of(problem: Problem, spec: DeviceSpec, serving: Servers) -> dict[str, TilePlan]:
    """The tiles of all kernels of a call, those of the gradients by whoever computes them."""
    tiles: dict[str, TilePlan] = {}
    for backward in (False, True):
        server = serving.name("backward" if backward else "forward")
        if server is not None:
            found = plans.tiles(server, problem, spec)
            tiles |= {pass_: tile for pass_, tile in found.items() if pass_.startswith("backward") == backward}
    return tiles


def countable(problem: Problem) -> Problem:
    """The same problem with the tensors of its mask in numpy, where tiles are counted."""
    program = problem.program
    if not program.tensors:
        return problem
    arrays = tuple(t if isinstance(t, np.ndarray) else np.asarray(t.detach().cpu()) for t in program.tensors)
    return replace(problem, mask=Lowered(MaskProgram(program.structure, program.ints, arrays)))
