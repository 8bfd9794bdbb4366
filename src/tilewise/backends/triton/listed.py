"""Passes that walk lists of tiles: their lists, their arguments, and the launch after them that is for what is not finite.

Where a tile is PARTIAL, values that no query of it sees are multiplied by 0 all the same: reading them by the mask would cost the
loop its buffers. An infinity or NaN among them shows in the results. A program flags results that are not finite, and a second
launch computes these once more with care. As a rule it has nothing to do. One kernel for both would take all registers there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.gpu.arguments import mask_args
from tilewise.backends.gpu.classify import ListSpec, lists_for
from tilewise.backends.gpu.lists import ListLayout, TileLists, list_layout, walks_lists
from tilewise.backends.gpu.record import Launch
from tilewise.backends.gpu.structs import Attention, KernelConfig, MaskArgs, MaskLayout
from tilewise.model import TilePlan
from tilewise.problem import Problem

PASSES = ("forward", "backward_dkdv", "backward_dq")


class PassLists(NamedTuple):
    lists: TileLists
    flags: Tensor  # of each program
    layout: ListLayout
    mask: MaskArgs  # what kernels evaluate themselves, if anything


def lists_of(problem: Problem, inputs: Inputs, tiles: dict[str, TilePlan]) -> dict[str, PassLists]:
    """Of each pass that walks lists."""
    if not walks_lists(problem):
        return {}
    found = {}
    for pass_ in PASSES:
        if pass_ in tiles:
            sizes, device = tiles[pass_].sizes, inputs.q.device
            lists = lists_for(problem, inputs, ListSpec(*sizes, by_key=pass_ == "backward_dkdv"))
            flags = torch.empty(_programs(problem, tiles[pass_]), dtype=torch.int32, device=device)
            layout = list_layout(problem.program, *sizes)
            mask = mask_args(problem.program, device, problem.batch) if layout.program else MaskArgs((), (), ())
            found[pass_] = PassLists(lists, flags, layout, mask)
    return found


def list_tensors(lists: dict[str, PassLists]) -> list[Tensor]:
    """What recorded launches read of them."""
    return [x for one in lists.values() for x in (*one.lists, one.flags, *one.mask.tensors) if isinstance(x, Tensor)]


def with_lists(
    a: Attention, config: KernelConfig, tile: TilePlan, lists: dict[str, PassLists]
) -> tuple[Attention, KernelConfig]:
    """Arguments and config of a kernel that walks lists, if its pass does."""
    if tile.pass_ not in lists:
        return a, config
    own, flags, layout, mask = lists[tile.pass_]
    if not layout.program:
        config = config._replace(MASK=MaskLayout())
    a = a._replace(lists=own, flags_ptr=flags, mask=mask)
    return a, config._replace(LISTED=True, LISTS=layout, EMPTY_ROWS=True)


def and_careful(launch: Launch) -> list[Launch]:
    """A launch, and the one after it if it walks lists."""
    if not launch.config.LISTED:
        return [launch]
    assert launch.options is not None
    careful = launch.config._replace(CAREFUL=True)
    # with one stage Triton sums rows in another layout: results would change in their last bits
    stages = min(2, launch.options.num_stages)
    return [launch, launch._replace(config=careful, options=launch.options._replace(num_stages=stages))]


def _programs(problem: Problem, tile: TilePlan) -> int:
    if tile.pass_ == "backward_dkdv":
        return grid(problem, problem.seqlen_k, tile.block_k, problem.kv_heads)
    return grid(problem, problem.seqlen_q, tile.block_q, problem.heads)


def grid(problem: Problem, rows: int, block: int, heads: int) -> int:
    """Programs for all tiles of all heads; for packed sequences an upper bound that needs no lengths."""
    if problem.varlen:
        return (rows // block + problem.batch) * heads
    return -(-rows // block) * heads * problem.batch
