"""Masks are values: `causal() & window(4096)`, `causal() | prefix(n)`, `~documents(ids)`.

A value says which keys a query may see, independently of lengths; `lower` binds it to lengths and gives the MaskProgram that
every backend evaluates. Widths count keys and the anchor of a diagonal is explicit: `bottom_right` (the last query sits at the
last key), `top_left` (query 0 at key 0) or an `offset` (query 0 at key `offset`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np

from tilewise.errors import ArgumentTypeError, MaskError
from tilewise.masks.arrays import fits, grouped, padding_hint, rank4
from tilewise.masks.program import KINDS, UNBOUNDED, Kind, Literal, MaskProgram, MaskShape, assemble

Terms = list[list[Literal]]
MAX_TERMS = 32
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
LIMIT = UNBOUNDED - 1
"""Lengths and offsets are cut to ± this, beyond every position: sums and differences of two stay within 32 bits."""


@dataclass(frozen=True)
class Binding:
    """What a mask is lowered for. `asarray` brings the mask's tensors to the caller's kind and device."""

    shape: MaskShape
    varlen: bool = False
    asarray: Callable[[Any], Any] = np.asarray
    kv_heads: int | None = None
    """None where nobody knows; then any divisor of the query heads may be it."""


class Mask(ABC):
    """Which keys a query sees, as a value; combine with `&`, `|`, `~`.

    >>> mask = tw.causal() & (tw.window(4096) | tw.prefix(128))
    """

    static = True
    """True if the mask holds no tensors, so that equal masks are equal values."""

    def __and__(self, other: Mask) -> Mask:
        return _combine(And, self, other)

    def __rand__(self, other: Mask) -> Mask:
        return _combine(And, other, self)

    def __or__(self, other: Mask) -> Mask:
        return _combine(Or, self, other)

    def __ror__(self, other: Mask) -> Mask:
        return _combine(Or, other, self)

    def __invert__(self) -> Mask:
        return self.part if isinstance(self, Not) else Not(self)

    def __bool__(self) -> bool:
        raise MaskError("a mask has no truth value: combine masks with &, | and ~ instead of and, or and not")

    def lower(self, binding: Binding) -> MaskProgram:
        """The program of this mask for given lengths."""
        return lowered(self.terms(binding, negate=False))

    def to(self, device: Any) -> Mask:
        """The mask with its torch tensors on another `device`.

        >>> mask = (causal() & key_padding(lengths)).to("cuda")
        """

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, Mask) or hasattr(value, "is_cuda") else value

        names: list[str] = [f.name for f in fields(self) if f.init] if is_dataclass(self) else []
        return self if self.static else type(self)(**{name: moved(getattr(self, name)) for name in names})

    def to_dense(self, Sq: int, Sk: int | None = None) -> Any:
        """What this mask stands for as booleans (B or 1, H or 1, Sq, Sk), True = attend; `Sk` is `Sq` if not given.

        B and H are those of the mask's tensors. If these are torch's, so is the result, on their device; else it is numpy's.

        >>> (causal() & window(2)).to_dense(3, 5)[0, 0]
        """
        from tilewise.masks.build import integer
        from tilewise.masks.forms import to_array

        queries = integer("to_dense: Sq", Sq, 0)
        return to_array(self, queries, queries if Sk is None else integer("to_dense: Sk", Sk, 0))

    def __repr__(self) -> str:
        from tilewise.masks.forms import text

        return text(self)

    def leaves(self) -> Iterator[Mask]:
        """The masks this one is combined of."""
        yield self

    @abstractmethod
    def terms(self, binding: Binding, negate: bool) -> Terms:
        """The mask (or its negation) as a disjunction of conjunctions of literals."""


@dataclass(frozen=True, repr=False)
class Full(Mask):
    """Every key is visible."""

    def terms(self, binding: Binding, negate: bool) -> Terms:
        return [] if negate else [[]]


@dataclass(frozen=True, repr=False)
class Band(Mask):
    """lo <= k - q - anchor <= hi, the anchor being 0 (`top_left`) or Sk - Sq (`bottom_right`)."""

    lo: int
    hi: int
    letter: str

    def terms(self, binding: Binding, negate: bool) -> Terms:
        return [[Literal(KINDS[self.letter], pair, ())] for pair in _band_pairs(self.lo, self.hi, negate)]


@dataclass(frozen=True, eq=False, repr=False)
class OffsetBand(Mask):
    """A band whose anchor is given for each sequence."""

    lo: int
    hi: int
    offset: Any
    static = False

    def terms(self, binding: Binding, negate: bool) -> Terms:
        off = _per_sequence("offset", self.offset, binding)
        return [[Literal(KINDS["o"], pair, (off,))] for pair in _band_pairs(self.lo, self.hi, negate)]


@dataclass(frozen=True, repr=False)
class KeyRange(Mask):
    """start <= k < end, the same for every sequence."""

    start: int
    end: int

    def terms(self, binding: Binding, negate: bool) -> Terms:
        pairs = [(-UNBOUNDED, self.start), (self.end, UNBOUNDED)] if negate else [(self.start, self.end)]
        return [[Literal(KINDS["r"], pair, ())] for pair in pairs]


@dataclass(frozen=True, eq=False, repr=False)
class KeyRanges(Mask):
    """start[b] <= k < start[b] + length[b]; `maker` is the name of its constructor."""

    lengths: Any
    start: Any = None
    maker: str = "key_padding"
    static = False

    def terms(self, binding: Binding, negate: bool) -> Terms:
        length = _per_sequence("lengths", self.lengths, binding)
        start = length * 0 if self.start is None else _per_sequence("start", self.start, binding)
        end = start + length
        pairs = [(start * 0, start), (end, end * 0 + UNBOUNDED)] if negate else [(start, end)]
        return [[Literal(KINDS["k"], (), pair)] for pair in pairs]


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """A query sees the keys of its own document."""

    ids: Any
    q_ids: Any = None
    static = False

    def terms(self, binding: Binding, negate: bool) -> Terms:
        shape = binding.shape
        if self.q_ids is None and shape.seqlen_q != shape.seqlen_k:
            raise MaskError(
                f"documents: {shape.seqlen_q} queries and {shape.seqlen_k} keys differ, so the ids of the queries "
                "are needed too; pass documents(key_ids, q_ids=query_ids)"
            )
        k_ids = _ids("ids", self.ids, shape.seqlen_k, binding)
        q_ids = k_ids if self.q_ids is None else _ids("q_ids", self.q_ids, shape.seqlen_q, binding)
        return [[Literal(KINDS["D" if negate else "d"], (), (q_ids, k_ids))]]


@dataclass(frozen=True, eq=False, repr=False)
class Blocks(Mask):
    """A table of blocks: query q sees key k iff table[q // size_q, k // size_k]."""

    table: Any
    size_q: int
    size_k: int
    static = False

    def terms(self, binding: Binding, negate: bool) -> Terms:
        shape = binding.shape
        table = rank4("blocks", "table", binding.asarray(self.table), shape)
        want = (-(-shape.seqlen_q // self.size_q), -(-shape.seqlen_k // self.size_k))
        if not binding.varlen and tuple(table.shape[2:]) != want:
            raise MaskError(
                f"blocks: table covers {tuple(table.shape[2:])} blocks, but {shape.seqlen_q} × {shape.seqlen_k} positions "
                f"in blocks of {self.size_q} × {self.size_k} are {want}"
            )
        return [[Literal(KINDS["S" if negate else "s"], (self.size_q, self.size_k), (_as(table, "bool"),))]]


@dataclass(frozen=True, eq=False, repr=False)
class Selected(Mask):
    """Lists of key blocks: query q sees key k iff indices[q // size_q] holds k // size_k."""

    indices: Any
    size_k: int
    size_q: int
    static = False

    def terms(self, binding: Binding, negate: bool) -> Terms:
        shape = binding.shape
        lists, heads = grouped("selected", "indices", binding.asarray(self.indices), shape, binding.kv_heads)
        _check_integers("selected: indices", lists)
        rows = -(-shape.seqlen_q // self.size_q)
        if not binding.varlen and lists.shape[2] != rows:
            raise MaskError(
                f"selected: indices has {lists.shape[2]} lists, but {shape.seqlen_q} queries in blocks of {self.size_q} "
                f"are {rows}; its shape is (…, {rows}, k)"
            )
        narrow = _as(lists if lists.dtype.itemsize < 8 else lists.clip(-1, LIMIT), "int")
        return [[Literal(KINDS["I" if negate else "i"], (self.size_q, self.size_k, heads, lists.shape[3]), (narrow,))]]


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A boolean tensor, True where the query may see the key."""

    tensor: Any
    static = False

    def terms(self, binding: Binding, negate: bool) -> Terms:
        if binding.varlen:
            raise MaskError(
                "dense: a packed batch has no dense mask; describe it with documents, blocks, causal, window or key_padding"
            )
        shape = binding.shape
        dense = rank4("dense", "tensor", binding.asarray(self.tensor), shape)
        for size, want, name in zip(dense.shape[2:], shape[2:], ("queries", "keys"), strict=True):
            if not fits(size, want):
                hint = padding_hint(self.tensor.shape, shape)
                raise MaskError(
                    f"dense: tensor of shape {tuple(self.tensor.shape)} has {size} {name}, the problem has {want}{hint}"
                )
        return [[Literal(KINDS["E" if negate else "e"], (), (dense,))]]


@dataclass(frozen=True, eq=False, repr=False)
class Lowered(Mask):
    """A program that was lowered before: what an operator receives."""

    program: MaskProgram

    @property
    def static(self) -> bool:  # type: ignore[override]
        return not self.program.tensors

    def lower(self, binding: Binding) -> MaskProgram:
        return self.program

    def terms(self, binding: Binding, negate: bool) -> Terms:
        if negate:
            raise MaskError("a lowered mask cannot be negated; negate the mask it came from")
        return list(self.program.terms())


@dataclass(frozen=True, repr=False)
class Not(Mask):
    part: Mask
    static: bool = field(init=False, compare=False, default=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "static", self.part.static)

    def leaves(self) -> Iterator[Mask]:
        return self.part.leaves()

    def terms(self, binding: Binding, negate: bool) -> Terms:
        return self.part.terms(binding, not negate)


@dataclass(frozen=True, repr=False)
class _Pair(Mask):
    conjunction: ClassVar[bool]
    left: Mask
    right: Mask
    static: bool = field(init=False, compare=False, default=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "static", self.left.static and self.right.static)

    def leaves(self) -> Iterator[Mask]:
        yield from self.left.leaves()
        yield from self.right.leaves()

    def terms(self, binding: Binding, negate: bool) -> Terms:
        left, right = self.left.terms(binding, negate), self.right.terms(binding, negate)
        both = self.conjunction != negate  # De Morgan: the negation of an AND is an OR of negations
        terms = [a + b for a in left for b in right] if both else left + right
        if len(terms) > MAX_TERMS:
            raise MaskError(
                f"the mask expands to {len(terms)} alternatives, more than {MAX_TERMS}; describe it with blocks(...) or "
                "dense(...)"
            )
        return terms


class And(_Pair):
    conjunction = True


class Or(_Pair):
    conjunction = False


def _combine(kind: type[_Pair], left: Mask, right: Mask) -> Mask:
    for side in (left, right):
        if not isinstance(side, Mask):
            raise ArgumentTypeError(
                f"masks combine with masks, got {type(side).__name__}; wrap a boolean tensor in dense(...)"
            )
    if isinstance(left, Full) or isinstance(right, Full):
        other = right if isinstance(left, Full) else left
        return other if kind is And else Full()
    return kind(left, right)


def lowered(terms: Terms) -> MaskProgram:
    """The program of a disjunction of conjunctions, with what can be said of its terms without reading tensors."""
    merged = [_merge(term) for term in terms]
    possible = [term for term in merged if term is not None]
    return MaskProgram() if any(not term for term in possible) else assemble(possible)


def _merge(term: list[Literal]) -> list[Literal] | None:
    """One term with its static bands and ranges intersected and its literals in order; None if it can hold nowhere."""
    merged: dict[Kind, tuple[int, int]] = {}
    rest: list[Literal] = []
    for literal in term:
        kind = literal.kind
        if kind.ints and not kind.tensors:
            lo, hi = literal.ints
            old = merged.get(kind, (lo, hi))
            merged[kind] = (max(lo, old[0]), min(hi, old[1]))
        elif not any(kind == other.kind and _same(literal, other) for other in rest):
            rest.append(literal)
    for kind, (lo, hi) in merged.items():
        if isinstance(lo, int) and isinstance(hi, int) and (lo > hi or (kind.is_range and lo == hi)):
            return None
    whole = (-UNBOUNDED, UNBOUNDED)
    rest += [Literal(kind, pair, ()) for kind, pair in merged.items() if pair != whole]
    return sorted(rest, key=lambda literal: list(KINDS).index(literal.kind.letter))


def _same(a: Literal, b: Literal) -> bool:
    return a.ints == b.ints and all(x is y for x, y in zip(a.tensors, b.tensors, strict=True))


def _band_pairs(lo: int, hi: int, negate: bool) -> list[tuple[int, int]]:
    if not negate:
        return [(lo, hi)]
    below = [(-UNBOUNDED, lo - 1)] if lo > -UNBOUNDED else []
    above = [(hi + 1, UNBOUNDED)] if hi < UNBOUNDED else []
    return below + above


def _as(array: Any, kind: str) -> Any:
    """`array` as int32 or bool, for numpy and torch alike."""
    if isinstance(array, np.ndarray):
        return array.astype(np.int32 if kind == "int" else np.bool_)
    return array.int() if kind == "int" else array.bool()


def _per_sequence(name: str, value: Any, binding: Binding) -> Any:
    array = binding.asarray(value)
    if array.ndim == 0:
        array = array[None]
    elif array.ndim != 1 or not fits(array.shape[0], binding.shape.batch):
        raise MaskError(
            f"mask: {name} has shape {tuple(array.shape)}, need one integer for each of the {binding.shape.batch} sequences"
        )
    _check_integers(f"mask: {name}", array)
    wide = array if array.dtype.itemsize == 8 else _as(array, "int")
    return _as(wide.clip(-LIMIT, LIMIT), "int")


def _ids(name: str, value: Any, length: int, binding: Binding) -> Any:
    ids = binding.asarray(value)
    batch = 1 if binding.varlen or ids.ndim == 1 else binding.shape.batch
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or not fits(ids.shape[0], batch) or ids.shape[1] != length:
        want = f"({length},)" if binding.varlen else f"({length},) or ({binding.shape.batch}, {length})"
        raise MaskError(f"documents: {name} has shape {tuple(ids.shape)}, need {want}")
    _check_integers(f"documents: {name}", ids)
    return _as(ids, "int")


def check_integer_dtype(name: str, array: Any) -> None:
    if str(array.dtype).removeprefix("torch.") not in INTEGERS:
        raise ArgumentTypeError(f"{name}: dtype {array.dtype}, need integers of at most 64 bits; convert with .int()")


def _check_integers(name: str, array: Any) -> None:
    check_integer_dtype(name, array)
    if isinstance(array, np.ndarray) and array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise MaskError(f"{name}: integers from {array.min()} to {array.max()}, need integers of 32 bits")
