"""torch's own kernel in half precision: exact in its output alone; log-sum-exp and gradients it must refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tests.conformance.cases import CASES, Case, build
from tests.conformance.harness import gradients, inner
from tests.numerics import checks
from tilewise import dispatch
from tilewise.backends.aten import backend as aten
from tilewise.errors import BackendError
from tilewise.hardware.probe import probe_cpu
from tilewise.problem import Problem

HALVES = [
    replace(case, name=f"{case.name}-{str(dtype)[6:]}", dtype=dtype)
    for case in (*CASES, Case("long", batch=1, heads=2, seqlen=600, head_dim=64, mask=lambda shape, g: tw.causal()))
    for dtype in (torch.float16, torch.bfloat16)
    if case.name in ("plain", "gqa", "bshd", "scale", "huge-logits", "head-dim-256", "long")
]


@pytest.fixture(autouse=True)
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch had fast instructions for halves and the cpu backend none, and nobody had called before."""
    monkeypatch.setattr(aten.plan, "_half_obstacle", lambda dtype, spec: None)
    monkeypatch.setattr(aten, "probe_cpu", lambda: replace(probe_cpu(), isa_flags=("avx512_bf16",)))
    monkeypatch.setattr(aten, "half_gain", lambda dtype: 6.0)
    monkeypatch.setattr("tilewise.api.call_cache._calls", {})


@pytest.mark.parametrize("case", HALVES, ids=lambda case: case.name)
def test_outputs_and_gradients_are_within_their_bounds(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output by torch, the gradients by others from torch's log-sum-exp."""
    monkeypatch.setattr(aten.plan, "FEW_QUERIES", 0)
    built = build(case)
    unseen = replace(built.problem, needs_lse=False)
    assert dispatch.select(unseen, built.inputs).backend.name == "aten"
    assert dispatch.select(unseen, built.inputs, backward=True).backend.name != "aten"
    out = tw.attention(built.q, built.k, built.v, **built.options)
    assert isinstance(out, torch.Tensor)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, built.leaves, dout)
    assert checks.check_forward(built.problem, built.inputs, inner(built, out)) == []
    found = gradients(built, grads)
    assert checks.check_backward(built.problem, built.inputs, inner(built, dout), None, found) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_log_sum_exp_of_halves_is_refused(dtype: str) -> None:
    seen = Problem.of(heads=2, head_dim=64, seqlen=512, dtype=dtype)
    (reason,) = aten.backend.supports(seen).reasons
    assert "log-sum-exp" in reason
    assert aten.backend.supports(replace(seen, needs_lse=False)).ok
    assert aten.backend.supports(replace(seen, dtype="float32")).ok, "that of fp32 is exact"
    q = torch.randn(1, 2, 64, 64, dtype=getattr(torch, dtype))
    assert tw.attention(q, q, q, backend="aten").shape == q.shape
    with pytest.raises(BackendError, match="log-sum-exp"):
        tw.attention(q, q, q, backend="aten", return_lse=True)


def test_explain_tells_the_two_calls_apart() -> None:
    pytest.importorskip("llvmlite")
    q = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16)
    assert tw.explain(q, q, q).chosen == "aten"
    seen = tw.explain(q, q, q, return_lse=True)
    assert seen.chosen == "cpu"
    assert any("log-sum-exp" in reason for choice in seen.choices if choice.name == "aten" for reason in choice.reasons)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_halves_are_refused(dtype: str) -> None:
    problem = Problem.of(heads=2, head_dim=64, seqlen=512, dtype=dtype, needs_lse=False, needs_grad=True)
    assert aten.backend.supports(problem).ok
    (reason,) = aten.backend.supports(problem, backward=True).reasons
    assert "rounding after every block" in reason
    assert aten.backend.supports(replace(problem, dtype="float32"), backward=True).ok
    q = torch.randn(1, 2, 64, 64, dtype=getattr(torch, dtype), requires_grad=True)
    with pytest.raises(BackendError, match="dK and dV"):
        tw.attention(q, q, q, backend="aten")


def test_keys_past_the_triangle_are_not_touched() -> None:
    """Top-left causal with more keys than queries: nobody sees the last keys, whatever they hold."""
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    k, v = (torch.randn(1, 1, 12, 8) for _ in range(2))
    results = []
    for garbage in (0.0, float("nan")):
        own = [torch.cat([x[:, :, :5], torch.full_like(x[:, :, 5:], garbage)], dim=2).requires_grad_() for x in (k, v)]
        out, lse = tw.attention(q, *own, mask=tw.causal("top_left"), return_lse=True, backend="aten")
        alone = tw.attention(q.detach(), *(x.detach() for x in own), mask=tw.causal("top_left"), backend="aten")
        assert torch.equal(alone, out)
        results.append([out, lse, *torch.autograd.grad(out.sum() + lse.sum(), [q, *own])])
    for clean, spoiled in zip(*results, strict=True):
        assert clean.isfinite().all() and torch.equal(clean, spoiled)


def test_a_clock_does_not_decide_a_deterministic_call() -> None:
    pytest.importorskip("llvmlite")
    problem = Problem.of(heads=2, head_dim=32, seqlen=64, dtype="bfloat16", needs_lse=False, deterministic=True)
    selection = dispatch.select(problem)
    assert selection.backend.name == "cpu" and "clock" in selection.verdicts["aten"].reasons[0]
