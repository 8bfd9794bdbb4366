"""MaskProgram: what a mask lowers to, and the one place that says what its letters mean.

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

q and k count within the sequence. Tensors are carried as they come (torch or numpy); torch is never imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

UNBOUNDED = 2**30
"""A band side or range end at this value (or its negative) is no limit; sequence lengths stay below it."""

LITERALS = "0btorkdDsSeE"
INTS = {"b": 2, "t": 2, "o": 2, "r": 2, "s": 2, "S": 2}
TENSORS = {"o": 1, "k": 2, "d": 2, "D": 2, "s": 1, "S": 1, "e": 1, "E": 1}


class MaskShape(NamedTuple):
    """The extent of a mask: `heads` are query heads."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int


class Literal(NamedTuple):
    letter: str
    ints: tuple[int, ...]
    tensors: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class MaskProgram:
    structure: str = ""
    ints: tuple[int, ...] = ()
    tensors: tuple[Any, ...] = ()

    def terms(self) -> Iterator[list[Literal]]:
        """The literals, term by term; an unmasked program has one term without literals."""
        ints, tensors = iter(self.ints), iter(self.tensors)
        for term in self.structure.split("|"):
            yield [
                Literal(
                    letter,
                    tuple(next(ints) for _ in range(INTS.get(letter, 0))),
                    tuple(next(tensors) for _ in range(TENSORS.get(letter, 0))),
                )
                for letter in term
            ]

    def may_blind(self, queries: int, keys: int) -> bool:
        """May a query see no key? Exact for bands and ranges; what tensors hold is not looked at, so with them always."""
        if self.tensors:
            return True
        rows = sorted(_seeing_rows(term, queries, keys) for term in self.terms())
        covered = 0
        for first, past in rows:
            if first > covered:
                break
            covered = max(covered, past)
        return covered < queries

    def for_sequence(self, b: int, q_start: int, q_end: int, k_start: int, k_end: int) -> MaskProgram:
        """The program of sequence `b` alone, cut out of a packed batch whose tokens it holds at [start, end)."""
        tensors: list[Any] = []
        for term in self.terms():
            for letter, _, given in term:
                if letter in "dD":
                    tensors += [given[0][:, q_start:q_end], given[1][:, k_start:k_end]]
                else:
                    tensors += [t if t.shape[0] == 1 else t[b : b + 1] for t in given]
        return MaskProgram(self.structure, self.ints, tuple(tensors))


def _seeing_rows(term: list[Literal], queries: int, keys: int) -> tuple[int, int]:
    """[first, past): the rows that see some key under a term of bands and ranges."""
    lo, hi, start, end = -UNBOUNDED, UNBOUNDED, 0, keys
    for letter, ints, _ in term:
        if letter in "bt":
            shift = keys - queries if letter == "b" else 0
            lo = max(lo, ints[0] + shift if ints[0] > -UNBOUNDED else lo)
            hi = min(hi, ints[1] + shift if ints[1] < UNBOUNDED else hi)
        elif letter == "r":
            start, end = max(start, ints[0]), min(end, ints[1])
        else:
            end = start
    return (max(0, start - hi), min(queries, end - lo)) if lo <= hi and start < end else (0, 0)


def assemble(terms: list[list[Literal]]) -> MaskProgram:
    """The program of a disjunction of conjunctions."""
    literals = [literal for term in terms for literal in term]
    return MaskProgram(
        "|".join("".join(literal.letter for literal in term) for term in terms) if terms else "0",
        tuple(i for literal in literals for i in literal.ints),
        tuple(t for literal in literals for t in literal.tensors),
    )


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
    letter, ints, tensors = literal
    q_col, k_row = q[None, None, :, None], k[None, None, None, :]
    if letter in "bto":
        lo, hi = ints
        delta = k_row - q_col
        if letter == "b":
            delta = delta - (shape.seqlen_k - shape.seqlen_q)
        elif letter == "o":
            delta = delta - tensors[0][:, None, None, None]
        # an open side is no limit, not even with the largest offset
        above = delta >= lo if lo > -UNBOUNDED else delta == delta
        return above & (delta <= hi) if hi < UNBOUNDED else above
    if letter == "r":
        return (k_row >= ints[0]) & (k_row < ints[1])
    if letter == "k":
        start, end = (t[:, None, None, None] for t in tensors)
        return (k_row >= start) & (k_row < end)
    if letter in "dD":
        same = tensors[0][:, None, qs, None] == tensors[1][:, None, None, ks]
        return same if letter == "d" else ~same
    if letter in "sS":
        tile = tensors[0][:, :, (q // ints[0])[:, None], (k // ints[1])[None, :]]
        return tile if letter == "s" else ~tile
    if letter in "eE":
        dense = tensors[0]
        dense = dense[:, :, qs if dense.shape[2] > 1 else slice(None), ks if dense.shape[3] > 1 else slice(None)]
        return dense if letter == "e" else ~dense
    nothing = k_row - q_col
    return nothing != nothing
