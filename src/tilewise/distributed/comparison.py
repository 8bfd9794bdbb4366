"""The schedules of others beside the plan, for a problem on many devices: bytes, balance and predicted time of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise import hardware
from tilewise.distributed.context import ContextPlan, plan
from tilewise.distributed.intervals import Ints
from tilewise.distributed.predict import Floats, Links, Prediction, pair_seconds, predicted
from tilewise.distributed.routes import Routes
from tilewise.distributed.schedule import RowBytes
from tilewise.distributed.shards import excess
from tilewise.hardware.spec import DeviceSpec
from tilewise.problem import Problem

SCHEDULES = ("ring", "all-gather", "Ulysses", "2-D", "planned")


@dataclass(frozen=True)
class Row:
    """One schedule. Bytes are those that the busiest rank sends; seconds those of the slowest rank, both for one layer."""

    name: str
    note: str
    """How it is set up, or why it cannot run; then there are no figures."""
    imbalance: float | None = None
    bytes_forward: int | None = None
    bytes_backward: int | None = None
    forward: Prediction | None = None
    backward: Prediction | None = None

    @classmethod
    def of(cls, name: str, note: str, imbalance: float, sent: list[int], passes: list[Prediction]) -> Row:
        """A schedule that runs; bytes and predictions are of the forward and the backward pass."""
        return cls(name, note, imbalance, sent[0], sent[1], passes[0], passes[1])

    @property
    def runs(self) -> bool:
        return self.forward is not None

    @property
    def seconds(self) -> float | None:
        """Forward and backward."""
        return None if self.forward is None or self.backward is None else self.forward.seconds + self.backward.seconds

    @property
    def exposed_seconds(self) -> float | None:
        """Of them, what communication adds."""
        if self.forward is None or self.backward is None:
            return None
        return self.forward.exposed_seconds + self.backward.exposed_seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "note": self.note,
            "bytes_forward": self.bytes_forward,
            "bytes_backward": self.bytes_backward,
            "imbalance": self.imbalance,
            "seconds": self.seconds,
            "exposed_seconds": self.exposed_seconds,
        }


def compare(
    problem: Problem, ranks: int, device: str | DeviceSpec | None = None, *, lengths: Any = None
) -> tuple[Row, ...]:
    """Ring, all-gather, Ulysses (all-to-all over heads), 2-D (heads × sequence) and the plan, in this order.

    problem, lengths, device: as for `plan`. Ring and all-gather hold head and tail chunks and move all keys and values,
    whatever the mask; they skip the work that it leaves out.

    >>> for row in tw.distributed.compare(problem, 64, "h200"):
    ...     print(row.name, row.seconds)
    """
    spec = hardware.device(device)
    own = plan(problem, lengths=lengths, ranks=ranks, device=spec)
    usual = plan(problem, lengths=lengths, ranks=ranks, device=spec, shards="head_tail")
    if all(np.array_equal(*pair) for pair in _bounds(usual, own)):
        usual = own
    area = _areas(usual.routes)
    table = {
        "ring": _ring(usual, area, spec),
        "all-gather": _all_gather(usual, area, spec),
        "Ulysses": _ulysses(own, spec, ranks),
        "2-D": _two_dimensional(own, spec),
        "planned": _planned(own, spec),
    }
    return tuple(table[name] for name in SCHEDULES)


def _bounds(a: ContextPlan, b: ContextPlan) -> list[tuple[Ints, Ints]]:
    return [(a.shards.bounds, b.shards.bounds), (a.shards.rank, b.shards.rank)]


def _areas(found: Routes) -> Floats:
    """[ranks, ranks]: pairs of one rank's queries with another's keys."""
    ranks = found.shards.ranks
    flat = np.bincount(found.q_rank * ranks + found.k_rank, found.parts.area, ranks * ranks)
    return np.asarray(flat.reshape(ranks, ranks))


def _planned(own: ContextPlan, spec: DeviceSpec) -> Row:
    passes = [predicted(own.routes, own.problem, spec, own.remote_stages, backward=b) for b in (False, True)]
    sent = [int(own.routes.sent(own.row_bytes, backward=b).max()) for b in (False, True)]
    note = f"{own.remote_stages} remote stage{'s' * (own.remote_stages > 1)}"
    return Row.of("planned", note, own.imbalance, sent, passes)


def _ring(usual: ContextPlan, area: Floats, spec: DeviceSpec) -> Row:
    """Keys and values go round; in step s a rank computes with those of the rank s places before. All wait for the slowest."""
    ranks, tokens = usual.ranks, int(usual.shards.tokens.max())
    step = np.arange(ranks)
    rotated = area[step[None, :], (step[None, :] - step[:, None]) % ranks]  # [steps, ranks]
    passes, sent, row = [], [], usual.row_bytes
    for backward in (False, True):
        seconds, launch = pair_seconds(usual.problem, spec, tokens)[backward]
        size = tokens * (row.kv + (row.dkv if backward else 0))
        compute = rotated * seconds + launch * (rotated > 0)
        slowest = np.broadcast_to(compute.max(axis=1, keepdims=True), compute.shape)
        hop = _neighbours(Links(spec, ranks), ranks, size)
        arrive = np.zeros_like(compute)
        arrive[1:] = np.maximum(hop - slowest[:-1], 0)  # a message leaves when the one before it is there
        passes.append(Prediction(slowest, arrive, np.zeros_like(compute), overlaps=False))
        sent.append(size * (ranks - 1))
    return Row.of("ring", "head and tail chunks", excess(area.sum(axis=1)), sent, passes)


def _neighbours(links: Links, ranks: int, size: int) -> float:
    at = np.arange(ranks)
    if ranks == 1:
        return 0.0
    return float(links.seconds(at * 0, 1, at, (at + 1) % ranks, np.full(ranks, size)).max())


def _all_gather(usual: ContextPlan, area: Floats, spec: DeviceSpec) -> Row:
    """All keys and values first, then all work; backward the same, and a reduce-scatter of their gradients."""
    ranks, row, tokens = usual.ranks, usual.row_bytes, int(usual.shards.tokens.max())
    everyone = np.arange(ranks)
    passes, sent = [], []
    for backward in (False, True):
        seconds, launch = pair_seconds(usual.problem, spec, tokens)[backward]
        compute = (area.sum(axis=1) * seconds + launch)[None]
        gather = _to_all(Links(spec, ranks), everyone, tokens * row.kv)
        scatter = _to_all(Links(spec, ranks), everyone, tokens * row.dkv) if backward else 0.0
        passes.append(Prediction(compute, np.full((1, ranks), gather), np.full((1, ranks), scatter), overlaps=False))
        sent.append(tokens * (row.kv + (row.dkv if backward else 0)) * (ranks - 1))
    return Row.of("all-gather", "head and tail chunks", excess(area.sum(axis=1)), sent, passes)


def _to_all(links: Links, group: Ints, size: float) -> float:
    """Seconds in which every rank of a group sends `size` bytes to every other one."""
    others = group[1:]
    if not len(others):
        return 0.0
    near = int((others // links.node == group[0] // links.node).sum())
    parts = [
        count * size * per_byte + latency * (count > 0)
        for count, (per_byte, latency) in ((near, links.own), (len(others) - near, links.network))
    ]
    return max(parts)


def _ulysses(own: ContextPlan, spec: DeviceSpec, ranks: int) -> Row:
    problem = own.problem
    if problem.heads % ranks or problem.kv_heads % ranks:
        return Row("Ulysses", f"{problem.heads} and {problem.kv_heads} heads are no multiples of {ranks} ranks")
    return _by_heads(own, spec, ranks, "Ulysses", f"{problem.heads // ranks} heads a rank")


def _two_dimensional(own: ContextPlan, spec: DeviceSpec) -> Row:
    """Heads over neighbours, the plan over the rest: the best division."""
    problem, ranks = own.problem, own.ranks
    shares = [u for u in range(2, ranks) if not (ranks % u or problem.heads % u or problem.kv_heads % u)]
    rows = [_by_heads(own, spec, u, "2-D", f"heads over {u}, sequence over {ranks // u}") for u in shares]
    if not rows:
        return Row("2-D", f"{problem.heads} and {problem.kv_heads} heads have no divisor of {ranks} ranks but 1")
    return min(rows, key=lambda row: row.seconds or 0.0)


def _by_heads(own: ContextPlan, spec: DeviceSpec, share: int, name: str, note: str) -> Row:
    """An all-to-all among `share` neighbours before and after; each then has a part of the heads of all their tokens."""
    problem, ranks = own.problem, own.ranks
    part = replace(problem, heads=problem.heads // share, kv_heads=problem.kv_heads // share)
    strided = spec.with_figures("derived", node_devices=max((spec.node_devices or ranks) // share, 1))
    inner = plan(part, lengths=own.lengths, ranks=ranks // share, device=strided)
    row, links, group = RowBytes.of(problem), Links(spec, ranks), np.arange(share)
    tokens = -(-own.tokens // ranks)
    passes, sent = [], []
    for backward in (False, True):
        found = predicted(inner.routes, part, strided, inner.remote_stages, backward=backward)
        to, back = (row.q + row.kv + row.dout, row.dq + row.dkv) if backward else (row.q + row.kv, row.out)
        ends = [_to_all(links, group, tokens * size / share) for size in (to, back)]
        passes.append(_framed(found, *ends))
        sent.append(
            int(inner.routes.sent(inner.row_bytes, backward=backward).max())
            + tokens * (to + back) * (share - 1) // share
        )
    return Row.of(name, note, inner.imbalance, sent, passes)


def _framed(found: Prediction, before: float, after: float) -> Prediction:
    """A prediction with messages before and after all of it."""
    first, last = np.full((1, found.compute.shape[1]), before), np.full((1, found.compute.shape[1]), after)
    nothing = np.zeros_like(first)
    ends = found.ends[None]
    whole = np.concatenate([nothing, found.compute.sum(axis=0)[None], nothing])
    exposed = np.concatenate([first, ends - found.compute.sum(axis=0)[None], last])
    return Prediction(whole, exposed, np.zeros_like(whole), overlaps=False)
