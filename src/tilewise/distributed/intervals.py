"""Arithmetic on sorted intervals of tokens, as arrays: every function is a few passes of numpy over them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Intervals(NamedTuple):
    """[first, past) of tokens, each in a group: sorted by group, then first; disjoint and apart within a group."""

    group: Ints
    first: Ints
    past: Ints

    @classmethod
    def none(cls) -> Intervals:
        return cls(*np.zeros((3, 0), np.int64))

    @property
    def sizes(self) -> Ints:
        return self.past - self.first

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    def where(self, keep: Any) -> Intervals:
        return Intervals(self.group[keep], self.first[keep], self.past[keep])


def joined(group: Ints, first: Ints, past: Ints) -> Intervals:
    """Any intervals, none of them empty, in order; those of a group that overlap or touch become one."""
    order = np.lexsort((first, group))
    group, first, past = group[order], first[order], past[order]
    if len(group) < 2:
        return Intervals(group, first, past)
    stretch = int(past.max()) + 1  # one running maximum serves all groups, each on a stretch of its own
    reach = np.maximum.accumulate(past + group * stretch) - group * stretch
    begin = np.flatnonzero(np.concatenate([[True], (group[1:] != group[:-1]) | (first[1:] > reach[:-1])]))
    return Intervals(group[begin], first[begin], np.maximum.reduceat(past, begin))


def containing(whole: Intervals, group: Ints, at: Ints) -> Ints:
    """The number of the interval that holds each token of its group."""
    stretch = int(whole.past.max(initial=0)) + 1
    return np.asarray(np.searchsorted(whole.group * stretch + whole.first, group * stretch + at, side="right") - 1)


def pieces(intervals: Intervals, cuts: Ints) -> tuple[Intervals, Ints, Ints]:
    """Intervals cut where `cuts` lie (sorted, from 0 to past all of them): the pieces, the number of the interval each is of
    and the number of the cut it starts at or after."""
    low = np.searchsorted(cuts, intervals.first, side="right") - 1
    high = np.searchsorted(cuts, intervals.past, side="left")
    count = high - low
    source = np.repeat(np.arange(len(count)), count)
    cut = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count) + low[source]
    first = np.maximum(intervals.first[source], cuts[cut])
    past = np.minimum(intervals.past[source], cuts[cut + 1])
    return Intervals(intervals.group[source], first, past), source, cut
