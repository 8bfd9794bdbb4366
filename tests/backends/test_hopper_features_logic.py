"""The Hopper kernels with sinks and other features, run as Python threads: right results and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.backends import test_hopper_backward_logic as backward_logic
from tests.backends import test_hopper_forward_logic as forward_logic
from tests.backends.gluon_values import Value
from tests.backends.test_hopper_backward_logic import PAD, Shape, build
from tests.numerics import checks
from tilewise.backends.hopper.backward import choose
from tilewise.backends.hopper.features import SWITCH
from tilewise.backends.hopper.plan import supports
from tilewise.backends.tiled import backend as tiled
from tilewise.hardware import lookup

CAUSAL, WINDOW = "tw.causal()", "tw.causal() & tw.window(100)"
PACKED = ((5, 133, 0, 70), (5, 140, 7, 70))
SINKS = [
    Shape(64, WINDOW, 300, h=4, hk=2, sinks=True, dlse=True),
    Shape(128, CAUSAL, 200, h=2, hk=1, sinks=True),
    Shape(256, CAUSAL, 130, h=2, sinks=True),
    Shape(128, PAD.format("130, 0"), 100, 300, b=2, h=2, hk=2, sinks=True, dlse=True),
    Shape(64, CAUSAL, h=2, hk=1, sinks=True, lengths=PACKED),
    Shape(128, CAUSAL, 300, 200, h=2, softcap=3.0, sinks=True, deterministic=True),
]
SHAPES = SINKS


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(choose, "FEW_KEYS", {})
    monkeypatch.setattr(Value, "permute", lambda x, order: Value(x.value.permute(order)), raising=False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results(shape: Shape) -> None:
    problem, inputs = build(shape)
    assert supports(problem, lookup("h200")).ok
    assert checks.check_forward(problem, inputs, *forward_logic.run(problem, inputs, None)) == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape: Shape) -> None:
    problem, inputs = build(shape)
    assert supports(problem, lookup("h200"), backward=True).ok
    out, lse = tiled.backend.forward(replace(problem, tile=()), inputs)
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g).bfloat16()
    dlse = torch.randn(lse.shape, generator=g) if shape.dlse else None
    found = backward_logic.run(problem, inputs, out.contiguous(), lse, dout, dlse)
    assert (found.dsinks is not None) == shape.sinks
    assert checks.check_backward(problem, inputs, dout, dlse, found) == []


def test_sinks_that_are_infinite() -> None:
    """One has all the weight, one has none, one nearly all."""
    problem, inputs = build(Shape(64, CAUSAL, 100, 70, h=3, hk=1, sinks=True))
    inputs = inputs._replace(sinks=torch.tensor([float("inf"), float("-inf"), 60.0]))
    out, lse = forward_logic.run(problem, inputs, None)
    assert checks.check_forward(problem, inputs, out, lse) == []
    found = backward_logic.run(problem, inputs, out, lse, torch.ones_like(out), None)
    assert all(x is None or bool(x.isfinite().all()) for x in found)
    assert found.dq is not None and found.dsinks is not None
    assert found.dq[:, 0].count_nonzero() == 0 and found.dsinks[:2].tolist() == [0.0, 0.0]


def test_what_is_not_switched_on_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH)
    problem, _ = build(SINKS[0])
    assert supports(problem, lookup("h200")).reasons == ("sinks is not served here",)
