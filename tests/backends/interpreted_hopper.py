"""The Triton kernels that the Hopper backend has beside its own, in Triton's interpreter; a program of its own.

TRITON_INTERPRET=1 python -m tests.backends.interpreted_hopper
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import tilewise as tw
from tests.backends.hopper_lists import make_bounds, visible, words_of
from tilewise.backends.gpu.classify import ListSpec, bits_by_key, make_lists
from tilewise.backends.gpu.lists import TileLists, list_layout
from tilewise.backends.hopper.arguments import make_plan
from tilewise.backends.hopper.bounds import list_bounds
from tilewise.backends.hopper.device_order import dealt
from tilewise.backends.hopper.hidden import FLAGS, hidden_launch, hidden_mask
from tilewise.backends.hopper.packed_order import (
    BLOCK,
    Lengths,
    OrderArguments,
    OrderConfig,
    order_kernel,
    packed_order,
)
from tilewise.backends.hopper.seen import seen_words
from tilewise.hardware import lookup
from tilewise.lab.bench.cases import long_tailed
from tilewise.masks import Mask, MaskShape, allowed
from tilewise.numerics.oracle import Inputs
from tilewise.problem import Problem

UNITS = 5


def check_dealt(table: torch.Tensor, cost: Callable[[int], int], cluster: Callable[[int], int]) -> None:
    """A program's tiles stand without a gap, cluster by cluster, of each the longest first."""
    for column in table.T.tolist():
        own = column[: column.index(-1)]
        ranks = [(cluster(t), -cost(t)) for t in own]
        assert min(own, default=0) >= 0 and ranks == sorted(ranks)


def unevenness(table: torch.Tensor, cost: Callable[[int], int]) -> float:
    """How much the longest program has to do, in multiples of the mean. A tile costs one more than it visits, or nothing."""
    loads = [sum(cost(t) + 1 for t in column[: column.index(-1)] if cost(t)) for column in table.T.tolist()]
    return max(loads) * len(loads) / sum(loads)


def check_order(mask: Mask, batch: int, heads: int, kv_heads: int, cluster: int) -> None:
    """Every work tile once, the longest first for each cluster of heads, and a program's tiles without a gap."""
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seqlen": 700, "kv_seqlen": 900}
    problem = Problem.of(**sizes, head_dim=16, mask=mask, device="cpu")
    inputs = Inputs(*(torch.zeros(batch, h, s, 16) for h, s in ((heads, 700), (kv_heads, 900), (kv_heads, 900))))
    config = SimpleNamespace(BLOCK_M=128, BLOCK_N=64)
    for by_key in (False, True):
        lists = make_lists(problem, inputs, ListSpec(128, 64, by_key))
        table = dealt(problem, lists, config, by_key, UNITS, cluster).reshape(-1, UNITS)
        tiles, own = (15, kv_heads) if by_key else (6, heads)
        taken = table[table >= 0].tolist()
        assert (table[-1] == -1).all() and sorted(taken) == list(range(tiles * own * batch))
        sharing = len(taken) // len(lists.order)
        together = max(n for n in range(1, min(cluster, sharing) + 1) if sharing % n == 0)

        def place(t: int, tiles: int = tiles, own: int = own) -> tuple[int, int]:
            return divmod(t // tiles, own)

        def length(t: int, tiles: int = tiles, lists: TileLists = lists, by_key: bool = by_key) -> int:
            (b, h), tile = place(t), t % tiles if by_key else tiles - 1 - t % tiles
            return int(lists.counts[b * lists.stride_b + h * lists.stride_h + tile].sum())

        def cluster_of(t: int, lists: TileLists = lists, own: int = own, together: int = together) -> int:
            (b, h), per_batch, per_head = place(t), lists.stride_b > 0, lists.stride_h > 0
            among = 0 if per_batch and per_head else h if per_batch else b if per_head else b * own + h
            return among // together

        check_dealt(table, length, cluster_of)


FAR = 1 << 30


def costs(cu_q: np.ndarray, cu_k: np.ndarray, lo: int, past: int, C: OrderConfig) -> list[int]:
    """Visited tiles of every work tile of a head, counted one by one; 0 past a sequence's end."""
    own, cu = (C.BLOCK_N, cu_k) if C.BY_KEY else (C.BLOCK_M, cu_q)
    found = [0] * int(cu[-1] // own + len(cu) - 1)
    for b in range(len(cu) - 1):
        len_q, len_k = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
        q, k = np.arange(len_q)[:, None], np.arange(len_k)[None, :]
        delta = k - q - (len_k - len_q if C.BOTTOM_RIGHT else 0)
        shown = (delta >= lo) & (delta < past)
        for tile in range(-(-(len_k if C.BY_KEY else len_q) // own)):
            part = shown[:, tile * own : (tile + 1) * own].any(1) if C.BY_KEY else shown[tile * own : (tile + 1) * own].any(0)
            other = C.BLOCK_M if C.BY_KEY else C.BLOCK_N
            found[cu[b] // own + b + tile] = max(1, len(set(np.flatnonzero(part) // other)))
    return found


def check_packed_order(lengths: list[int], heads: int, cluster: int, programs: int, by_key: bool, lo: int, past: int) -> float:
    cu = np.cumsum([0, *lengths])
    C = OrderConfig(128, 64, by_key, BOTTOM_RIGHT=True)
    want = costs(cu, cu, lo, past, C)
    tiles = len(want)
    rounds = tiles * heads // programs + heads + 2
    order = torch.full((rounds * programs,), 99999, dtype=torch.int32)
    offsets = torch.from_numpy(cu).int()
    batch = len(lengths)
    owners = torch.full((tiles,), -1, dtype=torch.int32)
    a = OrderArguments(order, offsets, offsets, offsets, batch, tiles, heads, cluster, programs, lo, past, owners)
    order_kernel[(-(-tiles // BLOCK) * heads // cluster,)](a, C)
    own = C.BLOCK_N if by_key else C.BLOCK_M
    firsts = [cu[b] // own + b for b in range(batch + 1)]
    assert owners.tolist() == [b for b in range(batch) for _ in range(firsts[b], firsts[b + 1])]
    table = order.reshape(rounds, programs)
    taken = [t for column in table.T.tolist() for t in column[: column.index(-1)]]
    assert sorted(taken) == list(range(heads * tiles)), "every tile that any lengths may have, once"

    def cost(t: int) -> int:
        tile = t % tiles
        return want[tile if by_key else tiles - 1 - tile]

    check_dealt(table, cost, lambda t: t // tiles // cluster if cost(t) else heads)
    return unevenness(table, cost)


def check_kept_order() -> None:
    """An order that is taken again is that of the lengths as they are now."""
    problem = Problem.of(batch=3, heads=4, seqlen=900, head_dim=64, mask=tw.causal(), varlen=True, device="cuda")
    plan = make_plan(problem, replace(lookup("h200"), units=UNITS), lambda *_: None)

    def order(cu: torch.Tensor) -> list[list[int]]:
        found = packed_order(problem, cu, Lengths(cu, cu), plan.config, plan.arguments, False, lambda: 2).order
        return [column[: column.index(-1)] for column in found.reshape(-1, UNITS).T.tolist()]

    cu = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 100, 700, 900], [0, 0, 3, 900])]
    first, second = map(order, cu)
    assert first != second and order(cu[0]) == first and order(cu[1].clone()) == second
    cu[0].copy_(cu[1])
    assert order(cu[0]) == second
    cu[0].data.copy_(torch.tensor([0, 300, 600, 900]))  # as a graph's replay writes: no version counts it
    stale = order(cu[0])
    assert stale == second != order(cu[0].clone())
    assert sorted(t for column in stale for t in column) == list(range(plan.arguments.total)), "slower, not wrong"


def documents_unevenness(lengths: list[int], heads: int, cluster: int, programs: int) -> float:
    """Of causal documents in tiles of 128."""
    begin = np.repeat(np.cumsum(lengths) - lengths, lengths)[::128]  # of the document that a query tile begins in
    visited = np.arange(len(begin)) - begin // 128 + 1
    rows = torch.from_numpy(np.argsort(-visited, kind="stable")).int()
    problem = Problem.of(batch=1, heads=heads, seqlen=sum(lengths), head_dim=16, device="cpu")
    config: Any = SimpleNamespace(BLOCK_M=128, BLOCK_N=128)
    lists: Any = SimpleNamespace(order=rows, stride_b=0, stride_h=0)
    table = dealt(problem, lists, config, False, programs, cluster).reshape(-1, programs)
    assert (table >= 0).sum() == len(rows) * heads
    return unevenness(table, lambda t: int(visited[len(rows) - 1 - t % len(rows)]))


def check_seen(mask: Mask, queries: int, keys: int, block_q: int, block_k: int) -> None:
    problem = Problem.of(batch=2, heads=2, seqlen=queries, kv_seqlen=keys, head_dim=16, mask=mask, device="cpu")
    inputs = Inputs(*(torch.zeros(2, 2, s, 16) for s in (queries, keys, keys)))
    layout = list_layout(problem.program, block_q, block_k)
    assert not layout.program
    config = SimpleNamespace(BLOCK_M=block_q, BLOCK_N=block_k, LISTS=layout)
    shown = torch.from_numpy(visible(problem).copy())
    for by_key in (False, True):
        lists = make_lists(problem, inputs, ListSpec(block_q, block_k, by_key))
        found = seen_words(problem, lists, config, by_key)  # type: ignore[arg-type]
        want = words_of(shown.any(2 if by_key else 3), padding=True)
        assert torch.equal(found.words, want), (mask, by_key)
        assert (found.stride_b > 0) == (want.shape[0] > 1) and (found.stride_h > 0) == (want.shape[1] > 1)


def check_bits_by_key(sides: tuple[int, ...], negated: bool) -> None:
    """A dense mask's bits by key are those of the mask, transposed; a broadcast side stays one."""
    mask = torch.rand(*sides, generator=torch.Generator().manual_seed(0)) < 0.5
    shape = (*(x if y > 1 else 1 for x, y in zip((2, 4), sides, strict=False)), 70, 100)
    problem = Problem.of(batch=2, heads=4, seqlen=70, kv_seqlen=100, head_dim=16, device="cpu",
                         mask=~tw.dense(mask) if negated else tw.dense(mask))  # fmt: skip
    inputs = Inputs(*(torch.zeros(2, 4, s, 16) for s in (70, 100, 100)))
    lists = bits_by_key(problem, make_lists(problem, inputs, ListSpec(64, 64, True)), inputs.q.device)
    at = (lists.bits_b, lists.bits_h, lists.bits_row, lists.bits_w)
    words = torch.as_strided(lists.bits, (*shape[:2], 100, 3), at)
    bits = (words[..., None] >> torch.arange(32) & 1).flatten(-2)[..., :70].bool()
    assert torch.equal(bits, (mask ^ negated).expand(shape).transpose(2, 3)), (sides, negated)


def check_hidden(sides: tuple[int, int, int, int], packed: bool, mask: Mask | None = None) -> None:
    """Copies have zeros where mask and bias hide a key from all queries of its group, or all keys from a query; what is added to
    is cleared. Without the flag nothing is written."""
    g = torch.Generator().manual_seed(0)
    lengths = (70, 30) if packed else (100,)
    b = len(lengths)
    q, k, v, dout = (torch.randn(1, h, 100, 24, generator=g) for h in (4, 2, 2, 4))
    bias = torch.randn(*(x if x == 1 else y for x, y in zip(sides, (b, 4, max(lengths), max(lengths)), strict=True)), generator=g)
    bias[:, :, :, 10:25] = bias[:, :, 40:45, :] = bias[:, 1:2, :, 30] = float("-inf")
    cu = torch.tensor([0, *lengths]).cumsum(0).int() if packed else None
    inputs = Inputs(q, k, v, bias=bias, cu_q=cu, cu_k=cu)
    sizes = {"batch": b, "heads": 4, "kv_heads": 2, "seqlen": 100, "head_dim": 24}
    problem = replace(Problem.of(**sizes, mask=mask, device="cpu"), varlen=packed)
    whole = bias.expand(b, 4, max(lengths), max(lengths)) > -float("inf")
    for i, length in enumerate(lengths if mask is not None else ()):
        alone = Problem.of(**{**sizes, "batch": 1, "seqlen": length}, mask=mask, device="cpu")
        part = allowed(alone.program, MaskShape(1, 4, length, length), (0, length), (0, length), np.arange)
        whole[i, :, :length, :length] &= torch.from_numpy(np.broadcast_to(part, (1, 4, length, length))[0].copy())
    for of_keys, of_queries in (((k, v), (q, dout)), ((k, v), (q,))):
        flag, added = torch.zeros(FLAGS, dtype=torch.int32), [torch.ones(2000), torch.ones(3000)]
        keys, queries = (tuple((x, torch.full(x.shape, 7.0)) for x in side) for side in (of_keys, of_queries))
        copies = [copy for _, copy in (*keys, *queries)]
        clear = (added[0], 2000), (added[1], 3000)
        launch = hidden_launch(problem, inputs, hidden_mask(problem, q), flag, keys, queries, clear)
        launch.kernel[(3,)](*launch.args, launch.config)
        assert all((copy == 7.0).all() for copy in copies) and all((x == 1).all() for x in added)
        flag[4] = 1  # of a call before
        launch.kernel[(3,)](*launch.args, launch.config)
        assert flag.tolist() == [0] * 5 and all((x == 1).all() for x in added)
        flag[0] = 1
        launch.kernel[(3,)](*launch.args, launch.config)
        assert flag.tolist() == [0, 0, 0, 0, 1], "handed on, and down for the next call"
        assert all((x == 0).all() for x in added)
        start = 0
        for i, length in enumerate(lengths):
            part = whole[i, :, :length, :length]
            for shown, pairs in ((part.unflatten(0, (2, 2)).any((1, 2)), keys), (part.any(-1), queries)):
                for one, copy in pairs:
                    want = torch.where(shown[..., None], one[0, :, start : start + length], 0.0)
                    assert torch.equal(copy[0, :, start : start + length], want)
            start += length


def check_bounds(mask: Mask, queries: int, keys: int, block_q: int, block_k: int, exact: bool | None = None) -> None:
    """`exact`: whether all rows, or none, are intervals in their PARTIAL tiles."""
    problem = Problem.of(batch=2, heads=2, seqlen=queries, kv_seqlen=keys, head_dim=16, mask=mask, device="cpu")
    inputs = Inputs(*(torch.zeros(2, 2, s, 16) for s in (queries, keys, keys)))
    config: Any = SimpleNamespace(BLOCK_M=block_q, BLOCK_N=block_k, LISTS=list_layout(problem.program, block_q, block_k))
    for by_key in (False, True):
        lists = make_lists(problem, inputs, ListSpec(block_q, block_k, by_key))
        found, want = list_bounds(problem, lists, config, by_key), make_bounds(problem, lists, config, by_key)
        assert want is not None and torch.equal(found, want), (mask, by_key)
        assert exact is None or bool((found >= 0).all()) == bool((found >= 0).any()) == exact, (mask, by_key)


def main() -> None:
    for sides in ((1, 1, 70, 100), (2, 4, 70, 100), (1, 4, 1, 100), (2, 1, 70, 1)):
        for negated in (False, True):
            check_bits_by_key(sides, negated)
    check_hidden((2, 4, 2, 2), False)
    check_hidden((1, 4, 2, 2), True)
    check_hidden((1, 1, 2, 2), True)
    check_hidden((2, 4, 2, 2), False, tw.causal() & tw.window(12))
    check_hidden((1, 4, 2, 2), False, tw.key_padding(torch.tensor([80])) | tw.prefix(20))
    check_hidden((1, 1, 2, 2), True, tw.causal() & tw.window(8))
    for lengths in ([700, 3, 0, 129, 128, 1], [50], [300] * 7):
        for by_key in (False, True):
            check_packed_order(lengths, 4, 2, 5, by_key, -FAR, 1)
    check_packed_order([700, 3, 0, 129, 128, 1], 3, 3, 4, False, -99, 1)
    check_packed_order([400, 90], 2, 1, 3, True, -FAR, FAR)
    check_kept_order()
    lengths = list(long_tailed(16384))
    assert check_packed_order(lengths, 16, 2, 132, False, -FAR, 1) < 1.05
    assert documents_unevenness(lengths, 16, 2, 132) < 1.03
    g = torch.Generator().manual_seed(0)
    documents = torch.arange(900).div(210, rounding_mode="floor").int()
    shared = tw.causal() & tw.documents(documents, q_ids=documents[200:])
    check_order(shared, 2, 4, 2, 3)
    check_order(shared & tw.documents(documents.expand(2, 900), q_ids=documents[200:].expand(2, 700)), 2, 4, 4, 2)
    table = torch.rand(1, 4, 6, 15, generator=g) < 0.4
    check_order(tw.blocks(table, (128, 64)), 2, 4, 4, 2)
    check_order(tw.blocks(torch.cat([table, ~table]), (128, 64)), 2, 4, 4, 8)
    ids = torch.arange(300) // 70
    check_seen(tw.documents(ids.int(), q_ids=(torch.arange(200) // 60 * 2).int()), 200, 300, 64, 64)
    check_seen(tw.window(70) & tw.documents(ids.int(), q_ids=torch.randint(0, 3, (2, 200), generator=g).int()), 200, 300, 64, 128)
    check_seen(tw.blocks(torch.rand(1, 2, 3, 3, generator=g) < 0.3, 128) & tw.causal(), 300, 384, 128, 64)
    check_seen(tw.dense(torch.rand(1, 1, 200, 300, generator=g) < 0.005), 200, 300, 64, 64)
    check_seen(tw.causal() & tw.prefix(40) | tw.window(5) & tw.prefix(200), 200, 300, 64, 64)
    check_bounds(tw.causal() & tw.documents(ids.int()), 300, 300, 64, 64, exact=True)
    check_bounds(tw.causal() & tw.documents((torch.arange(300) % 7).int()), 300, 300, 128, 64, exact=False)
    check_bounds(tw.causal() & tw.documents(((torch.arange(300) % 256) // 64 * 5 - 9).int()), 300, 300, 64, 64)
    check_bounds(tw.documents(ids.int(), q_ids=torch.randint(0, 5, (2, 200), generator=g).int()), 200, 300, 64, 128)
    check_bounds((tw.prefix(4) | tw.window(90)) & tw.causal() & tw.documents(ids.int()), 300, 300, 64, 64)


if __name__ == "__main__":
    main()
