"""Masks against brute force: lowering, tile classes and cutting, for random expressions, lengths and tiles."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.masks.expressions import LEAVES, LENGTH_FREE, Batch, Expression, batches, expressions
from tilewise.errors import MaskError
from tilewise.masks import (
    UNBOUNDED,
    Binding,
    Interval,
    Literal,
    MaskProgram,
    MaskShape,
    TileClass,
    TileCounts,
    TileMap,
    allowed,
    may_have_empty_rows,
    visited_tiles,
    visits,
)
from tilewise.masks.program import KINDS, assemble

thorough = settings(max_examples=100, deadline=None, derandomize=True)
TILES = st.tuples(st.integers(1, 9), st.integers(1, 9))


def lowered(drawn: Expression, batch: Batch, asarray: Any = np.asarray) -> MaskProgram:
    """The program; expressions that expand to too many alternatives are refused, and not what is tested here."""
    try:
        return drawn.mask.lower(batch.binding(asarray))
    except MaskError as error:
        assume("alternatives" not in str(error))
        raise


def evaluated(program: MaskProgram, shape: MaskShape, arange: Any = np.arange) -> np.ndarray[Any, Any]:
    tile = allowed(program, shape, (0, shape.seqlen_q), (0, shape.seqlen_k), arange)
    tile = np.ones((1, 1, 1, 1), dtype=bool) if tile is None else np.asarray(tile)
    return np.broadcast_to(tile, shape)


def exact_classes(meaning: np.ndarray[Any, Any], block_q: int, block_k: int) -> np.ndarray[Any, Any]:
    """Classes of the tiles of one (Sq, Sk) array, by looking."""
    sq, sk = meaning.shape
    classes = np.zeros((-(-sq // block_q), -(-sk // block_k)), dtype=np.uint8)
    for i, j in np.ndindex(classes.shape):
        tile = meaning[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
        classes[i, j] = TileClass.FULL if tile.all() else TileClass.PARTIAL if tile.any() else TileClass.EMPTY
    return classes


def mapped(tiles: TileMap, b: int | None, h: int | None) -> np.ndarray[Any, Any]:
    rows = [tiles.row(i, b, h) for i in range(tiles.rows)]
    return np.stack(rows) if rows else np.zeros((0, tiles.cols), dtype=np.uint8)


@thorough
@given(st.data())
def test_lowering_is_the_mask(data: st.DataObject) -> None:
    batch = data.draw(batches())
    drawn = data.draw(expressions(batch))
    program = lowered(drawn, batch)
    meaning = np.stack(drawn.meaning)
    np.testing.assert_array_equal(evaluated(program, batch.shape), meaning)
    torch_program = lowered(drawn, batch, torch.as_tensor)
    assert torch_program.structure == program.structure and torch_program.ints == program.ints
    assert all(isinstance(t, torch.Tensor) for t in torch_program.tensors)
    np.testing.assert_array_equal(evaluated(torch_program, batch.shape, torch.arange), meaning)
    sq, sk = batch.lengths[0]
    if sq and sk:
        q0, k0 = data.draw(st.integers(0, sq - 1)), data.draw(st.integers(0, sk - 1))
        q1, k1 = data.draw(st.integers(q0 + 1, sq)), data.draw(st.integers(k0 + 1, sk))
        tile = allowed(program, batch.shape, (q0, q1), (k0, k1), np.arange)
        part = meaning[:, :, q0:q1, k0:k1]
        np.testing.assert_array_equal(np.broadcast_to(True if tile is None else tile, part.shape), part)


@thorough
@given(st.data())
def test_literals_are_ordered_and_merged(data: st.DataObject) -> None:
    batch = data.draw(batches())
    for term in lowered(data.draw(expressions(batch)), batch).structure.split("|"):
        assert list(term) == sorted(term, key="0btorkdDsSeEiI".index)
        assert all(term.count(letter) <= 1 for letter in "btr")


@thorough
@given(st.data())
def test_classes_are_sound_and_consistent(data: st.DataObject) -> None:
    batch = data.draw(batches())
    drawn = data.draw(expressions(batch))
    block_q, block_k = data.draw(TILES)
    tiles = TileMap(lowered(drawn, batch), batch.shape, block_q, block_k)
    counted = np.zeros(3, dtype=np.int64)
    together = []
    for b, h in np.ndindex(batch.shape[:2]):
        exact, found = exact_classes(drawn.meaning[b][h], block_q, block_k), mapped(tiles, b, h)
        assert found.shape == (tiles.rows, tiles.cols) == exact.shape
        assert ((found == TileClass.PARTIAL) | (found == exact)).all()
        for j in range(tiles.cols):
            np.testing.assert_array_equal(tiles.col(j, b, h), found[:, j])
        visits = {(i, j): kind for i in range(tiles.rows) for j, kind in tiles.key_blocks(i, b, h)}
        assert visits == {(i, j): kind for j in range(tiles.cols) for i, kind in tiles.query_blocks(j, b, h)}
        assert visits == {(int(i), int(j)): TileClass(found[i, j]) for i, j in np.argwhere(found)}
        counted += np.bincount(found.ravel(), minlength=3)
        together.append(found)
    assert tiles.counts() == TileCounts(*counted)
    assert sum(tiles.counts()) == batch.shape.batch * batch.heads * tiles.rows * tiles.cols
    # over all sequences and heads: EMPTY and FULL must hold for each of them
    stacked = np.stack(together)
    agreed = np.where(stacked.min(0) == stacked.max(0), stacked[0], TileClass.PARTIAL)
    np.testing.assert_array_equal(mapped(tiles, None, None), agreed)


LENGTHS, SHIFTS = st.integers(0, 14), st.integers(-16, 16)
INTERVALS = st.builds(
    Interval, SHIFTS | st.just(-UNBOUNDED), SHIFTS | st.just(UNBOUNDED), LENGTHS, LENGTHS | st.just(UNBOUNDED)
)


@settings(thorough, max_examples=500)
@given(st.lists(INTERVALS, max_size=3), LENGTHS, LENGTHS, TILES, st.booleans())
def test_visits_are_exact(terms: list[Interval], sq: int, sk: int, tile: tuple[int, int], by_key: bool) -> None:
    q, k = np.arange(sq)[:, None], np.arange(sk)
    union = np.zeros((-(-sq // tile[0]), -(-sk // tile[1])), dtype=bool)
    for term in terms:
        seen = (k - q >= term.lo) & (k - q <= term.hi) & (k >= term.start) & (k < term.end)
        classes = exact_classes(seen, *tile)
        for full in (False, True):
            first, past = visits(term, sq, sk, *tile, by_key=by_key, full=full)
            number = np.arange(union.shape[0 if by_key else 1])
            found = (number >= first[:, None]) & (number < past[:, None])
            wanted = classes == TileClass.FULL if full else classes > 0
            np.testing.assert_array_equal(found, wanted.T if by_key else wanted)
        union |= classes > 0
    np.testing.assert_array_equal(
        visited_tiles(terms, sq, sk, *tile, by_key=by_key), union.sum(axis=0 if by_key else 1)
    )
    literals = [[Literal(KINDS["t"], term[:2], ()), Literal(KINDS["r"], term[2:], ())] for term in terms]
    empty = visited_tiles(terms, sq, sk, 1, max(1, sk)) == 0
    assert may_have_empty_rows(assemble(literals), sq, sk) == empty.any()


@pytest.mark.parametrize(
    "mask, empty",
    [
        (tw.full(), False),
        (tw.causal(), True),
        (tw.causal("top_left"), False),
        (~tw.causal("top_left") | tw.prefix(1), False),
        (~tw.causal("top_left"), True),
        (tw.causal() & tw.key_padding([3, 3]), True),
    ],
)
def test_empty_rows(mask: tw.Mask, empty: bool) -> None:
    program = mask.lower(Binding(MaskShape(2, 1, 5, 4)))
    assert may_have_empty_rows(program, 5, 4) is empty


def assert_exact(drawn: Expression, batch: Batch, block_q: int, block_k: int) -> None:
    tiles = TileMap(lowered(drawn, batch), batch.shape, block_q, block_k)
    for b, h in np.ndindex(batch.shape[:2]):
        np.testing.assert_array_equal(mapped(tiles, b, h), exact_classes(drawn.meaning[b][h], block_q, block_k))


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
@settings(thorough, max_examples=30)
@given(data=st.data())
def test_single_masks_are_classified_exactly(leaf: Any, data: st.DataObject) -> None:
    batch = data.draw(batches())
    drawn, tile = leaf(data.draw, batch), data.draw(TILES)
    assert_exact(drawn, batch, *tile)
    if leaf not in LENGTH_FREE:  # those whose negation is a single literal too
        assert_exact(~drawn, batch, *tile)


@thorough
@given(st.data())
def test_conjunctions_of_bands_and_ranges_are_classified_exactly(data: st.DataObject) -> None:
    batch = data.draw(batches())
    leaves = data.draw(st.lists(st.sampled_from(LENGTH_FREE), min_size=2, max_size=4))
    drawn = leaves[0](data.draw, batch)
    for leaf in leaves[1:]:
        drawn = drawn & leaf(data.draw, batch)
    assert_exact(drawn, batch, *data.draw(TILES))


@thorough
@given(st.data())
def test_a_packed_sequence_keeps_its_own_mask(data: st.DataObject) -> None:
    batch = data.draw(batches(packed=True))
    drawn = data.draw(expressions(batch))
    q0 = k0 = 0
    for asarray, arange in ((np.asarray, np.arange), (torch.as_tensor, torch.arange)):
        program = lowered(drawn, batch, asarray)
        q0 = k0 = 0
        for b, (sq, sk) in enumerate(batch.lengths):
            own = program.for_sequence(b, q0, q0 + sq, k0, k0 + sk)
            shape = MaskShape(1, batch.heads, sq, sk)
            np.testing.assert_array_equal(evaluated(own, shape, arange)[0], drawn.meaning[b])
            tiles = TileMap(own, shape, 4, 5)
            for h in range(batch.heads):
                exact, found = exact_classes(drawn.meaning[b][h], 4, 5), mapped(tiles, 0, h)
                assert ((found == TileClass.PARTIAL) | (found == exact)).all()
            q0, k0 = q0 + sq, k0 + sk


@thorough
@given(st.data())
def test_the_structure_holds_no_length(data: st.DataObject) -> None:
    batch = data.draw(batches())
    drawn = data.draw(expressions(batch, leaves=LENGTH_FREE))
    program = lowered(drawn, batch)
    for lengths in ((1, 1), (5, 900), (4096, 4096), (10**6, 10**9)):
        other = drawn.mask.lower(Binding(MaskShape(batch.shape.batch, 7, *lengths)))
        assert (other.structure, other.ints) == (program.structure, program.ints)
    assert not any(character.isdigit() and character != "0" for character in program.structure)


@settings(thorough, max_examples=40)
@given(st.data())
def test_masks_move_between_devices(data: st.DataObject) -> None:
    batch = data.draw(batches())
    drawn = data.draw(expressions(batch))
    mask = as_torch(drawn.mask)
    assert as_torch(mask.to("cpu")).lower(batch.binding(torch.as_tensor)).structure == lowered(drawn, batch).structure
    moved = mask.to("meta").lower(batch.binding(torch.as_tensor))
    assert all(t.device.type == "meta" for t in moved.tensors)
    assert not moved.tensors or not mask.static
    if mask.static:
        assert mask.to("meta") is mask


def as_torch(mask: Any) -> Any:
    """The same mask with torch tensors in the place of arrays."""
    if not isinstance(mask, tw.Mask):
        return torch.from_numpy(mask.copy()) if isinstance(mask, np.ndarray) else mask
    names = [name for name in vars(mask) if name != "static"]
    return type(mask)(**{name: as_torch(getattr(mask, name)) for name in names})


STATIC = [
    tw.full,
    tw.causal,
    lambda: tw.causal("top_left"),
    lambda: tw.causal(offset=3),
    lambda: tw.window(4),
    lambda: tw.window(4, 2),
    lambda: tw.prefix(4),
    lambda: ~tw.window(4),
    lambda: tw.causal() & tw.window(4),
    lambda: tw.causal() | tw.prefix(4),
    lambda: ~(tw.causal() | tw.prefix(4)) & tw.window(9, 9),
]


def test_static_masks_are_values() -> None:
    first, second = [make() for make in STATIC], [make() for make in STATIC]
    assert first == second and [hash(m) for m in first] == [hash(m) for m in second]
    assert len(set(first + second)) == len(STATIC)
    assert all(mask.static for mask in first)
    assert tw.window(4) == tw.window(3, 0)
    assert ~~first[1] == first[1]
    assert tw.full() & first[1] == first[1] and tw.full() | first[1] == tw.full()


def test_masks_with_tensors_equal_only_themselves() -> None:
    lengths = torch.tensor([3, 4])
    one, other = tw.key_padding(lengths), tw.key_padding(lengths)
    assert one == one and one != other and not one.static
    assert not (tw.causal() & one).static and not (~one).static
    assert len({one, other, tw.causal() & one}) == 3


def test_a_million_by_a_million_is_classified_without_building_it() -> None:
    """The dense mask would be a terabit; one line of tiles of it is 8192 classes."""
    n, block = 1 << 20, 128
    mask = tw.causal() & tw.window(4096) & tw.key_padding(np.array([n - 5]))
    shape = MaskShape(1, 1, n, n)
    tracemalloc.start()
    begin = time.process_time()
    tiles = TileMap(mask.lower(Binding(shape)), shape, block, block)
    middle = tiles.rows // 2
    visited = tiles.key_blocks(middle)
    tiles.query_blocks(middle)
    elapsed, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # the window of 4096 keys before and including the query spans 32 tiles and, unaligned, one more
    assert [j for j, _ in visited] == list(range(middle - 32, middle + 1))
    assert [kind for _, kind in visited] == [TileClass.PARTIAL, *[TileClass.FULL] * 31, TileClass.PARTIAL]
    assert peak < 4 << 20 and elapsed < 2.0
