"""`tilewise.distributed.plan`: which tokens each rank holds, what it computes and what travels, from the problem alone.

torch is imported only where tensors are handled, so that any number of ranks can be simulated without it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise import hardware
from tilewise.display import Shown
from tilewise.distributed.arguments import given_shards, group_ranks, packed_lengths, whole_problem
from tilewise.distributed.choices import UNEVEN
from tilewise.distributed.coverage import Coverage, coverage
from tilewise.distributed.intervals import Ints
from tilewise.distributed.least import LeastBytes, least_bytes, of_rows, total
from tilewise.distributed.predict import Prediction, best_stages, predicted, unfilled_seconds
from tilewise.distributed.routes import Routes, routes
from tilewise.distributed.rows import OF_ROWS
from tilewise.distributed.schedule import Chunk, RowBytes, Stage
from tilewise.distributed.shards import SHARDS, Shards, candidates, excess, partition
from tilewise.distributed.stages import stages
from tilewise.distributed.teams import SwapBytes, divided, divisors, framed, swap_bytes
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError, PlanError
from tilewise.hardware.spec import DeviceSpec
from tilewise.problem import Problem

if TYPE_CHECKING:
    import torch

GIVEN = "given"
"""The name of shards that are those of another plan."""


@dataclass(frozen=True, eq=False)
class ContextPlan(Shown):
    """What `plan` returns: the same on every rank but for `rank`, `group`.

    problem: with the lengths of the whole sequences.
    lengths: of the packed sequences (T, H, D); None for a batch (B, H, S, D), whose entries are alike.
    rank, ranks: this rank and how many there are.
    group: the process group; None where the plan is only simulated.
    """

    problem: Problem
    lengths: tuple[int, ...] | None
    rank: int
    ranks: int
    shards: Shards
    coverage: Coverage
    kind: str = "balanced"
    """The name of the shards."""
    device: str | DeviceSpec | None = None
    group: Any = None
    heads: int = 1
    """So many neighbours, a team, share the heads; the teams share the sequence. 1: heads are not shared."""
    memory: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What execution keeps of its work on this plan."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Who computes and sends what, in order; see `schedule`. Where heads are shared, its ranks are the teams."""
        return stages(self.routes, self.remote_stages) if self.heads == 1 else self.of_teams.stages

    @cached_property
    def of_teams(self) -> ContextPlan:
        """Where heads are shared: the plan of a member's part of the heads, whose ranks are the teams."""
        size, problem, shards = self.heads, self.problem, self.shards
        if self.ranks % size or problem.heads % size or problem.kv_heads % size:
            raise PlanError(
                f"plan: {size} ranks cannot share {problem.heads} query and {problem.kv_heads} key heads over "
                f"{self.ranks} ranks; all three must be multiples of it"
            )
        return replace(
            self,
            problem=replace(problem, heads=problem.heads // size, kv_heads=problem.kv_heads // size),
            rank=self.rank // size,
            ranks=self.ranks // size,
            shards=partition(shards.lengths, self.ranks // size, shards.bounds, shards.rank // size),
            device=strided(catalogued(problem, self.device), size),
            heads=1,
        )

    def as_rank(self, rank: int) -> ContextPlan:
        """The plan as another rank has it; nothing is planned again."""
        found = replace(self, rank=self._rank(rank))
        vars(found).update(stages=self.stages, routes=self.routes, chunks=self.chunks)
        if self.heads > 1:
            vars(found)["of_teams"] = self.of_teams.as_rank(rank // self.heads)
        return found

    @cached_property
    def remote_stages(self) -> int:
        """In how many stages tokens of other ranks arrive: what is predicted to be fastest.

        The same on all ranks, so nothing of the live machine is asked: without a `device`, an H200 or a CPU of the catalogue.
        """
        if self.heads > 1:
            return self.of_teams.remote_stages
        return best_stages(self.routes, self.problem, catalogued(self.problem, self.device))

    def predict(self, *, backward: bool = False) -> Prediction:
        """Seconds of one pass on `device`: compute, and how much of the communication is exposed."""
        spec = hardware.device(self.device)
        if self.heads == 1:
            return predicted(self.routes, self.problem, spec, self.remote_stages, backward=backward)
        problem, swap = self.of_teams.problem, SwapBytes.of(self.problem, backward=backward)
        found = predicted(self.routes, problem, strided(spec, self.heads), self.remote_stages, backward=backward)
        return framed(found, spec, self.shards, self.heads, swap)

    @cached_property
    def routes(self) -> Routes:
        """What travels: keys or queries, for each part of the mask."""
        if self.heads > 1:
            return self.of_teams.routes
        settings = {"even": self.kind in ("balanced", GIVEN), "keys_only": self.problem.bias is not None}
        return routes(self.shards, self.coverage, self.row_bytes, **settings)

    @cached_property
    def chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        """The tokens of each rank, in the order of its shard."""
        return self.shards.of_rank()

    @cached_property
    def row_bytes(self) -> RowBytes:
        """Bytes of a token on the wire."""
        return RowBytes.of(self.problem)

    @property
    def tokens(self) -> int:
        """Of all sequences together."""
        return int(self.shards.bounds[-1])

    def local_tokens(self, rank: int | None = None) -> int:
        """Tokens that a rank (None: this one) holds."""
        return int(self.shards.tokens[self._rank(rank)])

    @cached_property
    def fingerprint(self) -> str:
        """Equal on ranks that planned the same problem with the same shards, mask and routes."""
        shards, problem = self.shards, self.problem
        digest = hashlib.sha256()
        fields = (problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.head_dim, problem.head_dim_v)
        settings = (problem.dtype, problem.scale, problem.softcap, problem.dropout_p, problem.sinks, problem.alibi)
        digest.update(repr((fields, settings, problem.bias, self.lengths, self.ranks, self.heads, self.remote_stages)).encode())
        seen = (side for layer in self.coverage.layers for side in layer)
        for array in (shards.bounds, shards.rank, self.routes.cuts, self.routes.by_query, *seen):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def area(self, rank: int | None = None) -> int:
        """(query, key) pairs that a rank computes: of one head, or of the part that it has of each where heads are shared."""
        return int(self.routes.areas[self._rank(rank) // self.heads]) // self.heads

    @property
    def imbalance(self) -> float:
        """By how much the most loaded rank exceeds the mean, as a part of it."""
        return excess(self.routes.areas)

    def bytes_sent(self, rank: int | None = None, *, backward: bool = False) -> int:
        """Bytes that a rank (None: this one) sends in one pass, exactly."""
        return int(self._sent(backward)[self._rank(rank)])

    def total_bytes(self, *, backward: bool = False) -> int:
        """Bytes that all ranks together send in one pass."""
        return int(self._sent(backward).sum())

    def least_bytes(self) -> LeastBytes:
        """What the ranks send in both passes beside the least that these shards allow, by two bounds.

        >>> plan.least_bytes().of_rows, plan.least_bytes().of_cut
        """
        if self.heads > 1:
            return self.of_teams.least_bytes()
        return least_bytes(self.routes, self.row_bytes, self.coverage)

    def shard(self, x: torch.Tensor, dim: int, rank: int | None = None) -> torch.Tensor:
        """This rank's tokens of a whole tensor, along `dim`. Differentiable: gradients of other ranks' tokens are zero.

        >>> q = plan.shard(q, dim=2)
        """
        import torch

        self._check_side(x, dim, self.tokens, "whole tensor")
        starts = self.shards.starts
        parts = [x.narrow(dim, int(starts[c.sequence]) + c.start, c.tokens) for c in self.chunks[self._rank(rank)]]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def unshard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole tensor, on every rank, from the shard of each, along `dim`. Every rank calls it.

        Differentiable: the gradient is that of the sum of all ranks' losses. Where every rank computes the same loss from the
        whole tensor, divide that by `plan.ranks`.

        >>> out = plan.unshard(out, dim=2)
        """
        from tilewise.distributed.gather import unshard

        self._check_side(x, dim, self.local_tokens(), f"shard of rank {self.rank}")
        return unshard(self, x, dim)

    def token_numbers(self, rank: int | None = None) -> Ints:
        """Where the tokens of a rank's shard stand in the whole tensor."""
        starts = self.shards.starts
        held = [np.arange(c.start, c.end) + starts[c.sequence] for c in self.chunks[self._rank(rank)]]
        return np.concatenate([np.zeros(0, np.int64), *held])

    def positions(self, rank: int | None = None, device: Any = None) -> torch.Tensor:
        """The position of each local token within its sequence, int64, as rotary embeddings want it."""
        import torch

        held = [torch.arange(c.start, c.end, device=device) for c in self.chunks[self._rank(rank)]]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *held])

    def content(self) -> Shown:
        from tilewise.distributed.show import show_plan

        return show_plan(self)

    def shift(self, labels: torch.Tensor, dim: int = -1, ignore_index: int = -100) -> torch.Tensor:
        """For each token of this rank the label of the token after it, whichever rank holds that.

        Where a sequence ends there is no next token: the label is `ignore_index`, which losses leave out.

        labels: integers, along `dim` one for each token of this rank (then every rank calls it, and a few labels travel) or
            one for each token of the whole tensor (then nothing travels).
        dim: where tokens are counted.
        ignore_index: what losses take for no label.

        >>> targets = plan.shift(plan.shard(ids, 1), 1)                       # ids (B, S); targets as many as this rank's
        """
        from tilewise.distributed.labels import shift

        return shift(self, labels, dim, ignore_index)

    def _sent(self, backward: bool) -> Ints:
        found: Ints | None = self.memory.get(("sent", backward))
        if found is None:
            if self.heads == 1:
                found = self.routes.sent(self.row_bytes, backward=backward)
            else:
                found = np.repeat(self.of_teams._sent(backward), self.heads)
                found = found + swap_bytes(self.shards, self.heads, self.problem, backward=backward)
            self.memory["sent", backward] = found
        return found

    def _rank(self, rank: int | None) -> int:
        if rank is None:
            return self.rank
        if not 0 <= rank < self.ranks:
            raise ArgumentError(f"rank: got {rank}, need 0 to {self.ranks - 1}")
        return rank

    def _check_side(self, x: Any, dim: int, want: int, name: str) -> None:
        if not -x.ndim <= dim < x.ndim:
            raise LayoutError(f"dim: got {dim}, the tensor has {x.ndim} sides")
        if x.shape[dim] != want:
            raise LayoutError(f"x: {x.shape[dim]} tokens along dim {dim}, the {name} has {want}; shape {tuple(x.shape)}")


def plan(
    problem: Problem,
    group: Any = None,
    *,
    lengths: Sequence[int] | None = None,
    shards: str | Shards = "balanced",
    ranks: int | None = None,
    device: str | DeviceSpec | None = None,
    heads: int | None = None,
) -> ContextPlan:
    """Plans self-attention over the ranks of a process group from the mask: shards, works and moves.

    problem: the whole problem, made by `Problem.of`; in a packed batch `seqlen` counts the tokens of all sequences.
    group: a process group or a one-dimensional DeviceMesh; None for torch's default group, or with `ranks` for a simulation.
    lengths: of the sequences of a packed batch (T, H, D); None for a batch (B, H, S, D).
    shards: "balanced" (equal tokens, then equal mask area), "contiguous", "head_tail" or "zigzag"; or the `shards` of another
        plan of the same tokens, so that layers with unlike masks divide them alike.
    ranks: how many ranks to simulate, where there is no group.
    device: what times are predicted for, such as "h200"; None for this machine.
    heads: how many neighbours share the heads, by an all-to-all before and after (with all of them: Ulysses); a divisor of the
        ranks and of both numbers of heads. None: on GPUs what is predicted to be fastest, on CPUs 1.

    >>> plan = tw.distributed.plan(problem, ranks=64, device="h200")
    >>> plan.imbalance, plan.total_bytes()
    """
    if not isinstance(shards, Shards) and shards not in SHARDS:
        raise ArgumentError(f"shards: got {shards!r}, need one of {', '.join(SHARDS)}")
    if not isinstance(problem, Problem):
        raise ArgumentTypeError(f"problem: got {type(problem).__name__}, need a Problem; make one with tw.Problem.of(...)")
    group, rank, count = group_ranks(group, ranks)
    sizes = None if lengths is None else packed_lengths(lengths)
    problem = whole_problem(problem, sizes)
    if group is not None and "nccl" in str(sys.modules["torch.distributed"].get_backend(group)):
        problem = replace(problem, device="cuda")
    seen = coverage(problem, sizes)
    whole = sizes if sizes is not None else (problem.seqlen_q,)

    kind, row = shards if isinstance(shards, str) else GIVEN, RowBytes.of(problem)

    def over(share: int) -> ContextPlan:
        if not isinstance(shards, str):
            return ContextPlan(problem, sizes, rank, count, given_shards(shards, whole, count), seen, kind, device, group, share)
        cheap = problem.bias is None and row.route("q") < row.route("kv")
        possible = candidates(shards, whole, count // share, seen, cheap)
        settings = seen, kind, device, group, share
        return _best([ContextPlan(problem, sizes, rank, count, divided(h, share), *settings) for h in some] for some in possible)

    return over(_share(problem, count, device, heads, over))


def _best(possible: Iterator[list[ContextPlan]]) -> ContextPlan:
    """The plan of fewest bytes among those whose ranks are even and send few bytes for their rows, from the first of some lists
    that has any; if none has, of those that send few for their rows the most even one."""
    every: list[ContextPlan] = []
    for some in possible:
        if some[0].kind != "balanced":
            return some[0]
        every += some
        good = [plan for plan in some if plan.imbalance <= UNEVEN and _sends_few(plan)]
        if good:
            return min(good, key=_both)
    few = [plan for plan in every if _sends_few(plan)]
    return min(few or every, key=lambda plan: (round(plan.imbalance, 2), _both(plan)))


def _sends_few(plan: ContextPlan) -> bool:
    own = plan if plan.heads == 1 else plan.of_teams
    return total(own.routes, own.row_bytes) <= OF_ROWS * of_rows(own.routes, own.row_bytes, own.coverage)


def _both(plan: ContextPlan) -> int:
    """Bytes of both passes."""
    return sum(plan.total_bytes(backward=backward) for backward in (False, True))


def _share(
    problem: Problem, ranks: int, device: str | DeviceSpec | None, heads: int | None, over: Callable[[int], ContextPlan]
) -> int:
    """How many neighbours share the heads."""
    possible = divisors(problem, ranks)
    if heads is not None:
        if heads not in possible:
            wanted = ", ".join(map(str, possible))
            raise ArgumentError(f"heads: got {heads!r}, need one of {wanted} for this problem and {ranks} ranks")
        return heads
    spec = catalogued(problem, device)
    if not spec.is_gpu or len(possible) == 1:
        return 1
    times = {}
    for share in possible:
        found = replace(over(share), device=spec)
        own = found if share == 1 else found.of_teams
        calls = unfilled_seconds(own.routes, own.problem, spec, own.remote_stages)
        times[share] = sum(found.predict(backward=backward).seconds for backward in (False, True)) + calls
    return min(times, key=lambda share: (times[share], share))


def catalogued(problem: Problem, device: str | DeviceSpec | None) -> DeviceSpec:
    """The machine that choices are made for: the one that is given, unless only the live one is meant, which may differ
    between ranks; then a usual one."""
    live = device is None or (isinstance(device, str) and device.partition(":")[0] in ("cpu", "cuda", "hip"))
    usual = "h200" if problem.device == "cuda" or (isinstance(device, str) and live and device != "cpu") else "altra-q80"
    return hardware.device(usual if live else device)


def strided(spec: DeviceSpec, heads: int) -> DeviceSpec:
    """The machine as teams see it, of which fewer have room in a node."""
    if heads == 1 or not spec.node_devices:
        return spec
    return replace(spec, node_devices=max(spec.node_devices // heads, 1))
