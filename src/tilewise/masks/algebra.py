"""Masks are values: `causal() & window(4096)`, `causal() | prefix(n)`, `~documents(ids)`.

A value says which keys a query may see, independently of lengths; `lower` binds it to lengths and gives the MaskProgram that
every backend evaluates. Widths count keys and the anchor of a diagonal is explicit: `bottom_right` (the last query sits at the
last key), `top_left` (query 0 at key 0) or an `offset` (query 0 at key `offset`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

from tilewise.errors import ArgumentTypeError, MaskError
from tilewise.masks.arrays import (
    Binding,
    as_kind,
    block_lists,
    document_ids,
    fits,
    grouped,
    padding_hint,
    per_sequence,
    rank4,
)
from tilewise.masks.program import KINDS, UNBOUNDED, Literal, MaskProgram, assemble, merge_term
from tilewise.masks.trees import parent_array, with_trees

if TYPE_CHECKING:
    from tilewise.masks.picture import TilePicture

Terms = list[list[Literal]]
MAX_TERMS = 32


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
        return lowered(self.terms(binding, negate=False), binding)

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

    def show(self, Sq: int | None = None, Sk: int | None = None, tile: int | tuple[int, int] | None = None) -> TilePicture:
        """The picture of this mask's tiles: which hold nothing, something or everything, and how many of each there are.

        Sq, Sk: queries and keys. What is None follows from the mask's tensors, or from each other, or is 1,024.
        tile: queries and keys of a tile, or one int for both; None: 128, less for short sequences, more for very long ones.

        It prints itself as text, or as a drawing in a notebook. Of several sequences and heads the first is shown.

        >>> (tw.causal() & tw.window(192)).show(384, tile=64)
        ▒▒··········
        ██▒▒········
        ████▒▒······
        ▒▒████▒▒····
        ··▒▒████▒▒··
        ····▒▒████▒▒
        """
        from tilewise.masks.picture import picture

        return picture(self, Sq, Sk, tile)

    def _repr_html_(self) -> str:
        try:
            return self.show().html()
        except (MaskError, ArgumentTypeError):  # its tensors do not fit each other: the call will say so
            from html import escape

            return f"<code>{escape(repr(self))}</code>"

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
        off = per_sequence("offset", self.offset, binding)
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
        length = per_sequence("lengths", self.lengths, binding)
        start = length * 0 if self.start is None else per_sequence("start", self.start, binding)
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
        k_ids = document_ids("ids", self.ids, shape.seqlen_k, binding)
        q_ids = k_ids if self.q_ids is None else document_ids("q_ids", self.q_ids, shape.seqlen_q, binding)
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
        return [[Literal(KINDS["S" if negate else "s"], (self.size_q, self.size_k), (as_kind(table, "bool"),))]]


@dataclass(frozen=True, eq=False, repr=False)
class Selected(Mask):
    """Lists of key blocks: query q sees key k iff indices[q // size_q] holds k // size_k."""

    indices: Any
    size_k: int
    size_q: int
    static = False

    def terms(self, binding: Binding, negate: bool) -> Terms:
        shape = binding.shape
        lists = binding.once(self.indices, "lists", block_lists)
        lists, heads = grouped("selected", "indices", lists, shape, binding.kv_heads)
        rows = -(-shape.seqlen_q // self.size_q)
        if not binding.varlen and lists.shape[2] != rows:
            raise MaskError(
                f"selected: indices has {lists.shape[2]} lists, but {shape.seqlen_q} queries in blocks of {self.size_q} "
                f"are {rows}; its shape is (…, {rows}, k)"
            )
        return [[Literal(KINDS["I" if negate else "i"], (self.size_q, self.size_k, heads, lists.shape[3]), (lists,))]]


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
class Tree(Mask):
    """The last tokens are a tree: each sees itself, its ancestors and the keys before the tree."""

    parents: Any
    static = False

    def terms(self, binding: Binding, negate: bool) -> Terms:
        return [[Literal(KINDS["a"], (), (parent_array(self.parents, binding, negate),))]]


@dataclass(frozen=True, eq=False, repr=False)
class Lowered(Mask):
    """A program that was lowered before: what an operator receives. `origin` is the mask it came from, while that lives."""

    program: MaskProgram
    origin: ref[Mask] | None = None

    @property
    def static(self) -> bool:  # type: ignore[override]
        return not self.program.tensors

    def __reduce__(self) -> tuple[Any, ...]:
        return Lowered, (self.program,)

    def lower(self, binding: Binding) -> MaskProgram:
        return self.program

    def leaves(self) -> Iterator[Mask]:
        origin = None if self.origin is None else self.origin()
        return iter((self,)) if origin is None else origin.leaves()

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


def lowered(terms: Terms, binding: Binding | None = None) -> MaskProgram:
    """The program of a disjunction of conjunctions, with what can be said of its terms without reading tensors; of the terms of
    masks, whose trees are not complete, with what they are bound to."""
    merged = [merge_term(term) for term in terms]
    possible = [term for term in merged if term is not None]
    if binding is not None and any(literal.kind.is_tree for term in possible for literal in term):
        possible = with_trees(possible, binding)
    return MaskProgram() if any(not term for term in possible) else assemble(possible)


def _band_pairs(lo: int, hi: int, negate: bool) -> list[tuple[int, int]]:
    if not negate:
        return [(lo, hi)]
    below = [(-UNBOUNDED, lo - 1)] if lo > -UNBOUNDED else []
    above = [(hi + 1, UNBOUNDED)] if hi < UNBOUNDED else []
    return below + above
