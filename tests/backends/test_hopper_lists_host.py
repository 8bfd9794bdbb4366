"""Tile lists on the Hopper backend, all but the kernels: what is served, what they are compiled for, and the kernels beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tests.backends.test_triton_interpreter import interpret
from tests.interpreter import needs_interpreter
from tilewise.backends.hopper import plan
from tilewise.backends.hopper.list_plan import all_seen, hides_in_tiles
from tilewise.hardware import lookup
from tilewise.masks import Mask
from tilewise.problem import Problem

IDS = torch.arange(512).div(100, rounding_mode="floor").int()
TABLE = torch.ones(1, 1, 4, 4, dtype=torch.bool)
DENSE = torch.ones(512, 512, dtype=torch.bool)


def problem(mask: Mask, **more: Any) -> Problem:
    sizes = {"batch": 1, "heads": 4, "seqlen": 512, "head_dim": 128, "dtype": "bfloat16", "device": "cuda"}
    return Problem.of(**{**sizes, **more}, mask=mask)


def test_documents_are_walked_as_lists() -> None:
    mask = tw.causal() & tw.documents(IDS)
    assert plan.supports(problem(mask), lookup("h200")).ok
    assert plan.supports(problem(mask), lookup("h200"), backward=True).ok


REFUSED = {
    "no form": (tw.documents(IDS) & tw.documents(IDS // 2), {}, False),
    "no form of": (tw.blocks(torch.ones(1, 1, 32, 32, dtype=torch.bool), 16), {}, False),
    "heads that share keys": (tw.blocks(TABLE.expand(1, 4, 4, 4), 128), {"kv_heads": 2}, True),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_has_no_lists_is_named(words: str) -> None:
    mask, more, backward = REFUSED[words]
    (reason,) = plan.supports(problem(mask, **more), lookup("h200"), backward=backward).reasons
    assert words in reason


CASES: list[tuple[Mask, bool, bool]] = [
    (tw.causal() & tw.documents(IDS), True, False),
    (tw.window(5, 5) & tw.documents(IDS), True, False),
    (tw.causal() & tw.documents(IDS.clone(), q_ids=IDS), False, True),
    (tw.blocks(TABLE, 128), False, False),
    (tw.causal() & tw.blocks(TABLE, 128), False, True),
    (tw.dense(DENSE), False, True),
    (tw.causal() & (tw.prefix(4) | tw.window(100)), True, False),
]


@pytest.mark.parametrize(("mask", "seen", "hides"), CASES, ids=str)
def test_what_may_be_hidden(mask: Mask, seen: bool, hides: bool) -> None:
    asked = problem(mask)
    assert (all_seen(asked), hides_in_tiles(asked)) == (seen, hides)
    configs = {pass_: planned.config for pass_, planned in plan.plan_of(asked).items()}
    assert hides == configs["forward"].UNSEEN_KEYS
    keys = configs.get("backward") or configs["backward_dkdv"]
    assert (not seen, hides) == (keys.UNSEEN_KEYS, keys.EMPTY_ROWS)


def test_nothing_is_hidden_where_it_is_known() -> None:
    """So 128 keys find registers at 128 columns."""
    known, unknown = (problem(tw.documents(IDS.clone(), q_ids=IDS), covered=covered) for covered in (True, False))
    assert all_seen(known) and not hides_in_tiles(known) and not all_seen(unknown)
    assert [plan.plan_of(one)["forward"].tile.sizes for one in (known, unknown)] == [(128, 128), (128, 64)]


@needs_interpreter
def test_orders_and_hidden_positions_in_the_interpreter() -> None:
    interpret("tests.backends.interpreted_hopper")
