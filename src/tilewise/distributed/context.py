"""`tilewise.distributed.plan`: which tokens each rank holds, what it computes and what travels, from the problem alone.

torch is imported only where tensors are handled, so that any number of ranks can be simulated without it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.distributed.coverage import Coverage, coverage
from tilewise.distributed.intervals import Ints
from tilewise.distributed.routes import Routes, routes
from tilewise.distributed.schedule import Chunk, RowBytes, Stage
from tilewise.distributed.shards import SHARDS, Shards, excess, make_shards
from tilewise.distributed.stages import stages
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError, PlanError
from tilewise.hardware.spec import DeviceSpec
from tilewise.masks.build import is_integer, plain
from tilewise.problem import Problem

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class ContextPlan:
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
    """So many ranks share the heads (all-to-all before and after); `ranks / heads` share the sequence. 1: no heads are shared."""
    memory: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What execution keeps of its work on this plan."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Who computes and sends what, in order; see `schedule`."""
        return stages(self.routes)

    @cached_property
    def routes(self) -> Routes:
        """What travels: keys or queries, for each part of the mask."""
        return routes(self.shards, self.coverage, self.row_bytes, even=self.kind == "balanced")

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
        """Equal on ranks that planned the same problem with the same shards and mask."""
        shards, problem = self.shards, self.problem
        digest = hashlib.sha256()
        fields = (problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.head_dim, problem.head_dim_v)
        settings = (problem.dtype, problem.scale, problem.softcap, problem.dropout_p, problem.sinks, problem.alibi)
        digest.update(repr((fields, settings, problem.bias, self.lengths, self.ranks, self.heads)).encode())
        for array in (shards.bounds, shards.rank, *(side for layer in self.coverage.layers for side in layer)):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def area(self, rank: int | None = None) -> int:
        """(query, key) pairs that a rank computes, of one head."""
        return int(self.routes.areas[self._rank(rank)])

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
            found = self.memory["sent", backward] = self.routes.sent(self.row_bytes, backward=backward)
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
) -> ContextPlan:
    """Plans self-attention over the ranks of a process group from the mask: shards, works and moves.

    problem: the whole problem, made by `Problem.of`; in a packed batch `seqlen` counts the tokens of all sequences.
    group: a process group or a one-dimensional DeviceMesh; None for torch's default group, or with `ranks` for a simulation.
    lengths: of the sequences of a packed batch (T, H, D); None for a batch (B, H, S, D).
    shards: "balanced" (equal tokens, then equal mask area), "contiguous", "head_tail" or "zigzag"; or the `shards` of another
        plan of the same tokens, so that layers with unlike masks divide them alike.
    ranks: how many ranks to simulate, where there is no group.
    device: what times are predicted for, such as "h200"; None for this machine.

    >>> plan = tw.distributed.plan(problem, ranks=64, device="h200")
    >>> plan.imbalance, plan.total_bytes()
    """
    if not isinstance(shards, Shards) and shards not in SHARDS:
        raise ArgumentError(f"shards: got {shards!r}, need one of {', '.join(SHARDS)}")
    if not isinstance(problem, Problem):
        raise ArgumentTypeError(f"problem: got {type(problem).__name__}, need a Problem; make one with tw.Problem.of(...)")
    group, rank, count = _ranks(group, ranks)
    sizes = None if lengths is None else _lengths(lengths)
    problem = _whole(problem, sizes)
    seen = coverage(problem, sizes)
    whole = sizes if sizes is not None else (problem.seqlen_q,)
    held = make_shards(shards, whole, count, seen) if isinstance(shards, str) else _given(shards, whole, count)
    kind = shards if isinstance(shards, str) else "given"
    return ContextPlan(problem, sizes, rank, count, held, seen, kind, device, group)


def _given(shards: Shards, lengths: tuple[int, ...], ranks: int) -> Shards:
    """The shards of another plan, if they are of these tokens and so many ranks."""
    if (shards.lengths, shards.ranks) != (lengths, ranks):
        raise ArgumentError(
            f"shards: those of sequences of {_short(shards.lengths)} tokens over {shards.ranks} ranks, need {_short(lengths)} "
            f"tokens over {ranks}; leave shards out, or plan with the same lengths and group"
        )
    return shards


def _short(lengths: tuple[int, ...]) -> str:
    return str(lengths) if len(lengths) <= 8 else f"({', '.join(map(str, lengths[:8]))}, … {len(lengths)} sequences)"


def _ranks(group: Any, ranks: int | None) -> tuple[Any, int, int]:
    """The group, this rank in it and its size; without a group rank 0 of a simulation."""
    if group is not None and hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise ArgumentError(f'group: a mesh of {group.ndim} dimensions, need one; pass mesh["cp"]')
        group = group.get_group()
    if group is None and ranks is not None:
        if not is_integer(plain(ranks)) or ranks < 1:
            raise ArgumentError(f"ranks: got {ranks!r}, need a positive integer")
        return None, 0, int(ranks)
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise PlanError(
            "group: torch.distributed has no process group; call torch.distributed.init_process_group first, "
            "or pass ranks= to simulate"
        )
    group = dist.group.WORLD if group is None else group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise PlanError("group: this process is no member of it")
    if ranks not in (None, size):
        raise ArgumentError(f"ranks: got {ranks}, the group has {size}; leave it out")
    return group, rank, size


def _lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    values = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    if not all(is_integer(plain(n)) and n >= 0 for n in values):
        raise ArgumentError(f"lengths: got {values!r}, need one integer of at least 0 for each sequence")
    return tuple(map(int, values))


def _whole(problem: Problem, lengths: tuple[int, ...] | None) -> Problem:
    """The problem, checked: self-attention, and packed iff lengths are given."""
    if problem.seqlen_q != problem.seqlen_k:
        raise ArgumentError(
            f"problem: {problem.seqlen_q} queries and {problem.seqlen_k} keys; context parallelism is for self-attention, "
            "and generation runs without it"
        )
    if lengths is None:
        if problem.varlen:
            raise ArgumentError("lengths: the problem is packed; pass the lengths of its sequences")
        return problem
    if sum(lengths) != problem.seqlen_q:
        raise ArgumentError(f"lengths: sum to {sum(lengths)}, the problem has {problem.seqlen_q} tokens")
    return replace(problem, varlen=True, batch=len(lengths))
