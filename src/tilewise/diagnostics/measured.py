"""Where the time of a call really goes: measured time against the roof, and the losses between the two by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise import dispatch, hardware, model
from tilewise.backends.base import BackwardInputs, Inputs, Needs
from tilewise.errors import ArgumentError
from tilewise.hardware.timers import median_seconds
from tilewise.masks import Full
from tilewise.model import Plan
from tilewise.problem import Problem

ROUNDS = 7
SPENT = 2.0
"""Seconds after which no further round is started."""


@dataclass(frozen=True)
class Measured:
    """A call that was run. Losses are seconds beyond what the roof allows; those of the model first, then the rest."""

    seconds: float
    rounds: int
    ideal: float
    """The time the measured ceilings of the machine allow for the useful work and the DRAM bytes of the plan."""
    losses: dict[str, float]
    ceilings: str

    @property
    def of_ceiling(self) -> float:
        return self.ideal / self.seconds if self.seconds else 0.0

    @property
    def loss(self) -> str:
        """The largest loss by name."""
        return max(self.losses, key=lambda name: self.losses[name])

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "of_ceiling": self.of_ceiling, "loss": self.loss}


def measure_call(problem: Problem, inputs: Inputs | None, backend: str, plan: Plan) -> Measured:
    """Run the call, with the tile of the plan, on its device and name what keeps it from the roof."""
    given = inputs if inputs is not None else random_inputs(problem)
    run = _runner(problem, given, backend, plan.tile.pass_.startswith("backward"))
    return measure_run(plan, run, partial(_overhead, problem, given, backend))


def measure_run(plan: Plan, run: Callable[[], Any], overhead: Callable[[], float] = float) -> Measured:
    """Time `run`, the call of a plan; `overhead` gives the time of one that computes nothing."""
    problem = plan.problem
    seconds, rounds = _seconds(run, problem.device)
    ceilings = hardware.measure(problem.device)
    spec = ceilings.apply(plan.spec)
    roof = model.roofline(plan.work.useful, plan.dram.total, problem.dtype, spec, problem.precision)
    ideal = plan.work.useful / roof.attainable if roof.attainable else 0.0
    losses = name_losses(plan, seconds, ideal, overhead(), spec)
    return Measured(seconds, rounds, ideal, losses, ceilings.words)


def name_losses(plan: Plan, seconds: float, ideal: float, launch: float, spec: hardware.DeviceSpec) -> dict[str, float]:
    """Split what lies between the roof and the measured time.

    Each named loss is what the model says its cause costs, as far as the time lasts; what no cause explains is the
    kernel's own.
    """
    work, flops = plan.work, spec.flops(plan.problem.dtype, plan.problem.precision) or spec.flops("float32")
    products = work.executed / flops if flops else 0.0
    moving = [s for name, s in plan.limits.items() if "bandwidth" in name]
    exps = work.exps / spec.exp_rate if spec.exp_rate else 0.0
    places = math.ceil(plan.waves) / plan.waves - 1 if plan.waves > 0 else 0.0
    claims = {
        "launch": launch,
        "masked and padded scores": (work.executed - work.useful) / flops if flops else 0.0,
        # a GPU's exponentials run beside its tensor cores: only what lasts longer than the products costs time
        "exp unit": max(0.0, exps - products) if plan.spec.is_gpu else exps,
        "traffic": max(0.0, max(moving, default=0.0) - max(products, ideal)),
        "tail wave": places * products,
    }
    left = max(0.0, seconds - ideal)
    losses = {}
    for name, claim in claims.items():
        losses[name] = min(claim, left)
        left -= losses[name]
    losses["kernel"] = left
    return losses


def random_inputs(problem: Problem) -> Inputs:
    """Inputs for a Problem without tensors."""
    if problem.varlen or problem.bias is not None or problem.alibi or problem.sinks:
        raise ArgumentError("measure: a packed batch, bias, ALiBi or sinks need tensors; pass q, k and v with them")
    dtype = getattr(torch, problem.dtype)

    def make(heads: int, length: int, dim: int) -> Tensor:
        return torch.randn(problem.batch, heads, length, dim, device=problem.device).to(dtype)

    return Inputs(
        make(problem.heads, problem.seqlen_q, problem.head_dim),
        make(problem.kv_heads, problem.seqlen_k, problem.head_dim),
        make(problem.kv_heads, problem.seqlen_k, problem.head_dim_v),
        seed=torch.zeros((), dtype=torch.int64, device=problem.device) if problem.dropout_p else None,
    )


def _runner(problem: Problem, inputs: Inputs, name: str, backward: bool) -> Callable[[], Any]:
    backend = dispatch.get(name)
    if not backward:
        return lambda: backend.forward(problem, inputs)
    with torch.no_grad():
        out, lse = backend.forward(problem, inputs)
    needs = Needs(dbias=inputs.bias is not None, dsinks=inputs.sinks is not None)
    return lambda: backend.backward(problem, inputs, BackwardInputs(out, lse, torch.ones_like(out), needs=needs))


@torch.no_grad()
def _seconds(run: Callable[[], Any], device: str) -> tuple[float, int]:
    """The median time of a call, and of how many."""
    return median_seconds(run, device, ROUNDS, SPENT)


def _overhead(problem: Problem, inputs: Inputs, name: str) -> float:
    """The time of the same call with one query and one key a head: checks, plan, launch and a tile that holds nothing."""
    plain = {
        "mask": Full(),
        "bias": None,
        "alibi": False,
        "varlen": False,
        "sinks": False,
        "dropout_p": 0.0,
        "tile": (),
    }
    small = replace(problem, batch=1, seqlen_q=1, seqlen_k=1, **plain)  # type: ignore[arg-type]
    one = Inputs(inputs.q[:1, :, :1], inputs.k[:1, :, :1], inputs.v[:1, :, :1])
    if not dispatch.judge(name, small, one).ok:
        return 0.0
    return _seconds(lambda: dispatch.get(name).forward(small, one), problem.device)[0]
