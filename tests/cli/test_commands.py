"""The commands, by the facts in their JSON and their exit status; wording is free to change."""

from __future__ import annotations

import json
import re
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from tilewise import __version__, dispatch
from tilewise.backends.base import Verdict
from tilewise.cli import console
from tilewise.cli.app import app
from tilewise.dispatch import Entry
from tilewise.lab.bench import engine, selftest, sweep
from tilewise.lab.bench.selftest import TRIALS

WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def invoke(*arguments: str) -> Result:
    return CliRunner(env=WIDE).invoke(app, list(arguments))


def facts(*arguments: str, status: int = 0) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == status, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_help_names_every_command() -> None:
    output = invoke("--help").output
    for command in ("demo", "check", "bench", "env"):
        assert re.search(rf"^\W*{command}\b", output, re.MULTILINE), output
    assert invoke().exit_code == 2


def test_version() -> None:
    assert invoke("--version").output.split() == ["tilewise", __version__]


def test_env_tells_what_is_usable_and_why_not() -> None:
    found = facts("env")
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory_bytes"] > 2**28
    assert found["versions"]["torch"] == torch.__version__
    backends = {backend["name"]: backend for backend in found["backends"]}
    assert list(backends) == list(dispatch.REGISTRY)
    assert "cpu" in backends["tiled"]["usable"]
    for backend in found["backends"]:
        assert backend["usable"] or all(backend["reasons"].values()), "a backend that is not usable says why"
    shown = invoke("env").output
    for name in backends:
        assert name in shown


def test_check_passes_here() -> None:
    found = facts("check", "--backend", "tiled", "--backend", "reference")
    assert found["ok"]
    for backend in found["backends"]:
        assert backend["failed"] == 0 and backend["passed"] + backend["declined"] == len(TRIALS)
        assert 0 < backend["bound_used"] <= 1
    assert found["backends"][0]["declined"] == 0, "tiled does everything"


def test_check_calls_unusable_what_is_not_usable() -> None:
    """Not wrong: nothing was tried. Alone it is status 2, beside another it is named."""
    if dispatch.usable("hopper", "cuda").ok:
        pytest.skip("this machine has what hopper needs")
    alone = invoke("check", "--backend", "hopper")
    text = " ".join(alone.output.split())
    assert alone.exit_code == 2 and "not usable here hopper" in text and "Nothing was checked" in text
    assert "Wrong" not in text and "Right" not in text


def test_check_names_the_unusable_beside_the_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "TRIALS", TRIALS[:1])
    monkeypatch.setattr(dispatch.get("reference"), "usable", lambda device: Verdict(False, ("has a day off",)), raising=False)
    found = facts("check", "--backend", "tiled", "--backend", "reference")
    assert found["ok"] and found["backends"][0]["backend"] == "tiled"
    assert ["has a day off"] in found["unusable"]["reference"].values()
    shown = invoke("check", "--backend", "tiled", "--backend", "reference").output
    assert "not usable here reference: " in shown and "has a day off" in shown


def test_the_interpreter_has_a_smaller_set() -> None:
    assert 0 < len(selftest.trials("triton", "cpu")) < len(TRIALS) / 2
    assert selftest.trials("triton", "cuda") == selftest.trials("triton", "cpu", every=True) == TRIALS
    for trial in selftest.INTERPRETED:  # each is a trial that tiled passes
        assert selftest.attempt(trial, "tiled", "cpu").status == "passed", trial.name


def test_long_commands_speak_where_there_is_no_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "SILENCE", 0.0)
    with console.progress() as update:
        update("triton on cpu: causal [3]", 0.5)
    captured = capsys.readouterr()
    assert captured.err.strip() == "triton on cpu: causal [3]" and not captured.out


class Sabotaged:
    """tiled, but with one wrong number: the first element of the output or of dq is off by a tenth."""

    name = "sabotaged"

    def __init__(self, part: str) -> None:
        self.inner, self.part = dispatch.get("tiled"), part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def usable(self, device: str) -> Verdict:
        return Verdict.of(None if device == "cpu" else "only on the CPU")

    def forward(self, problem: Any, inputs: Any) -> Any:
        out, lse = self.inner.forward(problem, inputs)
        if self.part == "out":
            out.view(-1)[0] += 0.1
        return out, lse

    def backward(self, *arguments: Any, **options: Any) -> Any:
        grads = self.inner.backward(*arguments, **options)
        if self.part == "dq":
            grads.dq.view(-1)[0] += 0.1
        return grads


@pytest.fixture(params=["out", "dq"])
def sabotaged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    module = types.ModuleType("sabotaged_backend_" + request.param)
    module.backend = Sabotaged(request.param)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    dispatch.register("sabotaged", Entry(module.__name__, ("cpu",)))
    yield "sabotaged"
    del dispatch.REGISTRY["sabotaged"]


def test_check_finds_a_wrong_backend(sabotaged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "TRIALS", TRIALS[:3])
    found = facts("check", "--backend", sabotaged, status=1)
    assert not found["ok"] and found["backends"][0]["failed"] == 3
    shown = invoke("check", "--backend", sabotaged)
    assert shown.exit_code == 1 and "failed" in shown.output


def test_check_says_what_a_backend_declines(sabotaged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "TRIALS", TRIALS[:3])
    monkeypatch.setattr(Sabotaged, "supports", lambda *_, **__: Verdict(False, ("has a day off",)), raising=False)
    found = facts("check", "--backend", sabotaged)
    assert found["ok"] and found["backends"][0]["declined"] == 3
    shown = invoke("check", "--backend", sabotaged)
    assert shown.output.count("has a day off") == 1, "one line for each reason"


def test_bench_smoke() -> None:
    found = facts("bench", "--suite", "smoke", "--seconds", "0.05", "--peer", "standard", "--peer", "flash_attn")
    assert found["ok"] and found["suite"] == "smoke" and found["machine"]["cpu"] and found["versions"]["tilewise"]
    for record in found["records"]:
        results = {result["contender"]: result for result in record["results"]}
        assert list(results) == ["tilewise", "sdpa", "standard", "flash_attn"]
        for name in ("tilewise", "sdpa", "standard"):
            seconds = results[name]["seconds"]
            assert 0 < seconds["p20"] <= seconds["p50"] <= seconds["p80"] and seconds["samples"] >= 5
            assert results[name]["judgement"]["ok"]
        assert results["flash_attn"]["status"] == "not run" and results["flash_attn"]["reasons"]
        assert record["ratio"]["p50"] > 0 and record["choice"]["backend"] in dispatch.REGISTRY


def test_bench_refuses_a_speed_for_a_wrong_result(sabotaged: str) -> None:
    arguments = ("bench", "--shape", "1,2/1,40/50,16", "--mask", "causal", "--backward", "--seconds", "0.01")
    found = facts(*arguments, "--peer", f"tilewise:{sabotaged}", status=1)
    result = found["records"][0]["results"][-1]
    assert result["contender"] == "tilewise:sabotaged" and result["status"] == "wrong" and result["seconds"] is None
    assert not found["ok"]
    shown = invoke(*arguments, "--peer", f"tilewise:{sabotaged}").output
    line = next(line for line in shown.splitlines() if "tilewise:sabotaged" in line)
    assert "wrong" in line and not re.search(r"\d (s|ms|µs)\b", line)


def test_bench_shows_the_speed_of_who_drops_other_weights() -> None:
    """SDPA draws its own dropout mask: its result is not judged, its time counts."""
    shown = invoke("bench", "--suite", "features", "--case", "forward dropout", "--seconds", "0.01").output
    line = next(line for line in shown.splitlines() if line.strip().startswith("sdpa "))
    assert "not judged" in line and re.search(r"\d (s|ms|µs)\b", line) and "×" in line
    assert "not run" not in line


def test_bench_saves_its_record(tmp_path: Path) -> None:
    found = facts("bench", "--suite", "smoke", "--case", "causal", "--seconds", "0.01", "--save", str(tmp_path))
    (path,) = tmp_path.glob("smoke-*.json")
    assert json.loads(path.read_text(encoding="utf-8")) == found


INTERRUPTING = (("bench", "--suite", "smoke"), ("bench", "--suite", "smoke", "--sweep", "tiles"))


@pytest.mark.parametrize("arguments", INTERRUPTING, ids=("cases", "tiles"))
def test_what_an_interrupted_bench_measured_is_kept(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM while the second case is measured: the first is shown and saved, the others are named."""
    module, name = (sweep, "sweep") if "--sweep" in arguments else (engine, "measure")
    one, calls = getattr(module, name), []

    def then_interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return one(*given)

    monkeypatch.setattr(module, name, then_interrupted)
    before = signal.getsignal(signal.SIGTERM)
    result = invoke(*arguments, "--seconds", "0.01", "--save", str(tmp_path), "--json")
    assert result.exit_code == 130 and len(calls) == 2
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["interrupted"] and found["left_out"] and len(found.get("sweeps") or found["records"]) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interruption_before_anything_is_measured_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "measure", lambda *given: signal.raise_signal(signal.SIGTERM))
    result = invoke("bench", "--suite", "smoke", "--seconds", "0.01")
    assert result.exit_code not in (0, 1, 2) and "interrupted" not in result.output


def test_bench_names_what_a_gpu_suite_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = invoke("bench", "--suite", "gpu", "--case", "forward full d64 512")
    assert result.exit_code == 2 and "torch finds no GPU" in " ".join(result.output.split())


def test_demo_names_the_gpu_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = invoke("demo", "--device", "cuda", "--seqlen", "128")
    assert result.exit_code == 2 and "torch finds no GPU" in " ".join(result.output.split())
    assert "AssertionError" not in result.output


def test_bench_overhead() -> None:
    """The figures are machine's business; here only that they are measured and judged by their limit."""
    result = invoke("bench", "--suite", "overhead", "--seconds", "0.05", "--json")
    assert result.exit_code in (0, 1)
    found = json.loads(result.stdout)
    assert [one["name"] for one in found["overhead"]] == ["plain", "causal", "fwd+bwd"]
    for one in found["overhead"]:
        assert one["cost"]["p50"] > 0
        assert one["passed"] == (one["cost"]["p50"] <= one["limit"] if one["limit"] else None)


def test_demo_small() -> None:
    found = facts("demo", "--seqlen", "1024", "--rounds", "1")
    assert found["ok"]
    runs = {run["contender"]: run for run in found["runs"]}
    assert set(runs) == {"standard", "sdpa", "tilewise"}
    for run in runs.values():
        assert run["judgement"]["ok"] and run["seconds"]["p50"] > 0
    scores = 1024 * 1024 * 4
    assert runs["standard"]["peak_bytes"] > 2 * scores, "standard attention holds scores and weights at once"
    assert [point["seqlen"] for point in found["growth"]] == [128, 256, 512, 1024]
    assert found["growth"][-1]["scores_bytes"] == scores
    assert found["growth"][-1]["peak_bytes"] == runs["tilewise"]["peak_bytes"]


def test_demo_says_when_standard_attention_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.lab.bench import demo
    from tilewise.lab.bench.cases import Case

    monkeypatch.setattr(demo, "available_bytes", lambda: 2**20)
    assert "GiB" in (demo.too_big(Case("demo", heads=1, seqlen=4096)) or "")
    assert demo.too_big(Case("demo", heads=1, seqlen=64)) is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("bench", "--suite", "nope"), "suite: got 'nope'"),
        (("bench", "--case", "nope"), "case: got 'nope'"),
        (("bench", "--peer", "nope", "--suite", "smoke"), "peer: got 'nope'"),
        (("bench", "--shape", "1,2,3"), "shape: got '1,2,3'"),
        (("bench", "--shape", "1,2,x,64"), "shape: got '1,2,x,64'"),
        (("bench", "--shape", "1,3/2,16,64"), "multiple"),
        (("bench", "--shape", "1,1,16,64", "--mask", "causel"), "causel"),
        (("bench", "--shape", "1,1,16,64", "--dtype", "int8"), "int8"),
        (("check", "--backend", "nope"), "backend: got 'nope'"),
        (("demo", "--mask", "window(-1)"), "window"),
        (("demo", "--device", "nope"), "device: got 'nope'"),
        (("bench", "--device", "nope", "--suite", "smoke"), "device: got 'nope'"),
        (("demo", "--head-dim", "1000"), "head_dim: got 1000"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments: tuple[str, ...], complaint: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert complaint in result.output and "error:" in result.output and "Traceback" not in result.output


def test_env_measures_anew_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.hardware import timers

    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    assert facts("env")["ceilings"]["cpu"] is None and "--remeasure" in invoke("env").output
    monkeypatch.setattr(timers, "clock_for", lambda device: lambda run, number: 1.0)
    found = facts("env", "--remeasure")["ceilings"]["cpu"]
    assert found["threads"] == torch.get_num_threads() and not found["noisy"] and found["gemm"]["float32"] > 0
    monkeypatch.setattr(timers, "clock_for", lambda device: lambda run, number: 2.0)
    assert facts("env")["ceilings"]["cpu"] == found, "kept"
    assert facts("env", "--remeasure")["ceilings"]["cpu"]["read"] == found["read"] / 2
    assert "Ceilings of cpu" in invoke("env").output
