"""Links that are measured, and partial results that are merged in place."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tilewise as tw
from tests.distributed.ranks import run_ranks
from tilewise import hardware
from tilewise.distributed import links
from tilewise.distributed.predict import pair_seconds, reference_call
from tilewise.errors import PlanError
from tilewise.numerics.merge import NEG_INF, merge, merge_into


def measured(rank: int) -> tuple[float, float, str, float]:
    device = tw.distributed.measure_links(device="altra-q80")
    problem = tw.Problem.of(heads=2, head_dim=16, seqlen=512, dtype="fp32", mask=tw.causal())
    plan = tw.distributed.plan(problem, dist.group.WORLD, device=device)
    return device.link_bandwidth, device.link_latency_s, device.sources["link_bandwidth"], plan.predict().seconds


def test_all_ranks_measure_the_same_links(tmp_path: Path) -> None:
    answers: list[Any] = run_ranks(2, measured, store=tmp_path / "store")
    assert answers[0] == answers[1]
    bandwidth, latency, source, seconds = answers[0]
    assert bandwidth > 1e6 and 0 <= latency < 1 and seconds > 0
    assert source.startswith("measured: 2 ranks of gloo, all at once")


def computed(rank: int) -> tuple[float, dict[str, float], str, float, float]:
    problem = tw.Problem.of(heads=4, kv_heads=2, head_dim=64, seqlen=4096, dtype="fp32", mask=tw.causal(), dropout_p=0.1)
    before = replace(hardware.lookup("altra-q80"), threads=1)
    with mock.patch.object(links, "_call_seconds", lambda *_: 3.0):
        device = tw.distributed.measure_links(device=before, problem=problem)
    call = reference_call(problem, device, 2048)
    whole = sum(seconds * 2048**2 for seconds, _ in pair_seconds(replace(call, dropout_p=0.0), device, 2048))
    measured = links._call_seconds(dist.group.WORLD, replace(call, seqlen_q=64, seqlen_k=64))
    return device.clock_hz / before.clock_hz, dict(device.peak), device.sources["clock_hz"], whole, measured


def test_the_clock_is_the_one_at_which_kernels_take_what_they_took(tmp_path: Path) -> None:
    answers: list[Any] = run_ranks(2, computed, store=tmp_path / "store")
    assert answers[0] == answers[1]
    slower, peak, source, predicted, seconds = answers[0]
    assert predicted == pytest.approx(3.0, rel=0.02) and slower < 1 and 0 < seconds < 3
    assert peak["float32"] == pytest.approx(slower * hardware.lookup("altra-q80").peak["float32"])
    assert source == "measured: 2 ranks at once, 2048 tokens, 3000.0 ms forward and backward"


def alone(rank: int) -> tuple[str, str]:
    problem = tw.Problem.of(heads=2, head_dim=16, seqlen=64, dtype="fp32", mask=tw.causal())
    devices = [tw.distributed.measure_links(device="altra-q80", problem=one) for one in (None, problem)]
    return devices[0].sources["clock_hz"], devices[1].sources["clock_hz"]


def test_one_rank_has_no_links_but_a_clock(tmp_path: Path) -> None:
    ((before, after),) = run_ranks(1, alone, store=tmp_path / "store")
    assert not before.startswith("measured") and after.startswith("measured: 1 ranks at once, 1024 tokens")


def late(rank: int) -> tuple[float, float]:
    def timed(together: bool) -> float:
        rounds = iter(range(100))
        return links._slowest(None, torch.device("cpu"), lambda: time.sleep(0.1 * (next(rounds) % 3 == rank)), together)

    return timed(True), timed(False)


def test_a_rank_that_is_late_now_and_then_is_not_slow(tmp_path: Path) -> None:
    """Of two ranks one is late in two rounds of three, each in one: exchanges wait for it, what each computes alone does not."""
    for together, apart in run_ranks(2, late, store=tmp_path / "store"):
        assert together > 0.09 and apart < 0.05


def test_links_need_a_group() -> None:
    with pytest.raises(PlanError, match="init_process_group"):
        tw.distributed.measure_links()


def test_merging_in_place_is_the_merge() -> None:
    g = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(2, 3, 5, 4, generator=g), torch.randn(2, 3, 5, generator=g)
    lses[0, 0], lses[1, 1], lses[:, 2] = NEG_INF, NEG_INF, NEG_INF
    outs[lses == NEG_INF] = 0.0
    want = merge((outs[0], lses[0]), (outs[1], lses[1]))
    merge_into((outs[0], lses[0]), (outs[1], lses[1]))
    torch.testing.assert_close((outs[0], lses[0]), want, rtol=1e-6, atol=1e-6)
