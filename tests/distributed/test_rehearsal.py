"""Ranks in turn on one device: their messages, calls and results are those of real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.distributed.test_plan import ids, problem
from tests.numerics import checks
from tilewise.backends.base import Grads, Inputs
from tilewise.distributed.rehearsal import Rehearsal
from tilewise.distributed.segments import SIDE_BY_SIDE, Call, Segment

MASKS: dict[str, tw.Mask] = {
    "full": tw.full(),
    "causal": tw.causal(),
    "documents": tw.causal() & tw.documents(ids(96)),
    "narrow-window": tw.causal() & tw.window(3),
    "two-sided": tw.window(3, 2),
    "window": tw.causal() & tw.window(7),
    "wide-window": tw.causal() & tw.window(40),
}


def rehearsal(mask: tw.Mask, heads: int = 1, kv_heads: int = 4, **options: Any) -> tuple[Rehearsal, Inputs]:
    whole = problem(96, mask, kv_heads=kv_heads, dtype="float32", needs_grad=True, needs_lse=False)
    g = torch.Generator().manual_seed(0)
    q, dout = torch.randn((2, 1, whole.heads, 96, 8), generator=g)
    k, v = torch.randn((2, 1, kv_heads, 96, 8), generator=g)
    plan = tw.distributed.plan(whole, ranks=8 if heads == 1 else 4, device="h200", heads=heads)
    return Rehearsal(plan, q, k, v, dout, **options), Inputs(q, k, v)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 4), (1, 2), (2, 4)])
@pytest.mark.parametrize("name", MASKS)
def test_results_and_bytes(name: str, heads: int, kv_heads: int) -> None:
    check(*rehearsal(MASKS[name], heads, kv_heads))


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_results_of_calls_side_by_side(name: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIDE_BY_SIDE, "cpu", 1 << 20)
    found, inputs = rehearsal(MASKS[name], kv_heads=kv_heads)
    check(found, inputs)
    assert any(s.block.groups for rank in found.ranks for stage in rank.call.stages for s in stage)


def check(found: Rehearsal, inputs: Inputs) -> None:
    found.settle()
    plan = found.plan
    for number, rank in enumerate(found.ranks):
        assert rank.link.sent == sum(plan.bytes_sent(number, backward=b) for b in (False, True))
    out, *grads = found.results()
    whole = plan.problem
    wrong = checks.check_forward(whole, inputs, out, None)
    wrong += checks.check_backward(whole, inputs, found.dout, None, Grads(*grads))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_rank_makes_its_planned_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, Segment]] = []

    class Noted(Call):
        def forward(self, segment: Segment, *args: Any) -> Any:
            made.append((self.rank, segment))
            return super().forward(segment, *args)

    found, _ = rehearsal(MASKS["causal"], kind=Noted)
    for rank in found.ranks:
        rank.forward()
    planned = [(r, s) for r, rank in enumerate(found.ranks) for stage in rank.call.stages for s in stage]
    assert [(r, id(s)) for r, s in made] == [(r, id(s)) for r, s in planned]
    pairs = sum(w.area for stage in found.plan.stages for w in stage.works)
    assert pairs == 96 * 97 // 2
