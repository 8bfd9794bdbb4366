"""The order in which the programs of each kernel take their work tiles, for a shape: on the host, and as the model plays it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.backends.hopper.backward.choose import visiting_queries
from tilewise.backends.hopper.backward.config import KeysConfig, QueriesConfig
from tilewise.backends.hopper.config import Config
from tilewise.backends.hopper.intervals import IntervalMask, mask_of
from tilewise.backends.hopper.tile_order import best_order, evened, visited_keys
from tilewise.model.tile import WorkOrder
from tilewise.problem import Problem

CLUSTER_BYTES = (8 << 20, 24 << 20)
"""Keys and values of heads that are processed together: few, so that long tiles and short ones mix, and at most what the L2 cache
(50 MiB on H100, 60 on H200) holds beside the rest."""
LOCAL = 3
"""Where no tile visits more than one part in so many of its stream, as under a window, more heads fit the cache than whole
streams tell."""
L2_BYTES = 24 << 20
"""Of the L2 cache for what is streamed past the tiles of heads that are processed together."""


def work_order(config: Any, problem: Problem, units: int) -> WorkOrder | None:
    """The order on a device of so many units; None where the device writes it in the call."""
    if config.VARLEN or config.LISTS is not None or config.ORDERED:
        return None
    of_keys = isinstance(config, KeysConfig)
    length, block = (problem.seqlen_k, config.BLOCK_N) if of_keys else (problem.seqlen_q, config.BLOCK_M)
    total = -(-length // block) * problem.batch * (problem.kv_heads if of_keys else problem.heads)
    order = host_order(problem, mask_of(problem), config, units)
    if order is None:
        programs = max(1, min(total, units))
        order = np.full((-(-total // programs), programs), -1, dtype=np.int32)
        order.reshape(-1)[:total] = np.arange(total)
    return WorkOrder(
        order, from_last=not of_keys, back=isinstance(config, Config), heads_inside=of_keys and config.GROUPED
    )


def host_order(problem: Problem, mask: IntervalMask, config: Any, units: int) -> np.ndarray | None:
    """Tiles by round and program, the last row all -1; None where work tiles are alike, or the device writes their order."""
    if not mask.uneven or problem.varlen:
        return None
    return forward_order(problem, mask, config, units) if isinstance(config, Config) else grad_order(problem, mask, config, units)


def forward_order(problem: Problem, mask: IntervalMask, config: Any, units: int, moving: int = 1) -> np.ndarray:
    """`moving`: as many tensors of the size of keys and values are streamed, those of tangents too."""
    heads = problem.heads * problem.batch
    keys = visited_keys(mask, config, problem.seqlen_q, problem.seqlen_k)
    clusters = tuple(heads_together(problem, config, size // moving) for size in CLUSTER_BYTES)
    held = CLUSTER_BYTES[1] // moving // kv_bytes(problem, config) * problem.group
    order = best_order(keys, heads, clusters, min(len(keys) * heads, units), held)
    return evened(order, keys, clusters[0]) if mask.from_left else order


def grad_order(problem: Problem, mask: IntervalMask, config: KeysConfig | QueriesConfig, units: int) -> np.ndarray:
    if isinstance(config, KeysConfig):
        # key tiles are numbered from the first to the last
        visiting = visiting_queries(mask, config, problem.seqlen_q, problem.seqlen_k)
        times, stream, heads = visiting[::-1] * problem.group, problem.seqlen_q * problem.group, problem.kv_heads * problem.batch
    else:
        times = visited_keys(mask, config, problem.seqlen_q, problem.seqlen_k)
        stream, heads = problem.seqlen_k, problem.heads * problem.batch
    together = heads_fitting(problem, config, heads)
    clusters = tuple(n for n in range(together, heads + 1) if heads % n == 0)
    held = heads if LOCAL * int(times.max(initial=0)) <= stream else together
    order = best_order(times, heads, clusters, min(len(times) * heads, units), held)
    return evened(order, times, clusters[0]) if mask.from_left else order


def heads_together(problem: Problem, config: Any, size: int) -> int:
    """How many heads a forward processes side by side: those whose keys and values have the size."""
    most = max(1, size // kv_bytes(problem, config)) * problem.group
    return largest_divisor(problem.batch * problem.heads, most)


def kv_bytes(problem: Problem, config: Any) -> int:
    """Of a key head's keys and values."""
    return max(1, 2 * problem.seqlen_k * (config.BLOCK_D + config.BLOCK_DV))


def heads_fitting(problem: Problem, config: KeysConfig | QueriesConfig, heads: int) -> int:
    """How many heads a backward's kernel processes side by side: those whose streams the L2 cache holds."""
    width = 2 * (config.BLOCK_D + config.BLOCK_DV)
    if isinstance(config, KeysConfig):
        each = problem.group * problem.seqlen_q * (width + 4 * config.BLOCK_D)  # with the sums of dQ
    else:
        each = -(-problem.seqlen_k * width // problem.group)
    return largest_divisor(heads, max(1, L2_BYTES // each))


def largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, min(most, number) + 1) if number % n == 0)
