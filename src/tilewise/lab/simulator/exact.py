"""Attention as it is written in the books, in float64: what every schedule must reproduce."""

from __future__ import annotations

import numpy as np

from tilewise.lab.simulator.device import Simulation
from tilewise.lab.simulator.memory import Array
from tilewise.lab.simulator.softmax import divided, finite, log_sum_exp
from tilewise.masks import allowed
from tilewise.problem import Problem


def probabilities(problem: Problem, q: Array, k: Array, bias: Array | None = None) -> tuple[Array, Array]:
    """P and LSE over the whole N × N; rows without keys are zero and −inf."""
    k = np.repeat(k, problem.group, axis=1)
    s = problem.scale * np.einsum("bhmd,bhnd->bhmn", q, k)
    if problem.softcap:
        s = problem.softcap * np.tanh(s / problem.softcap)
    if bias is not None:
        s = s + bias
    visible = allowed(problem.program, problem.shape, (0, problem.seqlen_q), (0, problem.seqlen_k), np.arange)
    if visible is not None:
        s = np.where(visible, s, -np.inf)
    m = s.max(axis=-1, initial=-np.inf)
    e = np.exp(s - finite(m)[..., None])
    l = e.sum(axis=-1)
    return divided(e, l), log_sum_exp(m, l)


def attention(problem: Problem, q: Array, k: Array, v: Array, bias: Array | None = None) -> tuple[Array, Array]:
    """Output and LSE."""
    p, lse = probabilities(problem, q, k, bias)
    return np.einsum("bhmn,bhnd->bhmd", p, np.repeat(v, problem.group, axis=1)), lse


def gradients(problem: Problem, q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, Array, Array]:
    """dQ, dK, dV without softcap or bias."""
    p, _ = probabilities(problem, q, k)
    group = problem.group
    k_all, v_all = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    dp = np.einsum("bhmd,bhnd->bhmn", dout, v_all)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * problem.scale
    dq = np.einsum("bhmn,bhnd->bhmd", ds, k_all)
    dk = np.einsum("bhmn,bhmd->bhnd", ds, q)
    dv = np.einsum("bhmn,bhmd->bhnd", p, dout)

    def fold(x: Array) -> Array:
        b, h, n, d = x.shape
        return np.asarray(x.reshape(b, h // group, group, n, d).sum(axis=2))

    return dq, fold(dk), fold(dv)


def largest_error(run: Simulation, inputs: dict[str, Array]) -> float:
    """The largest absolute difference of any output from float64 attention on the same inputs."""
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    if run.schedule.startswith("backward"):
        wanted = dict(zip(("dQ", "dK", "dV"), gradients(run.problem, q, k, v, inputs["dO"]), strict=True))
    else:
        out, lse = attention(run.problem, q, k, v, inputs.get("bias"))
        wanted = {"O": out, "LSE": lse}
    worst = 0.0
    for name, value in wanted.items():
        if name in run.outputs:
            both = np.isfinite(value)  # rows without keys have LSE −inf in both
            worst = max(worst, float(np.abs(run.outputs[name][both] - value[both]).max(initial=0.0)))
            if not np.array_equal(np.isfinite(run.outputs[name]), both):
                return float("inf")
    return worst
