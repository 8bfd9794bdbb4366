"""On-line tuning: what is kept, when it is believed, and when it is measured again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tilewise import masks
from tilewise.backends.gpu.record import Recorder
from tilewise.backends.triton import plan, tune
from tilewise.hardware import lookup
from tilewise.model import TilePlan
from tilewise.problem import Problem


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(tune.VARIABLE, "1")
    monkeypatch.setattr(tune, "_winners", {})


def problem(seqlen: int = 4096) -> Problem:
    return Problem.of(heads=8, seqlen=seqlen, head_dim=128, mask=masks.causal(), device="cuda")


class Timer:
    """Every tile takes a second; 128×64 half of one, and 64×64 cannot run."""

    def __init__(self) -> None:
        self.asked: list[TilePlan] = []

    def __call__(self, tile: TilePlan) -> float:
        self.asked.append(tile)
        sides = (tile.block_q, tile.block_k)
        return {(128, 64): 0.5, (64, 64): float("inf")}.get(sides, 1.0)


def best(timer: Timer, **changes: int) -> TilePlan:
    """What the plan says when a call like this has been made with tuning on."""
    asked, spec = problem(**changes), lookup("h200")
    if tune.winner(asked, "forward", spec) is None:
        tune.measure(asked, "forward", spec, plan.choices(asked, spec, "forward")[: tune.CANDIDATES + 1], timer)
    return plan.tiles(asked, spec)["forward"]


def test_the_fastest_tile_wins_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer()
    winner = best(timer)
    assert (winner.block_q, winner.block_k, winner.source) == (128, 64, "tuned")
    assert winner.reasons[0].startswith("measured here: 500 ms, the fastest of 9 tiles"), winner.reasons
    assert winner.on_chip and winner.registers and winner.kernel == "forward_kernel"
    assert 1 < len(timer.asked) <= tune.CANDIDATES + 1 and len(set(timer.asked)) == len(timer.asked)
    again = Timer()
    assert best(again) == winner and not again.asked
    monkeypatch.setattr(tune, "_winners", {})  # as another process would find it
    assert best(again) == winner and not again.asked


def test_lengths_close_by_share_a_winner_and_others_do_not() -> None:
    best(Timer())
    near, far = Timer(), Timer()
    best(near, seqlen=4090)
    best(far, seqlen=512)
    assert not near.asked and far.asked


def test_a_tile_asked_for_is_not_tuned() -> None:
    best(Timer())
    asked = dataclasses.replace(problem(), tile=(("forward", 64, 32),))
    assert plan.tiles(asked, lookup("h200"))["forward"].sizes == (64, 32)


def test_damaged_or_foreign_files_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    winner = best(Timer())
    path = tune.place_of(tune.kind_of(problem(), "forward", lookup("h200")))
    path.write_text(path.read_text().replace('"block_q": 128', '"block_q": 256'))
    monkeypatch.setattr(tune, "_winners", {})
    timer = Timer()
    assert best(timer) == winner and timer.asked


def test_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    winner = best(Timer())
    monkeypatch.delenv(tune.VARIABLE, raising=False)
    assert not tune.tuning()
    usual = plan.tiles(problem(), lookup("h200"))["forward"]
    assert usual.sizes != winner.sizes and "H200" in usual.reasons[0], "the table's, not the winner's"
    monkeypatch.setenv(tune.VARIABLE, "0")
    assert not tune.tuning()
    monkeypatch.setenv(tune.VARIABLE, "1")
    assert tune.tuning()


@pytest.mark.gpu
def test_tuned_calls_on_a_gpu_are_right_and_keep_their_winners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends.triton import run
    from tilewise.hardware.cache import load_json

    q, k, v, dout = (torch.randn(2, 4, 640, 32, dtype=torch.float16, device="cuda") for _ in range(4))

    def call() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = tw.attention(*leaves, mask=masks.causal(), backend="triton")
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    monkeypatch.delenv(tune.VARIABLE)
    planned = call()
    monkeypatch.setenv(tune.VARIABLE, "1")
    monkeypatch.setattr(tune, "CANDIDATES", 3)
    monkeypatch.setattr(run, "recorder", Recorder())
    timed: list[float] = []
    measured = tune.seconds_of
    monkeypatch.setattr(tune, "seconds_of", lambda launch: timed.append(measured(launch)) or timed[-1])
    for _ in range(3):
        for got, want in zip(call(), planned, strict=True):
            torch.testing.assert_close(got, want, atol=4e-3, rtol=2e-3)
    files = sorted((tmp_path / "tiles").glob("*.json"))
    assert len(files) == 3, "forward, dK and dV, dQ"
    assert 3 < len(timed) <= 12 and min(timed) > 0
    problem = Problem.of(batch=2, heads=4, seqlen=640, head_dim=32, dtype="float16", mask=masks.causal(), device="cuda")
    spec = run.spec_of(q.device)
    kind = tune.kind_of(problem, "forward", spec)
    found = load_json(tune.place_of(kind), kind)
    assert found is not None and found["seconds"] == min(timed[: found["tried"]])
    told = plan.tiles(problem, spec)["forward"]
    assert {name: getattr(told, name) for name in tune.SIZES} == found["tile"] and told.source == "tuned"
