"""The plan of a shape's forward: which tile, compiled for what, over which work tiles in which order."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from tilewise.backends.hopper.compile import pointer
from tilewise.backends.hopper.config import Config, shortened, tiles_for
from tilewise.backends.hopper.intervals import IntervalMask, interval_mask, typed, unseen_keys
from tilewise.backends.hopper.structs import Arguments, Divisor, Rows
from tilewise.backends.hopper.tile_order import best_order, fastest_tile, visited_keys
from tilewise.problem import Problem

CLUSTER_BYTES = (8 << 20, 24 << 20)
"""Keys and values of heads that are processed together: few, so that long tiles and short ones mix, and at most what the L2 cache
(50 MiB on H100 and H200) holds beside the rest."""
LOG2E = 1.4426950408889634
RELEASE_EARLY_KEYS = 2048
"""Up to so many keys the queries' stage is released early without a mask too (H200, head dim 256: S 512 and 2048 0.5 to
1 % faster, 8192 and 16384 1 % slower; causal 0.5 to 2 % faster at all four)."""


class ForwardPlan(NamedTuple):
    """All of a launch that does not depend on the call's tensors."""

    kernel: Any
    config: Config
    arguments: Arguments  # with types in place of addresses, but for the order
    programs: int


def make_plan(problem: Problem, processors: int, compile_: Any, tile: Config | None = None) -> ForwardPlan:
    """The plan on a GPU with so many multiprocessors; `compile_(dtype, arguments, config)` gives the kernel, `tile` overrides
    the table's."""
    mask = mask_of(problem)
    unseen = problem.varlen or unseen_keys(mask, problem.seqlen_q, problem.seqlen_k)
    tile = tile or tile_of(problem, mask, unseen)
    tail = not mask.terms and problem.seqlen_k % tile.BLOCK_N > 0
    # rows that begin after key 0 and keys that no query sees leave fewer registers
    roomy = not (mask.left or unseen)
    if newer_registers():
        lazy = roomy and not (tail and tile.BLOCK_DV == 256)
    else:
        lazy = not (unseen and tile.BLOCK_DV == 128)
    in_registers = tile.Q_IN_REGISTERS if roomy and not (mask.band and newer_registers()) else 0
    config = tile._replace(
        LAZY_RESCALE=lazy,
        Q_IN_REGISTERS=in_registers,
        RELEASE_Q_EARLY=in_registers > 0 and (mask.band or problem.seqlen_k <= RELEASE_EARLY_KEYS),
        TAIL=tail,
        UNSEEN_KEYS=unseen,
        SCORES="softcap" if problem.softcap > 0 else "fold" if problem.scale > 0 else "scale",
        **mask_config(problem, mask),
    )
    blocks = blocks_of(problem, problem.seqlen_q, config.BLOCK_M)
    heads = problem.heads * (1 if problem.varlen else problem.batch)
    programs = min(blocks * heads, processors)
    order = None
    if mask.band and not problem.varlen:
        clusters = tuple(heads_together(problem, config, size) for size in CLUSTER_BYTES)
        keys = visited_keys(mask, config, problem.seqlen_q, problem.seqlen_k)
        order = torch.from_numpy(best_order(keys, heads, clusters, programs))
    a = Arguments(
        lse_ptr="*fp32",
        out=Rows(pointer(problem.dtype), "i64", "i64", 0) if problem.varlen else None,  # type: ignore[arg-type]
        last_q=problem.seqlen_q - 1,
        last_block=blocks - 1,
        stat_blocks=None,
        stat_tiles=None,
        **tile_arguments(problem, mask, problem.heads, blocks),
        total=blocks * heads,
        programs=programs,
        order=order,
    )
    return ForwardPlan(compile_(problem.dtype, a, config), config, a, programs)


def mask_of(problem: Problem) -> IntervalMask:
    mask = interval_mask(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
    assert isinstance(mask, IntervalMask), "the backend has refused this problem"
    return mask


def mask_config(problem: Problem, mask: IntervalMask) -> dict[str, Any]:
    """What every kernel is compiled for."""
    return {
        "TERMS": len(mask.terms),
        "BAND": mask.band,
        "LEFT": mask.left,
        "VARLEN": problem.varlen,
        "BOTTOM_RIGHT": mask.bottom,
    }


def tile_arguments(problem: Problem, mask: IntervalMask, heads: int, blocks: int) -> dict[str, Any]:
    """The arguments of every kernel whose work tiles are `blocks` of each of so many heads."""
    return {
        "cu_q": "*i32" if problem.varlen else None,
        "cu_k": "*i32" if problem.varlen else None,
        "terms": tuple(typed(term) for term in mask.terms),
        "heads": Divisor.of(heads),
        "group": Divisor.of(problem.group),
        "blocks": Divisor.of(blocks),
        "batch": problem.batch,
        "len_q": problem.seqlen_q,
        "len_k": problem.seqlen_k,
        "scale_log2": (problem.softcap or problem.scale) * LOG2E,
        "softcap_slope": problem.scale / problem.softcap if problem.softcap else 0.0,
    }


def blocks_of(problem: Problem, length: int, block: int) -> int:
    """Tiles of a head; what packed sequences of any lengths need at most, see find_sequence."""
    return length // block + problem.batch if problem.varlen else -(-length // block)


def tile_of(problem: Problem, mask: IntervalMask, unseen: bool) -> Config:
    """The table's tile. Three warpgroups have no registers for rows that begin after key 0 and for keys that no query sees, as in
    a packed batch."""
    tiles = tiles_for(problem.head_dim, problem.head_dim_v)
    if unseen or mask.left or (mask.band and newer_registers()):
        tiles = tiles[:1]
    if newer_registers() and mask.terms and (unseen or mask.left) and tiles[0].BLOCK_D > 64:
        return shortened(tiles[0])
    return tiles[0] if problem.varlen else fastest_tile(tiles, mask, problem.seqlen_q, problem.seqlen_k)


@cache
def newer_registers() -> bool:
    """From 3.8 on Triton's compiler needs so many more registers that loops spill where a mask meets the widest tile or queries
    in registers, or head dim 128 rows that begin after key 0 or keys that no query sees."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 8)


def heads_together(problem: Problem, config: Config, size: int) -> int:
    """How many heads are processed side by side: those whose keys and values have the size."""
    most = max(1, size // (2 * problem.seqlen_k * (config.BLOCK_D + config.BLOCK_DV))) * problem.group
    return largest_divisor(problem.batch * problem.heads, most)


def largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, min(most, number) + 1) if number % n == 0)
