"""MaskProgram: what a mask lowers to, and the one place that says what its letters mean: elsewhere a literal is asked by `kind`.

A program is a disjunction of terms ("b|r"); a term is a run of one-letter literals that must all hold ("bk"). Literals take
their integers and tensors from `ints` and `tensors`, left to right. The structure never holds a length, so one compiled
kernel serves every length.

    0      nothing                                                        -
    b      lo <= k - q - (Sk - Sq) <= hi      band, bottom-right          ints lo, hi
    t      lo <= k - q <= hi                  band, top-left              ints lo, hi
    o      lo <= k - q - off[b] <= hi         band, per sequence          ints lo, hi; tensor off (B,)
    r      start <= k < end                   keys                        ints start, end
    k      start[b] <= k < end[b]             keys, per sequence          tensors start (B,), end (B,)
    d D    q_ids[q] == k_ids[k], or !=        documents                   tensors q_ids (B|1, Sq), k_ids (B|1, Sk)
    s S    table[q // mq, k // mk] set, or not  blocks                    ints mq, mk; tensor (B|1, H|1, nQ, nK)
    e E    dense[q, k] set, or not            dense                       tensor (B|1, H|1, Sq|1, Sk|1)
    j      lo[q] <= k < hi[q]                 ends of each row            int 1 if rows widen; tensors lo (B|1, Sq), hi
    a      an ancestor, or a key before       tree                        ints lo, hi, n; tensors (B|1, n, n), (B|1, n) × 2
    i I    k // mk in lists[q // mq], or not  selected                    ints mq, mk, heads, n; tensor (B|1, H / heads, nQ, n)

A list of `selected` serves `heads` query heads: all of them, those of one key head, or one. Its entries are int32; those below 0
or past the last block name nothing, and naming a block twice is naming it once. No mask lowers to `j`: a backend makes it of
masks whose rows see one interval each (`rows.row_ends`), in the whole batch if it is packed.

The last n queries and keys of a sequence are the tokens of a tree. `a` tells which of these a token sees, and from and up to
which key before the tree, counted from the first of it. Queries before the tree see keys before it that the band lo, hi leaves.

q and k count within the sequence. Tensors are carried as they come (torch or numpy); torch is never imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

UNBOUNDED = 2**30
"""A band side or range end at this value (or its negative) is no limit; sequence lengths stay below it."""


class MaskShape(NamedTuple):
    """The extent of a mask: `heads` are query heads."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int


class Kind(NamedTuple):
    """What a letter stands for, and how many integers and tensors it takes. Nobody outside this package reads the letter."""

    letter: str
    ints: int = 0
    tensors: int = 0
    is_nothing: bool = False
    is_band: bool = False
    is_bottom_right: bool = False
    """A band that counts from the last query and key."""
    is_offset: bool = False
    """A band at an offset for each sequence."""
    is_range: bool = False
    """Keys from `start` up to `end`, the same for every sequence."""
    is_padding: bool = False
    """Keys from `start` up to `end` of each sequence."""
    is_rows: bool = False
    """Keys from `lo` up to `hi` of each row."""
    is_interval: bool = False
    """Leaves every row one interval of keys, which may be empty."""
    is_documents: bool = False
    is_blocks: bool = False
    is_dense: bool = False
    is_selected: bool = False
    is_tree: bool = False
    reads_data: bool = False
    """Reads ids or tables as long as the sequence."""
    per_head: bool = False
    """Has a tensor whose second side counts heads, or (`selected`) lists of several heads each."""
    negated: bool = False


_BAND: dict[str, Any] = {"ints": 2, "is_band": True, "is_interval": True}
_DATA: dict[str, dict[str, Any]] = {
    "d": {"tensors": 2, "is_documents": True},
    "s": {"tensors": 1, "is_blocks": True, "ints": 2, "per_head": True},
    "e": {"tensors": 1, "is_dense": True, "per_head": True},
    "a": {"tensors": 3, "is_tree": True, "ints": 3},
    "i": {"tensors": 1, "is_selected": True, "ints": 4, "per_head": True},
}
_ALL = (
    Kind("0", is_nothing=True, is_interval=True),
    Kind("b", is_bottom_right=True, **_BAND),
    Kind("t", **_BAND),
    Kind("o", tensors=1, is_offset=True, **_BAND),
    Kind("r", ints=2, is_range=True, is_interval=True),
    Kind("k", tensors=2, is_padding=True, is_interval=True),
    Kind("j", ints=1, tensors=2, is_rows=True, is_interval=True),
    *(Kind(c, reads_data=True, negated=c.isupper(), **_DATA[c.lower()]) for c in "dDsSeEiIa"),
)
KINDS = {kind.letter: kind for kind in _ALL}
"""In the order in which a term holds them."""


class Literal(NamedTuple):
    kind: Kind
    ints: tuple[int, ...]
    tensors: tuple[Any, ...]

    def shift(self, shape: MaskShape, b: int = 0) -> int:
        """How far the diagonal that a band counts from lies right of k == q, in sequence `b`."""
        if self.kind.is_offset:
            return int(self.tensors[0][b if self.tensors[0].shape[0] > 1 else 0])
        return shape.seqlen_k - shape.seqlen_q if self.kind.is_bottom_right else 0

    def side(self, h: int) -> int:
        """Which of a tensor's heads is that of query head `h`; of a literal that has such."""
        return 0 if self.tensors[0].shape[1] == 1 else h // self.ints[2] if self.kind.is_selected else h

    def for_heads(self, heads: range) -> Literal:
        """The literal of some query heads only, as if there were no others."""
        if not self.kind.per_head or self.tensors[0].shape[1] == 1:
            return self
        ints = (*self.ints[:2], 1, self.ints[3]) if self.kind.is_selected else self.ints
        return self._replace(ints=ints, tensors=(self.tensors[0][:, [self.side(h) for h in heads]],))

    def band(self, shift: int) -> tuple[int, int]:
        """lo, hi of lo <= k - q <= hi; a side without limit keeps none, however far it is shifted."""
        lo, hi = self.ints
        return (lo + shift if lo > -UNBOUNDED else -UNBOUNDED), (hi + shift if hi < UNBOUNDED else UNBOUNDED)


class Operand(NamedTuple):
    """A literal of a structure and where its integers and tensors start among the program's."""

    kind: Kind
    ints: int
    tensors: int


def operands(structure: str) -> list[list[Operand]]:
    """The literals of a structure, term by term."""
    terms, ints, tensors = [], 0, 0
    for text in structure.split("|"):
        term = []
        for kind in map(KINDS.__getitem__, text):
            term.append(Operand(kind, ints, tensors))
            ints, tensors = ints + kind.ints, tensors + kind.tensors
        terms.append(term)
    return terms


def is_interval(structure: str) -> bool:
    """Does every row see one interval of keys? Not under a union, whose terms may leave a gap."""
    terms = operands(structure)
    return len(terms) == 1 and all(part.kind.is_interval for part in terms[0])


class Interval(NamedTuple):
    """lo <= k - q <= hi and start <= k < end."""

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    start: int = 0
    end: int = UNBOUNDED


def interval(term: list[Literal], shape: MaskShape, b: int | None = 0) -> Interval:
    """The bands and ranges of a term in sequence `b`, intersected; what reads data is not looked at.

    With `b` None no tensor is read: offsets count as 0 and padding as absent, as where only the device knows them.
    """
    lo, hi, start, end = Interval(end=shape.seqlen_k)
    for literal in term:
        kind, ints, tensors = literal
        if kind.is_band:
            new_lo, new_hi = literal.band(0 if b is None and kind.is_offset else literal.shift(shape, b or 0))
            lo, hi = max(lo, new_lo), min(hi, new_hi)
        elif kind.is_range or (kind.is_padding and b is not None):
            first, past = ints if kind.is_range else (int(t[b if t.shape[0] > 1 else 0]) for t in tensors)
            start, end = max(start, first), min(end, past)
        elif kind.is_nothing:
            end = start
    return Interval(lo, hi, start, end)


@dataclass(frozen=True, slots=True)
class MaskProgram:
    structure: str = ""
    ints: tuple[int, ...] = ()
    tensors: tuple[Any, ...] = ()

    def terms(self) -> Iterator[list[Literal]]:
        """The literals, term by term; an unmasked program has one term without literals."""
        for term in operands(self.structure):
            yield [
                Literal(kind, self.ints[i : i + kind.ints], self.tensors[t : t + kind.tensors]) for kind, i, t in term
            ]

    def intervals(self, shape: MaskShape, b: int | None = None) -> list[Interval]:
        """The bands and ranges of each term in sequence `b`; without `b` no tensor is read."""
        return [interval(term, shape, b) for term in self.terms()]

    @property
    def kinds(self) -> list[Kind]:
        """Of all literals, in order."""
        return [KINDS[letter] for letter in self.structure if letter != "|"]

    def map(self, change: Callable[[Literal], Literal]) -> MaskProgram:
        """The program with its literals changed; their kinds stay."""
        literals = [change(literal) for term in self.terms() for literal in term]
        ints = tuple(i for literal in literals for i in literal.ints)
        return MaskProgram(self.structure, ints, tuple(t for literal in literals for t in literal.tensors))

    def for_sequence(self, b: int, q_start: int, q_end: int, k_start: int, k_end: int) -> MaskProgram:
        """The program of sequence `b` alone, cut out of a packed batch whose tokens it holds at [start, end)."""
        tensors: list[Any] = []
        for term in self.terms():
            for kind, _, given in term:
                if kind.is_documents:
                    tensors += [given[0][:, q_start:q_end], given[1][:, k_start:k_end]]
                else:
                    tensors += [t if t.shape[0] == 1 else t[b : b + 1] for t in given]
        return MaskProgram(self.structure, self.ints, tuple(tensors))

    def for_sequences(self, at: Any) -> MaskProgram:
        """The program of the sequences with the indices `at`, of one whose tensors have a row for each or one for all."""
        return MaskProgram(self.structure, self.ints, tuple(t if t.shape[0] == 1 else t[at] for t in self.tensors))


def assemble(terms: list[list[Literal]]) -> MaskProgram:
    """The program of a disjunction of conjunctions."""
    literals = [literal for term in terms for literal in term]
    return MaskProgram(
        "|".join("".join(literal.kind.letter for literal in term) for term in terms) if terms else "0",
        tuple(i for literal in literals for i in literal.ints),
        tuple(t for literal in literals for t in literal.tensors),
    )


def merge_term(term: list[Literal]) -> list[Literal] | None:
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


def allowed(
    program: MaskProgram,
    shape: MaskShape,
    q_range: tuple[int, int],
    k_range: tuple[int, int],
    arange: Callable[[int, int], Any],
) -> Any:
    """The boolean tile over `q_range` × `k_range`, broadcastable to (B, H, M, N); None where everything is allowed.

    The arithmetic is the same for numpy and torch: `arange(lo, hi)` makes the index vectors of the caller's kind, on the
    caller's device.
    """
    q, k = arange(*q_range), arange(*k_range)
    result = None
    for term in program.terms():
        tile = None
        for literal in term:
            part = _literal_tile(literal, shape, q, k, slice(*q_range), slice(*k_range))
            tile = part if tile is None else tile & part
        if tile is None:
            return None
        result = tile if result is None else result | tile
    return result


def _literal_tile(literal: Literal, shape: MaskShape, q: Any, k: Any, qs: slice, ks: slice) -> Any:
    """One literal over a tile, rank 4; `q`, `k` are index vectors and `qs`, `ks` the same as slices."""
    kind, ints, tensors = literal
    q_col, k_row = q[None, None, :, None], k[None, None, None, :]
    if kind.is_band:
        lo, hi = ints
        anchor = tensors[0][:, None, None, None] if kind.is_offset else literal.shift(shape)
        delta = k_row - q_col - anchor
        # an open side is no limit, not even with the largest offset
        above = delta >= lo if lo > -UNBOUNDED else delta == delta
        return above & (delta <= hi) if hi < UNBOUNDED else above
    if kind.is_range or kind.is_padding:
        start, end = ints if kind.is_range else (t[:, None, None, None] for t in tensors)
        return (k_row >= start) & (k_row < end)
    if kind.is_documents:
        tile = tensors[0][:, None, qs, None] == tensors[1][:, None, None, ks]
    elif kind.is_blocks:
        tile = tensors[0][:, :, (q // ints[0])[:, None], (k // ints[1])[None, :]]
    elif kind.is_selected:
        tile = _selected_tile(literal, q, k, ks)
    elif kind.is_tree:
        tile = tree_tile(literal, shape, q, k)
    elif kind.is_dense:
        dense = tensors[0]
        tile = dense[:, :, qs if dense.shape[2] > 1 else slice(None), ks if dense.shape[3] > 1 else slice(None)]
    else:
        nothing = k_row - q_col
        return nothing != nothing
    return ~tile if kind.negated else tile


def _selected_tile(literal: Literal, q: Any, k: Any, ks: slice) -> Any:
    """`selected` over a tile: the lists of its rows as a small table of key blocks, then element by element."""
    _, (size_q, size_k, heads, _), (lists,) = literal
    first = ks.start // size_k
    table = listed(lists[:, :, q // size_q], first, max(0, (ks.stop - 1) // size_k + 1 - first))
    tile = table[..., k // size_k - first]  # [B, lists, M, N]
    if tile.shape[1] == 1 or heads == 1:
        return tile
    shape = (tile.shape[0], tile.shape[1], heads, *tile.shape[2:])
    wide = np.broadcast_to(tile[:, :, None], shape) if isinstance(tile, np.ndarray) else tile[:, :, None].expand(shape)
    return wide.reshape(tile.shape[0], tile.shape[1] * heads, *tile.shape[2:])


def tree_tile(literal: Literal, shape: MaskShape, q: Any, k: Any) -> Any:
    """`tree` over a tile, (B or 1, 1, M, N), of queries q and keys k."""
    _, (lo, hi, n), (reach, first, past) = literal
    i, j = q - (shape.seqlen_q - n), k - (shape.seqlen_k - n)  # slots of the tree; negative before it
    rows, cols = i.clip(0), j.clip(0, n - 1)
    inside = i >= 0
    ends = ((first, i + lo), (past, i + (hi + 1)))
    begin, end = ((own[:, rows] * inside + other * ~inside)[..., None] for own, other in ends)
    before = (j < 0) & (j >= begin) & (j < end)
    among = (j >= 0) & inside[:, None] & reach[:, rows][:, :, cols]
    return (before | among)[:, None]


def listed(lists: Any, first: int, count: int) -> Any:
    """Booleans (…, count): which of the blocks from `first` on does a list (…, n) name? For numpy and torch alike."""
    inside = (lists >= first) & (lists < first + count)
    if isinstance(lists, np.ndarray):
        table = np.zeros((*lists.shape[:-1], count + 1), dtype=np.bool_)  # what is outside falls into the last column
        np.put_along_axis(table, np.where(inside, lists - first, count), True, axis=-1)
        return table[..., :count]
    at = (lists - first).where(inside, count).long()
    return lists.new_zeros((*lists.shape[:-1], count + 1)).scatter_(-1, at, 1)[..., :count] != 0
