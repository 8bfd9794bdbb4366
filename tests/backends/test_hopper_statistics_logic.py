"""The Hopper forward with statistics, run as Python threads: right values within the derived bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.backends import test_hopper_forward_logic as forward_logic
from tests.backends import test_hopper_lists_logic as lists_logic
from tests.backends.gluon_values import Value
from tests.backends.test_hopper_backward_logic import PAD, Shape, build
from tests.numerics import checks
from tilewise.backends.hopper.features import statistics_types
from tilewise.backends.hopper.plan import obstacles
from tilewise.numerics import bounds, statistics

CAUSAL = "tw.causal()"
LISTS = "tw.causal() & (tw.prefix(10) | tw.window(40))"
SHAPES = [
    Shape(64, LISTS, 300),
    Shape(64, CAUSAL, 200, h=2, hk=1),
    Shape(64, CAUSAL, 300, h=2, hk=1),
    Shape(128, "None", 130, 300, h=2),
    Shape(128, CAUSAL, 64, 191),  # the first query sees nothing of its first key tile, and all of the second
    Shape(128, PAD.format("130, 0"), 70, 200, b=2, sinks=True),
    Shape(64, "tw.causal() & tw.window(100)", 300, dropout=0.2),
    Shape(256, CAUSAL, 130, 100, softcap=3.0),
    Shape(128, CAUSAL, lengths=((5, 133, 0, 70), (5, 140, 7, 70)), h=2, hk=1),
    Shape(64, "None", 130, 300, scale=-0.2),
]


@pytest.fixture(autouse=True)
def tensors_permute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Value, "permute", lambda x, order: Value(x.value.permute(order)), raising=False)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: f"d{x.d}-{x.mask[3:20]}")
def test_results(shape: Shape) -> None:
    problem, inputs = build(shape)
    stats = ("max_logit",) if shape is SHAPES[1] else ("max_logit", "entropy")
    watched = replace(problem, stats=stats)
    assert not obstacles(watched)
    to = {name: torch.full(inputs.q.shape[:3], float("nan")) for name in statistics_types(watched)}
    if shape.mask == LISTS:
        out, lse = lists_logic.run_forward(watched, inputs, to)
    else:
        out, lse = forward_logic.run(watched, inputs, None, to)
    assert checks.check_forward(problem, inputs, out, lse) == []
    exact, slack = statistics.exact(problem, inputs), statistics.bounds(problem, inputs)
    for name in stats:
        assert bounds.ratios(to[f"{name}_ptr"], getattr(exact, name), getattr(slack, name)).max() <= 1, name
    if "entropy" in stats and not shape.sinks:
        slack_lse = bounds.forward(problem, inputs)[1]
        assert bounds.ratios(to["key_lse_ptr"], lse.double(), 2 * slack_lse).max() <= 1


@pytest.mark.parametrize("climb", [1.0, 20.0])
def test_a_maximum_that_lags_behind(climb: float) -> None:
    """Scores of each tile lie above those of the tile before: the reference of the weights is raised now and then, or always."""
    problem, inputs = build(Shape(128, sq=128, sk=1024, h=1))
    inputs.q[..., 0], inputs.q[..., 1:] = 8.0, inputs.q[..., 1:] / 4
    inputs.k[..., 0] = climb * 128**0.5 / 8 * torch.arange(7, -1, -1).repeat_interleave(128)
    watched = replace(problem, stats=("max_logit", "entropy"))
    to = {name: torch.full(inputs.q.shape[:3], float("nan")) for name in statistics_types(watched)}
    forward_logic.run(watched, inputs, None, to)
    exact, slack = statistics.exact(problem, inputs), statistics.bounds(problem, inputs)
    for name in watched.stats:
        assert bounds.ratios(to[f"{name}_ptr"], getattr(exact, name), getattr(slack, name)).max() <= 1, name


def test_what_is_not_served() -> None:
    problem, _ = build(SHAPES[1])
    assert "top(3)" in obstacles(replace(problem, stats=("max_logit", "top(3)")))[0]
    assert "key_mass" in obstacles(replace(problem, stats=("key_mass",)))[0]
    assert "no gradient" in obstacles(replace(problem, stats=("entropy",)), backward=True)[0]
    assert not obstacles(replace(problem, stats=("max_logit",)), backward=True)
    problem, _ = build(Shape(64, CAUSAL, 130, alibi=1))
    assert any("ALiBi" in reason for reason in obstacles(replace(problem, stats=("max_logit",))))
