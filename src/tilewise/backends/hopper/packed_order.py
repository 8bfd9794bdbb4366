"""The order of work tiles of a packed batch, dealt out as in `device_order.py`. Only the device knows the lengths, so a small
kernel writes it there: first the rank of each tile by its length, then its place for every head. It is kept like lists are
(`gpu/kept.py`): the layers of a model share `cu_seqlens`, so all but the first of them take the order that is there. Beside it
stands whose each tile is, so that kernels need not search for it.

An order names every tile that sequences of any lengths may have; those past their sequence's end come last, and kernels find out
for themselves that there is nothing to do, and whether an owner still is one. So an order of other lengths is slower, never
wrong: not every write into `cu_seqlens` is seen by the host (the replay of a CUDA graph, a kernel of someone else).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.gpu.kept import kept
from tilewise.backends.gpu.launch import LaunchOptions
from tilewise.backends.gpu.record import Launch, recorder
from tilewise.backends.hopper.device_order import in_turn, program_of, tiles_before
from tilewise.backends.hopper.structs import Arguments
from tilewise.masks import UNBOUNDED
from tilewise.problem import Problem

BLOCK = 128
FAR = tl.constexpr(1 << 29)


class OrderArguments(NamedTuple):
    order: Any  # int32 (places, programs), see structs.Arguments
    cu_own: Any  # of the side whose tiles are work tiles
    cu_q: Any
    cu_k: Any
    batch: int
    tiles: int  # of a head
    heads: int
    cluster: int  # heads that are processed together, which divide `heads`
    programs: int
    lo: int  # lo <= k - q < past, of the mask's first term
    past: int
    owners: Any  # int32 (tiles,): the sequence of each tile of a head


class OrderConfig(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    BY_KEY: bool
    BOTTOM_RIGHT: bool
    BLOCK: int = BLOCK


@triton.jit
def tile_cost(a, tile, C: tl.constexpr):
    """Tiles of the other side that each of these tiles visits, at least 1, or 0 for tiles past their sequence's end; and whose
    they are."""
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
    return tl.where((start < length) & (tile < a.tiles), tl.maximum(end - begin, 1), 0), lo


@triton.jit
def order_kernel(a, C: tl.constexpr):
    """The ranks of BLOCK tiles among all, and their places for every head of a cluster."""
    blocks = tl.cdiv(a.tiles, C.BLOCK)
    pid = tl.program_id(0)
    cluster = pid // blocks
    clusters = a.heads // a.cluster
    i = (pid - cluster * blocks) * C.BLOCK + tl.arange(0, C.BLOCK)
    cost, owner = tile_cost(a, i, C)
    if cluster == 0:
        tl.store(a.owners + i, owner, mask=i < a.tiles)
    rank = i * 0
    valid = pid * 0
    for j0 in range(0, a.tiles, C.BLOCK):
        j = j0 + tl.arange(0, C.BLOCK)
        other, _ = tile_cost(a, j, C)
        longer = (other[None, :] > cost[:, None]) | ((other[None, :] == cost[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum(longer.to(tl.int32), 1)
        valid += tl.sum((other > 0).to(tl.int32), 0)
    size = valid * a.cluster
    empty = a.tiles - valid  # of a head
    for among in range(a.cluster):
        head = cluster * a.cluster + among
        position = rank * a.cluster + among
        turn = position // a.programs
        slot = in_turn(turn, position - turn * a.programs, a.programs)
        program = program_of(slot, cluster, clusters, a.programs)
        # tiles with nothing to do are dealt out in turn, after all others
        last = head * empty + rank - valid
        turn = tl.where(cost > 0, turn, last // a.programs)
        program = tl.where(cost > 0, program, last % a.programs)
        place = tiles_before(program, tl.where(cost > 0, cluster, clusters), clusters, size, a.programs) + turn
        number = i if C.BY_KEY else a.tiles - 1 - i  # work tiles of queries are numbered from the last
        tl.store(a.order + place * a.programs + program, head * a.tiles + number, mask=i < a.tiles)
    for first in range(pid * C.BLOCK, a.programs, tl.num_programs(0) * C.BLOCK):
        program = first + tl.arange(0, C.BLOCK)
        place = tiles_before(program, clusters, clusters, size, a.programs)
        place += (a.heads * empty + a.programs - 1 - program) // a.programs
        tl.store(a.order + place * a.programs + program, program * 0 - 1, mask=program < a.programs)


class Order(NamedTuple):
    """As structs.Arguments has them."""

    order: Tensor
    owners: Tensor


class Lengths(NamedTuple):
    """The cumulative lengths of a call."""

    cu_q: Tensor
    cu_k: Tensor


def packed_order(
    problem: Problem, q: Tensor, lengths: Lengths, config: Any, arguments: Arguments, by_key: bool, cluster: Callable[[], int]
) -> Order:
    """The order of a kernel's work tiles, kept or written on the current stream, for at most `cluster()` heads at a time."""
    key = ("hopper order", by_key, config.BLOCK_M, config.BLOCK_N, arguments.blocks.value, arguments.programs)

    def make() -> Order:
        sizes = order_size(arguments), arguments.blocks.value
        order = Order(*(torch.empty(size, dtype=torch.int32, device=q.device) for size in sizes))
        recording = recorder.get(problem, key, q.device, lambda: None)
        tensors = (*order, *lengths)
        if not recording.repeat(tensors):
            own = arguments._replace(**order._asdict(), cu_q=lengths.cu_q, cu_k=lengths.cu_k)
            recording.record(tensors, [order_launch(problem, config, own, by_key, cluster())])
        return order

    return kept(problem, q, key, make, lengths)


def order_size(arguments: Arguments) -> int:
    """Enough for clusters of one head each and for empty tiles, all of which leave the same program one more than others."""
    return (arguments.total // arguments.programs + arguments.heads.value + 2) * arguments.programs


def order_launch(problem: Problem, config: Any, arguments: Arguments, by_key: bool, cluster: int) -> Launch:
    """The kernel that writes the order into `arguments.order`."""
    lo, past = arguments.terms[0][:2] if arguments.terms else (-UNBOUNDED, UNBOUNDED)
    heads = problem.kv_heads if by_key else problem.heads
    together = max(n for n in range(1, min(cluster, heads) + 1) if heads % n == 0)
    a = OrderArguments(
        order=arguments.order,
        cu_own=arguments.cu_k if by_key else arguments.cu_q,
        cu_q=arguments.cu_q,
        cu_k=arguments.cu_k,
        batch=problem.batch,
        tiles=arguments.blocks.value,
        heads=heads,
        cluster=together,
        programs=arguments.programs,
        lo=lo,
        past=past,
        owners=arguments.owners,
    )
    shape = OrderConfig(config.BLOCK_M, config.BLOCK_N, by_key, config.BOTTOM_RIGHT)
    return Launch(order_kernel, -(-arguments.blocks.value // BLOCK) * (heads // together), (a,), shape, LaunchOptions(4, 1))
