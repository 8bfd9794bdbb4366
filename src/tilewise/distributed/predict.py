"""How long a plan takes on machines that may be others: compute by the IO model, communication by the links of the device.

The model: a rank's kernels take its share of the pairs at the rate of one long call on one device. Messages of a stage travel
while the stage before computes; a rank waits for what has not arrived, and at the end for results that return. On a CPU
the cores that compute also copy, so nothing overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tilewise.diagnostics.plan import plan as kernel_plan
from tilewise.distributed.intervals import Ints
from tilewise.distributed.routes import Routes
from tilewise.distributed.schedule import RowBytes
from tilewise.distributed.stages import stage_of
from tilewise.errors import PlanError
from tilewise.hardware.spec import DeviceSpec
from tilewise.masks import Full
from tilewise.model.evaluation import AROUND, EVALUATED
from tilewise.problem import Problem

Floats = np.ndarray[Any, np.dtype[np.float64]]
REFERENCE = (1024, 65536)
"""Tokens of the call whose rate counts: those of a rank, within these."""
STAGES = (1, 2, 4, 8)
"""Remote stages that are tried."""
GRAIN, UNFILLED = 128, 0.5
"""Rows of a work tile, and how much of the last round of them stays empty in a call: more stages, whose calls are more and
smaller, cost time too. On an H200 calls of 8 ranks took 10 to 30 µs more than their tiles forward and 50 to 85 backward, where
this says 27 and 75."""
WORTH, LONGER = 1.001, 1.03
"""Times the shortest: fewer stages are taken up to that, and none that are longer than the last if rounds are left out."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """Seconds of one pass of a plan, by stage and rank.

    compute, arrive: [stages, ranks]: the kernels, and the messages that they wait for. back: the messages after them.
    overlaps: whether messages travel while kernels run.
    """

    compute: Floats
    arrive: Floats
    back: Floats
    overlaps: bool = True

    @cached_property
    def ends(self) -> Floats:
        """When each rank is done."""
        if not self.overlaps:
            return np.asarray((self.compute + self.arrive + self.back).sum(axis=0))
        computed, link, back = np.zeros((3, self.compute.shape[1]))
        for compute, arrive, returned in zip(self.compute, self.arrive, self.back, strict=True):
            link = link + arrive
            computed = np.maximum(computed, link) + compute
            back = np.maximum(back, np.where(returned > 0, computed, 0)) + returned
        return np.asarray(np.maximum(computed, back))

    @property
    def seconds(self) -> float:
        """The slowest rank's time."""
        return float(self.ends.max(initial=0.0))

    @property
    def compute_seconds(self) -> float:
        """The kernels of the most loaded rank."""
        return float(self.compute.sum(axis=0).max(initial=0.0))

    @property
    def exposed_seconds(self) -> float:
        """By how much communication makes it longer."""
        return max(self.seconds - self.compute_seconds, 0.0)

    def to_dict(self) -> dict[str, float]:
        names = ("seconds", "compute_seconds", "exposed_seconds")
        return {name: getattr(self, name) for name in names}


class Links:
    """The time of messages between ranks, which fill nodes one after another."""

    def __init__(self, spec: DeviceSpec, ranks: int) -> None:
        if not spec.link_bandwidth:
            raise PlanError(f"device: no links are known of {spec.name}; give it link_bandwidth with_figures(...)")
        self.ranks, self.node = ranks, spec.node_devices or ranks
        self.own = 1 / spec.link_bandwidth, spec.link_latency_s
        self.network = (1 / spec.network_bandwidth, spec.network_latency_s) if spec.network_bandwidth else self.own

    def seconds(self, near: Floats, far: Floats) -> Floats:
        """From bytes each way, [2, stages, ranks], within nodes and between them: as long as the fuller way takes."""
        times = []
        for size, (per_byte, latency) in ((near.max(axis=0), self.own), (far.max(axis=0), self.network)):
            times.append(size * per_byte + latency * (size > 0))
        return np.asarray(np.maximum(*times))


class Flows:
    """Work and tokens by how far apart their ranks are: [distance, rank]. Stages are runs of distances."""

    def __init__(self, found: Routes, node: int) -> None:
        self.ranks = found.shards.ranks
        sender = np.where(found.by_query, found.q_rank, found.k_rank)
        self.work = self._table(sender, found.rank, found.rank, found.parts.area)
        self.moved: dict[str, Floats] = {}
        for what, (moved, source) in (("kv", found.keys), ("q", found.queries)):
            near = source // node == moved.group // node
            ends = (source, moved.group)
            self.moved[what] = np.array(
                [[self._table(*ends, end, moved.sizes * keep) for end in ends] for keep in (near, ~near)]
            )

    def _table(self, source: Ints, target: Ints, rank: Ints, size: Ints) -> Floats:
        flat = np.bincount((source - target) % self.ranks * self.ranks + rank, size, self.ranks**2)
        return np.asarray(flat.reshape(self.ranks, self.ranks))

    def staged(self, table: Floats, remote: int) -> Floats:
        """[…, distances, ranks] as [… , stages, ranks]; own work is stage 0."""
        distance = np.arange(self.ranks)
        stage = np.where(distance, stage_of(distance, distance * 0, self.ranks, remote), 0)
        found = np.zeros((*table.shape[:-2], remote + 1, self.ranks))
        there, starts = np.unique(stage, return_index=True)
        found[..., there, :] = np.add.reduceat(table, starts, axis=-2)
        return found


def predicted(found: Routes, problem: Problem, spec: DeviceSpec, remote: int, *, backward: bool = False) -> Prediction:
    """The time of one pass with given routes and so many remote stages."""
    ranks, row = found.shards.ranks, RowBytes.of(problem)
    links = Links(spec, ranks)
    flows: Flows | None = found.memory.get(links.node)
    if flows is None:
        flows = found.memory[links.node] = Flows(found, links.node)
    areas = flows.staged(flows.work, remote)
    seconds, launch = pair_seconds(problem, spec, int(found.shards.tokens.max(initial=1)))[backward]
    compute = areas * seconds + launch * (areas > 0)
    arrive, back = np.zeros((2, remote + 1, ranks))
    for what, table in flows.moved.items():
        there, home = _costs(row, what, backward)
        near, far = flows.staged(table, remote)
        arrive += links.seconds(near * there, far * there)
        if home:
            back += links.seconds(near * home, far * home)
    return Prediction(compute, arrive, back, overlaps=spec.is_gpu)


def _costs(row: RowBytes, what: str, backward: bool) -> tuple[int, int]:
    """Bytes of a token that travels, there and back, in one pass."""
    if what == "kv":
        return row.sent("kv", backward=backward), row.returned("kv", backward=backward)
    return row.sent("q", backward=backward), row.sent("out", backward=backward)


@lru_cache(maxsize=256)
def _rates(problem: Problem, spec: DeviceSpec) -> tuple[tuple[float, float], tuple[float, float]]:
    found = []
    for passes in (("forward",), ("backward", "backward_dkdv", "backward_dq")):
        first = kernel_plan(problem, spec, pass_="auto" if passes[0] == "forward" else _backward(problem, spec))
        names = [tile.pass_ for tile in first.passes if tile.pass_ in passes] or [first.tile.pass_]
        seconds = sum(kernel_plan(problem, spec, pass_=name).seconds for name in names if name in EVALUATED)
        pairs = problem.batch * problem.seqlen_q * problem.seqlen_k
        around = sum(tile.pass_ in AROUND for tile in first.passes) if passes[0] == "backward" else 0
        found.append((seconds / pairs, spec.launch_s * (len(names) + around)))
    return found[0], found[1]


def _backward(problem: Problem, spec: DeviceSpec) -> str:
    """A kernel of the gradients that whoever serves them has."""
    tiles = [tile.pass_ for tile in kernel_plan(problem, spec).passes]
    return next((name for name in ("backward", "backward_dkdv") if name in tiles), "backward")


def pair_seconds(problem: Problem, spec: DeviceSpec, tokens: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds for each (query, key) pair of one head's mask, and for each launch: of the forward and of the gradients."""
    alone = replace(spec, node_devices=0)  # teams see other nodes, but the same device
    return _rates(reference_call(problem, spec, tokens), alone)


def reference_call(problem: Problem, spec: DeviceSpec, tokens: int) -> Problem:
    """The call whose rate counts for a rank of so many tokens."""
    length = 2 ** int(np.clip(np.log2(max(tokens, 1)), *np.log2(REFERENCE)))
    return replace(
        problem,
        mask=Full(),
        batch=1,
        seqlen_q=length,
        seqlen_k=length,
        varlen=False,
        bias=None,
        needs_grad=True,
        tile=(),
        device="cuda" if spec.is_gpu else "cpu",
    )


def best_stages(found: Routes, problem: Problem, spec: DeviceSpec) -> int:
    """The fewest remote stages with about the shortest forward and backward pass; 1 where nothing travels."""
    if found.own.all():
        return 1
    tries = [n for n in STAGES if n < found.shards.ranks]
    if not spec.is_gpu:
        return 1  # more stages are more messages, and nothing overlaps
    empty = unfilled_seconds(found, problem, spec)
    plain: dict[int, float] = {}
    times: dict[int, float] = {}
    for n in tries or [1]:
        passes = [predicted(found, problem, spec, n, backward=backward) for backward in (False, True)]
        plain[n] = sum(one.seconds for one in passes)
        times[n] = plain[n] + empty * int((passes[0].compute > 0).sum(axis=0).max())  # stages of the rank with most
    times = {n: took for n, took in times.items() if plain[n] <= LONGER * min(plain.values())}
    return min(n for n in times if times[n] <= WORTH * min(times.values()))


def unfilled_seconds(found: Routes, problem: Problem, spec: DeviceSpec, remote: int = 1) -> float:
    """What calls of so many remote stages take beside their work tiles, in both passes; not on CPUs, which have no rounds.

    A tile's rows see as many keys as rows of the mask do, or half of a rank's.
    """
    if not spec.is_gpu or found.own.all():
        return 0.0
    tokens, seen = found.shards.tokens, float(found.areas.sum())
    keys = min(seen / (problem.batch * float(tokens.sum())), float(tokens.max()) / 2)
    both = sum(seconds for seconds, _ in pair_seconds(problem, spec, int(tokens.max())))
    return remote * UNFILLED * GRAIN * keys * both * spec.units / problem.heads
