"""How many calls of a backend a rank makes: its own tokens are one where their order says what they see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.distributed.test_attention_random import Drawn, excesses
from tests.distributed.test_plan import ids, problem
from tilewise.distributed.segments import Call, Local

ONE: dict[str, tuple[Any, tuple[int, ...] | None]] = {
    "full": (tw.full(), None),
    "causal": (tw.causal(), None),
    "documents": (tw.causal() & tw.documents(ids(96)), None),
    "packed": (tw.causal(), (31, 0, 40, 25)),
}


def calls(mask: Any, lengths: tuple[int, ...] | None, rank: int, **fields: Any) -> tuple[int, int]:
    """Works of a rank with its own tokens, and the calls for them."""
    whole = problem(96, mask, varlen=lengths is not None, **fields)
    plan = tw.distributed.plan(whole, lengths=lengths, ranks=4, shards="zigzag")
    object.__setattr__(plan, "rank", rank)
    local = Local(*(torch.zeros(1, heads, plan.local_tokens(), 8) for heads in (4, 2, 2)))
    return len(plan.stages[0].works_of(rank)), len(Call(plan, whole, "auto", torch.device("cpu")).segments(local, 0))


@pytest.mark.parametrize("name", ONE)
def test_own_tokens_are_one_call(name: str) -> None:
    for rank in range(4):
        works, made = calls(*ONE[name], rank)
        assert works > 1 and made == 1


@pytest.mark.parametrize(
    ("mask", "fields"), [(tw.causal() & tw.window(9), {}), (tw.causal(), {"dropout_p": 0.1}), (tw.causal(), {"alibi": True})]
)
def test_works_stay_apart_where_positions_count(mask: Any, fields: dict[str, Any]) -> None:
    works, made = calls(mask, None, 1, **fields)
    assert works == made > 1


@pytest.mark.parametrize("name", ONE)
def test_one_call_computes_the_same(name: str) -> None:
    mask, lengths = ONE[name]
    batch = {} if lengths is None else {"batch": len(lengths), "varlen": True}
    whole = problem(96, mask, dtype="float64", head_dim_v=4, needs_grad=True, **batch)
    assert not excesses(Drawn(whole, lengths, 4, "zigzag", 2))


@pytest.mark.parametrize("mask", [tw.causal() & tw.window(12), tw.window(11, 11)], ids=["window", "two-sided"])
def test_own_chunks_that_a_window_keeps_apart_are_groups_of_one_call(mask: Any) -> None:
    """Heads and tails of twelve tokens, which see all (that came before them) of their own chunk and nothing of the other."""
    whole = problem(96, mask, dtype="float64", head_dim_v=4, needs_grad=True)
    plan = tw.distributed.plan(whole, ranks=4, shards="head_tail")
    local = Local(*(torch.zeros(1, heads, 24, 8) for heads in (4, 2, 2)))
    for rank in range(3):
        (own,) = Call(plan.as_rank(rank), whole, "auto", torch.device("cpu")).segments(local, 0)
        assert own.problem.program.structure == ("bd" if "causal" in repr(mask) else "d")
        assert own.problem.program.tensors[0].tolist() == [[0] * 12 + [1] * 12]
    assert not excesses(Drawn(whole, None, 4, "head_tail", 2))
