"""The order of work tiles where only the device knows how long they are: longest first, written there by a small kernel.

A queue as in `tile_order.py`: clusters of heads one after the other, in each the longest tiles first. Programs take from it in
turns, every second round backwards, for nothing is played through.
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
    total: int  # work tiles
    programs: int
    size: int  # of the order


class DealConfig(NamedTuple):
    BY_KEY: bool
    PER_BATCH: bool
    PER_HEAD: bool
    BLOCK: int = BLOCK


@triton.jit
def place_of(a, position):
    """Where in the order the tile at a position of the queue stands; odd rounds run backwards."""
    turn = position // a.programs
    column = position - turn * a.programs
    return turn * a.programs + tl.where(turn % 2 == 0, column, a.programs - 1 - column)


@triton.jit
def deal_kernel(a, C: tl.constexpr):
    """BLOCK positions of the queue, each to its place in the order."""
    position = tl.program_id(0) * C.BLOCK + tl.arange(0, C.BLOCK)
    n = position // a.cluster
    among = n // a.row_count
    live = position < a.total
    row = tl.load(a.rows + (n - among * a.row_count), mask=live, other=0)
    head = among * a.cluster + (position - n * a.cluster)  # among those that share a row
    above = row // a.tiles
    tile = row - above * a.tiles
    if C.PER_BATCH and C.PER_HEAD:
        head = above
    elif C.PER_BATCH:
        head = above * a.heads + head
    elif C.PER_HEAD:
        head = head * a.heads + above
    number = tile if C.BY_KEY else a.tiles - 1 - tile  # work tiles of queries are numbered from the last
    tl.store(a.order + place_of(a, position), tl.where(live, head * a.tiles + number, -1), mask=position < a.size)


def dealt(problem: Problem, lists: TileLists, config: Any, by_key: bool, units: int, cluster: int) -> Tensor:
    """The order of the work tiles of lists, for at most `cluster` heads at a time."""
    heads = problem.kv_heads if by_key else problem.heads
    block, length = (config.BLOCK_N, problem.seqlen_k) if by_key else (config.BLOCK_M, problem.seqlen_q)
    tiles, rows = -(-length // block), lists.order
    total = tiles * heads * problem.batch
    programs = min(total, units)
    sharing = total // rows.numel()
    size = (-(-total // programs) + 1) * programs
    order = torch.empty(size, dtype=torch.int32, device=rows.device)
    together = max(n for n in range(1, min(cluster, sharing) + 1) if sharing % n == 0)
    a = DealArguments(order, rows, rows.numel(), tiles, heads, together, total, programs, size)
    shape = DealConfig(by_key, lists.stride_b > 0, lists.stride_h > 0)
    Launch(deal_kernel, -(-size // BLOCK), (a,), shape, LaunchOptions(4, 1)).run()
    return order
