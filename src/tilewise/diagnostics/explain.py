"""`explain`: which backend and plan a call gets, why not the others, what it moves and how long it should take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np
from torch import Tensor

from tilewise import dispatch, hardware
from tilewise.api.names import BackendName
from tilewise.api.options import CallOptions
from tilewise.api.parse import parse_call
from tilewise.backends.base import Inputs
from tilewise.diagnostics.explanation import Choice, Explanation, Tiles
from tilewise.diagnostics.measured import Measured, measure_call
from tilewise.diagnostics.there import Answer, answer_there
from tilewise.errors import ArgumentError, ArgumentTypeError
from tilewise.hardware import DeviceSpec
from tilewise.masks import Lowered, MaskProgram, MaskShape, TileCounts, TileMap
from tilewise.model import TilePlan
from tilewise.model import plan as make_plan
from tilewise.model.grid import even
from tilewise.problem import Problem


def explain(
    q: Tensor | Problem,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    device: str | DeviceSpec | None = None,
    backend: BackendName = "auto",
    tile: TilePlan | tuple[int, int] | None = None,
    pass_: str = "auto",
    measure: bool = False,
    **options: Unpack[CallOptions],
) -> Explanation:
    """Explain the call `attention(q, k, v, …)`, or a Problem, for which neither tensors nor its device are needed.

    q: queries (B, Hq, Sq, D), or a Problem alone.
    k: keys (B, Hk, Sk, D).
    v: values (B, Hk, Sk, Dv).
    device: the machine to explain it for: a name such as "h200" or a DeviceSpec; None for that of the tensors, or this one.
    backend: "auto", or one by name.
    tile: your own tile, (queries, keys), whose cost is shown beside ours.
    pass_: "auto", or a kernel's pass: "forward", "decode", "backward_dkdv" or "backward_dq".
    measure: run the call, and say where its time goes.
    options: all else that `attention` takes; with `cu_seqlens_q` (and `cu_seqlens_k`) the call is that of `attention_varlen`.

    >>> print(tw.explain(q, k, v, mask=tw.causal()))
    >>> print(tw.explain(tw.Problem.of(heads=32, kv_heads=8, seqlen=8192, head_dim=128, mask=tw.causal()), device="h200"))
    """
    inputs = None
    if isinstance(q, Problem):
        if k is not None or v is not None or options:
            raise ArgumentError("explain: got a Problem with further arguments; what they say belongs in the Problem")
        problem = q
    elif k is None or v is None:
        raise ArgumentTypeError("explain: need q, k and v, or a Problem alone")
    else:
        problem, inputs = parse_call(q, k, v, options)
    spec, live = _machine(problem, inputs, device)
    problem = replace(problem, device="cuda" if spec.is_gpu else "cpu")
    backward = pass_.startswith("backward")
    answers = partial(_answer_here, problem, inputs, backward) if live else partial(answer_there, problem, spec, backward)
    choices = _choices(answers, backend)
    server = next((choice.name for choice in choices if choice.chosen), None)
    chosen, there = (server, None) if live else (None, server)
    countable = _countable(problem)
    plan = make_plan(countable, spec, pass_=pass_, tile=tile)
    measured: Measured | None = None
    if measure:
        if not live or chosen is None:
            raise ArgumentError(
                f"measure: {spec.name} is not this machine, or no backend serves the call here; leave it out"
            )
        measured = measure_call(problem, inputs, chosen, plan, backward)
    return Explanation(
        problem=problem,
        spec=spec,
        live=live,
        chosen=chosen,
        there=there,
        asked=backend,
        choices=choices,
        plan=plan,
        tiles=_tiles(countable, inputs, plan.tile),
        measured=measured,
        notes=_notes(problem, live),
    )


def _machine(problem: Problem, inputs: Inputs | None, device: str | DeviceSpec | None) -> tuple[DeviceSpec, bool]:
    """The machine the plan is for, and whether it is this one."""
    if device is None and inputs is not None:
        device = str(inputs.q.device)
    elif device is None and problem.device == "cpu":
        device = "cpu"
    live = device is None or (isinstance(device, str) and device.partition(":")[0] in ("cpu", "cuda", "hip"))
    return hardware.device(device), live


def _answer_here(problem: Problem, inputs: Inputs | None, backward: bool, candidate: str) -> Answer:
    """Can the backend serve the call on this machine, and if so, why would it rather not?"""
    verdict = dispatch.judge(candidate, problem, inputs, backward=backward)
    return verdict, dispatch.get(candidate).declines(problem, inputs, backward=backward) if verdict.ok else None


def _choices(answers: Callable[[str], Answer], name: str) -> tuple[Choice, ...]:
    """Every backend's answer, in order of preference; the first that can and would is chosen."""
    choices: list[Choice] = []
    server = None
    for candidate in dispatch.REGISTRY:
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
    if name != "auto" and server is None:
        dispatch.get(name)  # raises for a name nobody knows
    return tuple(choices)


def _countable(problem: Problem) -> Problem:
    """The same problem with the tensors of its mask in numpy, where tiles are counted."""
    program = problem.program
    if not program.tensors:
        return problem
    arrays = tuple(t if isinstance(t, np.ndarray) else np.asarray(t.detach().cpu()) for t in program.tensors)
    return replace(problem, mask=Lowered(MaskProgram(program.structure, program.ints, arrays)))


def _tiles(problem: Problem, inputs: Inputs | None, tile: TilePlan) -> Tiles:
    """Tiles by class over all sequences and heads; of a packed batch, by its real lengths where they are known."""
    counts: list[TileCounts] = []
    if problem.varlen and inputs is not None and inputs.cu_q is not None and inputs.cu_k is not None:
        starts: tuple[Any, Any] = inputs.cu_q.tolist(), inputs.cu_k.tolist()
        for b in range(problem.batch):
            (q0, q1), (k0, k1) = (side[b : b + 2] for side in starts)
            program = problem.program.for_sequence(b, q0, q1, k0, k1)
            shape = MaskShape(1, problem.heads, q1 - q0, k1 - k0)
            counts.append(TileMap(program, shape, tile.block_q, tile.block_k).counts())
    else:
        same = even(problem)
        counts.append(TileMap(same.program, same.shape, tile.block_q, tile.block_k).counts())
    skipped, masked, full = (sum(side) for side in zip(*counts, strict=True)) if counts else (0, 0, 0)
    return Tiles(tile.block_q, tile.block_k, full, masked, skipped)


def _notes(problem: Problem, live: bool) -> tuple[str, ...]:
    notes = []
    if not live:
        notes.append("the device is not this machine: what serves there is judged by its kind, not tried")
    if problem.varlen:
        notes.append("bytes and times take the packed sequences as equally long")
    return tuple(notes)
