"""Trials of every feature, small enough for any machine, that each backend must pass within the derived bounds."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.backends.base import Inputs
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.judge import Judgement, compare
from tilewise.numerics import bounds
from tilewise.numerics.oracle import oracle, oracle_gradients
from tilewise.ops.autograd import attend
from tilewise.problem import Problem

trial = partial(Case, batch=2, heads=4, seqlen=130, head_dim=32, passes="training")
grouped = partial(trial, heads=6, kv_heads=2, mask="causal")
TRIALS = (
    trial("full"),
    trial("causal", mask="causal"),
    trial("causal, more keys than queries", mask="causal", seqlen=33, kv_seqlen=130),
    trial("causal, rows that see nothing", mask="causal", kv_seqlen=33),
    trial("causal, top-left", mask="causal(top_left)", seqlen=33, kv_seqlen=130),
    trial("window", mask="causal & window(17)"),
    trial("prefix-LM", mask="causal | prefix(20)"),
    trial("documents", mask="causal", data="documents"),
    trial("key padding", data="padding"),
    trial("blocks", data="blocks"),
    trial("dense", data="dense"),
    grouped("one query", mask="full", seqlen=1, kv_seqlen=300),
    grouped("grouped heads"),
    grouped("one key head", kv_heads=1),
    trial("odd head dims", mask="causal", batch=1, heads=2, head_dim=40, head_dim_v=24),
    trial("wide heads", mask="causal", batch=1, heads=2, seqlen=70, head_dim=256),
    trial("bias", mask="causal", bias=(1, 4, 130, 130)),
    trial("broadcast bias", mask="causal", bias=(2, 1, 1, 130)),
    trial("alibi", mask="causal", alibi=True),
    trial("softcap", mask="causal", softcap=2.0),
    trial("sinks", mask="causal", sinks=True),
    trial("dropout", mask="causal", dropout_p=0.2),
    trial("packed", mask="causal", lengths=(50, 0, 80)),
    trial("deterministic", mask="causal", deterministic=True),
    *(grouped(dtype, dtype=dtype) for dtype in ("float16", "bfloat16", "float64")),
)

small = partial(Case, batch=1, heads=2, kv_heads=1, seqlen=33, head_dim=16, passes="training")
INTERPRETED = (
    small("full"),
    small("causal, more keys than queries", mask="causal", seqlen=17, kv_seqlen=33),
    small("window", mask="causal & window(9)"),
    small("key padding", data="padding"),
    small("documents", data="documents"),
    small("bias", mask="causal", bias=(1, 2, 33, 33)),
    small("softcap and sinks", mask="causal", softcap=2.0, sinks=True),
    small("dropout", mask="causal", dropout_p=0.2),
    small("packed", mask="causal", lengths=(12, 21)),
    small("bfloat16", mask="causal", dtype="bfloat16"),
)
"""For Triton's interpreter, which takes a thousand times as long as a GPU."""


def trials(backend: str, device: str, every: bool = False) -> tuple[Case, ...]:
    """What a backend is tried with; `every`: also where that takes minutes. On a CPU Triton's kernels are interpreted."""
    return INTERPRETED if (backend, device) == ("triton", "cpu") and not every else TRIALS


class TrialResult(NamedTuple):
    """`judgement` is None where the backend declined (`reasons`) or failed (`failure`)."""

    trial: str
    judgement: Judgement | None
    reasons: tuple[str, ...] = ()
    failure: str | None = None
    seconds: float = 0.0

    @property
    def status(self) -> str:
        if self.reasons:
            return "declined"
        return "passed" if self.judgement and self.judgement.ok else "failed"


class Expectation(NamedTuple):
    """A trial's tensors, and what the oracle makes of them."""

    problem: Problem
    inputs: Inputs
    upstream: tuple[Tensor, Tensor]  # gradients of out and lse
    want: dict[str, tuple[Tensor, Tensor]]  # by name: the value, and how far from it a right one may be


@cache
def expected(case: Case, device: str) -> Expectation:
    """Made once for all backends."""
    case = replace(case, device=device)
    tensors = case.tensors(seed=7)
    problem, inputs, dout = replace(case.problem(), needs_lse=True), case.inputs(tensors), case.rank4(tensors.dout)
    out, lse = oracle(problem, inputs)
    generator = torch.Generator().manual_seed(8)
    exact: torch.dtype = getattr(torch, problem.arithmetic)
    dlse = torch.where(lse.isfinite(), torch.randn(lse.shape, generator=generator).to(device, exact), 0.0)
    far = bounds.forward(problem, inputs)
    want = {"out": (out, far.out), "lse": (lse, far.lse)}
    grads, far_grads = oracle_gradients(problem, inputs, dout, dlse), bounds.backward(problem, inputs, dout, dlse)
    for name, grad, bound in zip(grads._fields, grads, far_grads, strict=True):
        if grad is not None and bound is not None:
            want[name] = grad, bound
    return Expectation(problem, inputs, (dout, dlse), want)


def attempt(case: Case, backend: str, device: str) -> TrialResult:
    """Run one trial, forward and backward, and compare out, lse and every gradient with the oracle."""
    problem, inputs, upstream, want = expected(case, device)
    verdicts = [dispatch.judge(backend, problem, inputs, backward=backward) for backward in (False, True)]
    against = dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons)
    if against:
        return TrialResult(case.name, None, tuple(against))
    begin = time.perf_counter()
    try:
        names = [name for name in ("q", "k", "v", "bias", "sinks") if getattr(inputs, name) is not None]
        leaves: dict[str, Any] = {name: getattr(inputs, name).detach().requires_grad_() for name in names}
        out, lse = attend(problem, inputs._replace(**leaves), backend)
        grads = torch.autograd.grad((out, lse), list(leaves.values()), upstream)
    except Exception as error:  # whatever goes wrong in a backend is the trial's finding
        return TrialResult(case.name, None, failure=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - begin
    results = {"out": out.detach(), "lse": lse.detach()} | {f"d{x}": grad for x, grad in zip(names, grads, strict=True)}
    judgement = compare(((value, *want[name]) for name, value in results.items()), 1.0)
    return TrialResult(case.name, judgement, seconds=seconds)
