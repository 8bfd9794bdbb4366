"""The plan of a shape's backward: which kernels, compiled for what, over which work tiles in which order."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from tilewise.backends.hopper.backward.config import (
    KEYS,
    QUERIES,
    SEPARATE_DQ,
    SEPARATE_DQ_SOFTCAP,
    SEPARATE_DQ_UNMASKED,
    KeysConfig,
    QueriesConfig,
    widths,
)
from tilewise.backends.hopper.compile import pointer
from tilewise.backends.hopper.intervals import IntervalMask
from tilewise.backends.hopper.plan import LOG2E, blocks_of, largest_divisor, mask_config, mask_of, tile_arguments
from tilewise.backends.hopper.structs import Arguments, Divisor, Plane, PrePostArguments, Rows
from tilewise.backends.hopper.tile_order import tile_order, visited_keys
from tilewise.masks import may_have_empty_rows
from tilewise.problem import Problem

L2_BYTES = 24 << 20
"""Of the L2 cache (50 MiB on H100 and H200) for what is streamed past the tiles of heads that are processed together."""
FEW_KEYS = {128: 400}
"""By head dim: up to so many keys for each query, on average, dQ by a kernel of its own costs less than clearing and casting its
sums. H200: at 128 causal 512 (320 keys in tiles) 246 against 235 TFLOP/s, causal 1k 334 against 365; at 64 217 against 234."""


class Step(NamedTuple):
    """One kernel of a plan; its arguments have types in place of addresses, but for the order."""

    name: str
    kernel: Any
    config: KeysConfig | QueriesConfig
    arguments: Arguments | PrePostArguments
    programs: int


class BackwardPlan(NamedTuple):
    """All of a call that does not depend on its tensors, and the calls made so far."""

    steps: tuple[Step, ...]
    stats: int  # numbers of scratch memory: of the statistics, and of dQ
    dq: int


def tile_of(problem: Problem, mask: IntervalMask) -> KeysConfig:
    """The table's tile. dQ gets a kernel of its own where bits must repeat, rows are short, or the scores are more than products
    to accumulate from -lse (softcap, a scale that is not positive; subtracted, statistics of 128 queries find no registers)."""
    dims = widths(problem.head_dim, problem.head_dim_v)
    tile = KEYS[dims]
    unfit = tile.ACC_FROM_STATS and (problem.softcap > 0 or problem.scale <= 0)
    if not (problem.deterministic or unfit or keys_per_query(problem, mask, tile) <= FEW_KEYS.get(tile.BLOCK_D, 0)):
        return tile
    if problem.softcap > 0:
        return SEPARATE_DQ_SOFTCAP[dims]
    return (SEPARATE_DQ if mask.terms or problem.varlen else SEPARATE_DQ_UNMASKED)[dims]


def keys_per_query(problem: Problem, mask: IntervalMask, tile: KeysConfig) -> float:
    """Keys in the tiles that a query sees, on average; in a packed batch as if its sequences were equally long."""
    sequences = problem.batch if problem.varlen else 1
    queries, keys = max(1, problem.seqlen_q // sequences), max(1, problem.seqlen_k // sequences)
    if not mask.band:
        return keys
    return float(visiting_queries(mask, tile, queries, keys).sum()) * tile.BLOCK_N / queries


def visiting_queries(mask: IntervalMask, tile: KeysConfig, queries: int, keys: int) -> np.ndarray:
    """Queries in the tiles that visit each key tile, int64 [blocks]."""
    return mask.visited(queries, keys, tile.BLOCK_M, tile.BLOCK_N, by_key=True) * tile.BLOCK_M


def make_plan(
    problem: Problem, processors: int, compile_: Any, with_dlse: bool = False, tile: KeysConfig | None = None
) -> BackwardPlan:
    """The plan on a GPU with so many multiprocessors; `compile_(name, dtype, arguments, config)` gives the kernels, `tile`
    overrides the table's."""
    mask = mask_of(problem)
    tile = tile or tile_of(problem, mask)
    compiled_for = mask_config(problem, mask) | {
        "EMPTY_ROWS": problem.varlen or may_have_empty_rows(problem.program, problem.seqlen_q, problem.seqlen_k),
        "SCORES": "softcap" if problem.softcap > 0 else "fold",
    }
    config = tile._replace(**compiled_for)
    plain = tile._replace(VARLEN=problem.varlen)  # the first kernel and the last know no mask
    stat_blocks = blocks_of(problem, problem.seqlen_q, config.BLOCK_M)
    stat_tiles = stat_blocks * problem.heads * (1 if problem.varlen else problem.batch)
    around = prepost_arguments(problem, config, stat_blocks, with_dlse)

    def step(name: str, own: Any, arguments: Arguments | PrePostArguments, programs: int) -> Step:
        return Step(name, compile_(name, problem.dtype, arguments, own), own, arguments, programs)

    def over_tiles(name: str, own: Any) -> Step:
        arguments = grad_arguments(problem, mask, own, stat_blocks, processors)
        return step(name, own, arguments, arguments.programs)

    first = step("preprocess_kernel", plain, around, stat_tiles)
    second = over_tiles("split_kernel" if config.SPLIT else "keys_kernel", config)
    if config.REDUCE_DQ:
        third = step("postprocess_kernel", plain, around, stat_tiles)
    else:
        assert not config.ACC_FROM_STATS, "dQ's kernel reads plain statistics"
        queries = QUERIES[widths(problem.head_dim, problem.head_dim_v)]
        third = over_tiles("queries_kernel", queries._replace(STAT_ROWS=config.BLOCK_M, **compiled_for))
    scratch = (stat_tiles + 1) * config.BLOCK_M * config.BLOCK_D if config.REDUCE_DQ else 0
    return BackwardPlan((first, second, third), 2 * stat_tiles * config.BLOCK_M, scratch)


def grad_arguments(
    problem: Problem, mask: IntervalMask, config: KeysConfig | QueriesConfig, stat_blocks: int, processors: int
) -> Arguments:
    """Arguments of a kernel over key tiles, or over query tiles."""
    of_keys = isinstance(config, KeysConfig)
    length, block = (problem.seqlen_k, config.BLOCK_N) if of_keys else (problem.seqlen_q, config.BLOCK_M)
    own_heads = problem.kv_heads if of_keys else problem.heads
    sequences = 1 if problem.varlen else problem.batch
    blocks, heads = blocks_of(problem, length, block), own_heads * sequences
    programs = min(blocks * heads, processors)
    order = None
    if config.BAND and not problem.varlen:
        if isinstance(config, KeysConfig):
            # key tiles are numbered from the first to the last
            visiting = visiting_queries(mask, config, problem.seqlen_q, problem.seqlen_k)
            times = visiting[::-1] * problem.group
        else:
            times = visited_keys(mask, config, problem.seqlen_q, problem.seqlen_k)
        order = torch.from_numpy(tile_order(times, heads, heads_together(problem, config, heads), programs)[0])
    rows = Rows(pointer(problem.dtype), 0, 0, 0) if problem.varlen else None
    return Arguments(
        lse_ptr=None,
        out=None,
        last_q=None,
        last_block=None,
        **tile_arguments(problem, mask, own_heads, blocks),
        stat_blocks=stat_blocks,
        stat_tiles=stat_blocks * problem.heads * sequences,
        total=blocks * heads,
        programs=programs,
        order=order,
        scale=float(problem.scale),
        stats_ptr="*fp32",
        dq_ptr="*fp32",
        dq=rows,
        dk=rows,
        dv=rows,
    )


def prepost_arguments(problem: Problem, config: KeysConfig, stat_blocks: int, with_dlse: bool) -> PrePostArguments:
    anywhere = Plane(pointer(problem.dtype), 0, 0, 0, 0)
    return PrePostArguments(
        out=anywhere,
        dout=anywhere,
        dq=anywhere,
        lse_ptr="*fp32",
        dlse_ptr="*fp32" if with_dlse else None,
        stats_ptr="*fp32",
        dq_ptr="*fp32",
        cu_q="*i32" if problem.varlen else None,
        heads=Divisor.of(problem.heads),
        blocks=Divisor.of(stat_blocks),
        batch=problem.batch,
        len_q=problem.seqlen_q,
        factor=-LOG2E / (problem.scale * LOG2E) if config.ACC_FROM_STATS else LOG2E,
        scale=float(problem.scale),
    )


def heads_together(problem: Problem, config: KeysConfig | QueriesConfig, heads: int) -> int:
    """How many heads are processed side by side: those whose streamed tensors (and sums of dQ) the L2 cache holds."""
    width = 2 * (config.BLOCK_D + config.BLOCK_DV)
    if isinstance(config, KeysConfig):
        each = problem.group * problem.seqlen_q * (width + 4 * config.BLOCK_D)
    else:
        each = -(-problem.seqlen_k * width // problem.group)
    return largest_divisor(heads, max(1, L2_BYTES // each))
