"""The least that can travel between two ranks: of each cell of the mask that both have a side of, its queries or its keys.

That is a vertex cover of least weight in a graph of queries and keys, and a minimum cut. Many such graphs are cut at once: each
step finds one augmenting path in every one of them, in a few passes of numpy over all of their edges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tilewise.distributed.intervals import Ints

Bools = np.ndarray[Any, np.dtype[np.bool_]]
MOST_STEPS = 400
END = -1
"""In the place of an edge: this node is reached from the source."""


class Graphs(NamedTuple):
    """Graphs without common nodes: edges as (query node, key node), and what it costs to move each node."""

    query: Ints
    key: Ints
    query_cost: Ints
    key_cost: Ints
    graph: Ints
    """Of each key node."""


class _Reached(NamedTuple):
    """The nodes to which more can flow, and the edge by which it comes there."""

    queries: Bools
    keys: Bools
    to_query: Ints
    to_key: Ints
    open: Ints
    """Of each graph a key node from which the sink is reached, by a shortest path, or END."""


def moved_nodes(graphs: Graphs) -> tuple[Bools, Bools] | None:
    """The edges whose query travels, and those whose key does, in a cover of least cost; None if that takes too many steps."""
    flow = np.zeros(len(graphs.query), np.int64)
    left = graphs.query_cost.copy(), graphs.key_cost.copy()
    for _ in range(MOST_STEPS):
        found = _reach(graphs, flow, left)
        some = found.open[found.open != END]
        if not len(some):
            return np.asarray(~found.queries[graphs.query]), np.asarray(found.keys[graphs.key])
        _augment(graphs, flow, left, found, some)
    return None


def _reach(graphs: Graphs, flow: Ints, left: tuple[Ints, Ints]) -> _Reached:
    """Breadth first from the source, all graphs in step."""
    query, key = graphs.query, graphs.key
    queries, keys = left[0] > 0, np.zeros(len(left[1]), bool)
    to_query, to_key = np.full(len(queries), END), np.full(len(keys), END)
    open_ = np.full(int(graphs.graph.max(initial=-1)) + 1, END)
    while True:
        new = np.flatnonzero(queries[query] & ~keys[key])
        to_key[key[new]] = new
        keys[key[new]] = True
        ends = np.unique(key[new])
        ends = ends[(left[1][ends] > 0) & (open_[graphs.graph[ends]] == END)]
        open_[graphs.graph[ends]] = ends
        back = np.flatnonzero(keys[key] & (flow > 0) & ~queries[query])
        if not len(back):
            return _Reached(queries, keys, to_query, to_key, open_)
        to_query[query[back]] = back
        queries[query[back]] = True


def _augment(graphs: Graphs, flow: Ints, left: tuple[Ints, Ints], found: _Reached, ends: Ints) -> None:
    """Send as much as a path of each graph takes, from the source to these key nodes."""
    size, at = left[1][ends].copy(), ends
    path: list[tuple[Ints, Ints, Ints]] = []  # which graphs, and their edges there and back
    which = np.arange(len(ends))
    while len(which):
        there = found.to_key[at]
        start = graphs.query[there]
        back = found.to_query[start]
        first = back == END
        size[which[first]] = np.minimum(size[which[first]], left[0][start[first]])
        size[which[~first]] = np.minimum(size[which[~first]], flow[back[~first]])
        path.append((which, there, back))
        which, at = which[~first], graphs.key[back[~first]]
    left[1][ends] -= size
    for which, there, back in path:
        flow[there] += size[which]
        first = back == END
        flow[back[~first]] -= size[which[~first]]
        left[0][graphs.query[there[first]]] -= size[which[first]]
