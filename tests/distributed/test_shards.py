"""Shards: equal tokens and even mask area, for documents, windows, causal and prefix masks and packed sequences."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.distributed.test_plan import masks, problem, visible
from tilewise.distributed.coverage import coverage
from tilewise.distributed.shards import excess, filled

LONG = 1 << 17


def document_ids(tokens: int, most: int, kind: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Ids of documents of at most `most` tokens: of any length, with a long tail, or mostly short with a few long ones."""
    rng = np.random.default_rng(seed)
    sizes = {
        "uniform": rng.uniform(1, most, tokens),
        "long tail": rng.lognormal(np.log(most / 8), 1.0, tokens),
        "two kinds": np.where(rng.random(tokens) < 0.1, most, rng.uniform(1, most / 10, tokens)),
    }[kind]
    ends = np.cumsum(np.clip(sizes, 1, most).astype(np.int64))
    return np.searchsorted(ends, np.arange(tokens), side="right")


def long_problem(mask: Any, tokens: int = LONG, **fields: Any) -> tw.Problem:
    return tw.Problem.of(**{"heads": 32, "kv_heads": 8, "head_dim": 128, "seqlen": tokens, "mask": mask} | fields)


@pytest.mark.parametrize("kind", ["uniform", "long tail", "two kinds"])
@pytest.mark.parametrize("ranks", [8, 24, 64])
@pytest.mark.parametrize("kv_heads", [8, 32])
def test_documents_are_even_in_tokens_and_area(kind: str, ranks: int, kv_heads: int) -> None:
    ids = document_ids(LONG, LONG // ranks - 1, kind, seed=ranks)
    plan = tw.distributed.plan(long_problem(tw.causal() & tw.documents(ids), kv_heads=kv_heads), ranks=ranks)
    assert plan.imbalance <= 0.03
    assert plan.shards.tokens.max() - plan.shards.tokens.min() <= 1
    assert plan.total_bytes() <= 0.15 * plan.tokens * (ranks - 1) * plan.row_bytes.kv
    assert len(plan.shards.rank) <= ids[-1] + 1 + 4 * ranks  # few documents are cut


@pytest.mark.parametrize(
    "mask", [tw.causal(), tw.causal() | tw.prefix(20000), tw.causal() & tw.window(3000), tw.full(), ~tw.causal()], ids=repr
)
@pytest.mark.parametrize(("tokens", "ranks"), [(LONG, 8), (100_003, 7), (LONG, 64)])
def test_other_masks_are_even(mask: tw.Mask, tokens: int, ranks: int) -> None:
    plan = tw.distributed.plan(long_problem(mask, tokens), ranks=ranks)
    assert plan.imbalance <= 0.03
    assert plan.shards.tokens.max() - plan.shards.tokens.min() <= 128


def test_packed_sequences_are_even() -> None:
    lengths = np.bincount(document_ids(50_000, 6_000, "uniform"))
    problem = long_problem(tw.causal(), 50_000, varlen=True)
    plan = tw.distributed.plan(problem, lengths=lengths, ranks=8)
    assert plan.imbalance <= 0.03
    assert plan.shards.tokens.max() - plan.shards.tokens.min() <= 1


def test_a_causal_mask_is_dealt_head_and_tail() -> None:
    balanced, named = (
        tw.distributed.plan(long_problem(tw.causal()), ranks=8, shards=kind) for kind in ("balanced", "head_tail")
    )
    assert balanced.chunks == named.chunks
    assert tw.distributed.plan(long_problem(tw.causal()), ranks=8, shards="contiguous").imbalance > 0.8


def test_zigzag_has_eight_chunks() -> None:
    plan = tw.distributed.plan(long_problem(tw.causal()), ranks=8, shards="zigzag")
    assert [len(chunks) for chunks in plan.chunks] == [5, 8, 8, 8, 8, 8, 8, 4]  # at a turn two chunks are neighbours
    assert sum(chunk.tokens for chunk in plan.chunks[3]) == LONG // 8


def test_documents_that_fit_stay_whole() -> None:
    plan = tw.distributed.plan(long_problem(tw.causal() & tw.documents(np.arange(LONG) // 1024)), ranks=8)
    assert plan.total_bytes() == 0
    assert len(plan.stages) == 1


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_more_ranks_than_tokens(tokens: int) -> None:
    plan = tw.distributed.plan(long_problem(tw.causal(), tokens), ranks=9)
    assert plan.shards.tokens.sum() == tokens
    assert plan.imbalance >= 0
    assert plan.token_numbers(8).tolist() == sorted(plan.token_numbers(8).tolist())


@pytest.mark.parametrize("name", masks(96))
def test_rows_that_see_a_key_are_counted(name: str) -> None:
    plan = tw.distributed.plan(problem(96, masks(96)[name]), ranks=1)
    assert plan.coverage.seeing.tolist() == visible(plan).sum(axis=0).tolist()
    assert plan.coverage.counts.tolist() == visible(plan).sum(axis=1).tolist()


@pytest.mark.parametrize("ranks", [3, 8, 64])
def test_components_that_are_light_at_both_ends_are_even(ranks: int) -> None:
    seen = coverage(long_problem(tw.window(LONG // 4, LONG // 4)))
    assert excess(filled((LONG,), ranks, seen).areas(seen)) <= 0.03


def test_shards_are_filled_by_any_area() -> None:
    seen = coverage(long_problem(tw.causal() & tw.window(LONG // 4)))
    held = filled((LONG,), 8, seen, seen.seeing)
    sums = np.concatenate([[0], np.cumsum(seen.seeing)])
    assert excess(np.bincount(held.rank, np.diff(sums[held.bounds]))) <= 0.01
    assert excess(held.areas(seen)) > 0.1


def test_excess() -> None:
    assert excess(np.array([1, 2, 3])) == 0.5
    assert excess(np.array([0, 0])) == 0.0


def test_reading_document_ids_is_quick() -> None:
    """128k ids in 10 ms, and a plan for 64 ranks well within a second."""
    problem = long_problem(tw.causal() & tw.documents(document_ids(LONG, 2047, "long tail")))
    assert problem.program.tensors
    read, planned = [], []
    for _ in range(4):
        start = time.process_time()
        coverage(problem)
        read.append(time.process_time() - start)
        start = time.process_time()
        assert tw.distributed.plan(problem, ranks=64).total_bytes() > 0
        planned.append(time.process_time() - start)
    assert min(read) <= 0.010, read
    assert min(planned) <= 0.5, planned
