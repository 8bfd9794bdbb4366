"""Random mask expressions beside what they mean: boolean arrays written from the users' definitions, element by element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st

import tilewise as tw
from tilewise.masks import Binding, Mask, MaskShape
from tilewise.masks.build import LEAST_PER

Draw = Callable[[st.SearchStrategy[Any]], Any]
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Batch:
    """The sequences a mask is drawn for: all of one length, or packed one after another."""

    heads: int
    lengths: tuple[tuple[int, int], ...]  # (queries, keys) of each sequence
    packed: bool = False

    @property
    def shape(self) -> MaskShape:
        if self.packed:
            return MaskShape(len(self.lengths), self.heads, *(sum(side) for side in zip(*self.lengths, strict=True)))
        return MaskShape(len(self.lengths), self.heads, *self.lengths[0])

    @property
    def longest(self) -> tuple[int, int]:
        return max(q for q, _ in self.lengths), max(k for _, k in self.lengths)

    def binding(self, asarray: Callable[[Any], Any] = np.asarray) -> Binding:
        return Binding(self.shape, self.packed, asarray)


Sees = Callable[[int, int, int, int], bool]
"""May query q of sequence b and head h see key k? Asked as (b, h, q, k)."""


@dataclass(frozen=True)
class Expression:
    """A mask beside what it means."""

    text: str
    mask: Mask
    batch: Batch
    sees: Sees

    def __repr__(self) -> str:
        return self.text

    @cached_property
    def meaning(self) -> list[Array]:
        """For each sequence the (H, Sq, Sk) array of what is allowed, element by element."""
        arrays = [np.zeros((self.batch.heads, *lengths), dtype=bool) for lengths in self.batch.lengths]
        for b, array in enumerate(arrays):
            for at in np.ndindex(array.shape):
                array[at] = self.sees(b, *at)
        return arrays

    def __and__(self, other: Expression) -> Expression:
        sees: Sees = lambda *at: self.sees(*at) and other.sees(*at)  # noqa: E731
        return Expression(f"({self} & {other})", self.mask & other.mask, self.batch, sees)

    def __or__(self, other: Expression) -> Expression:
        sees: Sees = lambda *at: self.sees(*at) or other.sees(*at)  # noqa: E731
        return Expression(f"({self} | {other})", self.mask | other.mask, self.batch, sees)

    def __invert__(self) -> Expression:
        return Expression(f"~{self}", ~self.mask, self.batch, lambda *at: not self.sees(*at))


def _anchor(draw: Draw, batch: Batch) -> tuple[str, dict[str, Any], Callable[[int], int]]:
    """How a diagonal is placed: words, arguments, and the key at which query 0 of a sequence sits."""
    kind = draw(st.sampled_from(["bottom_right", "top_left", "offset", "offsets"]))
    if kind == "offset":
        offset = draw(st.integers(-6, 12))
        return f"offset={offset}", {"offset": offset}, lambda b: offset
    if kind == "offsets":
        offsets = _integers(draw, batch, -6, 12)
        return f"offset={offsets}", {"offset": offsets}, lambda b: int(offsets[b % len(offsets)])
    if kind == "top_left":
        return kind, {"align": kind}, lambda b: 0
    return kind, draw(st.sampled_from([{}, {"align": kind}])), lambda b: batch.lengths[b][1] - batch.lengths[b][0]


def _integers(draw: Draw, batch: Batch, least: int, most: int) -> Array:
    """One integer for each sequence, or one for all of them."""
    count = draw(st.sampled_from([1, len(batch.lengths)]))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    return np.array(draw(st.lists(st.integers(least, most), min_size=count, max_size=count)), dtype=dtype)


def causal(draw: Draw, batch: Batch) -> Expression:
    words, options, first = _anchor(draw, batch)
    return Expression(f"causal({words})", tw.causal(**options), batch, lambda b, h, q, k: k <= q + first(b))


def window(draw: Draw, batch: Batch) -> Expression:
    words, options, first = _anchor(draw, batch)
    n = draw(st.integers(1, 9))
    keys = lambda own: range(own - n + 1, own + 1)  # noqa: E731 - exactly n keys, the last one the query's own
    mask = tw.window(n, **options)
    return Expression(f"window({n}, {words})", mask, batch, lambda b, h, q, k: k in keys(q + first(b)))


def two_sided(draw: Draw, batch: Batch) -> Expression:
    words, options, first = _anchor(draw, batch)
    left, right = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    mask = tw.window(left, right, **options)
    text = f"window({left}, {right}, {words})"
    return Expression(text, mask, batch, lambda b, h, q, k: q + first(b) - left <= k <= q + first(b) + right)


def prefix(draw: Draw, batch: Batch) -> Expression:
    if draw(st.booleans()):
        n = draw(st.integers(0, 20))
        return Expression(f"prefix({n})", tw.prefix(n), batch, lambda b, h, q, k: k < n)
    ns = _integers(draw, batch, 0, 20)
    return Expression(f"prefix({ns})", tw.prefix(ns), batch, lambda b, h, q, k: k < ns[b % len(ns)])


def padding(draw: Draw, batch: Batch) -> Expression:
    keys = min((n for _, n in batch.lengths), default=0)
    lengths = np.minimum(_integers(draw, batch, 0, 20), keys)
    if draw(st.booleans()):
        mask = tw.key_padding(lengths)
        return Expression(f"key_padding({lengths})", mask, batch, lambda b, h, q, k: k < lengths[b % len(lengths)])
    starts = np.minimum(_integers(draw, batch, 0, 12), keys)
    lengths = np.minimum(lengths, keys - starts.max())

    def sees(b: int, h: int, q: int, k: int) -> bool:
        start, length = starts[b % len(starts)], lengths[b % len(lengths)]
        return bool(start <= k < start + length)

    return Expression(f"key_padding({lengths}, {starts})", tw.key_padding(lengths, starts), batch, sees)


def documents(draw: Draw, batch: Batch) -> Expression:
    _, _, total_q, total_k = batch.shape
    rows = 1 if batch.packed else draw(st.sampled_from([1, len(batch.lengths)]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    most = draw(st.integers(1, 4))
    ids, q_ids = ([generator.integers(0, most, n) for _ in range(rows)] for n in (total_k, total_q))
    if draw(st.booleans()):
        ids, q_ids = [np.sort(x) for x in ids], [np.sort(x) for x in q_ids]
    one = rows == 1 and draw(st.booleans())
    if total_q == total_k and all(q == k for q, k in batch.lengths) and draw(st.booleans()):
        q_ids = ids
        mask = tw.documents(ids[0] if one else np.stack(ids))
    else:
        mask = tw.documents(*((ids[0], q_ids[0]) if one else (np.stack(ids), np.stack(q_ids))))

    def sees(b: int, h: int, q: int, k: int) -> bool:
        if batch.packed:
            q, k = (n + sum(lengths[side] for lengths in batch.lengths[:b]) for side, n in enumerate((q, k)))
        return bool(q_ids[b % rows][q] == ids[b % rows][k])

    return Expression(f"documents({ids}, {q_ids})", mask, batch, sees)


def _lead(draw: Draw, batch: Batch) -> tuple[int, ...]:
    """The leading sides of a table: none, heads, or batch and heads, each of them possibly 1."""
    sides = draw(
        st.sampled_from([(1, 1), (len(batch.lengths), 1), (1, batch.heads), (len(batch.lengths), batch.heads)])
    )
    return sides if sides[0] > 1 else draw(st.sampled_from([sides, sides[1:]] + ([()] if sides[1] == 1 else [])))


def _bits(draw: Draw, shape: tuple[int, ...]) -> Array:
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return generator.random(shape) < draw(st.sampled_from([0.1, 0.5, 0.9]))


def blocks(draw: Draw, batch: Batch) -> Expression:
    size = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    sides = tuple(-(-n // s) for n, s in zip(batch.longest, size, strict=True))
    table = _bits(draw, (*_lead(draw, batch), *sides))
    full = np.broadcast_to(table, (len(batch.lengths), batch.heads, *sides))
    mask = tw.blocks(table, size if size[0] != size[1] else size[0])
    text = f"blocks({table.astype(int).tolist()}, {size})"
    return Expression(text, mask, batch, lambda b, h, q, k: bool(full[b, h, q // size[0], k // size[1]]))


def selected(draw: Draw, batch: Batch) -> Expression:
    """What is beyond the keys names nothing."""
    block = draw(st.integers(1, 7))
    return _selected(draw, batch, block, max(1, -(-batch.longest[1] // block) + draw(st.sampled_from([0, 2]))))


def selected_within(draw: Draw, batch: Batch) -> Expression:
    """Only blocks that every sequence has: calls refuse others."""
    block = draw(st.integers(1, 7))
    return _selected(draw, batch, block, -(-min(keys for _, keys in batch.lengths) // block))


def _selected(draw: Draw, batch: Batch, block: int, most: int) -> Expression:
    per = draw(st.integers(LEAST_PER, LEAST_PER + 3))
    lead, rows = _lead(draw, batch), -(-batch.longest[0] // per)
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lists = generator.integers(-1, most, (*lead, rows, draw(st.integers(0, 3))))
    full = np.broadcast_to(lists, (len(batch.lengths), batch.heads, *lists.shape[-2:]))
    mask = tw.selected(lists.astype(draw(st.sampled_from([np.int32, np.int64]))), block, per)
    text = f"selected({lists.tolist()}, {block}, {per})"
    return Expression(text, mask, batch, lambda b, h, q, k: k // block in full[b, h, q // per])


def dense(draw: Draw, batch: Batch) -> Expression:
    sq, sk = batch.lengths[0]
    sides = draw(st.sampled_from([(sq, sk), (1, sk), (sq, 1), (1, 1)]))
    bits = _bits(draw, (*_lead(draw, batch), *sides))
    full = np.broadcast_to(bits, (len(batch.lengths), batch.heads, sq, sk))
    return Expression(
        f"dense({bits.astype(int).tolist()})", tw.dense(bits), batch, lambda b, h, q, k: bool(full[b, h, q, k])
    )


LENGTH_FREE = (causal, window, two_sided, prefix, padding)
"""Leaves whose tensors fit any length; conjunctions of them are classified exactly."""
LEAVES = (*LENGTH_FREE, documents, blocks, selected, dense)
CALLED = (*LENGTH_FREE, documents, blocks, selected_within, dense)
"""Leaves of calls on a CPU, where values are checked."""


@st.composite
def batches(draw: Draw, packed: bool = False) -> Batch:
    count, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    length = st.one_of(st.sampled_from([0, 1]), st.integers(0, 17))
    if packed:
        return Batch(heads, tuple((draw(length), draw(length)) for _ in range(count)), packed=True)
    queries = draw(length)
    return Batch(heads, ((queries, draw(st.one_of(st.just(queries), length))),) * count)


@st.composite
def expressions(draw: Draw, batch: Batch, depth: int = 3, leaves: tuple[Any, ...] = LEAVES) -> Expression:
    """Leaves joined by &, | and ~, nested up to `depth`."""
    usable = [leaf for leaf in leaves if not (batch.packed and leaf is dense)]
    kind = draw(st.sampled_from(["leaf", "and", "or", "not"])) if depth else "leaf"
    if kind == "leaf":
        return draw(st.sampled_from(usable))(draw, batch)
    first = draw(expressions(batch, depth - 1, leaves))
    if kind == "not":
        return ~first
    second = draw(expressions(batch, depth - 1, leaves))
    return first & second if kind == "and" else first | second
