"""The backward pass, run literally: S and P are made again from Q, K and LSE, tile by tile."""

from __future__ import annotations

import numpy as np

from tilewise.errors import PlanError
from tilewise.lab.simulator.device import Run
from tilewise.lab.simulator.memory import Array
from tilewise.lab.simulator.softmax import ScoreTile, scores


def prepare(run: Run, out: Array, lse: Array) -> None:
    """O and LSE of the forward in HBM, room for the gradients, and delta = rowsum(dO ∘ O)."""
    problem, hbm = run.problem, run.hbm
    if problem.softcap or problem.bias is not None:
        raise PlanError("softcap, bias: the simulated backward does not differentiate them; take a problem without")
    hbm.place("O", out, run.size)
    hbm.place("LSE", lse, run.stat)
    hbm.reserve("delta", lse.shape, run.stat)
    for name in ("Q", "K", "V"):
        hbm.reserve("d" + name, hbm.arrays[name].shape, run.size)
    for b, h in run.heads():
        every = (b, h, slice(0, problem.seqlen_q))
        hbm.store("delta", every, (hbm.load("O", every) * hbm.load("dO", every)).sum(axis=-1))


def _tile(run: Run, q_side: tuple[Array, ...], k_tile: Array, v_tile: Array, at: ScoreTile) -> tuple[Array, Array]:
    """P and dS of one tile, [M, N] each."""
    q_tile, do_tile, lse, delta = q_side
    s_tile = scores(run.problem, run.hbm, q_tile, k_tile, at, run.counts)
    p_tile = np.exp(s_tile - np.where(np.isfinite(lse), lse, np.inf)[:, None])
    run.counts.exps += s_tile.size
    run.counts.updates += 1
    dp_tile = do_tile @ v_tile.T
    run.counts.matmul(dp_tile.shape, v_tile.shape[1])
    run.sram.hold("S, dP", 2 * s_tile.size, run.stat)
    return p_tile, p_tile * (dp_tile - delta[:, None]) * run.problem.scale


def _q_side(run: Run, b: int, h: int, span: tuple[int, int], buffers: int = 1) -> tuple[Array, ...]:
    return tuple(run.take(name, b, h, span, buffers) for name in ("Q", "dO", "LSE", "delta"))


def dkdv(run: Run, reduce_dq: bool = False) -> None:
    """One block per K/V tile; with `reduce_dq` each tile also adds its part of dQ in memory."""
    problem, group = run.problem, run.problem.group
    for b in range(problem.batch):
        for kv in range(problem.kv_heads):
            heads = range(kv * group, (kv + 1) * group)
            for j in range(run.map.cols):
                span = run.cols(j)
                visits = [(h, i, kind) for h in heads for i, kind in run.map.query_blocks(j, b, h)]
                dk = np.zeros((span[1] - span[0], problem.head_dim))
                dv = np.zeros((span[1] - span[0], problem.head_dim_v))
                if visits:
                    k_tile = run.take("K", b, kv, span)  # [N, D]
                    v_tile = run.take("V", b, kv, span)  # [N, Dv]
                    run.sram.hold("dK, dV", dk.size + dv.size, run.stat)
                for h, i, kind in visits:
                    q_side = _q_side(run, b, h, run.rows(i), run.tile.stages)
                    p_tile, ds_tile = _tile(run, q_side, k_tile, v_tile, run.at(b, h, i, j, kind))
                    dv += p_tile.T @ q_side[1]
                    dk += ds_tile.T @ q_side[0]
                    run.counts.matmul(dv.shape, len(p_tile))
                    run.counts.matmul(dk.shape, len(p_tile))
                    if reduce_dq:
                        run.hbm.add("dQ acc", (b, h, slice(*run.rows(i))), ds_tile @ k_tile)
                        run.counts.matmul((len(p_tile), problem.head_dim), len(k_tile))
                run.give("dK", b, kv, span, dk)
                run.give("dV", b, kv, span, dv)
                run.sram.used.clear()


def dq(run: Run) -> None:
    """One block per Q tile."""
    problem = run.problem
    for b, h in run.heads():
        for i in range(run.map.rows):
            span = run.rows(i)
            total = np.zeros((span[1] - span[0], problem.head_dim))
            visits = run.map.key_blocks(i, b, h)
            if visits:
                q_side = _q_side(run, b, h, span)
                run.sram.hold("dQ", total.size, run.stat)
            for j, kind in visits:
                k_tile, v_tile = run.take_kv(b, h // problem.group, j)
                _, ds_tile = _tile(run, q_side, k_tile, v_tile, run.at(b, h, i, j, kind))
                run.counts.matmul((len(ds_tile), problem.head_dim), len(k_tile))
                total += ds_tile @ k_tile
            run.give("dQ", b, h, span, total)
            run.sram.used.clear()


def fused(run: Run) -> None:
    """dK, dV and dQ in one pass, dQ added up in an fp32 buffer and narrowed at the end."""
    problem, hbm = run.problem, run.hbm
    hbm.reserve("dQ acc", hbm.arrays["Q"].shape, run.stat)
    rows = [(b, h, slice(0, problem.seqlen_q)) for b, h in run.heads()]
    for every in rows:
        hbm.store("dQ acc", every, 0.0)
    dkdv(run, reduce_dq=True)
    for every in rows:
        hbm.store("dQ", every, hbm.load("dQ acc", every))
