"""The schedules of others beside the plan, for a problem on many devices: bytes, balance and predicted time of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise import hardware
from tilewise.distributed.context import ContextPlan, plan
from tilewise.distributed.intervals import Ints
from tilewise.distributed.predict import Floats, Links, Prediction, pair_seconds
from tilewise.distributed.routes import Routes
from tilewise.distributed.shards import excess
from tilewise.distributed.teams import divisors
from tilewise.hardware.spec import DeviceSpec
from tilewise.problem import Problem

SCHEDULES = ("ring", "all-gather", "Ulysses", "2-D", "planned")
"""The names of the rows, in their order."""


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
    """Ring, all-gather, Ulysses (all-to-all over heads), 2-D (heads × sequence) and planned, in this order.

    2-D plans the sequence from the mask too. The last row is what `plan` takes on a GPU: the fastest of the plans.

    Ring and all-gather hold head and tail chunks and move all keys and values, whatever the mask; they skip the work
    that it leaves out.

    problem, lengths, device: as for `plan`.

    >>> for row in tw.distributed.compare(problem, 64, "h200"):
    ...     print(row.name, row.seconds)
    """
    spec = hardware.device(device)
    own = plan(problem, lengths=lengths, ranks=ranks, device=spec, heads=1)
    usual = plan(problem, lengths=lengths, ranks=ranks, device=spec, shards="head_tail", heads=1)
    if all(np.array_equal(*pair) for pair in _bounds(usual, own)):
        usual = own
    area = _areas(usual.routes)
    ulysses, two_dimensional = _by_heads(problem, ranks, spec, lengths)
    planned = [_row("planned", own), replace(ulysses, name="planned"), replace(two_dimensional, name="planned")]
    best = min((row for row in planned if row.runs), key=lambda row: row.seconds or 0.0)
    return _ring(usual, area, spec), _all_gather(usual, area, spec), ulysses, two_dimensional, best


def _bounds(a: ContextPlan, b: ContextPlan) -> list[tuple[Ints, Ints]]:
    return [(a.shards.bounds, b.shards.bounds), (a.shards.rank, b.shards.rank)]


def _areas(found: Routes) -> Floats:
    """[ranks, ranks]: pairs of one rank's queries with another's keys."""
    ranks = found.shards.ranks
    flat = np.bincount(found.q_rank * ranks + found.k_rank, found.parts.area, ranks * ranks)
    return np.asarray(flat.reshape(ranks, ranks))


def _row(name: str, own: ContextPlan, note: str = "") -> Row:
    passes = [own.predict(backward=backward) for backward in (False, True)]
    sent = [max(own.bytes_sent(rank, backward=backward) for rank in range(own.ranks)) for backward in (False, True)]
    return Row.of(name, note or f"{own.remote_stages} remote stage{'s' * (own.remote_stages > 1)}", own.imbalance, sent, passes)


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
    """Seconds in which every rank sends so many bytes to the next one, which may be in another node."""
    if ranks == 1:
        return 0.0
    per_byte, latency = links.own if ranks <= links.node else max(links.own, links.network)
    return size * per_byte + latency


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


def _by_heads(problem: Problem, ranks: int, spec: DeviceSpec, lengths: Any) -> tuple[Row, Row]:
    """All heads over all ranks, and the best division of the ranks into heads × sequence."""
    shares = divisors(problem, ranks)
    names = f"{problem.heads} and {problem.kv_heads} heads"
    rows = {}
    for share in shares[1:]:
        found = plan(problem, lengths=lengths, ranks=ranks, device=spec, heads=share)
        if share == ranks:
            rows[share] = _row("Ulysses", found, f"{problem.heads // ranks} heads a rank")
        else:
            rows[share] = _row("2-D", found, f"heads over {share}, sequence over {ranks // share}")
    ulysses = rows.pop(ranks, Row("Ulysses", f"{names} are no multiples of {ranks} ranks"))
    if not rows:
        return ulysses, Row("2-D", f"{names} have no divisor of {ranks} ranks between 1 and these")
    return ulysses, min(rows.values(), key=lambda row: row.seconds or 0.0)
