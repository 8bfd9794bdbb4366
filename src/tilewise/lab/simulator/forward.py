"""The forward schedules, run literally: standard attention, K/V outside (v1), Q outside (v2), split keys (decode)."""

from __future__ import annotations

import numpy as np

from tilewise.lab.simulator.device import Run
from tilewise.lab.simulator.memory import Array
from tilewise.lab.simulator.softmax import RowState, ScoreTile, divided, finite, log_sum_exp, scores
from tilewise.masks import TileClass


def standard(run: Run, kernels: int = 6) -> None:
    """Every step a kernel of its own, reading and writing whole matrices; SRAM is a window they stream through."""
    problem, hbm = run.problem, run.hbm
    m, n = problem.seqlen_q, problem.seqlen_k
    square = (problem.batch, problem.heads, m, n)
    for name in ("S", "E", "P"):
        hbm.reserve(name, square, run.size)
    for name in ("rowmax", "rowsum"):
        hbm.reserve(name, square[:3], run.stat)
    hbm.reserve("O", (*square[:3], problem.head_dim_v), run.size)
    for b, h in run.heads():
        every = (b, h, slice(0, m))
        if not (m and n):
            hbm.store("O", every, 0.0)
            continue
        _scores_kernel(run, b, h)
        s = hbm.load("S", every)
        top = s.max(axis=-1)
        if kernels == 6:
            hbm.store("rowmax", every, top)
            s, top = hbm.load("S", every), hbm.load("rowmax", every)
        e = np.exp(s - finite(top)[:, None])
        total = e.sum(axis=-1)
        run.counts.exps += s.size
        if kernels == 6:
            hbm.store("E", every, e)
            hbm.store("rowsum", every, hbm.load("E", every).sum(axis=-1))
            e, total = hbm.load("E", every), hbm.load("rowsum", every)
        hbm.store("P", every, divided(e, total))
        p, v = hbm.load("P", every), hbm.load("V", (b, h // problem.group, slice(0, n)))
        run.counts.matmul((m, problem.head_dim_v), n)
        hbm.store("O", every, p @ v)


def _scores_kernel(run: Run, b: int, h: int) -> None:
    problem, hbm = run.problem, run.hbm
    at = ScoreTile(b, h, (0, problem.seqlen_q), (0, problem.seqlen_k), TileClass.PARTIAL)
    q = hbm.load("Q", (b, h, slice(*at.q)))
    k = hbm.load("K", (b, h // problem.group, slice(*at.k)))
    hbm.store("S", (b, h, slice(*at.q)), scores(problem, hbm, q, k, at, run.counts))


def _reserve_outputs(run: Run) -> tuple[int, int, int]:
    """Room for O and LSE; the shape of a statistic."""
    rows = (run.problem.batch, run.problem.heads, run.problem.seqlen_q)
    run.hbm.reserve("O", (*rows, run.problem.head_dim_v), run.size)
    run.hbm.reserve("LSE", rows, run.stat)
    return rows


def _attend(run: Run, state: RowState, q_tile: Array, k_tile: Array, v_tile: Array, at: ScoreTile) -> None:
    """One tile: score, update."""
    state.update(scores(run.problem, run.hbm, q_tile, k_tile, at, run.counts), v_tile, run.counts)
    run.counts.matmul(state.acc.shape, len(v_tile))


def v1(run: Run, form: str = "unnormalised") -> None:
    """K/V blocks outside: the state of every row waits in HBM between its tiles."""
    problem, hbm, sram = run.problem, run.hbm, run.sram
    rows = _reserve_outputs(run)
    for name, shape in (("acc", (*rows, problem.head_dim_v)), ("m", rows), ("l", rows)):
        hbm.reserve(name, shape, run.stat)
    every = (0, problem.seqlen_q)
    for b, h in run.heads():
        for name, start in (("acc", 0.0), ("m", -np.inf), ("l", 0.0)):
            run.give(name, b, h, every, start)
        for j in range(run.map.cols):
            visits = run.map.query_blocks(j, b, h)
            if not visits:
                continue
            k_tile, v_tile = (run.take(name, b, h // problem.group, run.cols(j)) for name in "KV")  # [N, D], [N, Dv]
            for i, kind in visits:
                span = run.rows(i)
                q_tile = run.take("Q", b, h, span)  # [M, D]
                m, l, acc = (run.take(name, b, h, span) for name in ("m", "l", "acc"))
                state = RowState(m, l, acc, form)
                sram.hold("S", len(q_tile) * len(k_tile), run.stat)
                _attend(run, state, q_tile, k_tile, v_tile, run.at(b, h, i, j, kind))
                for name, value in (("acc", state.acc), ("m", state.m), ("l", state.l)):
                    run.give(name, b, h, span, value)
            sram.used.clear()
        acc, l = (hbm.load(name, (b, h, slice(*every))) for name in ("acc", "l"))
        run.give("O", b, h, every, acc if form == "normalised" else divided(acc, l))


def v2(run: Run, form: str = "unnormalised") -> None:
    """Q blocks outside: the state of a block of rows stays on chip until its output is written, once."""
    problem, sram = run.problem, run.sram
    _reserve_outputs(run)
    for b, h in run.heads():
        for i in range(run.map.rows):
            span = run.rows(i)
            state = RowState.empty(span[1] - span[0], problem.head_dim_v, form)
            visits = run.map.key_blocks(i, b, h)
            if visits:
                q_tile = run.take("Q", b, h, span)  # [M, D]
                sram.hold("acc", state.acc.size, run.stat)
                sram.hold("m, l", 2 * len(state.m), run.stat)
            # over the key tiles visited: acc = Σ exp(s − m)·v, l = Σ exp(s − m)
            for j, kind in visits:
                k_tile, v_tile = run.take_kv(b, h // problem.group, j)
                sram.hold("S", len(q_tile) * len(k_tile), run.stat)
                _attend(run, state, q_tile, k_tile, v_tile, run.at(b, h, i, j, kind))
            for name, value in zip(("O", "LSE"), state.finish(), strict=True):
                run.give(name, b, h, span, value)
            sram.used.clear()


def decode(run: Run, form: str = "unnormalised") -> None:
    """v2 over parts of the keys, then a second kernel that merges the parts' (O, LSE)."""
    problem, hbm, splits = run.problem, run.hbm, run.tile.splits
    rows = _reserve_outputs(run)
    hbm.reserve("partial O", (splits, *rows, problem.head_dim_v), run.stat)
    hbm.reserve("partial LSE", (splits, *rows), run.stat)
    per = -(-run.map.cols // splits) if run.map.cols else 0
    for b in range(problem.batch):
        for members in _members(run):
            for split in range(splits):
                _decode_part(run, b, members, range(split * per, min((split + 1) * per, run.map.cols)), split, form)
    if splits > 1:
        for b, h in run.heads():
            _merge(run, b, h)


def _members(run: Run) -> list[list[tuple[int, int]]]:
    """(query, head) rows that share a tile: a block of queries of one head, or of all heads of a group."""
    problem, block = run.problem, run.tile.block_q
    per = problem.group if run.tile.pack_gqa else 1
    packed = [
        [(q, first + g) for q in range(problem.seqlen_q) for g in range(per)] for first in range(0, problem.heads, per)
    ]
    return [rows[i : i + block] for rows in packed for i in range(0, len(rows), block)]


def _decode_part(run: Run, b: int, members: list[tuple[int, int]], tiles: range, split: int, form: str) -> None:
    """One block of rows over one part of the keys."""
    problem, hbm = run.problem, run.hbm
    kv = members[0][1] // problem.group
    single = run.single_rows
    if run.tile.pack_gqa:
        seen = [j for j in tiles if any(single.row(q, b, h)[j] for q, h in members)]
    else:
        q, h = members[0]
        seen = [j for j in tiles if run.map.row(q // run.tile.block_q, b, h)[j]]
    if seen:
        q_tile = np.stack([hbm.load("Q", (b, h, q)) for q, h in members])  # [M, D]
        run.sram.hold("Q", q_tile.size, run.size)
    states = [RowState.empty(1, problem.head_dim_v, form) for _ in members]
    for j in seen:
        k_tile, v_tile = run.take_kv(b, kv, j)
        for state, row, (q, h) in zip(states, q_tile, members, strict=True):
            kind = TileClass(single.row(q, b, h)[j])
            if kind != TileClass.EMPTY:
                _attend(run, state, row[None], k_tile, v_tile, ScoreTile(b, h, (q, q + 1), run.cols(j), kind))
    split_up = run.tile.splits > 1
    for state, (q, h) in zip(states, members, strict=True):
        for name, value in zip(("O", "LSE"), state.finish(), strict=True):
            index: tuple[int | slice, ...] = (b, h, slice(q, q + 1))
            hbm.store(f"partial {name}" if split_up else name, (split, *index) if split_up else index, value)
    run.sram.used.clear()


def _merge(run: Run, b: int, h: int) -> None:
    """(O, LSE) of the parts into one: weights exp(LSE_i − LSE)."""
    every = slice(0, run.problem.seqlen_q)
    parts = run.hbm.load("partial O", (slice(None), b, h, every))  # [splits, M, Dv]
    lses = run.hbm.load("partial LSE", (slice(None), b, h, every))  # [splits, M]
    top = lses.max(axis=0)
    weights = np.exp(lses - finite(top))
    total = weights.sum(axis=0)
    run.hbm.store("O", (b, h, every), divided((weights[..., None] * parts).sum(axis=0), total))
    run.hbm.store("LSE", (b, h, every), log_sum_exp(top, total))
