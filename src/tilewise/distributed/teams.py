"""What it takes that ranks share heads, planned: teams of neighbours exchange tokens for heads before attention, and back.

The sequence is planned over the teams, as over so many ranks. With one team nothing else travels (Ulysses); with more it is
two-dimensional.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilewise.distributed.intervals import Ints
from tilewise.distributed.predict import Floats, Links, Prediction
from tilewise.distributed.schedule import RowBytes
from tilewise.distributed.shards import Shards, partition
from tilewise.hardware.spec import DeviceSpec
from tilewise.problem import ITEMSIZE, Problem


def divisors(problem: Problem, ranks: int) -> list[int]:
    """How many ranks may share the heads, 1 first. A bias, or a mask that differs between heads, keeps them together."""
    per_head = any(
        literal.kind.per_head and tensor.shape[1] > 1
        for term in problem.program.terms()
        for literal in term
        for tensor in literal.tensors
    )
    if problem.bias is not None or per_head or not problem.kv_heads:
        return [1]
    return [u for u in range(1, ranks + 1) if not (ranks % u or problem.heads % u or problem.kv_heads % u)]


def divided(teams: Shards, heads: int) -> Shards:
    """The shards of ranks from those of teams: each team's tokens in equal parts, in their order."""
    if heads == 1:
        return teams
    cuts, rank = [0], []
    size, taken = teams.tokens, np.zeros(teams.ranks, np.int64)
    for team, start, end in zip(teams.rank.tolist(), teams.bounds[:-1].tolist(), teams.bounds[1:].tolist(), strict=True):
        while start < end:
            own = int(taken[team] * heads // max(size[team], 1))
            own = next(j for j in range(own, heads) if (j + 1) * size[team] // heads > taken[team])
            took = min(end - start, int((own + 1) * size[team] // heads - taken[team]))
            start, taken[team] = start + took, taken[team] + took
            cuts.append(start)
            rank.append(team * heads + own)
    return partition(teams.lengths, teams.ranks * heads, np.array(cuts), np.array(rank, np.int64))


class SwapBytes(NamedTuple):
    """Bytes of a token, all heads together, in the exchanges of a pass: before attention and after it."""

    before: int
    after: int

    @classmethod
    def of(cls, problem: Problem, *, backward: bool = False) -> SwapBytes:
        """q, k and v, then out and (if it is asked for) lse; backward their gradients, then dq, dk and dv."""
        row, size = RowBytes.of(problem), ITEMSIZE[problem.dtype]
        rows = problem.heads * (1 if problem.varlen else problem.batch)
        out = rows * (problem.head_dim_v * size + (ITEMSIZE[problem.arithmetic] if problem.needs_lse else 0))
        return cls(out, row.q + row.kv) if backward else cls(row.q + row.kv, out)


def swap_bytes(shards: Shards, heads: int, problem: Problem, *, backward: bool = False) -> Ints:
    """Bytes that each rank sends in the exchanges of a pass."""
    size, own = SwapBytes.of(problem, backward=backward), shards.tokens
    together = np.repeat(own.reshape(-1, heads).sum(axis=1), heads)
    return np.asarray(own * (heads - 1) * size.before // heads + (together - own) * size.after // heads)


def framed(found: Prediction, spec: DeviceSpec, shards: Shards, heads: int, swap: SwapBytes) -> Prediction:
    """The prediction of the teams with the exchanges before and after it."""
    links, tokens = Links(spec, shards.ranks), int(shards.tokens.max(initial=0))
    ends = [_to_all(links, heads, tokens * size / heads) for size in swap]
    compute = np.repeat(found.compute.sum(axis=0), heads)[None]
    whole = np.repeat(found.ends, heads)[None]
    nothing = np.zeros_like(compute)
    exposed: Floats = np.concatenate([nothing + ends[0], whole - compute, nothing + ends[1]])
    return Prediction(np.concatenate([nothing, compute, nothing]), exposed, np.zeros_like(exposed), overlaps=False)


def _to_all(links: Links, heads: int, size: float) -> float:
    """Seconds in which each of so many neighbours sends `size` bytes to every other one."""
    near = min(heads, links.node) - 1
    ways = ((near, links.own), (heads - 1 - near, links.network))
    return max(count * size * per_byte + latency * (count > 0) for count, (per_byte, latency) in ways)
