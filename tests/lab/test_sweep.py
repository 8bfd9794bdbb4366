"""Sweeps over tiles: every tile a backend has, judged, timed in turns, beside its predicted time and the planner's choice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tilewise import dispatch, hardware
from tilewise.backends import plans
from tilewise.cli.app import app
from tilewise.errors import ArgumentError
from tilewise.lab.bench import sweep as sweeps
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.engine import Measured, Result
from tilewise.lab.bench.judge import Judgement
from tilewise.lab.bench.sweep import Sweep, jobs_for, sweep, sweep_all
from tilewise.lab.bench.timing import Effort, Spread
from tilewise.model import evaluate

CASE = Case("small", heads=2, seqlen=40, head_dim=16, mask="causal")
QUICK = Effort(seconds=0.0, least=2, most=2, sample=0.0)
OWN = ("bench", "--sweep", "tiles", "--shape", "1,2,40,16", "--mask", "causal", "--seconds", "0.01")


def invoke(*arguments: str, width: int = 120) -> Any:
    return CliRunner(env={"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("backend", "pass_"), [("cpu", "forward"), ("cpu", "backward"), ("tiled", "forward"), ("tiled", "backward")]
)
def test_every_tile_of_a_kernel_is_timed(backend: str, pass_: str) -> None:
    found = sweep(CASE, backend, pass_, QUICK)
    problem, spec = found.case.problem(), hardware.device("cpu")
    has = plans.choices(backend, problem, spec, pass_)
    assert [one.tile.sizes for one in found.tiles] == [tile.sizes for tile in has] and len(has) >= 8
    assert found.planned.tile == plans.tiles(backend, problem, spec)[pass_]
    assert found.right and all(one.seconds and one.speed for one in found.tiles)
    for one in found.tiles:
        assert one.predicted == (None if backend == "tiled" else evaluate(problem, spec, one.tile).seconds)
    assert found.planned.speed is not None and found.planned.speed.p50 == 1.0
    assert found.ratio is not None and found.ratio >= 1.0
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["passed"] == (found.ratio <= 1.05) and len(told["tiles"]) == len(has)


def test_decoding_is_swept_as_such() -> None:
    (found,) = sweep_all(jobs_for([replace(CASE, seqlen=1, kv_seqlen=300, kv_heads=1)], "cpu", "auto"), QUICK)
    assert found.pass_ == "decode" and {one.tile.block_q for one in found.tiles} == {1}


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({"head_dim": 128, "mask": "full"}, ["backward"]),
        ({"head_dim": 128, "deterministic": True}, ["backward_dkdv", "backward_dq"]),
    ],
)
def test_a_backward_of_one_tile_is_swept_and_no_forward(
    fields: dict[str, Any], passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "device", lambda name: hardware.lookup("h200"))
    case = replace(CASE, seqlen=4096, dtype="bfloat16", passes="backward", device="cuda", **fields)
    assert sweeps.passes_of(case, "hopper") == passes
    assert sweeps.passes_of(case, "aten") == []


def test_training_sweeps_the_backward() -> None:
    (found,) = sweep_all(jobs_for([replace(CASE, passes="training")], "auto", "auto"), QUICK)
    assert (found.backend, found.pass_, found.case.passes) == ("cpu", "backward", "backward")
    (forward,) = sweep_all(jobs_for([replace(CASE, passes="training")], "auto", "forward"), QUICK)
    assert (forward.pass_, forward.case.passes) == ("forward", "forward")


def planted(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> Sweep:
    """A sweep over tiles of tiled whose times are given: the planner's first."""

    def timed(case: Case, contenders: Any, effort: Effort, on_progress: Any) -> Measured:
        names = [one.name for one in contenders][: len(seconds)]
        right = Judgement(True, 0.0, 0.0, 0.0)
        samples = {name: [time] * 5 for name, time in zip(names, seconds, strict=True)}
        results = {one.name: Result(one.name, right) for one in contenders}
        for name, values in samples.items():
            results[name].times = Spread.of(values)
        return Measured(results, samples)

    monkeypatch.setattr(sweeps, "judge_and_time", timed)
    return sweep(CASE, "tiled", "forward", QUICK)


@pytest.mark.parametrize(
    ("seconds", "near"), [([1.0, 2.0, 3.0], True), ([1.04, 1.0, 3.0], True), ([1.06, 1.0, 3.0], False)]
)
def test_the_planners_tile_is_held_to_the_fastest(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], near: bool
) -> None:
    found = planted(monkeypatch, seconds)
    assert found.ratio == pytest.approx(seconds[0] / min(seconds)) and found.near == near
    assert found.fastest is found.tiles[seconds.index(min(seconds))]


def test_luck_is_not_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that look faster the first time are timed again, and only that counts."""
    rounds: list[int] = []

    def timed(case: Case, contenders: Any, effort: Effort, on_progress: Any) -> Measured:
        rounds.append(len(contenders))
        samples = {one.name: [1.0] * 5 for one in contenders}
        if len(rounds) == 1:
            samples |= {one.name: [0.8 + 0.01 * n] * 5 for n, one in enumerate(contenders[1:8])}
        results = {one.name: Result(one.name, Judgement(True, 0.0, 0.0, 0.0)) for one in contenders}
        return Measured(results, samples)

    monkeypatch.setattr(sweeps, "judge_and_time", timed)
    found = sweep(CASE, "tiled", "forward", QUICK)
    assert rounds == [len(found.tiles), 1 + sweeps.FINALISTS] and found.ratio == 1.0 and found.near
    assert sum(one.final for one in found.tiles) == 1 + sweeps.FINALISTS


def test_the_command_draws_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "NEAR", 1e9)
    done = invoke(*OWN, "--backend", "cpu", "--json", "--save", str(tmp_path))
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    (path,) = tmp_path.glob("sweep-*.json")
    assert json.loads(path.read_text(encoding="utf-8")) == told and told["ok"]
    (record,) = told["sweeps"]
    assert record["backend"] == "cpu" and record["pass"] == "forward" and len(record["tiles"]) >= 8
    shown = invoke(*OWN, "--backend", "cpu").output
    assert (
        f"{record['planned']} planned" in shown
        and "█" in shown
        and "speed by queries (down) and keys (across)" in shown
    )
    assert "the planner's" in shown
    for line in invoke(*OWN, "--backend", "cpu", width=60).output.splitlines():
        assert len(line) <= 60, line


def test_a_planner_far_from_the_fastest_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "NEAR", 0.5)
    assert invoke(*OWN, "--backend", "cpu").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--backend", "aten", "--mask", "full"), "aten has no kernel 'forward'"),
        (("--backend", "reference"), "reference has no kernel 'forward'"),
        (
            ("--backend", "cpu", "--pass", "backward_dq"),
            "cpu has no kernel 'backward_dq' for own; it has forward, backward",
        ),
        (("--backend", "nobody"), "need 'auto' or one of"),
        (("--sweep", "stages"), "sweep: got 'stages', need tiles"),
    ],
)
def test_what_cannot_be_swept(arguments: tuple[str, ...], complaint: str) -> None:
    done = invoke(*OWN, *arguments)
    assert done.exit_code == 2 and complaint in " ".join(done.output.split()), done.output


def test_a_wrong_tile_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = dispatch.get("tiled")
    forward = backend.forward

    def wrong(problem: Any, inputs: Any) -> Any:
        out, lse = forward(problem, inputs)
        return (out * 2 if problem.asked("forward") == (16, 16) else out), lse

    monkeypatch.setattr(backend, "forward", wrong, raising=False)
    found = sweep(CASE, "tiled", "forward", QUICK)
    bad = next(one for one in found.tiles if one.tile.sizes == (16, 16))
    assert bad.result.status == "wrong" and bad.seconds is None and not found.right


def test_kernels_that_do_not_exist_are_named() -> None:
    with pytest.raises(ArgumentError, match="no tile of ours; choose tiled, cpu, triton or hopper"):
        sweep(CASE, "reference", "forward", QUICK)


def test_kernels_are_compiled_first_and_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Case] = []
    monkeypatch.setattr(
        sweeps, "compile_ahead", lambda calls, workers, tell: asked.extend(case for case, _, _ in calls)
    )
    jobs = jobs_for([CASE, replace(CASE, name="other")], "tiled", "auto")
    (found,) = sweep_all(jobs, QUICK, workers=2, limit=0.0) or sweep_all(jobs[:1], QUICK)
    assert [case.tile for case in asked[: len(found.tiles)]] == [
        (), *((("forward", *one.tile.sizes),) for one in found.tiles[1:]),
    ]  # fmt: skip
    assert len(asked) == 2 * len(found.tiles)


def test_each_sweep_is_heard_of_as_it_ends_and_none_begins_that_would_end_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, heard = [0.0], []

    def slow(case: Case, *rest: object) -> Case:
        clock[0] += 10.0
        return case

    monkeypatch.setattr(sweeps, "sweep", slow)
    monkeypatch.setattr(sweeps, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    jobs = jobs_for([replace(CASE, name=name) for name in "abcd"], "tiled", "auto")
    assert len(sweep_all(jobs, QUICK, limit=25.0, on_sweep=lambda one: heard.append(clock[0]))) == 2  # a third: at 30 s
    assert heard == [10.0, 20.0]
    assert len(sweep_all(jobs, QUICK)) == 4
