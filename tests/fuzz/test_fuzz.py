"""A short run of the fuzz over the backends of a CPU, cases that once failed, and the fuzz held to what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from tests.fuzz import run
from tests.fuzz.case import Case, snippet
from tests.fuzz.draw import draw, number_of
from tests.fuzz.judge import judge, truth
from tests.fuzz.shrink import shrink
from tests.interpreter import needs_interpreter
from tests.numerics.checks import check

BACKENDS = ("cpu", "aten", "tiled", "reference", "auto")
NAN = float("nan")


def fuzz(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(run.ROOT / "src"), str(run.ROOT)])}
    command = [sys.executable, "-m", "tests.fuzz", *words]
    return subprocess.run(command, cwd=run.ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "backends", ["cpu,aten,tiled,reference,auto", pytest.param("triton", marks=needs_interpreter)]
)
def test_a_short_run(backends: str) -> None:
    done = fuzz("--minutes", "2", "--cases", "4" if backends == "triton" else "72", "--seed", "2026", "--backend", backends)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


ONCE = [
    # the sinks' gradient was NaN where NaN came back to a row that sees nothing
    Case(seed=1, lengths=((4, 2),), mask=("causal", "bottom_right", None), sinks=("normal", "float32"), poison=NAN),
    # torch's kernel multiplied keys that the top-left triangle hides from every query
    Case(seed=2, lengths=((1, 2),), mask=("causal", "top_left", None), wanted="", poison=NAN),
    # a row of finfo.min gave 0, or the sum instead of the mean; a row of 2.4e38 gave NaN
    Case(seed=1, lengths=((9, 9),), bias=("lowest rows", "qk", "float32")),
    Case(seed=1, lengths=((9, 9),), bias=("huge rows", "qk", "float32")),
    Case(seed=1, lengths=((4, 40),), bias=("huge rows", "bhq", "float32")),
    # keys past a block's end counted: in the bias's gradient, and in the queries' where the log-sum-exp is far below 0
    Case(seed=1, lengths=((7, 129),), mask=("window", 1, None, "bottom_right", None), bias=("normal", "qk", "float32")),
    Case(seed=11, lengths=((33, 70),), head_dim=16, mask=("not", ("causal", "bottom_right", 46)), shift=-95.0),
    # rows past the last query saw keys that nobody sees
    Case(seed=1, lengths=((1, 20),), mask=("or", ("causal", "bottom_right", 5), ("not", ("prefix", 12))), poison=NAN),
    # small values vanished; a lazily negated gradient lost its sign; an open band ended at its largest offset
    Case(seed=1, lengths=((40, 90),), head_dim=64, shift=-18.0, sizes=(0.1, 0.1, 1e-30, 1.0), wanted="", lse="no"),
    Case(seed=1, lengths=((4, 9),), strides=(("dlse", "negated"),)),
    Case(seed=1, lengths=((4, 9),), mask=("causal", "bottom_right", (2**30 - 1,))),
    Case(seed=1, lengths=((4, 9),), dtype="float64", alibi=(1, "float64")),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ONCE, ids=repr)
def test_what_failed_once(case: Case, backend: str) -> None:
    assert judge(case, backend).failures == ()


DYING = """
import json, os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
number = int(given["--after"]) + 3
print(json.dumps({"begin": [number, "cpu"]}), flush=True)
if number == 5:
    os.abort()
if number == 8:
    import time
    time.sleep(60)
print(json.dumps({"end": [number, "cpu", [], []]}))
print(json.dumps({"case": number}))
"""


def test_a_crash_and_a_hang_cost_one_case_each(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "COMMAND", (sys.executable, "-c", DYING))
    monkeypatch.setitem(run.HANG_S, "cpu", 1.0)
    books = run.Books()
    run.run(run.Lane("cpu", "cpu", ("cpu",)), books, seed=0, workers=1, seconds=60, cases=5)
    assert [(failure.number, failure.words.split(":")[0]) for failure in books.failures] == [
        (5, "ends the process (status -6)"),
        (8, "hangs"),
    ]
    assert books.cases == 5 and books.right["cpu"] == 3
    assert "case 5 ends the process" in capfd.readouterr().out


def test_a_number_is_a_case() -> None:
    for serial in range(300):
        number = number_of("cpu", serial)
        case = draw(number)
        assert repr(case) == repr(draw(number)) == repr(eval(repr(case), {"Case": Case}))
        assert repr(case) in snippet(case, "cpu", "cpu")


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dbias", "dsinks"])
def test_a_wrong_result_is_noticed(name: str) -> None:
    causal, normal = ("causal", "bottom_right", None), ("normal", "float32")
    case = Case(seed=3, lengths=((9, 30),) * 2, mask=causal, bias=("normal", "hqk", "float32"), sinks=normal)
    _, want, bound = truth(case)
    exact, limit = getattr(want, name), getattr(bound, name)
    assert check(exact.float(), exact, limit, name) is None
    worse = exact.float() * 1.001
    assert check(worse, exact, limit, name) is not None
    worse = exact.float()
    worse.view(-1)[0] = NAN
    assert check(worse, exact, limit, name) is not None


def test_shrinking_keeps_the_failure() -> None:
    case = draw(number_of("cpu", 77))
    assert case.mask is not None
    start = time.monotonic()
    small = shrink(case, lambda simpler: simpler.lengths != () and simpler.totals[1] >= 3)
    assert time.monotonic() - start < 20, "nothing gets simpler forever"
    assert small.totals[1] == 3 and small.mask is None and small.batch == 1


def test_poison_is_where_nobody_looks() -> None:
    spoiled = 0
    for serial in range(0, 1600, 20):
        given, want, bound = truth(draw(number_of("cpu", serial)))
        spoiled += not all(x.isfinite().all() for x in (given.q, given.k, given.dout))
        for exact, limit in zip(want, bound, strict=True):
            assert exact is None or not (exact.isnan().any() or torch.as_tensor(limit).isnan().any())
    assert spoiled > 10
