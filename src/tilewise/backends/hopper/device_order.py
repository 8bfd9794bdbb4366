"""The order of work tiles where only the device knows how long they are, written there by a small kernel.

Clusters of heads come one after the other as in `tile_order.py`. They all have the same tiles to do, so a closed form deals them
out and nothing is played through. A cluster's tiles, the longest first, go to as many slots as there are programs, every second
round backwards. A program takes one slot of each cluster: mirrored in every second one, and moved on from one pair of clusters to
the next, so that it meets slots of all lengths. With 16k tokens in sequences of 170 to 1,388, 16 heads in clusters of two and 132
programs, counted in tiles, the longest program then has 1.02 times the mean of causal documents to do and 1.04 times that of a
causal packed batch. One queue through all clusters, every second round backwards, leaves 1.59 and 1.39 times: its rounds and the
clusters, each about two rounds long, stay in step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.gpu.launch import LaunchOptions
from tilewise.backends.gpu.lists import TileLists
from tilewise.backends.gpu.record import Launch
from tilewise.problem import Problem

BLOCK = 256


class DealArguments(NamedTuple):
    order: Any  # int32 (rounds + 1, programs), see structs.Arguments
    rows: Any  # int32: rows of lists, the longest first
    row_count: int
    tiles: int  # of a head
    heads: int
    cluster: int  # heads that are processed together
    clusters: int
    programs: int
    size: int  # of the order


class DealConfig(NamedTuple):
    BY_KEY: bool
    PER_BATCH: bool
    PER_HEAD: bool
    BLOCK: int = BLOCK


@triton.jit
def _moved_by(cluster, clusters, programs):
    """From one pair of clusters to the next, once around in all."""
    return cluster // 2 * programs // ((clusters + 1) // 2)


@triton.jit
def slot_of(program, cluster, clusters, programs):
    """The slot of a cluster that a program takes."""
    slot = (program + _moved_by(cluster, clusters, programs)) % programs
    return tl.where(cluster % 2 == 0, slot, programs - 1 - slot)


@triton.jit
def program_of(slot, cluster, clusters, programs):
    """The program that takes a slot of a cluster."""
    slot = tl.where(cluster % 2 == 0, slot, programs - 1 - slot)
    return (slot + programs - _moved_by(cluster, clusters, programs)) % programs


@triton.jit
def in_turn(turn, column, programs):
    """The slot of a column of a round, and the reverse; odd rounds run backwards."""
    return tl.where(turn % 2 == 0, column, programs - 1 - column)


@triton.jit
def tiles_of(slot, size, programs):
    """How many of a cluster's tiles a slot has."""
    turns = size // programs
    return turns + (in_turn(turns, slot, programs) < size - turns * programs).to(tl.int32)


@triton.jit
def tiles_before(program, past, clusters, size, programs):
    """How many tiles a program has in the clusters before cluster `past`."""
    found = program * 0
    for cluster in range(clusters):
        own = tiles_of(slot_of(program, cluster, clusters, programs), size, programs)
        found += tl.where(cluster < past, own, 0)
    return found


@triton.jit
def deal_kernel(a, C: tl.constexpr):
    """BLOCK places of the order."""
    at = tl.program_id(0) * C.BLOCK + tl.arange(0, C.BLOCK)
    left = at // a.programs
    program = at - left * a.programs
    size = a.row_count * a.cluster
    found = at * 0 - 1
    slot = at * 0
    turn = at * 0
    for cluster in range(a.clusters):
        taken = slot_of(program, cluster, a.clusters, a.programs)
        count = tiles_of(taken, size, a.programs)
        here = (left >= 0) & (left < count)
        found = tl.where(here, cluster, found)
        slot = tl.where(here, taken, slot)
        turn = tl.where(here, left, turn)
        left -= count
    live = found >= 0
    position = turn * a.programs + in_turn(turn, slot, a.programs)
    n = position // a.cluster
    row = tl.load(a.rows + n, mask=live, other=0)
    head = found * a.cluster + (position - n * a.cluster)  # among those that share a row
    above = row // a.tiles
    tile = row - above * a.tiles
    if C.PER_BATCH and C.PER_HEAD:
        head = above
    elif C.PER_BATCH:
        head = above * a.heads + head
    elif C.PER_HEAD:
        head = head * a.heads + above
    number = tile if C.BY_KEY else a.tiles - 1 - tile  # work tiles of queries are numbered from the last
    tl.store(a.order + at, tl.where(live, head * a.tiles + number, -1), mask=at < a.size)


def dealt(problem: Problem, lists: TileLists, config: Any, by_key: bool, units: int, cluster: int) -> Tensor:
    """The order of the work tiles of lists, for at most `cluster` heads at a time."""
    heads = problem.kv_heads if by_key else problem.heads
    block, length = (config.BLOCK_N, problem.seqlen_k) if by_key else (config.BLOCK_M, problem.seqlen_q)
    tiles, rows = -(-length // block), lists.order
    total = tiles * heads * problem.batch
    programs = min(total, units)
    sharing = total // rows.numel()
    together = max(n for n in range(1, min(cluster, sharing) + 1) if sharing % n == 0)
    clusters = sharing // together
    size = (clusters * -(-rows.numel() * together // programs) + 1) * programs
    order = torch.empty(size, dtype=torch.int32, device=rows.device)
    a = DealArguments(order, rows, rows.numel(), tiles, heads, together, clusters, programs, size)
    shape = DealConfig(by_key, lists.stride_b > 0, lists.stride_h > 0)
    Launch(deal_kernel, -(-size // BLOCK), (a,), shape, LaunchOptions(4, 1)).run()
    return order
