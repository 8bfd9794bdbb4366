"""Lists of tiles in Triton's interpreter, held to `TileMap`; a program of its own.

TRITON_INTERPRET=1 python -m tests.backends.interpreted_lists
"""

from __future__ import annotations

import os
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

import random

import numpy as np
import torch

import tilewise as tw
from tilewise.backends.gpu.classify import ListSpec, lists_for, make_lists, tile_count
from tilewise.backends.gpu.lists import TileLists, is_listed, list_layout
from tilewise.backends.triton.listed import all_full
from tilewise.masks import Mask, TileMap
from tilewise.numerics.oracle import Inputs
from tilewise.problem import Problem

Rng = random.Random


def problem_of(mask: Mask, queries: int, keys: int, batch: int = 2, heads: int = 2) -> tuple[Problem, Inputs]:
    problem = Problem.of(batch=batch, heads=heads, seqlen=queries, kv_seqlen=keys, head_dim=16, mask=mask, device="cpu")
    return problem, Inputs(*(torch.zeros(batch, heads, s, 16) for s in (queries, keys, keys)))


def classes_of(lists: TileLists, row: int, tiles: int) -> tuple[list[int], list[int]]:
    """The class of each tile of a row, and the live terms of those that are PARTIAL."""
    classes, live = [0] * tiles, [0] * tiles
    words = lists.runs[row].tolist()
    for kind, count, runs in ((2, lists.counts[row, 0], words), (1, lists.counts[row, 1], words[::-1])):
        last, seen = -1, 0
        for word in runs:
            if seen == count:
                break
            first, length = word & 0xFFFF, (word >> 16 & 0xFF) + 1
            assert first > last, "runs ascend"
            for tile in range(first, first + length):
                assert classes[tile] == 0, "a tile is listed once"
                classes[tile], live[tile] = kind, word >> 24
            last, seen = first + length - 1, seen + length
        assert seen == count
    return classes, live


def check(mask: Mask, queries: int, keys: int, blocks: tuple[int, int], exact: bool = True) -> None:
    """Every row of both kinds of lists has the classes of a TileMap, tiles that the end cuts aside."""
    problem, inputs = problem_of(mask, queries, keys)
    assert is_listed(problem.program.structure), mask
    block_q, block_k = blocks
    tiles = TileMap(problem.program, problem.shape, *blocks)
    for by_key in (False, True):
        lists = make_lists(problem, inputs, ListSpec(*blocks, by_key))
        own, across = (tiles.cols, tiles.rows) if by_key else (tiles.rows, tiles.cols)
        for b in range(problem.batch):
            for h in range(problem.heads):
                for i in range(own):
                    want = (tiles.col if by_key else tiles.row)(i, b, h).copy()
                    cut = keys % block_k and (not by_key or i == own - 1)
                    if by_key and cut:
                        want = np.minimum(want, 1)
                    elif cut or (by_key and queries % block_q):
                        want[-1] = min(want[-1], 1)
                    got, _ = classes_of(lists, b * lists.stride_b + h * lists.stride_h + i, across)
                    same = got == want.tolist() if exact else all(
                        g == w or g == 1 for g, w in zip(got, want.tolist(), strict=True)
                    )  # fmt: skip
                    assert same, (mask, blocks, by_key, b, h, i, got, want)
        lengths = lists.counts.sum(1)[lists.order.long()]
        assert sorted(lists.order.tolist()) == list(range(len(lists.order))) and (lengths.diff() <= 0).all()


def sorted_ids(rng: Rng, length: int) -> torch.Tensor:
    steps = torch.tensor([rng.random() < 0.06 for _ in range(length)]).int()
    return torch.cumsum(steps, 0).int() - 2


def random_leaf(rng: Rng, queries: int, keys: int) -> Mask:
    """A mask that the classifier decides exactly."""
    kind = rng.randrange(7)
    sides = rng.choice(((1, 1), (2, 1), (1, 2), (2, 2)))
    if kind == 0 and queries == keys:
        return tw.documents(sorted_ids(rng, keys))
    if kind == 1:
        sizes = (rng.choice((8, 16, 24, 32)), rng.choice((4, 16, 32, 48)))
        table = torch.rand(*sides, -(-queries // sizes[0]), -(-keys // sizes[1])) < 0.4
        return tw.blocks(table, sizes)
    if kind == 2:
        rows, columns = rng.choice(((queries, keys), (1, keys), (queries, 1)))
        dense = torch.rand(*sides, rows, columns) < rng.choice((0.02, 0.98))
        dense[..., : rows // 2, : columns // 2] = rng.random() < 0.5
        return tw.dense(dense)
    if kind == 6:
        per, block = rng.choice((16, 32)), rng.choice((4, 16, 32))
        return tw.selected(torch.randint(-1, -(-keys // block) + 1, (*sides, -(-queries // per), 3)), block, per)
    if kind == 3:
        return tw.window(rng.choice((5, 40)), offset=torch.tensor([3, -9]))
    if kind == 4:
        return tw.key_padding(torch.tensor([keys // 2, keys - 3]))
    return rng.choice((tw.causal(), tw.window(20, 7), tw.prefix(19), tw.causal(align="top_left")))


def random_mask(rng: Rng, queries: int, keys: int) -> Mask:
    mask = random_leaf(rng, queries, keys)
    for _ in range(rng.randrange(3)):
        other = random_leaf(rng, queries, keys)
        other = ~other if rng.random() < 0.2 else other
        mask = mask & other if rng.random() < 0.6 else mask | other
    return mask


def check_random(count: int) -> None:
    rng = Rng(0)
    torch.manual_seed(0)
    done = 0
    while done < count:
        queries = rng.choice((33, 48, 64))
        keys = queries if rng.random() < 0.7 else rng.choice((20, 70))
        mask = random_mask(rng, queries, keys)
        if not is_listed(problem_of(mask, queries, keys)[0].program.structure):
            continue
        negated = "~documents" in repr(mask)
        check(mask, queries, keys, rng.choice(((16, 16), (32, 16), (16, 32))), exact=not negated)
        done += 1


def check_ids() -> None:
    """Ids in any order: EMPTY and FULL are never wrong; few ids are decided exactly where hashes can."""
    for ids in (
        torch.randint(-3, 3, (40,)),
        torch.arange(40),
        torch.full((40,), -(2**31), dtype=torch.int64),
        torch.randint(-(2**31), 2**31, (2, 40)),
    ):
        check(tw.window(30) | tw.documents(ids) & tw.causal(), 40, 40, (16, 16), exact=False)
    check(tw.documents(torch.tensor([5] * 32 + [-7] * 32 + [5] * 16)), 80, 80, (16, 16))
    q_ids = torch.tensor([1] * 20 + [4] * 20)
    check(tw.documents(torch.tensor([3] * 40 + [4] * 40), q_ids=q_ids), 40, 80, (16, 16))


def check_many_runs() -> None:
    """More runs than there is room for: one for all of them."""
    ids = torch.tensor([0, 1] * 4).repeat_interleave(16)
    check(tw.documents(ids), 128, 128, (16, 16), exact=False)
    long = torch.zeros(300 * 16, dtype=torch.int32)
    problem, inputs = problem_of(
        tw.documents(long, q_ids=long[:16]), 16, 300 * 16
    )  # fmt: skip
    lists = make_lists(problem, inputs, ListSpec(16, 16))
    assert classes_of(lists, 0, 300)[0] == [2] * 300


def check_live() -> None:
    """The live terms of a PARTIAL tile, where terms have tables of whole tiles; of a FULL one all, for kernels mask a row's
    first tile whatever its class is."""
    table = torch.eye(5, dtype=torch.bool)[None, None]
    found = set()
    for tables in (tw.blocks(table, 16) & tw.causal(), tw.blocks(table, 16)):
        problem, inputs = problem_of(tables | tw.window(20), 80, 80)
        assert list_layout(problem.program, 16, 16).live
        lists = make_lists(problem, inputs, ListSpec(16, 16))
        terms = [TileMap(problem_of(part, 80, 80)[0].program, problem.shape, 16, 16) for part in (tables, tw.window(20))]
        letters = problem.program.structure.split("|")
        order = [0, 1] if "s" in letters[0] else [1, 0]
        for i in range(5):
            classes, live = classes_of(lists, i, 5)
            for j in range(5):
                want = sum((terms[order[t]].row(i)[j] > 0) << t for t in range(2))
                assert classes[j] == 0 or live[j] == (want if classes[j] == 1 else 15), (i, j, live[j], want)
            found |= set(classes)
    assert found == {0, 1, 2}


def check_empty_rows() -> None:
    """A row that sees nothing may be given a tile to look at."""
    mask = tw.documents(torch.zeros(48, dtype=torch.int32), q_ids=torch.ones(48, dtype=torch.int32))
    problem, inputs = problem_of(mask, 48, 48)
    assert make_lists(problem, inputs, ListSpec(16, 16)).counts.tolist() == [[0, 0]] * 3
    lists = make_lists(problem, inputs, ListSpec(16, 16, at_least_one=True))
    assert lists.counts.tolist() == [[0, 1]] * 3 and (lists.runs[:, -1] == 0).all()


def check_kept() -> None:
    """Lists are taken again while nothing they were made from has changed."""
    ids = torch.zeros(48, dtype=torch.int64)
    mask = tw.documents(ids)
    spec = ListSpec(16, 16)

    def lists(mask: Mask, spec: ListSpec = spec) -> TileLists:
        return lists_for(*problem_of(mask, 48, 48), spec)

    first = lists(mask)
    assert lists(mask) is first and lists(mask, ListSpec(16, 32)) is not first
    assert lists(tw.causal() & mask) is lists(tw.causal() & mask), "a new value of the same leaves"
    assert lists(tw.documents(ids)) is not first, "another leaf"
    ids[20:] = 7
    second = lists(mask)
    assert second is not first and second.counts.tolist() != first.counts.tolist()
    with torch.inference_mode():
        frozen = torch.zeros(48, dtype=torch.int64)
        still = tw.documents(frozen)
        a = lists(still)
        frozen[20:] = 7
        assert lists(still).counts.tolist() == second.counts.tolist() != a.counts.tolist()
    array = tw.documents(np.zeros(48, dtype=np.int64))
    assert lists(array) is not lists(array), "numpy counts no versions"
    problem, inputs = problem_of(tw.causal() & (tw.prefix(3) | tw.window(9)), 48, 48)
    assert lists_for(problem, inputs, spec) is lists_for(problem, inputs, spec), "kept with a problem whose mask has no tensors"
    problem, inputs = problem_of(tw.documents(ids.int()), 48, 48)
    packed = replace(problem, varlen=True, batch=2)
    cu = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 20, 48], [0, 32, 48])]
    counts = []
    for ends in (*cu, *cu):
        given = inputs._replace(cu_q=ends, cu_k=ends)
        counts.append(lists_for(packed, given, spec).counts.tolist())
        assert lists_for(packed, given, spec) is lists_for(packed, given, spec)
    assert counts[0] == counts[2] != counts[1] == counts[3], "the lengths of a call are its own"
    cu[0].copy_(cu[1])
    given = inputs._replace(cu_q=cu[0], cu_k=cu[0])
    assert lists_for(packed, given, spec).counts.tolist() == counts[1], "lengths that have changed"
    ids.data[40:] = 9
    assert lists(mask) is second, "a write through .data counts no version, for torch neither"
    assert lists(tw.documents(ids)).counts.tolist() != second.counts.tolist(), "a mask built anew reads it"


def check_packed() -> None:
    """Rows of a packed batch are the tiles of all sequences."""
    lengths = (40, 0, 17, 64)
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    total = int(cu[-1])
    ids = sorted_ids(Rng(1), total)
    table = torch.rand(4, 1, 4, 4) < 0.5
    for mask in (tw.causal() & tw.documents(ids), tw.blocks(table, 16) & tw.causal()):
        problem = Problem.of(batch=4, heads=2, seqlen=total, head_dim=16, mask=mask, device="cpu", varlen=True)
        tensors = [torch.zeros(1, 2, total, 16) for _ in range(3)]
        inputs = Inputs(*tensors, cu_q=cu, cu_k=cu)
        for by_key in (False, True):
            lists = make_lists(problem, inputs, ListSpec(16, 16, by_key))
            assert len(lists.counts) == tile_count(problem, 16, by_key)
            for b, length in enumerate(lengths):
                start = int(cu[b])
                own = problem.program.for_sequence(b, start, start + length, start, start + length)
                tiles = TileMap(own, problem.shape._replace(batch=1, seqlen_q=length, seqlen_k=length), 16, 16)
                for i in range(tiles.rows):
                    want = (tiles.col if by_key else tiles.row)(i, 0, 0).copy()
                    if length % 16:
                        want[-1] = min(want[-1], 1)
                        want = np.minimum(want, 1) if by_key and i == tiles.rows - 1 else want
                    got, _ = classes_of(lists, start // 16 + b + i, tiles.cols)
                    assert got == want.tolist(), (mask, by_key, b, i, got, want)


def attend(
    mask: Mask, backend: str, tensors: list[torch.Tensor], cu: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Output and gradients."""
    q, k, v, dout = (x.clone().requires_grad_(i < 3) for i, x in enumerate(tensors))
    if cu is None:
        out = tw.attention(q, k, v, mask=mask, bias=bias, backend=backend)
    else:
        out = tw.attention_varlen(q, k, v, cu, mask=mask, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def check_results() -> None:
    """What the kernels compute from lists is what the reference computes from the mask, and nothing hidden shows."""
    torch.manual_seed(0)
    length = 40
    q, k, v, dout = (torch.randn(1, heads, length, 16) for heads in (2, 1, 1, 2))
    ids = sorted_ids(Rng(3), length)
    dense = torch.rand(1, 2, length, length) < 0.5
    dense[:, :, :, 5], dense[:, :, 7] = False, False
    blocks = torch.rand(1, 2, 2, 2) < 0.5
    lists = torch.randint(-1, 2, (1, 1, 2, 2))
    for x, row in ((q, 7), (dout, 7), (k, 5), (v, 5)):
        x[:, :, row] = float("nan")
    hidden = tw.dense(dense)
    for mask in (
        tw.causal() & hidden & tw.documents(ids),
        hidden & (tw.blocks(blocks, 32) & tw.causal() | tw.selected(lists, 32, 32) | tw.causal() & tw.window(5)),
        hidden & (tw.documents(ids) | ~tw.documents(ids % 3)),
    ):
        for got, want in zip(attend(mask, "triton", [q, k, v, dout]), attend(mask, "reference", [q, k, v, dout]), strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5, msg=lambda text, mask=mask: f"{mask}: {text}")


def check_hidden_by_a_bias() -> None:
    """In FULL tiles a bias hides keys and leaves queries without any: what these hold does not show."""
    torch.manual_seed(0)
    length = 128
    tensors = [torch.randn(1, heads, length, 16) for heads in (2, 1, 1, 2)]
    bias = torch.randn(1, 1, length, length)
    bias[..., 3], bias[:, :, 118] = float("-inf"), float("-inf")
    for x, row in zip(tensors, (118, 3, 3, 118), strict=True):
        x[:, :, row] = float("inf")
    ids = torch.zeros(length, dtype=torch.int32)
    for mask in (tw.causal() & tw.documents(ids), tw.causal() | tw.prefix(123)):
        problem, inputs = problem_of(mask, length, length, batch=1)
        assert is_listed(problem.program.structure), mask
        assert (make_lists(problem, inputs, ListSpec(64, 64)).counts[:, 0] > 0).any(), mask
        both = (attend(mask, backend, tensors, bias=bias) for backend in ("triton", "reference"))
        for got, want in zip(*both, strict=True):
            assert want.isfinite().all()
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5, msg=lambda text, mask=mask: f"{mask}: {text}")


def check_all_full() -> None:
    """Masks of tables alone, made of whole tiles, have no PARTIAL tile: kernels without a loop over these rest on it."""
    torch.manual_seed(0)
    length, tile = 64, (16, 32)
    table, rows = torch.rand(2, 2, 2, 2) < 0.5, torch.rand(1, 1, 4, 1) < 0.5
    lists = torch.randint(-1, 2, (1, 2, 2, 2))
    table[0, 0, 1], lists[0, 0, 1] = False, -1
    whole = (
        tw.blocks(table, 32),
        ~tw.blocks(table, 32) & tw.blocks(rows, (16, 64)),
        tw.selected(lists, 32, 32),
        tw.selected(lists, 32, 32) | tw.blocks(table, 32),
    )
    for mask in whole:
        problem, inputs = problem_of(mask, length, length)
        assert all_full(problem, tile), mask
        for by_key in (False, True):
            counts = make_lists(problem, inputs, ListSpec(*tile, by_key)).counts
            assert (counts[:, 1] == 0).all() and (counts[:, 0] > 0).any(), mask
        cut, _ = problem_of(mask, length - 8, length)
        assert not all_full(cut, tile) and not all_full(replace(problem, bias=(1, 1, length, length)), tile)
    small, ids = tw.blocks(torch.rand(1, 1, 8, 8) < 0.5, 8), torch.zeros(length, dtype=torch.int32)
    for mask in (tw.causal() & whole[0], small, whole[0] | tw.documents(ids)):
        assert not all_full(problem_of(mask, length, length)[0], tile), mask
    tensors = [torch.randn(2, 2, length, 16) for _ in range(4)]
    tensors[0][0, 0, 32:], tensors[3][0, 0, 32:] = float("nan"), float("inf")  # queries that see nothing
    for mask in (whole[0], whole[2]):
        assert all_full(problem_of(mask, length, length)[0], (32, 32))
        for got, want in zip(attend(mask, "triton", tensors), attend(mask, "reference", tensors), strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5, msg=lambda text, mask=mask: f"{mask}: {text}")


def check_packed_results() -> None:
    """One long and many short sequences, with documents, blocks and selected blocks within each."""
    torch.manual_seed(0)
    cu = torch.tensor([0, 50, 53, 53, 61, 62], dtype=torch.int32)
    tensors = [torch.randn(62, 2, 16) for _ in range(4)]
    blocks, lists = torch.rand(5, 1, 2, 2) < 0.6, torch.randint(-1, 1, (5, 1, 2, 2))
    for mask in (
        tw.causal() & tw.documents(sorted_ids(Rng(4), 62)),
        tw.blocks(blocks, 32) & tw.causal() | tw.selected(lists, 32, 32) & tw.window(20),
    ):
        for got, want in zip(attend(mask, "triton", tensors, cu), attend(mask, "reference", tensors, cu), strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5, msg=lambda text, mask=mask: f"{mask}: {text}")


def main() -> None:
    check_random(int(os.environ.get("TILEWISE_LISTS", "5")))
    check_ids()
    check_many_runs()
    check_live()
    check_empty_rows()
    check_kept()
    check_packed()
    check_results()
    check_hidden_by_a_bias()
    check_all_full()
    check_packed_results()


if __name__ == "__main__":
    main()
