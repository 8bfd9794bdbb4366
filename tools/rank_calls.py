"""The attention calls of every rank of a plan, and what the model predicts for them: no GPU is needed.

    python -m tools.ranks --calls --length 65536
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from tilewise import hardware
from tilewise.diagnostics.plan import countable, servers, tiles_of
from tilewise.distributed.context import ContextPlan
from tilewise.distributed.segments import Call, Local
from tilewise.hardware import DeviceSpec
from tilewise.model.evaluation import call_seconds
from tilewise.problem import Problem

FULL = "full"
LETTERS = {"b": "band", "d": "documents"}


class Kernels(NamedTuple):
    """Who serves a call, in which tiles, and the predicted seconds: forward, then backward."""

    backends: tuple[str, str]
    tiles: tuple[str, str]
    seconds: tuple[float, float]

    @classmethod
    def of(cls, problem: Problem, spec: DeviceSpec) -> Kernels:
        problem = replace(problem, device="cuda" if spec.is_gpu else "cpu")
        serving = servers(problem, spec, live=False)
        tiles = tiles_of(problem, spec, serving)
        sides = [[tile for name, tile in tiles.items() if name.startswith("backward") == backward] for backward in (False, True)]
        counted = countable(problem)
        shown = ["+".join(f"{t.block_q}×{t.block_k}" for t in side if t.block_k > 1) for side in sides]
        names = (serving.name("forward") or "none", serving.name("backward") or "none")
        return cls(names, (shown[0], shown[1]), tuple(call_seconds(counted, spec, side) for side in sides))  # type: ignore[arg-type]


class RankCall(NamedTuple):
    """One call. queries: whose they are, "own" or "others'". groups: documents of calls that stand side by side."""

    rank: int
    stage: int
    rows: int
    keys: int
    queries: str
    mask: str
    groups: int
    kernels: Kernels


def rank_calls(plan: ContextPlan, spec: DeviceSpec) -> Iterator[RankCall]:
    """Of all ranks, as they would be on that device."""
    whole = replace(plan.problem, needs_grad=True, device="cuda" if spec.is_gpu else "cpu")
    for rank in range(plan.ranks):
        own = plan.as_rank(rank)
        sides = ((whole.heads, whole.head_dim), (whole.kv_heads, whole.head_dim), (whole.kv_heads, whole.head_dim_v))
        local = Local(*(torch.empty(whole.batch, h, own.local_tokens(), d, device="meta") for h, d in sides))
        call = Call(own, whole, "auto", torch.device("cpu"))
        for stage in range(len(plan.stages)):
            for segment in call.segments(local, stage):
                letters = dict.fromkeys(segment.problem.program.structure)
                mask = " & ".join(LETTERS.get(letter, letter) for letter in letters) or FULL
                block = segment.block
                kernels = Kernels.of(segment.problem, spec)
                queries = "others'" if block.travels else "own"
                yield RankCall(rank, stage, *block.sizes, queries, mask, len(block.groups), kernels)


def show_calls(plan: ContextPlan, device: str) -> Iterator[str]:
    """A line for each call, and one for all of them beside the single call. Where ranks share heads: of one of each team."""
    spec, members = hardware.device(device), plan.heads
    single, total, count = Kernels.of(plan.problem, spec), [0.0, 0.0], 0
    plan = plan if members == 1 else plan.of_teams
    yield _line("rank", "stage", "rows", "keys", "queries", "mask", "forward", "backward", "µs", "µs")
    for call in rank_calls(plan, spec):
        served = (f"{name} {tile}" for name, tile in zip(call.kernels.backends, call.kernels.tiles, strict=True))
        mask = f"{call.mask} ({call.groups})" if call.groups else call.mask
        times = (f"{1e6 * seconds:.1f}" for seconds in call.kernels.seconds)
        yield _line(*call[:5], mask, *served, *times)
        total, count = [a + members * b for a, b in zip(total, call.kernels.seconds, strict=True)], count + members
    rates = ", ".join(f"{one / all_:.3f}" for one, all_ in zip(single.seconds, total, strict=True))
    times = ", ".join(f"{1e3 * all_:.3f} against {1e3 * one:.3f} ms" for one, all_ in zip(single.seconds, total, strict=True))
    yield f"{count} calls; predicted, forward and backward: {times}; rate {rates}"


def _line(*columns: str | int) -> str:
    widths = (">4", ">5", ">6", ">6", "8", "16", "20", "28", ">8", ">8")
    return " ".join(f"{column:{width}}" for column, width in zip(columns, widths, strict=True))
