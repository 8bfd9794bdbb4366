"""Links that are measured, and partial results that are merged in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tilewise as tw
from tests.distributed.ranks import run_ranks
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
