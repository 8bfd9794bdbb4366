"""Accuracy beside a rival: all elements count, a larger error fails the case, and a smaller one does not."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from tilewise.backends.base import Verdict
from tilewise.cli.app import app
from tilewise.lab.bench import judge as judging
from tilewise.lab.bench.accuracy import Errors, errors, truth
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.child import Outcome
from tilewise.lab.bench.engine import Record, Result, bind_run, measure
from tilewise.lab.bench.peers import PEERS, Contender, contender
from tilewise.lab.bench.suites import SUITES, Suite, suite
from tilewise.lab.bench.timing import Effort

QUICK = Effort(seconds=0.0, least=2, most=2, sample=0.0)
CASE = Case("case", heads=4, kv_heads=2, seqlen=40, kv_seqlen=56, head_dim=16, mask="causal", accurate=True)
SDPA = PEERS["sdpa"]
TRAINING = replace(CASE, passes="training", layout="bshd")


def rival(convert) -> Contender:
    """SDPA, its results converted."""

    def bind(case: Case, tensors):
        run = SDPA.bind(case, tensors)
        return lambda q, k, v: convert(run, q, k, v)

    return Contender("sdpa", lambda case: Verdict(True), bind, "bhsd")


def exact(run, q, k, v) -> torch.Tensor:
    return run(q.double(), k.double(), v.double()).to(q.dtype)


def rough(run, q, k, v) -> torch.Tensor:
    return run(q, k, v) + 1e-6


@pytest.mark.parametrize("blocks", [None, 2**8])
@pytest.mark.parametrize("case", [CASE, TRAINING], ids=["forward", "training"])
def test_the_truth_is_what_float64_gives(case: Case, blocks: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if blocks:
        monkeypatch.setattr(judging, "BLOCK_SCORES", blocks)
    tensors = case.tensors()
    wide = type(tensors)(*(x.double() for x in tensors[:4]))
    got = bind_run(replace(case, dtype="float64"), SDPA, wide)()
    found = errors(case, truth(case, tensors), got)
    assert list(found) == (["out", "dq", "dk", "dv"] if case.trains else ["out"])
    for one in found.values():
        assert max(one) < 1e-13


@pytest.mark.parametrize("case", [CASE, TRAINING], ids=["forward", "training"])
def test_every_element_counts(case: Case) -> None:
    tensors = case.tensors()
    want = truth(case, tensors)
    perfect = [case.rank4(x).contiguous() for x in want.values()]  # the layouts are their own inverses
    for number, name in enumerate(want):
        moved = [x.clone() for x in perfect]
        moved[number].flatten()[-1] += 0.25
        found = errors(case, want, Outcome(moved[0], tuple(moved[1:])))
        assert found[name] == pytest.approx(Errors(0.25, 0.25 / float(want[name].norm())))
        assert all(max(one) == 0 for other, one in found.items() if other != name)


def test_ratios_of_errors_without_errors() -> None:
    assert Errors(0.0, 0.0).over(Errors(0.0, 0.0)) == Errors(1.0, 1.0)
    assert Errors(1.0, 2.0).over(Errors(2.0, 0.0)) == Errors(0.5, math.inf)
    assert Errors(1.0, math.inf).to_dict() == {"largest": 1.0, "frobenius": None}
    nothing = torch.zeros(1, 1, 2, 4)
    assert errors(CASE, {"out": nothing.double()}, Outcome(nothing)) == {"out": Errors(0.0, 0.0)}


@pytest.mark.parametrize(("convert", "kept"), [(exact, False), (rough, True)])
@pytest.mark.parametrize("floor", [None, 1e-9])
def test_a_rival_with_smaller_errors_fails_the_case(convert, kept: bool, floor: float | None) -> None:
    record = measure(replace(CASE, floor=floor), [contender("tilewise"), rival(convert)], QUICK)
    assert record.errors is not None and record.accurate is kept and record.passed is kept
    assert record.fast is (None if floor is None else True)
    assert (max(record.errors) > 1) is not kept
    found = json.loads(json.dumps(record.to_dict(), allow_nan=False))
    assert found["errors"]["largest"] == pytest.approx(record.errors.largest)
    assert [set(result["errors"]) for result in found["results"]] == [{"out"}] * 2


@pytest.mark.parametrize(
    ("dtype", "ratio", "kept"), [("float32", 1.001, False), ("bfloat16", 1.001, True), ("float16", 1.02, False)]
)
def test_a_rounded_result_may_be_unlucky(dtype: str, ratio: float, kept: bool) -> None:
    ours, other = Result("tilewise", errors={"out": Errors(ratio, 1.0)}), Result("sdpa", errors={"out": Errors(1.0, 1.0)})
    assert Record(replace(CASE, dtype=dtype), [ours, other], rival="sdpa").accurate is kept


def test_accuracy_and_speed_are_both_asked_for() -> None:
    slow = measure(replace(CASE, floor=1e9), [contender("tilewise"), rival(rough)], QUICK)
    assert slow.accurate and not slow.fast and not slow.passed
    unasked = measure(replace(CASE, accurate=False), [contender("tilewise"), rival(exact)], QUICK)
    assert unasked.errors is unasked.accurate is unasked.passed is None


@pytest.mark.parametrize("number", range(4))
def test_what_is_not_a_number_is_never_accurate(number: int) -> None:
    """Wherever it is: comparing it with a number would be false either way."""
    tensors, case = TRAINING.tensors(), TRAINING
    want = truth(case, tensors)
    got = [case.rank4(x).clone() for x in want.values()]
    got[number][0, 0, 0, 0] = math.nan
    found = errors(case, want, Outcome(got[0], tuple(got[1:])))
    theirs = {name: Errors(1e-6, 1e-6) for name in found}
    ours, rival_ = Result("tilewise", errors=found), Result("sdpa", errors=theirs)
    record = Record(case, [ours, rival_], rival="sdpa")
    assert record.errors == Errors(math.inf, math.inf) and record.accurate is False
    assert Errors(math.inf, 1.0).over(Errors(math.inf, math.inf)) == Errors(math.inf, 0.0)


def test_the_worst_of_output_and_gradients_is_told() -> None:
    record = measure(TRAINING, [contender("tilewise"), SDPA], QUICK)
    ours, theirs = (record.result(name).errors for name in ("tilewise", "sdpa"))
    assert list(ours) == list(theirs) == ["out", "dq", "dk", "dv"]
    ours.update((name, Errors(0.5, 0.25)) for name in ours)
    theirs.update((name, Errors(1.0, 1.0)) for name in theirs)
    ours["dk"], theirs["dv"] = Errors(0.75, 0.25), Errors(1.0, 0.5)
    assert record.errors == Errors(0.75, 0.5)


@pytest.mark.parametrize("name", ["cpu", "cpu-avx512", "cpu-avx512-16"])
def test_the_cpu_suites_promise_accuracy_in_every_case(name: str) -> None:
    assert all(case.accurate for case in suite(name).cases)


@pytest.mark.parametrize(("convert", "status"), [(exact, 1), (rough, 0)])
def test_the_command_says_so(convert, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "smoke", Suite((CASE,)))
    monkeypatch.setitem(PEERS, "sdpa", rival(convert))
    found = CliRunner().invoke(app, ["bench", "--suite", "smoke", "--seconds", "0.01"], env={"COLUMNS": "160"})
    assert found.exit_code == status, found.output
    assert "errors of its" in found.output and "relative Frobenius" in found.output
