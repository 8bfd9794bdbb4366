"""The tool that runs the conformance suite on a GPU tells what it finds when it finds it, and ends in time."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.conformance import harness
from tests.conformance.cases import BY_NAME
from tests.interpreter import needs_interpreter
from tilewise import dispatch
from tilewise.backends.base import Verdict
from tilewise.numerics.bounds import Excess

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
OFF = Excess("out", (0, 1), 2.0, 1.0, 0.5, 1, 4)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "tools"))
    gpu_conform = importlib.import_module("gpu_conform")
    monkeypatch.setattr(gpu_conform, "RECORDS", [])
    return gpu_conform


def arguments(path: Path, tool: ModuleType, *cases: str) -> argparse.Namespace:
    def save() -> None:
        path.write_text(json.dumps(tool.RECORDS))

    return argparse.Namespace(cases=cases, workers=2, save=save)


def test_a_wrong_case_is_told_and_kept_before_the_next_one_comes(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    heard = []

    def comes_in(names: list[str], workers: int, clock: object) -> Iterator[tuple[str, str]]:
        yield "edge-1", tool.BEGUN
        yield "edge-1", "off"
        heard.append((capsys.readouterr().out, json.loads(path.read_text())[0]["found"]))
        yield "plain", tool.BEGUN

    monkeypatch.setattr(tool, "shared_out", comes_in)
    tool.conform(None, arguments(path, tool, "edge-1", "plain"))
    assert heard == [("  WRONG edge-1: off\n", {"edge-1": "off"})]
    assert capsys.readouterr().out == (
        "  0 right, 1 wrong ['edge-1'], not served: []\n  left out: ['plain'], of which begun: ['plain']\n"
    )


def test_each_of_three_calls_is_judged(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([[], [OFF], [OFF]])
    monkeypatch.setattr(tool, "DEVICE", "cpu")
    monkeypatch.setattr(harness, "excesses", lambda built, backend, lse_gradient: next(answers))
    monkeypatch.setattr(dispatch, "judge", lambda name, problem, inputs: Verdict(True))
    assert tool.judged(BY_NAME["edge-1"]) == f"recorded: {OFF}; repeated: {OFF}"


@needs_interpreter
def test_processes_share_the_cases_and_end_in_time(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the workers, which import triton anew
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "found.json"
    tool.conform(tool.Clock(200.0), arguments(path, tool, "edge-1", "edge-keys-1", "compensated"))
    assert "2 right, 0 wrong [], not served: ['compensated']" in capsys.readouterr().out
    assert json.loads(path.read_text())[0]["found"]["edge-1"] == ""
    start = time.monotonic()
    tool.conform(tool.Clock(tool.RESERVE + 0.5), arguments(path, tool, "everything"))
    assert time.monotonic() - start < tool.RESERVE
    assert "left out: ['everything']" in capsys.readouterr().out
