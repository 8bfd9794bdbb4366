"""Trials of every feature, small enough for any machine, that each backend must pass within the derived bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import dispatch, masks
from tilewise.backends.base import Inputs
from tilewise.lab.bench.judge import Judgement, Worst
from tilewise.masks import Binding, Lowered, Mask, MaskShape
from tilewise.numerics import bounds
from tilewise.numerics.oracle import oracle, oracle_gradients
from tilewise.ops.autograd import attend
from tilewise.problem import Problem


@dataclass(frozen=True, eq=False)
class Trial:
    """One call: sizes, a mask (made when needed: some hold tensors) and features."""

    name: str
    mask: Callable[[], Mask] = masks.full
    dtype: str = "float32"
    seqlen: int = 130
    kv_seqlen: int | None = None
    sizes: dict[str, int] = field(default_factory=lambda: {"batch": 2, "heads": 4, "head_dim": 32})
    features: dict[str, Any] = field(default_factory=dict)
    bias: tuple[int, int, int, int] | None = None
    cu_seqlens: tuple[int, ...] = ()

    def bound_mask(self, device: str) -> Mask:
        """The mask with its tensors on the device."""
        shape = MaskShape(self.sizes["batch"], self.sizes["heads"], self.seqlen, self.kv_seqlen or self.seqlen)
        asarray = partial(torch.as_tensor, device=device)
        return Lowered(self.mask().lower(Binding(shape, bool(self.cu_seqlens), asarray)))

    def build(self, device: str) -> tuple[Problem, Inputs, Tensor, Tensor]:
        """The problem, its tensors, and upstream gradients of out and lse."""
        generator = torch.Generator().manual_seed(7)
        problem = Problem.of(
            **self.sizes,
            seqlen=self.seqlen,
            kv_seqlen=self.kv_seqlen,
            dtype=self.dtype,
            mask=self.bound_mask(device),
            bias=self.bias,
            varlen=bool(self.cu_seqlens),
            needs_grad=True,
            device=device,
            **self.features,
        )

        own: torch.dtype = getattr(torch, self.dtype)

        def normal(*shape: int, dtype: torch.dtype = own, grad: bool = True) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)

        rows = 1 if problem.varlen else problem.batch
        cu = torch.tensor(self.cu_seqlens, dtype=torch.int32, device=device) if problem.varlen else None
        inputs = Inputs(
            q=normal(rows, problem.heads, problem.seqlen_q, problem.head_dim),
            k=normal(rows, problem.kv_heads, problem.seqlen_k, problem.head_dim),
            v=normal(rows, problem.kv_heads, problem.seqlen_k, problem.head_dim_v),
            bias=normal(*self.bias) if self.bias else None,
            alibi=normal(1, problem.heads, dtype=torch.float32, grad=False).abs() if problem.alibi else None,
            sinks=normal(problem.heads, dtype=torch.float32) if problem.sinks else None,
            seed=torch.tensor(2026) if problem.dropout_p else None,
            cu_q=cu,
            cu_k=cu,
        )
        exact = torch.float64 if self.dtype == "float64" else torch.float32
        dout = normal(*inputs.q.shape[:3], problem.head_dim_v, grad=False)
        dlse = normal(*inputs.q.shape[:3], dtype=exact, grad=False)
        return problem, inputs, dout, dlse


def _block_table() -> Mask:
    i, j = torch.arange(5)[:, None], torch.arange(5)[None, :]
    return masks.blocks(((i - j).abs() % 3 == 0)[None, None], 32)


def _checkerboard() -> Mask:
    i, j = torch.arange(130)[:, None], torch.arange(130)[None, :]
    return masks.dense(((i * j) % 3 == 0)[None, None])


GQA = {"batch": 2, "heads": 6, "kv_heads": 2, "head_dim": 32}

TRIALS = (
    Trial("full"),
    Trial("causal", masks.causal),
    Trial("causal, more keys than queries", masks.causal, seqlen=33, kv_seqlen=130),
    Trial("causal, rows that see nothing", masks.causal, seqlen=130, kv_seqlen=33),
    Trial("causal, top-left", lambda: masks.causal(align="top_left"), seqlen=33, kv_seqlen=130),
    Trial("window", lambda: masks.causal() & masks.window(17)),
    Trial("prefix-LM", lambda: masks.causal() | masks.prefix(20)),
    Trial("documents", lambda: masks.causal() & masks.documents(torch.arange(130)[None] // 37)),
    Trial("key padding", lambda: masks.key_padding(torch.tensor([70, 0]))),
    Trial("blocks", _block_table),
    Trial("dense", _checkerboard),
    Trial("one query", seqlen=1, kv_seqlen=300, sizes=GQA),
    Trial("grouped heads", masks.causal, sizes=GQA),
    Trial("one key head", masks.causal, sizes={**GQA, "kv_heads": 1}),
    Trial("odd head dims", masks.causal, sizes={"batch": 1, "heads": 2, "head_dim": 40, "head_dim_v": 24}),
    Trial("wide heads", masks.causal, seqlen=70, sizes={"batch": 1, "heads": 2, "head_dim": 256}),
    Trial("bias", masks.causal, bias=(1, 4, 130, 130)),
    Trial("broadcast bias", masks.causal, bias=(2, 1, 1, 130)),
    Trial("alibi", masks.causal, features={"alibi": True}),
    Trial("softcap", masks.causal, features={"softcap": 2.0}),
    Trial("sinks", masks.causal, features={"sinks": True}),
    Trial("dropout", masks.causal, features={"dropout_p": 0.2}),
    Trial("packed", masks.causal, cu_seqlens=(0, 50, 50, 130), sizes={"batch": 3, "heads": 4, "head_dim": 32}),
    Trial("deterministic", masks.causal, features={"deterministic": True}),
    Trial("float16", masks.causal, dtype="float16", sizes=GQA),
    Trial("bfloat16", masks.causal, dtype="bfloat16", sizes=GQA),
    Trial("float64", masks.causal, dtype="float64", sizes=GQA),
)


SMALL = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 16}

INTERPRETED = (
    Trial("full", seqlen=33, sizes=SMALL),
    Trial("causal, more keys than queries", masks.causal, seqlen=17, kv_seqlen=33, sizes=SMALL),
    Trial("window", lambda: masks.causal() & masks.window(9), seqlen=33, sizes=SMALL),
    Trial("key padding", lambda: masks.key_padding(torch.tensor([20])), seqlen=33, sizes=SMALL),
    Trial("documents", lambda: masks.documents(torch.arange(33)[None] // 12), seqlen=33, sizes=SMALL),
    Trial("bias", masks.causal, seqlen=33, sizes=SMALL, bias=(1, 2, 33, 33)),
    Trial("softcap and sinks", masks.causal, seqlen=33, sizes=SMALL, features={"softcap": 2.0, "sinks": True}),
    Trial("dropout", masks.causal, seqlen=33, sizes=SMALL, features={"dropout_p": 0.2}),
    Trial("packed", masks.causal, seqlen=33, cu_seqlens=(0, 12, 33), sizes={**SMALL, "batch": 2}),
    Trial("bfloat16", masks.causal, seqlen=33, dtype="bfloat16", sizes=SMALL),
)
"""For Triton's interpreter, which takes a thousand times as long as a GPU."""


def trials(backend: str, device: str, every: bool = False) -> tuple[Trial, ...]:
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


class Expected(NamedTuple):
    """A trial's tensors, what the oracle makes of them, and how far from it a right result may be."""

    problem: Problem
    inputs: Inputs
    upstream: tuple[Tensor, Tensor]  # gradients of out and lse
    want: dict[str, Tensor]
    limit: dict[str, Tensor]


@cache
def expected(trial: Trial, device: str) -> Expected:
    """Made once for all backends."""
    problem, inputs, dout, dlse = trial.build(device)
    plain = Inputs._make(None if x is None else x.detach() for x in inputs)
    out, lse = oracle(problem, plain)
    dlse = torch.where(lse.isfinite(), dlse, 0.0)
    far = bounds.forward(problem, plain)
    want, limit = {"out": out, "lse": lse}, {"out": far.out, "lse": far.lse}
    grads, far_grads = oracle_gradients(problem, plain, dout, dlse), bounds.backward(problem, plain, dout, dlse)
    for name, grad, bound in zip(grads._fields, grads, far_grads, strict=True):
        if grad is not None and bound is not None:
            want[name], limit[name] = grad, bound
    return Expected(problem, inputs, (dout, dlse), want, limit)


def attempt(trial: Trial, backend: str, device: str) -> TrialResult:
    """Run one trial, forward and backward, and compare out, lse and every gradient with the oracle."""
    problem, inputs, upstream, want, limit = expected(trial, device)
    verdicts = [dispatch.judge(backend, problem, inputs, backward=backward) for backward in (False, True)]
    against = dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons)
    if against:
        return TrialResult(trial.name, None, tuple(against))
    begin = time.perf_counter()
    try:
        leaves = {
            f"d{name}": x for name in ("q", "k", "v", "bias", "sinks") if (x := getattr(inputs, name)) is not None
        }
        out, lse = attend(problem, inputs, backend)
        grads = torch.autograd.grad((out, lse), list(leaves.values()), upstream)
    except Exception as error:  # whatever goes wrong in a backend is the trial's finding
        return TrialResult(trial.name, None, failure=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - begin
    worst = Worst()
    for name, value in zip(("out", "lse", *leaves), (out.detach(), lse.detach(), *grads), strict=True):
        worst.see(value, want[name], limit[name])
    return TrialResult(trial.name, worst.verdict(1.0), seconds=seconds)


def selftest(backend: str, device: str, every: bool = False) -> Iterator[tuple[str, Callable[[], TrialResult]]]:
    """Each trial's name, and the trial to be run: whoever waits can be told first."""
    for trial in trials(backend, device, every):
        yield trial.name, partial(attempt, trial, backend, device)
