"""The judge must find what is wrong, wherever it looks, and accept what is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewise.lab.bench import judge as judging
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.child import Outcome
from tilewise.lab.bench.engine import bind_run
from tilewise.lab.bench.judge import Expected
from tilewise.lab.bench.peers import PEERS, contender
from tilewise.lab.bench.selftest import TRIALS

CASES = [
    Case("full", heads=2, seqlen=100, head_dim=16),
    Case("causal, cross", heads=2, seqlen=40, kv_seqlen=90, head_dim=16, mask="causal"),
    Case(
        "window, grouped, bshd", heads=4, kv_heads=2, seqlen=96, head_dim=16, mask="causal & window(9)", layout="bshd"
    ),
    Case("half", heads=2, seqlen=64, head_dim=16, dtype="float16", mask="causal"),
    Case("training", batch=2, heads=4, kv_heads=2, seqlen=96, head_dim=16, mask="causal", passes="training"),
]


@pytest.fixture(params=["whole", "sampled"])
def reach(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of judging: everything, and rows and blocks as in large cases."""
    if request.param == "sampled":
        monkeypatch.setattr(judging, "WHOLE", 0)
        monkeypatch.setattr(judging, "SAMPLE_ROWS", 8)
        monkeypatch.setattr(judging, "BLOCK_SCORES", 2**12)
    return request.param


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["standard", "sdpa", "tilewise:reference"])
def test_right_results_pass(case: Case, name: str, reach: str) -> None:
    tensors = case.tensors()
    found = Expected(case, tensors).judge(bind_run(case, contender(name), tensors)())
    assert found.ok and 0 < found.used <= 1
    assert (found.checked == 1.0) == (reach == "whole" or case.seqlen <= 32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_element_is_found(case: Case) -> None:
    """In whole cases every element is looked at: one is moved by a hundredth."""
    tensors = case.tensors()
    expected = Expected(case, tensors)
    right = bind_run(case, PEERS["standard"], tensors)()
    out = right.out.clone()
    out[(-1,) * 4] += 0.01
    assert not expected.judge(right._replace(out=out)).ok
    for i, grad in enumerate(right.grads):
        grads = list(right.grads)
        grads[i] = grad.clone()
        grads[i][(-1,) * 4] += 0.01
        assert not expected.judge(right._replace(grads=tuple(grads))).ok


def test_a_wrong_mask_is_found_in_sampled_rows(reach: str) -> None:
    case = Case("causal", heads=1, seqlen=128, head_dim=16, mask="causal")
    tensors = case.tensors()
    wrong = bind_run(Case("full", heads=1, seqlen=128, head_dim=16), PEERS["standard"], tensors)()
    assert not Expected(case, tensors).judge(wrong).ok


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_wrong(value: float) -> None:
    case = CASES[0]
    tensors = case.tensors()
    out = bind_run(case, PEERS["standard"], tensors)().out.clone()
    out[0, 0, 0, 0] = value
    found = Expected(case, tensors).judge(Outcome(out))
    assert not found.ok and found.error == float("inf")


def test_a_wrong_shape_is_wrong() -> None:
    case = CASES[0]
    tensors = case.tensors()
    assert not Expected(case, tensors).judge(Outcome(torch.zeros(1, 2, 100, 8))).ok


FEATURES = [case for case in TRIALS if case.features]


@pytest.mark.parametrize("case", FEATURES, ids=lambda case: case.name)
def test_features_are_judged(case: Case, reach: str) -> None:
    """By all heads or by one: the result with the feature is right, the one without it wrong, and so is one moved element."""
    tensors = case.tensors()
    expected = Expected(case, tensors)
    right = bind_run(case, contender("tilewise:reference"), tensors)()
    assert expected.judge(right).ok
    grads = [grad.clone() for grad in right.grads]
    grads[1].flatten()[0] += 0.5
    assert not expected.judge(right._replace(grads=tuple(grads))).ok
    if not case.lengths:
        changes = {"data": "", "bias": None, "alibi": False, "sinks": False, "softcap": 0.0, "dropout_p": 0.0}
        plain = replace(case, **changes)
        assert not expected.judge(bind_run(plain, contender("tilewise:reference"), plain.tensors())()).ok
