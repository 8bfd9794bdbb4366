"""What `plan` is given, checked: the group, the lengths, the problem and the shards of another plan."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tilewise.distributed.shards import Shards
from tilewise.errors import ArgumentError, PlanError
from tilewise.masks.build import is_integer, plain
from tilewise.problem import Problem


def given_shards(shards: Shards, lengths: tuple[int, ...], ranks: int) -> Shards:
    """The shards of another plan, if they are of these tokens and so many ranks."""
    if (shards.lengths, shards.ranks) != (lengths, ranks):
        raise ArgumentError(
            f"shards: those of sequences of {_short(shards.lengths)} tokens over {shards.ranks} ranks, need {_short(lengths)} "
            f"tokens over {ranks}; leave shards out, or plan with the same lengths and group"
        )
    return shards


def _short(lengths: tuple[int, ...]) -> str:
    return str(lengths) if len(lengths) <= 8 else f"({', '.join(map(str, lengths[:8]))}, … {len(lengths)} sequences)"


def group_ranks(group: Any, ranks: int | None) -> tuple[Any, int, int]:
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


def packed_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    values = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    if not all(is_integer(plain(n)) and n >= 0 for n in values):
        raise ArgumentError(f"lengths: got {values!r}, need one integer of at least 0 for each sequence")
    return tuple(map(int, values))


def whole_problem(problem: Problem, lengths: tuple[int, ...] | None) -> Problem:
    """The problem, checked: self-attention, and packed iff lengths are given."""
    if problem.seqlen_q != problem.seqlen_k:
        raise ArgumentError(
            f"problem: {problem.seqlen_q} queries and {problem.seqlen_k} keys; context parallelism is for self-attention, "
            "and generation runs without it"
        )
    if not problem.mask.static:  # ids and tables are read on the host, and kept as they are now
        problem = replace(problem, mask=copy.deepcopy(problem.mask.to("cpu")))
    if lengths is None:
        if problem.varlen:
            raise ArgumentError("lengths: the problem is packed; pass the lengths of its sequences")
        return problem
    if sum(lengths) != problem.seqlen_q:
        raise ArgumentError(f"lengths: sum to {sum(lengths)}, the problem has {problem.seqlen_q} tokens")
    problem = replace(problem, varlen=True, batch=len(lengths))
    if any(literal.kind.is_tree for term in problem.program.terms() for literal in term):
        raise ArgumentError("mask: a tree of drafts in a packed batch; generation runs without context parallelism")
    return problem
