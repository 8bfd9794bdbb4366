"""Passes that walk lists of tiles: their lists, their arguments, and the launch after them that is for what is not finite.

Where a tile is PARTIAL, values that no query of it sees are multiplied by 0 all the same: reading them by the mask would cost the
loop its buffers. An infinity or NaN among them shows in the results. A program flags results that are not finite, and a second
launch computes these once more with care. As a rule it has nothing to do. One kernel for both would take all registers there are.
Where tables alone say what is seen, and are made of whole tiles, no tile is PARTIAL, and there is no second launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.gpu.arguments import mask_args
from tilewise.backends.gpu.classify import ListSpec, lists_for
from tilewise.backends.gpu.kept import kept, lengths_of
from tilewise.backends.gpu.lists import ListLayout, TileLists, is_listed, list_layout, walks_lists, whole_tiles
from tilewise.backends.gpu.record import Launch
from tilewise.backends.gpu.structs import Attention, KernelConfig, MaskArgs, MaskLayout
from tilewise.model import TilePlan
from tilewise.problem import Problem

PASSES = ("forward", "backward_dkdv", "backward_dq")


class PassLists(NamedTuple):
    lists: TileLists
    layout: ListLayout
    flags: int  # one for each program
    evaluated: bool  # whether kernels evaluate the mask in PARTIAL tiles
    all_full: bool  # there are no PARTIAL tiles


class CallMask(NamedTuple):
    """The mask of a call as kernels read it."""

    args: MaskArgs | None
    """What kernels evaluate themselves; empty where the lists say all, None where the program holds no tensors."""
    lists: dict[str, PassLists]
    """Of each pass that walks some."""
    tensors: tuple[Tensor, ...]
    """What recorded launches read of these."""
    flags: tuple[Tensor, ...] = ()
    """Of this call, in the order of the lists."""


NO_TENSORS = CallMask(None, {}, ())


def call_mask(problem: Problem, inputs: Inputs, tiles: dict[str, TilePlan]) -> CallMask:
    """What passes with these tiles read of a mask: kept with the problem, but for flags."""
    program = problem.program
    listed = is_listed(program.structure) and walks_lists(problem)
    if not listed and not program.tensors:
        return NO_TENSORS
    sizes = tuple([(pass_, tiles[pass_].sizes) for pass_ in PASSES if pass_ in tiles]) if listed else ()
    cu = lengths_of(inputs) if listed else ()
    mask = kept(problem, inputs.q, ("triton", sizes), lambda: _make(problem, inputs, sizes, tiles), cu)
    if not sizes:
        return mask
    device = inputs.q.device
    return mask._replace(
        flags=tuple([torch.empty(one.flags, dtype=torch.int32, device=device) for one in mask.lists.values()])
    )


def _make(
    problem: Problem, inputs: Inputs, sizes: tuple[tuple[str, tuple[int, int]], ...], tiles: dict[str, TilePlan]
) -> CallMask:
    program, passes = problem.program, {}
    for pass_, pair in sizes:
        lists = lists_for(problem, inputs, ListSpec(*pair, by_key=pass_ == "backward_dkdv"))
        layout = list_layout(program, *pair)
        passes[pass_] = PassLists(lists, layout, _programs(problem, tiles[pass_]), layout.program, all_full(problem, pair))
    evaluated = not passes or any(one.evaluated for one in passes.values())
    args = mask_args(program, inputs.q.device, problem.batch) if evaluated else MaskArgs((), (), ())
    read = (x for one in passes.values() for x in one.lists if isinstance(x, Tensor))
    return CallMask(args, passes, (*read, *args.tensors))


def all_full(problem: Problem, sizes: tuple[int, int]) -> bool:
    """Is every tile FULL or EMPTY, whatever the mask's tables hold, and nothing in it hidden by a bias?"""
    if problem.varlen or problem.bias is not None or problem.seqlen_q % sizes[0] or problem.seqlen_k % sizes[1]:
        return False
    if list_layout(problem.program, *sizes).program:
        return False
    return all(whole_tiles(literal, *sizes) for term in problem.program.terms() for literal in term)


def with_lists(a: Attention, config: KernelConfig, tile: TilePlan, mask: CallMask) -> tuple[Attention, KernelConfig]:
    """Arguments and config of a kernel that walks lists, if its pass does."""
    if tile.pass_ not in mask.lists:
        return a, config
    own, layout, _, evaluated, full = mask.lists[tile.pass_]
    if not evaluated:
        config, a = config._replace(MASK=MaskLayout()), a._replace(mask=MaskArgs((), (), ()))
    a = a._replace(lists=own, flags_ptr=mask.flags[list(mask.lists).index(tile.pass_)])
    return a, config._replace(LISTED=True, LISTS=layout, ALL_FULL=full, EMPTY_ROWS=True)


def and_careful(launch: Launch) -> list[Launch]:
    """A launch, and the one after it if it walks lists with PARTIAL tiles."""
    if not launch.config.LISTED or launch.config.ALL_FULL:
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
