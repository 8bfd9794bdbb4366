"""On-line tuning: what is kept, when it is believed, and when it is measured again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tilewise import masks
from tilewise.backends.gpu.record import Recorder
from tilewise.backends.triton import tune
from tilewise.hardware import lookup
from tilewise.model import TilePlan
from tilewise.problem import Problem

PLANNED = TilePlan(64, 64, 3, 4)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
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
    return tune.best_tile(problem(**changes), "forward", lookup("h200"), PLANNED, timer)


def test_the_fastest_tile_wins_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer()
    winner = best(timer)
    assert (winner.block_q, winner.block_k, winner.source) == (128, 64, "tuned")
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


def test_damaged_or_foreign_files_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    winner = best(Timer())
    path = tune.place_of(tune.kind_of(problem(), "forward", lookup("h200")))
    path.write_text(path.read_text().replace('"block_q": 128', '"block_q": 256'))
    monkeypatch.setattr(tune, "_winners", {})
    timer = Timer()
    assert best(timer) == winner and timer.asked


def test_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tune.VARIABLE, raising=False)
    assert not tune.tuning()
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

    planned = call()
    monkeypatch.setenv(tune.VARIABLE, "1")
    monkeypatch.setattr(tune, "CANDIDATES", 3)
    monkeypatch.setattr(run, "recorder", Recorder())
    timed: list[float] = []
    monkeypatch.setattr(run, "seconds_of", lambda launch: timed.append(tune.seconds_of(launch)) or timed[-1])
    for _ in range(3):
        for got, want in zip(call(), planned, strict=True):
            torch.testing.assert_close(got, want, atol=4e-3, rtol=2e-3)
    files = sorted((tmp_path / "tiles").glob("*.json"))
    assert len(files) == 3, "forward, dK and dV, dQ"
    assert 3 < len(timed) <= 12 and min(timed) > 0
    problem = Problem.of(batch=2, heads=4, seqlen=640, head_dim=32, dtype="float16", mask=masks.causal(), device="cuda")
    kind = tune.kind_of(problem, "forward", run.spec_of(0))
    found = load_json(tune.place_of(kind), kind)
    assert found is not None and found["seconds"] == min(timed[: found["tried"]])
