"""Bad input gives the same clear error on every rank; a rank that dies or stands still is named, with the stage."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.distributed.faults import FAULTS, all_faults, late
from tests.distributed.ranks import run_ranks
from tilewise.distributed.agree import check_place, judge
from tilewise.errors import ArgumentError, LayoutError, PlanError

WANTED = {
    "other_mask": r"PlanError: ranks disagree about the plan .*: rank 0 has \w+, rank 1 has \w+",
    "other_length": r"PlanError: ranks disagree about the plan",
    "other_option": r"PlanError: ranks disagree about softcap: rank 0 has 1.0, rank 1 has 2.0; every rank passes the same",
    "wrong_shard": r"LayoutError: rank 1: q: shape \(1, 4, 19, 8\) .* has \(1, 4, 20, 8\); pass plan.shard\(x, dim\)",
    "wrong_dtype": r"ArgumentTypeError: rank 1: q: dtype torch.bfloat16, the plan is for float32; plan with dtype='bfloat16'",
    "later": r"LayoutError: rank 1: q: shape .*\nArgumentTypeError: rank 1: q: dtype .*\nPlanError: ranks disagree about softcap",
    "generation": r"LayoutError: rank 0: q has 1 tokens and k 20; .* Generation .* runs without it",
    "a_mask_of_its_own": r"ArgumentError: rank 0: mask: the plan has it",
    "no_sinks": r"ArgumentError: rank 0: sinks: the plan's problem has it",
    "wrong_bias": r"LayoutError: rank 0: bias: ",
    "after_all_that": "no error",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    found = run_ranks(2, all_faults, store=tmp_path_factory.mktemp("faults") / "store")
    assert all(isinstance(answer, dict) for answer in found), "\n".join(map(str, found))
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_says_the_same(fault: str, answers: list[dict[str, str]]) -> None:
    first, second = (answer[fault] for answer in answers)
    assert first == second
    assert re.match(WANTED[fault], first), first


@pytest.mark.parametrize(
    ("how", "backward", "stage"),
    [
        *(("dies", False, "stage 1 of 1, "), ("dies", True, "stage 1 of 1, "), ("stands", False, "stage 1 of 1, ")),
        ("is killed", False, "before stage 0, "),
    ],
)
def test_a_rank_that_is_lost_is_named_with_the_stage(how: str, backward: bool, stage: str, tmp_path: Path) -> None:
    limit = 3.0
    message, seconds = run_ranks(3, late, how, backward, store=tmp_path / "store", timeout=limit, only=0)[0]
    assert message.startswith(f"CommunicationError: context parallel: rank 0, {stage}"), message
    assert ": rank 2 did not answer" in message
    assert seconds < 2 * limit


def test_answers_are_judged_by_the_lowest_rank_with_an_error() -> None:
    fine = {"dtype": "float32"}
    judge([fine, fine])
    with pytest.raises(LayoutError, match="rank 1: bad"):
        judge([fine, {"error": "LayoutError", "text": "bad"}, {"error": "PlanError", "text": "worse"}])
    with pytest.raises(PlanError, match="disagree about dtype: rank 0 has float32, rank 2 has float16"):
        judge([fine, fine, {"dtype": "float16"}])


def test_a_simulated_plan_computes_nothing() -> None:
    plan = tw.distributed.plan(tw.Problem.of(heads=1, seqlen=8, head_dim=4, dtype="float32"), ranks=2)
    x = torch.zeros(1, 1, plan.local_tokens(), 4)
    with pytest.raises(PlanError, match="simulates 2 ranks"):
        tw.distributed.attention(x, x, x, plan)


def test_one_rank_needs_no_group() -> None:
    plan = tw.distributed.plan(tw.Problem.of(heads=2, seqlen=8, head_dim=4, dtype="float32", mask=tw.causal()), ranks=1)
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    assert torch.equal(tw.distributed.attention(q, k, v, plan), tw.attention(q, k, v, mask=tw.causal()))


@pytest.mark.parametrize(("backend", "wrong"), [("nccl", "cpu"), ("gloo", "cuda"), ("undefined", None)])
def test_tensors_that_a_group_cannot_send(backend: str, wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
    for device in ("cpu", "cuda"):
        if device != wrong:
            check_place(None, torch.device(device))
            continue
        with pytest.raises(ArgumentError, match=f"q: on {device}, and the group is one of {backend}"):
            check_place(None, torch.device(device))
