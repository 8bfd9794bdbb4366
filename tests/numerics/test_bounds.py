"""The bounds hold for correct arithmetic, are not absurdly loose, and are broken by plausible mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.numerics import checks
from tests.numerics.emulation import Case, Kernel, make_case
from tilewise.backends.base import Inputs
from tilewise.errors import LayoutError
from tilewise.masks import causal, dense, window
from tilewise.numerics import bounds
from tilewise.numerics.oracle import oracle, oracle_gradients
from tilewise.numerics.rounding import Arithmetic, growth
from tilewise.problem import Problem

DTYPES = ("float64", "float32", "float16", "bfloat16")

# name: queries, keys, head dim, features
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "square": (64, 64, 32, {}),
    "tiny": (3, 5, 8, {}),
    "one query": (1, 300, 64, {}),
    "few keys": (300, 20, 64, {}),
    "long": (16, 700, 96, {}),
    "causal": (100, 130, 64, {"mask": causal()}),
    "window with empty rows": (60, 40, 32, {"mask": causal() & window(4)}),
    "value dim": (40, 50, 16, {"head_dim_v": 80}),
    "softcap": (64, 64, 16, {"softcap": 5.0}),
    "bias and sinks": (50, 90, 32, {"bias": (1, 4, 1, 90), "sinks": True}),
    "full bias": (33, 31, 16, {"bias": (2, 4, 33, 31)}),
    "alibi and dropout": (50, 90, 32, {"alibi": True, "dropout_p": 0.3}),
    "sharp": (64, 64, 64, {"spread": 20.0}),
    "huge logits": (64, 64, 64, {"spread": 1e3}),
    "flat": (64, 64, 64, {"spread": 1e-3}),
}


def error_ratios(case: Case, problem: Problem | None = None, no_delta: bool = False) -> dict[str, float]:
    """Largest error / bound of each tensor of a kernel that computes `problem` where `case.problem` is asked for."""
    kernel = Kernel(case, problem)
    out, lse = kernel.forward()
    grads = kernel.backward(torch.zeros_like(out) if no_delta else out, lse)
    exact = (*oracle(case.problem, case), *oracle_gradients(case.problem, case, case.dout, case.dlse))
    limit = (*bounds.forward(case.problem, case), *bounds.backward(case.problem, case, case.dout, case.dlse))
    names = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
    return {
        name: float(bounds.ratios(actual, right, bound).max())
        for name, actual, right, bound in zip(names, (out, lse, *grads), exact, limit, strict=True)
        if actual is not None
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_correct_arithmetic_is_within(dtype: str, name: str) -> None:
    m, n, d, features = CASES[name]
    ratios = error_ratios(make_case(dtype, m, n, d, **features))
    assert max(ratios.values()) <= 1, ratios


def test_tf32_is_within_its_bounds_and_outside_those_of_fp32() -> None:
    case = make_case("float32", 64, 200, 64, precision="tf32")
    assert max(error_ratios(case).values()) <= 1
    strict = case._replace(problem=replace(case.problem, precision="default"))
    assert error_ratios(strict, problem=case.problem)["out"] > 1


@pytest.mark.parametrize(
    ("dtype", "least"), [("float64", 0.003), ("float32", 0.005), ("float16", 0.1), ("bfloat16", 0.1)]
)
def test_not_absurdly_loose(dtype: str, least: float) -> None:
    """fp32 and fp64 pay for score errors that conspire over all keys; 16 bits come within ten times of what happens."""
    shapes = [(64, 64, 32), (20, 400, 64), (9, 7, 8)]
    tightness = [error_ratios(make_case(dtype, *shape, seed=1)) for shape in shapes]
    for tensor in ("out", "dv"):
        assert max(ratios[tensor] for ratios in tightness) > least, tightness


def without_key(case: Case) -> Problem:
    """One of the keys is never seen by the last row."""
    seen = torch.ones(case.problem.seqlen_q, case.problem.seqlen_k, dtype=torch.bool)
    seen[-1, case.problem.seqlen_k // 2] = False
    return replace(case.problem, mask=case.problem.mask & dense(seen))


MISTAKES: dict[str, tuple[dict[str, Any], Callable[[Case], Problem]]] = {
    "scale off by 1 %": ({}, lambda case: replace(case.problem, scale=1.01 * case.problem.scale)),
    "a key missing": ({}, without_key),
    "causal, one key too many": ({"mask": causal()}, lambda case: replace(case.problem, mask=causal(offset=1))),
    "causal, one key too few": ({"mask": causal()}, lambda case: replace(case.problem, mask=causal(offset=-1))),
    "window one too wide": ({"mask": window(8)}, lambda case: replace(case.problem, mask=window(9))),
    "softcap forgotten": ({"softcap": 20.0}, lambda case: replace(case.problem, softcap=0.0)),
    "kept weights not scaled up": ({"dropout_p": 0.01}, lambda case: replace(case.problem, dropout_p=0.0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mistakes_are_caught(dtype: str, mistake: str) -> None:
    features, spoil = MISTAKES[mistake]
    case = make_case(dtype, 64, 64, 32, spread=2.0, **features)
    ratios = error_ratios(case, problem=spoil(case))
    assert ratios["out"] > 1, ratios
    assert max(ratios[name] for name in ("dq", "dk", "dv")) > 1, ratios


@pytest.mark.parametrize("dtype", DTYPES)
def test_forgotten_delta_is_caught(dtype: str) -> None:
    ratios = error_ratios(make_case(dtype, 64, 64, 32), no_delta=True)
    assert ratios["dq"] > 1 and ratios["dk"] > 1 and ratios["dv"] <= 1, ratios


def test_low_accumulation_is_caught() -> None:
    """Sums in bf16 are not what a bf16 result may be made of."""
    case = make_case("bfloat16", 16, 256, 64)
    scores = case.problem.scale * (case.q.float() @ case.k.float().repeat_interleave(2, 1).mT)
    weights = torch.softmax(scores, dim=-1).bfloat16()
    out = torch.zeros_like(case.dout)
    values = case.v.repeat_interleave(2, 1)
    for j in range(256):
        out += weights[..., j : j + 1] * values[:, :, j : j + 1]
    assert checks.check_forward(case.problem, case, out)


def test_equal_weights_round_alike() -> None:
    """The same rounding error in every weight: no averaging may be assumed."""
    case = make_case("bfloat16", 4, 300, 16)
    case = case._replace(q=torch.zeros_like(case.q), v=torch.ones_like(case.v))
    weight = torch.full((2, 4, 4, 300), 1 / 300, dtype=torch.bfloat16).float()
    out = (weight @ case.v.float().repeat_interleave(2, 1)).bfloat16()
    assert abs(float(out[0, 0, 0, 0]) - 1) > 0.001
    assert not checks.check_forward(case.problem, case, out)


def test_weights_too_small_to_be_normal_may_vanish_before_dropout_joins() -> None:
    """GPUs flush P below 2⁻¹²⁶; dV then lacks P · keep · dO, which dropout makes twice as large."""
    case = make_case("float32", 1, 2, 4, dropout_p=0.5)
    q, k = torch.zeros_like(case.q), torch.zeros_like(case.k)
    q[..., 0], k[..., 0, 0] = 87.4, 2.0  # the second key's logit is 87.4 lower: P is about 1.1e-38
    case = case._replace(q=q, k=k)
    exact = oracle_gradients(case.problem, case, case.dout, case.dlse).dv
    faint = exact[:, :, 1].abs()
    assert 0 < faint.max() < 1e-37
    vanished = exact.clone()
    vanished[:, :, 1] = 0.0
    limit = bounds.backward(case.problem, case, case.dout, case.dlse).dv
    assert checks.check(vanished, exact, limit, "dv") is None
    assert checks.check(vanished, exact, 0.45 * limit, "dv") is not None, "and not much more is allowed"


@pytest.mark.parametrize(("dtype", "logit"), [("float32", -88.0), ("float64", -709.0)])
def test_weights_too_small_to_be_normal_may_vanish_from_gradients(dtype: str, logit: float) -> None:
    """The weight is flushed to 0, and the gradient of its logit is a hundred times the weight."""
    problem = Problem.of(heads=1, head_dim=1, seqlen=1, kv_seqlen=2, dtype=dtype, scale=1.0)
    tensors = (torch.tensor(x).reshape(1, 1, -1, 1).to(getattr(torch, dtype)) for x in ([1.0], [0.0, logit], [0.0, 100.0]))
    inputs = Inputs(*tensors)
    dout = torch.ones_like(inputs.q)
    exact, bound = oracle_gradients(problem, inputs, dout).dk, bounds.backward(problem, inputs, dout).dk
    assert exact[0, 0, 1].abs() > torch.finfo(getattr(torch, dtype)).smallest_normal
    vanished = torch.tensor([0.0, 0.0]).reshape(exact.shape).to(dout.dtype)
    assert checks.check(vanished, exact, bound) is None


def test_empty_rows_must_be_exact() -> None:
    case = make_case("float32", 8, 4, 16, mask=causal())
    out, lse = Kernel(case).forward()
    assert (lse[:, :, :4] == float("-inf")).all()
    assert not checks.check_forward(case.problem, case, out, lse)
    out[0, 0, 0, 0], lse[0, 0, 1] = float("nan"), -1e30
    spoilt = checks.check_forward(case.problem, case, out, lse)
    assert [excess.at for excess in spoilt] == [(0, 0, 0, 0), (0, 0, 1)]


@pytest.mark.parametrize(
    ("actual", "exact", "bound", "inside"),
    [
        (1.0, 1.5, 0.5, True),
        (1.0, 1.51, 0.5, False),
        (float("inf"), 65500.0, 32.0, True),  # fp16 ends at 65504
        (float("-inf"), 65500.0, 32.0, False),
        (float("inf"), 1.0, 32.0, False),
        (float("-inf"), float("-inf"), 0.0, True),
        (0.0, float("-inf"), 0.0, False),
        (float("nan"), 1.0, 32.0, False),
        (float("nan"), float("nan"), float("nan"), True),
        (1.0, float("nan"), float("nan"), False),
        (0.0, 0.0, 0.0, True),
    ],
)
def test_check(actual: float, exact: float, bound: float, inside: bool) -> None:
    def full(x: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor([0.0, x], dtype=dtype)

    excess = checks.check(full(actual, torch.float16), full(exact), full(bound), "dq")
    assert (excess is None) == inside
    assert excess is None or (excess.at == (1,) and excess.outside == 1 and str(excess).startswith("dq[1] is "))


def test_shapes_must_agree() -> None:
    with pytest.raises(LayoutError, match=r"dq: got shape \(2,\), need the oracle's \(1, 2\)"):
        checks.check(torch.zeros(2), torch.zeros(1, 2).double(), torch.zeros(1, 2).double(), "dq")


def test_message() -> None:
    actual, exact, bound = torch.tensor([[[1.0, 2.5]], [[1.0, 2.0]], [[0.1, 0.1]]], dtype=torch.float64)
    assert str(checks.check(actual, exact, bound)) == (
        "result[0, 1] is 2.5, exactly 2: off by 0.5, 5 times the bound 0.1 (1 of 2 elements are outside theirs)"
    )


def test_check_backward_names_the_gradient() -> None:
    case = make_case("float32", 16, 16, 16, bias=(1, 1, 16, 16), sinks=True)
    out, lse = Kernel(case).forward()
    grads = Kernel(case).backward(out, lse)
    assert not checks.check_backward(case.problem, case, case.dout, case.dlse, grads)
    assert grads.dbias is not None and grads.dsinks is not None
    spoilt = grads._replace(dk=1.001 * grads.dk, dbias=grads.dbias.mT, dsinks=-grads.dsinks, dv=None)
    found = checks.check_backward(case.problem, case, case.dout, case.dlse, spoilt)
    assert [excess.name for excess in found] == ["dk", "dbias", "dsinks"]


def test_bounds_shrink_with_the_unit_roundoff() -> None:
    """Everything is first order in the roundings: halving them all halves the bound."""
    case = make_case("float32", 16, 64, 32, softcap=10.0, bias=(1, 1, 1, 64))
    whole = Arithmetic.of(case.problem)
    half = replace(whole, u=whole.u / 2, store=whole.store / 2)
    for a, b in zip(
        bounds.backward(case.problem, case, case.dout, case.dlse, whole)[:3],
        bounds.backward(case.problem, case, case.dout, case.dlse, half)[:3],
        strict=True,
    ):
        torch.testing.assert_close(a / b, torch.full_like(a, 2.0), rtol=1e-3, atol=0)


def test_growth() -> None:
    assert growth(torch.tensor([0, 1, 49, 4900])).tolist() == [0, 1, 49, 490]


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_compute(m: int, n: int) -> None:
    case = make_case("float32", m, n, 8, bias=(2, 1, 1, n), sinks=True)
    found = bounds.backward(case.problem, case, case.dout, case.dlse)
    assert all(bound.isfinite().all() for bound in (*bounds.forward(case.problem, case), *found) if bound is not None)
