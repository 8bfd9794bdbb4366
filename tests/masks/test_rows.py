"""Masks as intervals of rows: where there are such, they are the mask, and keep their promises."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.masks.expressions import Batch, batches, expressions
from tilewise.masks import Binding, Mask, MaskShape
from tilewise.masks.rows import row_ends


def cumulative(batch: Batch) -> tuple[Any, Any] | None:
    return tuple(np.cumsum([0, *side]) for side in zip(*batch.lengths, strict=True)) if batch.packed else None  # type: ignore[return-value]


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_ends_are_the_mask(data: st.DataObject, packed: bool) -> None:
    batch = data.draw(batches(packed))
    drawn = data.draw(expressions(batch, depth=2))
    cu = cumulative(batch)
    ends = row_ends(drawn.mask.lower(batch.binding()), batch.shape, cu)
    if ends is None:
        return
    for b, meaning in enumerate(drawn.meaning):
        start = int(cu[0][b]) if cu else 0
        row = b if len(ends[0]) > 1 else 0
        lo, hi = (side[row, start : start + meaning.shape[1]] for side in ends)
        keys = np.arange(meaning.shape[2])
        seen = (keys >= lo[:, None]) & (keys < hi[:, None])
        assert (meaning == seen).all()
        assert (np.diff(lo) >= 0).all() and (np.diff(hi) >= 0).all()
        for first in range(len(lo)):
            for last in range(first, len(lo)):
                assert seen[first : last + 1].any(axis=0)[lo[first] : hi[last]].all()


FOUND: dict[str, Mask] = {
    "packed documents": tw.documents(np.repeat([5, 3, 9], [4, 7, 5])),
    "causal": tw.causal() & tw.documents(np.repeat([5, 3, 9], [4, 7, 5])),
    "one token each": tw.causal() & tw.documents(np.arange(16)),
    "prefix-LM": tw.causal() | tw.prefix(5),
    "documents with a prefix": tw.documents(np.repeat([0, 1], 8)) & (tw.causal() | tw.prefix(3)),
    "two documents masks": tw.documents(np.repeat([0, 1], 8)) & tw.documents(np.repeat([0, 1], [4, 12])) & tw.window(5),
}
NOT_FOUND: dict[str, Mask] = {
    "a document in two places": tw.documents(np.array([0, 0, 1, 1, 0, 0, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3])),
    "a gap": tw.causal() & (tw.prefix(2) | tw.window(3)),
    "other documents": ~tw.documents(np.repeat([0, 1], 8)),
    "ids of their own": tw.documents(np.repeat([0, 1], 8), np.repeat([1, 0], 8)),
    "keys between that nobody sees": tw.documents(np.repeat([0, 1], 8)) & tw.causal(offset=-3),
    "a table": tw.blocks(np.eye(4, dtype=bool), 4),
}


@pytest.mark.parametrize("name", [*FOUND, *NOT_FOUND])
def test_which_masks_have_ends(name: str) -> None:
    shape = MaskShape(1, 1, 16, 16)
    program = {**FOUND, **NOT_FOUND}[name].lower(Binding(shape))
    assert (row_ends(program, shape) is not None) == (name in FOUND)


def test_documents_of_128k_tokens_take_little_time() -> None:
    """A few milliseconds on a quiet machine; nothing grows with N × N."""
    n = 1 << 17
    shape = MaskShape(1, 1, n, n)
    program = (tw.causal() & tw.documents(np.arange(n) // 1000)).lower(Binding(shape))
    best = min(_seconds(program, shape) for _ in range(5))
    assert best < 0.2


def _seconds(program: Any, shape: MaskShape) -> float:
    start = time.perf_counter()
    assert row_ends(program, shape) is not None
    return time.perf_counter() - start
