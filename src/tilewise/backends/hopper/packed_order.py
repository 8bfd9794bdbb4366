"""The order of work tiles of a packed batch, longest first. Lengths are known on the device only, so a small kernel writes it there.

Without it programs take tiles round robin. A batch of unequal sequences under a causal mask then leaves the longest program half
as long again as the mean: 17 tiles each of 1 to 16 key tiles, at random.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

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
def place_of(a, position):
    """Where in the order the tile at a position of the queue stands; odd rounds run backwards."""
    turn = position // a.programs
    column = position - turn * a.programs
    return turn * a.programs + tl.where(turn % 2 == 0, column, a.programs - 1 - column)


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
