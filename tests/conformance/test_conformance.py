"""Every backend against the fp64 oracle, forward and all gradients, within derived bounds."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.cases import CASES, Built, Case, build
from tilewise import dispatch
from tilewise.backends import sequence
from tilewise.backends.base import Grads
from tilewise.numerics import bounds

BACKENDS = ["tiled", "reference"]
COMPLETE = {"tiled"}
"""Backends that must serve every case."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32, so that short sequences have many."""
    monkeypatch.setattr(sequence, "TILE_BYTES", 1)


def gradients(built: Built, grads: tuple[torch.Tensor, ...]) -> Grads:
    """Gradients of the leaves, brought to the inside layout."""
    dq, dk, dv, *rest = grads
    if built.packed is not None:
        dq, dk, dv = (x.transpose(0, 1).unsqueeze(0) for x in (dq, dk, dv))
    elif built.options.get("layout") == "bshd":
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
    has_bias = built.problem.bias is not None
    dbias = rest[0].reshape(built.problem.bias) if has_bias and built.problem.bias else None
    return Grads(dq, dk, dv, dbias, rest[has_bias] if built.problem.sinks else None)


def conform(case: Case, backend: str, device: str) -> None:
    built = build(case, device)
    for backward in (False, True):
        verdict = dispatch.judge(backend, built.problem, built.inputs, backward=backward)
        if not verdict.ok:
            assert backend not in COMPLETE, verdict.reasons
            assert verdict.reasons, "a refusal must say why"
            pytest.skip("; ".join(verdict.reasons))
    out, lse = built.call(backend)
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g).to(out)
    dlse = torch.randn(lse.shape, generator=g).to(lse) if case.lse_gradient else None
    grads = torch.autograd.grad([out, lse], built.leaves, [dout, torch.zeros_like(lse) if dlse is None else dlse])
    if built.packed is not None:
        out, dout = (x.transpose(0, 1).unsqueeze(0) for x in (out, dout))
        lse, dlse = lse.unsqueeze(0), None if dlse is None else dlse.unsqueeze(0)
    elif case.layout == "bshd":
        out, dout = out.transpose(1, 2), dout.transpose(1, 2)
    assert bounds.check_forward(built.problem, built.inputs, out, lse) == []
    assert bounds.check_backward(built.problem, built.inputs, dout, dlse, gradients(built, grads)) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_conformance(backend: str, case: Case) -> None:
    conform(case, backend, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", [name for name, entry in dispatch.REGISTRY.items() if "cuda" in entry.devices])
def test_conformance_on_gpu(backend: str, case: Case) -> None:
    conform(case, backend, "cuda")
