"""The Triton kernels that the Hopper backend has beside its own, in Triton's interpreter; a program of its own.

TRITON_INTERPRET=1 python -m tests.backends.interpreted_hopper
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import tilewise as tw
from tests.backends.hopper_lists import make_bounds, visible, words_of
from tilewise.backends.gpu.classify import ListSpec, make_lists
from tilewise.backends.gpu.lists import TileLists, list_layout
from tilewise.backends.hopper.bounds import list_bounds
from tilewise.backends.hopper.device_order import dealt
from tilewise.backends.hopper.packed_order import BLOCK, OrderArguments, OrderConfig, order_kernel
from tilewise.backends.hopper.seen import seen_words
from tilewise.lab.bench.cases import long_tailed
from tilewise.masks import Mask
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
    """How much the longest program has to do, in multiples of the mean. A tile costs one more than it visits."""
    loads = [sum(cost(t) + 1 for t in column[: column.index(-1)]) for column in table.T.tolist()]
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
    rounds = tiles * heads // programs + heads + 1
    order = torch.full((rounds * programs,), 99999, dtype=torch.int32)
    offsets = torch.from_numpy(cu).int()
    batch = len(lengths)
    a = OrderArguments(order, offsets, offsets, offsets, batch, tiles, heads, cluster, programs, lo, past)
    order_kernel[(-(-tiles // BLOCK) * heads // cluster,)](a, C)
    table = order.reshape(rounds, programs)
    taken = [t for column in table.T.tolist() for t in column[: column.index(-1)]]
    real = [head * tiles + (i if by_key else tiles - 1 - i) for head in range(heads) for i, n in enumerate(want) if n]
    assert sorted(taken) == sorted(real), "every tile once, none past a sequence's end"

    def cost(t: int) -> int:
        tile = t % tiles
        return want[tile if by_key else tiles - 1 - tile]

    check_dealt(table, cost, lambda t: t // tiles // cluster)
    return unevenness(table, cost)


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
    for lengths in ([700, 3, 0, 129, 128, 1], [50], [300] * 7):
        for by_key in (False, True):
            check_packed_order(lengths, 4, 2, 5, by_key, -FAR, 1)
    check_packed_order([700, 3, 0, 129, 128, 1], 3, 3, 4, False, -99, 1)
    check_packed_order([400, 90], 2, 1, 3, True, -FAR, FAR)
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
