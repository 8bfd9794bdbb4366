"""Masks the kernels know: those that leave every row one interval of keys. Lowered to `Term`s, or refused with the reason."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilewise.backends.hopper.structs import Term
from tilewise.masks import UNBOUNDED, Interval, Literal, MaskProgram, MaskShape, visited_tiles
from tilewise.masks.program import interval
from tilewise.problem import Problem


class IntervalMask(NamedTuple):
    """A mask as intervals: what the kernel is compiled for and the numbers of its terms, tensors as the mask holds them."""

    terms: tuple[Term, ...] = ()
    band: bool = False  # may a row's keys end before the sequence does?
    left: bool = False  # may they begin after key 0?
    bottom: bool = False  # packed: bands count from each sequence's bottom right corner
    listed: bool = False  # it is no interval, and comes as tile lists

    @property
    def intervals(self) -> list[Interval]:
        return [Interval(term.lo, term.past - 1, term.start, term.end) for term in self.terms]

    @property
    def from_left(self) -> bool:
        """Do bands bound the first key?"""
        return any(term.lo > -UNBOUNDED for term in self.terms)

    @property
    def uneven(self) -> bool:
        """Do bands give tiles of rows or keys more or fewer of the others to visit, by where they lie?"""
        return self.band or self.from_left

    def visited(self, queries: int, keys: int, block_q: int, block_k: int, *, by_key: bool = False) -> np.ndarray:
        """Key tiles that each query tile visits (by key: query tiles that visit each key tile), at least 1, int64 [tiles].

        Numbers that only the device knows (offsets, padding) are taken as absent.
        """
        return np.maximum(visited_tiles(self.intervals, queries, keys, block_q, block_k, by_key=by_key), 1)


def interval_mask(program: MaskProgram, queries: int, keys: int, packed: bool = False) -> IntervalMask | str:
    """The mask over so many queries and keys as intervals, or why it is none.

    In a packed batch only the device knows the sequences' lengths: bands keep their corner, ranges end where they end.
    """
    if not all(kind.is_interval for kind in program.kinds):
        return "the mask reads tables or ids; bands, ranges and key padding are served"
    if program.structure == "":
        return IntervalMask()
    terms = []
    bands = {kind for kind in program.kinds if kind.is_band}
    bottom = packed and any(kind.is_bottom_right for kind in bands)
    if bottom and len(bands) > 1:
        return "the mask joins bands that count from different corners, in a packed batch"
    shape = MaskShape(1, 1, UNBOUNDED, UNBOUNDED) if packed else MaskShape(1, 1, queries, keys)
    for literals in program.terms():
        term = _term(literals, shape)
        if isinstance(term, str):
            return term
        if term.lo < term.past and term.start < term.end:
            terms.append(term)
    if not terms:
        return IntervalMask((Term(-UNBOUNDED, UNBOUNDED, 0, 0, None, None, None),))
    if len(terms) == 1:
        return IntervalMask((terms[0],), terms[0].past < UNBOUNDED, begins_inside(terms[0]), bottom)
    if len(terms) > 2:
        return f"the mask is a union of {len(terms)} parts; two are served"
    if any(begins_inside(term) for term in terms):
        return "the mask is a union of parts of which one may begin after key 0"
    return IntervalMask(tuple(terms), True, False, bottom)


def mask_of(problem: Problem) -> IntervalMask:
    """The mask of a problem that is supported."""
    mask = interval_mask(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
    return mask if isinstance(mask, IntervalMask) else IntervalMask(listed=True)


def unseen_keys(mask: IntervalMask, queries: int, keys: int) -> bool:
    """May there be keys that no query sees? Not under a plain causal mask or window, where the first row sees key 0 and the
    last row the last key."""
    if any(term.off is not None or term.first is not None for term in mask.terms):
        return True
    return bool(mask.terms) and not visited_tiles(mask.intervals, queries, keys, queries, 1, by_key=True).all()


def begins_inside(term: Term) -> bool:
    return term.lo > -UNBOUNDED or term.start > 0 or term.first is not None


def _term(literals: list[Literal], shape: MaskShape) -> Term | str:
    lo, hi, start, end = interval(literals, shape, None)
    bands = [literal for literal in literals if literal.kind.is_band]
    off = next((band.tensors[0] for band in bands if band.kind.is_offset), None)
    if off is not None and len(bands) > 1:
        return "the mask joins a band at per-sequence offsets with another band"
    first, last = next((literal.tensors for literal in literals if literal.kind.is_padding), (None, None))
    return Term(lo, hi + 1 if hi < UNBOUNDED else UNBOUNDED, start, end, off, first, last)


def typed(term: Term) -> Term:
    """The term with the type of each of its tensors: a plan does not keep them alive."""
    return Term(*term[:4], *(None if t is None else "*i32" for t in term[4:]))
