"""The order of work tiles of a packed batch, longest first. Only the device knows the lengths, so a small kernel writes it there.

Without it programs take tiles round robin. Under a causal mask, with 16k tokens in sequences of 128 to 2,047 and 16 heads, the
longest of 132 programs then has 1.2 to 1.4 times the mean to do, counted in tiles; longest first 1.02 times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.gpu.launch import LaunchOptions
from tilewise.backends.gpu.record import Launch
from tilewise.backends.hopper.device_order import place_of
from tilewise.backends.hopper.structs import Arguments
from tilewise.masks import UNBOUNDED
from tilewise.problem import Problem

BLOCK = 128
FAR = tl.constexpr(1 << 29)


class OrderArguments(NamedTuple):
    order: Any  # int32 (rounds + 1, programs), see structs.Arguments
    cu_own: Any  # of the side whose tiles are work tiles
    cu_q: Any
    cu_k: Any
    batch: int
    tiles: int  # of a head
    heads: int
    cluster: int  # heads that are processed together, which divide `heads`
    programs: int
    size: int  # of the order
    lo: int  # lo <= k - q < past, of the mask's first term
    past: int


class OrderConfig(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    BY_KEY: bool
    BOTTOM_RIGHT: bool
    BLOCK: int = BLOCK


@triton.jit
def tile_cost(a, tile, C: tl.constexpr):
    """Tiles of the other side that each of these tiles visits, at least 1; 0 for tiles past their sequence's end."""
    OWN: tl.constexpr = C.BLOCK_N if C.BY_KEY else C.BLOCK_M
    lo = tile * 0
    hi = lo + a.batch
    span = a.batch
    while span > 1:  # the owner is in [lo, hi), as in work_tile.find_sequence
        mid = (lo + hi) // 2
        mine = tl.load(a.cu_own + mid) // OWN + mid <= tile
        more = hi - lo > 1
        lo = tl.where(more & mine, mid, lo)
        hi = tl.where(more & (mine == 0), mid, hi)
        span = (span + 1) // 2
    start = (tile - (tl.load(a.cu_own + lo) // OWN + lo)) * OWN
    len_q = tl.load(a.cu_q + lo + 1) - tl.load(a.cu_q + lo)
    len_k = tl.load(a.cu_k + lo + 1) - tl.load(a.cu_k + lo)
    shift = tile * 0
    if C.BOTTOM_RIGHT:
        shift = len_k - len_q
    first = tl.maximum(a.lo, -FAR) + shift
    past = tl.minimum(a.past, FAR) + shift
    if C.BY_KEY:
        begin = tl.maximum(start + 1 - past, 0) // C.BLOCK_M
        end = tl.cdiv(tl.minimum(start + C.BLOCK_N - first, len_q), C.BLOCK_M)
        length = len_k
    else:
        begin = tl.maximum(start + first, 0) // C.BLOCK_N
        end = tl.cdiv(tl.minimum(tl.minimum(start + C.BLOCK_M, len_q) - 1 + past, len_k), C.BLOCK_N)
        length = len_q
    return tl.where((start < length) & (tile < a.tiles), tl.maximum(end - begin, 1), 0)


@triton.jit
def order_kernel(a, C: tl.constexpr):
    """The ranks of BLOCK tiles among all, and their places for every head."""
    pid = tl.program_id(0)
    i = pid * C.BLOCK + tl.arange(0, C.BLOCK)
    cost = tile_cost(a, i, C)
    rank = i * 0
    valid = pid * 0
    for j0 in range(0, a.tiles, C.BLOCK):
        j = j0 + tl.arange(0, C.BLOCK)
        other = tile_cost(a, j, C)
        longer = (other[None, :] > cost[:, None]) | ((other[None, :] == cost[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum((longer & (other > 0)[None, :]).to(tl.int32), 1)
        valid += tl.sum((other > 0).to(tl.int32), 0)
    for head in range(a.heads):
        together = head // a.cluster
        position = (together * valid + rank) * a.cluster + (head - together * a.cluster)
        number = i if C.BY_KEY else a.tiles - 1 - i  # work tiles of queries are numbered from the last
        tl.store(a.order + place_of(a, position), head * a.tiles + number, mask=cost > 0)
    for rest in range(valid * a.heads + pid * C.BLOCK, a.size, tl.num_programs(0) * C.BLOCK):
        position = rest + tl.arange(0, C.BLOCK)
        tl.store(a.order + place_of(a, position), position * 0 - 1, mask=position < a.size)


def order_size(arguments: Arguments) -> int:
    return (-(-arguments.total // arguments.programs) + 1) * arguments.programs


def empty_order(arguments: Arguments, like: Tensor) -> Tensor:
    """Memory for the order of a kernel's work tiles."""
    return torch.empty(order_size(arguments), dtype=torch.int32, device=like.device)


def order_launch(problem: Problem, config: Any, arguments: Arguments, by_key: bool, cluster: int) -> Launch:
    """The kernel that writes the order into `arguments.order`."""
    lo, past = arguments.terms[0][:2] if arguments.terms else (-UNBOUNDED, UNBOUNDED)
    heads = problem.kv_heads if by_key else problem.heads
    a = OrderArguments(
        order=arguments.order,
        cu_own=arguments.cu_k if by_key else arguments.cu_q,
        cu_q=arguments.cu_q,
        cu_k=arguments.cu_k,
        batch=problem.batch,
        tiles=arguments.blocks.value,
        heads=heads,
        cluster=max(n for n in range(1, min(cluster, heads) + 1) if heads % n == 0),
        programs=arguments.programs,
        size=order_size(arguments),
        lo=lo,
        past=past,
    )
    shape = OrderConfig(config.BLOCK_M, config.BLOCK_N, by_key, config.BOTTOM_RIGHT)
    return Launch(order_kernel, -(-arguments.blocks.value // BLOCK), (a,), shape, LaunchOptions(4, 1))
