"""Masks restricted to rectangles: the same elements as the whole has there, and no more mask than needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.masks import (
    Binding,
    Mask,
    MaskShape,
    allowed,
    blocks,
    causal,
    dense,
    documents,
    full,
    key_padding,
    prefix,
    selected,
    window,
)
from tilewise.masks.restrict import picked, restricted

LENGTH = 24
SHAPE = MaskShape(2, 4, LENGTH, LENGTH)
g = np.random.default_rng(0)
IDS = np.sort(g.integers(0, 4, (2, LENGTH)))
MASKS: dict[str, Mask] = {
    "full": full(),
    "causal": causal(),
    "anti-causal": ~causal(),
    "window": causal() & window(5),
    "two-sided": window(3, 2),
    "top-left": causal(align="top_left") & window(9, align="top_left"),
    "offset": causal(offset=np.array([1, -2])),
    "prefix": causal() | prefix(7),
    "padding": causal() & key_padding(np.array([20, 9])),
    "left-padding": key_padding(np.array([11, 9]), start=np.array([13, 0])),
    "documents": causal() & documents(IDS),
    "other-documents": ~documents(IDS),
    "blocks": blocks(g.random((2, 4, 6, 3)) < 0.5, (4, 8)),
    "no-blocks": ~blocks(g.random((1, 1, 4, 4)) < 0.5, 6),
    "dense": dense(g.random((1, 4, LENGTH, LENGTH)) < 0.5) | causal() & window(2),
    "dense-keys": ~dense(g.random((2, 1, 1, LENGTH)) < 0.5),
    "selected": causal() & selected(g.integers(-1, 9, (2, 2, 2, 3)), block=4, per=16),
    "not-selected": ~selected(g.integers(-1, 2**31 - 1, (1, 4, 1, 2)) % 5, block=6, per=32) | window(3),
    "selected-far": selected(np.array([[[[0, 2**31 - 1]], [[1, -(2**31)]]]]), block=8, per=32),
    "never": causal() & ~causal(),
}


def elements(program: object, shape: MaskShape, q: tuple[int, int], k: tuple[int, int]) -> np.ndarray:
    tile = allowed(program, shape, q, k, np.arange)  # type: ignore[arg-type]
    size = (shape.batch, shape.heads, q[1] - q[0], k[1] - k[0])
    return np.broadcast_to(True if tile is None else tile, size)


@pytest.mark.parametrize("name", MASKS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_rectangle_has_the_elements_of_the_whole(name: str, data: st.DataObject) -> None:
    program = MASKS[name].lower(Binding(SHAPE))
    cuts = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).map(sorted).filter(lambda x: x[0] < x[1])
    q, k = (tuple(data.draw(cuts)) for _ in range(2))
    heads = data.draw(st.sampled_from([None, (0, 2), (1, 4)]))
    part = restricted(program, SHAPE, q, k, heads)
    shape = MaskShape(2, 4 if heads is None else heads[1] - heads[0], q[1] - q[0], k[1] - k[0])
    want = elements(program, SHAPE, q, k)[:, slice(*heads) if heads else slice(None)]
    assert np.array_equal(elements(part, shape, (0, shape.seqlen_q), (0, shape.seqlen_k)), want)


@pytest.mark.parametrize("name", MASKS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_tokens_have_the_elements_of_the_whole_where_their_order_says_them(name: str, data: st.DataObject) -> None:
    program = MASKS[name].lower(Binding(SHAPE))
    tokens = np.array(sorted(data.draw(st.sets(st.integers(0, LENGTH - 1), min_size=1))))
    sequences = data.draw(st.sampled_from([None, (np.arange(LENGTH) // 9)[tokens]]))
    part = picked(program, SHAPE, tokens, sequences)
    ordered = name in ("full", "causal", "anti-causal", "documents", "other-documents", "never")
    assert (part is not None) == ordered
    if part is None:
        return
    want = elements(program, SHAPE, (0, LENGTH), (0, LENGTH))[:, :, tokens][..., tokens]
    if sequences is not None:
        want = want & (sequences[:, None] == sequences)
    shape = MaskShape(2, 4, len(tokens), len(tokens))
    assert np.array_equal(elements(part, shape, (0, len(tokens)), (0, len(tokens))), want)


@pytest.mark.parametrize(
    ("q", "k", "structure", "ints"),
    [
        ((8, 16), (0, 8), "", ()),  # below the diagonal: full
        ((8, 16), (8, 16), "b", (-(2**30), 0)),  # on it: causal again
        ((8, 16), (0, 16), "b", (-(2**30), 0)),
        ((0, 8), (8, 16), "0", ()),  # above: nothing
    ],
)
def test_a_rectangle_has_no_more_mask_than_it_needs(
    q: tuple[int, int], k: tuple[int, int], structure: str, ints: tuple[int, ...]
) -> None:
    part = restricted(causal().lower(Binding(SHAPE)), SHAPE, q, k)
    assert (part.structure, part.ints) == (structure, ints)
    assert restricted((causal() & window(9)).lower(Binding(SHAPE)), SHAPE, (12, 20), (0, 8)).structure == "b"


def test_tables_are_cut_as_views_where_blocks_begin_with_the_rectangle() -> None:
    table = np.ones((1, 1, 6, 3), dtype=bool)
    program = blocks(table, (4, 8)).lower(Binding(SHAPE))
    part = restricted(program, SHAPE, (8, 20), (8, 24))
    assert part.ints == (4, 8) and part.tensors[0].shape == (1, 1, 3, 2)
    assert np.shares_memory(part.tensors[0], program.tensors[0])
    assert restricted(program, SHAPE, (10, 20), (9, 11)).ints == (2, 8)
