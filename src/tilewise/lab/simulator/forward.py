"""The forward schedules, run literally: standard attention, K/V outside (v1), Q outside (v2), split keys (decode)."""

from __future__ import annotations

import numpy as np

from tilewise.lab.simulator.device import Run
from tilewise.lab.simulator.memory import Array
from tilewise.lab.simulator.softmax import RowState, ScoreTile, mask_tile, raw_scores, scores
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
    every = (slice(0, m),)
    for b in range(problem.batch):
        for h in range(problem.heads):
            if not (m and n):
                hbm.store("O", (b, h, *every), 0.0)
                continue
            _scores_kernel(run, b, h)
            if kernels == 6:
                hbm.store("rowmax", (b, h, *every), hbm.load("S", (b, h, *every)).max(axis=-1))
                s, top = hbm.load("S", (b, h, *every)), hbm.load("rowmax", (b, h, *every))
                run.counts.exps += s.size
                hbm.store("E", (b, h, *every), np.exp(s - np.where(np.isfinite(top), top, 0.0)[:, None]))
                hbm.store("rowsum", (b, h, *every), hbm.load("E", (b, h, *every)).sum(axis=-1))
                e, total = hbm.load("E", (b, h, *every)), hbm.load("rowsum", (b, h, *every))
                hbm.store("P", (b, h, *every), e / np.where(total > 0, total, 1.0)[:, None])
            else:
                s = hbm.load("S", (b, h, *every))
                top = s.max(axis=-1, keepdims=True)
                e = np.exp(s - np.where(np.isfinite(top), top, 0.0))
                run.counts.exps += s.size
                total = e.sum(axis=-1, keepdims=True)
                hbm.store("P", (b, h, *every), e / np.where(total > 0, total, 1.0))
            p, v = hbm.load("P", (b, h, *every)), hbm.load("V", (b, h // problem.group, slice(0, n)))
            run.counts.matmul((m, problem.head_dim_v), n)
            hbm.store("O", (b, h, *every), p @ v)


def _scores_kernel(run: Run, b: int, h: int) -> None:
    problem, hbm = run.problem, run.hbm
    at = ScoreTile(b, h, (0, problem.seqlen_q), (0, problem.seqlen_k), TileClass.PARTIAL)
    q = hbm.load("Q", (b, h, slice(*at.q)))
    k = hbm.load("K", (b, h // problem.group, slice(*at.k)))
    s = raw_scores(problem, hbm, q, k, at, run.counts)
    hbm.store("S", (b, h, slice(*at.q)), np.where(mask_tile(problem, hbm, at), s, -np.inf))


def v1(run: Run, form: str = "unnormalised") -> None:
    """K/V blocks outside: the state of every row waits in HBM between its tiles."""
    problem, hbm, sram, dv = run.problem, run.hbm, run.sram, run.problem.head_dim_v
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    for name, shape in (("acc", (*rows, dv)), ("m", rows), ("l", rows)):
        hbm.reserve(name, shape, run.stat)
    hbm.reserve("O", (*rows, dv), run.size)
    every = (0, problem.seqlen_q)
    for b in range(problem.batch):
        for h in range(problem.heads):
            kv = h // problem.group
            for name, start in (("acc", 0.0), ("m", -np.inf), ("l", 0.0)):
                run.give(name, b, h, every, start)
            for j in range(run.map.cols):
                visits = run.map.query_blocks(j, b, h)
                if not visits:
                    continue
                k_tile = run.take("K", b, kv, run.cols(j))  # [N, D]
                v_tile = run.take("V", b, kv, run.cols(j))  # [N, Dv]
                for i, kind in visits:
                    span = run.rows(i)
                    q_tile = run.take("Q", b, h, span)  # [M, D]
                    m, l, acc = (run.take(name, b, h, span) for name in ("m", "l", "acc"))
                    state = RowState(m, l, acc, form)
                    at = run.at(b, h, i, j, kind)
                    sram.hold("S", len(q_tile) * len(k_tile), run.stat)
                    state.update(scores(problem, hbm, q_tile, k_tile, at, run.counts), v_tile, run.counts)
                    run.counts.matmul(state.acc.shape, len(v_tile))
                    for name, value in (("acc", state.acc), ("m", state.m), ("l", state.l)):
                        run.give(name, b, h, span, value)
                sram.free("K", "V", "Q", "S", "acc", "m", "l")
            acc, l = hbm.load("acc", (b, h, slice(*every))), hbm.load("l", (b, h, slice(*every)))
            done = form == "normalised"
            run.give("O", b, h, every, acc if done else acc / np.where(l > 0, l, 1.0)[:, None])


def v2(run: Run, form: str = "unnormalised") -> None:
    """Q blocks outside: the state of a block of rows stays on chip until its output is written, once."""
    problem, sram = run.problem, run.sram
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    run.hbm.reserve("O", (*rows, problem.head_dim_v), run.size)
    run.hbm.reserve("LSE", rows, run.stat)
    for b in range(problem.batch):
        for h in range(problem.heads):
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
                    _attend(run, state, q_tile, run_at=run.at(b, h, i, j, kind), stages=run.tile.stages)
                out, lse = state.finish()
                run.give("O", b, h, span, out)
                run.give("LSE", b, h, span, lse)
                sram.free("Q", "K", "V", "S", "acc", "m, l")


def _attend(run: Run, state: RowState, q_tile: Array, run_at: ScoreTile, stages: int) -> None:
    """One tile: load K and V, score, update."""
    kv = run_at.h // run.problem.group
    k_tile = run.take("K", run_at.b, kv, run_at.k, stages)  # [N, D]
    v_tile = run.take("V", run_at.b, kv, run_at.k, stages)  # [N, Dv]
    run.sram.hold("S", len(q_tile) * len(k_tile), run.stat)
    state.update(scores(run.problem, run.hbm, q_tile, k_tile, run_at, run.counts), v_tile, run.counts)
    run.counts.matmul(state.acc.shape, len(v_tile))


def decode(run: Run, form: str = "unnormalised") -> None:
    """v2 over parts of the keys, then a second kernel that merges the parts' (O, LSE)."""
    problem, hbm, splits = run.problem, run.hbm, run.tile.splits
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    dv = problem.head_dim_v
    hbm.reserve("O", (*rows, dv), run.size)
    hbm.reserve("LSE", rows, run.stat)
    hbm.reserve("partial O", (splits, *rows, dv), run.stat)
    hbm.reserve("partial LSE", (splits, *rows), run.stat)
    per = -(-run.map.cols // splits) if run.map.cols else 0
    for b in range(problem.batch):
        for members in _members(run):
            for split in range(splits):
                _decode_part(run, b, members, range(split * per, min((split + 1) * per, run.map.cols)), split, form)
    if splits > 1:
        for b in range(problem.batch):
            for h in range(problem.heads):
                _merge(run, b, h)


def _members(run: Run) -> list[list[tuple[int, int]]]:
    """(query, head) rows that share a tile: a block of queries of one head, or of all heads of a group."""
    problem, block = run.problem, run.tile.block_q
    if run.tile.pack_gqa:
        packed = [
            [(q, kv * problem.group + g) for q in range(problem.seqlen_q) for g in range(problem.group)]
            for kv in range(problem.kv_heads)
        ]
    else:
        packed = [[(q, h) for q in range(problem.seqlen_q)] for h in range(problem.heads)]
    return [rows[i : i + block] for rows in packed for i in range(0, len(rows), block)]


def _decode_part(run: Run, b: int, members: list[tuple[int, int]], tiles: range, split: int, form: str) -> None:
    """One block of rows over one part of the keys."""
    problem, hbm = run.problem, run.hbm
    kv = members[0][1] // problem.group
    single = run.single_rows()
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
        span = run.cols(j)
        k_tile = run.take("K", b, kv, span, run.tile.stages)  # [N, D]
        v_tile = run.take("V", b, kv, span, run.tile.stages)  # [N, Dv]
        for state, row, (q, h) in zip(states, q_tile, members, strict=True):
            kind = TileClass(single.row(q, b, h)[j])
            if kind == TileClass.EMPTY:
                continue
            at = ScoreTile(b, h, (q, q + 1), span, kind)
            state.update(scores(problem, hbm, row[None], k_tile, at, run.counts), v_tile, run.counts)
            run.counts.matmul((1, problem.head_dim_v), len(v_tile))
    for state, (q, h) in zip(states, members, strict=True):
        out, lse = state.finish()
        index: tuple[int | slice, ...] = (b, h, slice(q, q + 1))
        if run.tile.splits > 1:
            hbm.store("partial O", (split, *index), out)
            hbm.store("partial LSE", (split, *index), lse)
        else:
            hbm.store("O", index, out)
            hbm.store("LSE", index, lse)
    run.sram.free("Q", "K", "V")


def _merge(run: Run, b: int, h: int) -> None:
    """(O, LSE) of the parts into one: weights exp(LSE_i − LSE)."""
    every = slice(0, run.problem.seqlen_q)
    parts = run.hbm.load("partial O", (slice(None), b, h, every))  # [splits, M, Dv]
    lses = run.hbm.load("partial LSE", (slice(None), b, h, every))  # [splits, M]
    top = lses.max(axis=0)
    safe = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(lses - safe)
    total = weights.sum(axis=0)
    run.hbm.store(
        "O", (b, h, every), (weights[..., None] * parts).sum(axis=0) / np.where(total > 0, total, 1.0)[:, None]
    )
    run.hbm.store("LSE", (b, h, every), np.where(total > 0, safe + np.log(np.where(total > 0, total, 1.0)), -np.inf))
