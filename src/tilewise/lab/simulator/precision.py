"""The precision experiment: how the error depends on the number of rescalings, for each way of accumulating.

Each path computes the same attention with K/V tiles of different widths, and once more with the maxima known in advance,
so that alpha is always 1 and nothing is ever rescaled. Errors are against float64 on the same quantised inputs. The
difference between the two is what rescaling costs; what they share is rounding of the inputs' products and of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.lab.simulator.memory import Array

WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024)
DATA = ("random", "rising", "slow")
SLOW_RISE = 0.05
"""From the first score of `slow` data to the last."""


def to_bfloat16(x: Array) -> Array:
    """fp32 rounded to the nearest bfloat16 (ties to even), kept as fp32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    result = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
    return np.asarray(np.where(np.isfinite(x), result, x), dtype=np.float32)


def to_float16(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(x, dtype=np.float16).astype(np.float32)


def to_float32(x: Array) -> Array:
    return np.asarray(x, dtype=np.float32)


Round = Callable[[Array], Array]


@dataclass(frozen=True)
class Path:
    """A way of accumulating: how inputs, P and the state are rounded."""

    name: str
    inputs: Round
    weights: Round
    """P on its way into P·V."""
    state: Round
    """m, l, O and everything they are made of."""
    compensated: bool = False
    double: bool = False


PATHS = (
    Path("fp16", to_float16, to_float16, to_float32),
    Path("bf16", to_bfloat16, to_bfloat16, to_float32),
    Path("fp32", to_float32, to_float32, to_float32),
    Path("fp32 compensated", to_float32, to_float32, to_float32, compensated=True),
    Path("double accumulators", to_float32, lambda x: x, lambda x: x, double=True),
    Path("fp16 throughout", to_float16, to_float16, to_float16),
    Path("bf16 throughout", to_bfloat16, to_bfloat16, to_bfloat16),
)


@dataclass(frozen=True)
class Result:
    """One path with one tile width."""

    path: str
    data: str
    width: int
    updates: int
    rescalings: float
    """Updates with alpha < 1, on average over the rows."""
    error: float
    """Largest absolute error of the output."""
    relative: float
    """Frobenius norm of the error over that of the output."""
    error_without: float
    """Largest absolute error with the maxima known in advance: no rescaling."""
    relative_without: float


def make_data(kind: str, rows: int, n: int, d: int, seed: int) -> tuple[Array, Array, Array]:
    """q, k, v. With `rising` and `slow` data the scores climb along the keys, so that every tile brings a new maximum.

    `rising` scores climb by 8 on a noisy way: old keys soon weigh nothing, and with them their errors. `slow` ones climb
    evenly by 0.05 in all: every key keeps its weight, and one alpha close to 1 is rounded the same way again and again.
    """
    generator = np.random.default_rng(seed)
    q, k, v = (generator.standard_normal(shape) for shape in ((rows, d), (n, d), (n, d)))
    if kind == "rising":
        direction = np.ones(d) / np.sqrt(d)
        q = 0.1 * q + 4.0 * direction
        k = 0.1 * k + np.linspace(0.0, 16.0, n)[:, None] * direction
    if kind == "slow":
        direction = np.ones(d) / np.sqrt(d)
        q = np.broadcast_to(direction, q.shape)
        k = np.linspace(0.0, SLOW_RISE * np.sqrt(d), n)[:, None] * direction
    return q, k, v


def exact(q: Array, k: Array, v: Array) -> Array:
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    s = matmul(q, k.T) / np.sqrt(q.shape[1])
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return np.asarray(matmul(p, v) / p.sum(axis=1, keepdims=True))


def matmul(a: Array, b: Array) -> Array:
    """a @ b in pieces so small that BLAS does not wake its threads, which on a busy machine cost far more than they bring."""
    rows = max(1, 2**17 // max(1, b.shape[0] * b.shape[1]))
    return np.concatenate([a[i : i + rows] @ b for i in range(0, len(a), rows)])


def run(path: Path, q: Array, k: Array, v: Array, width: int, known: bool = False) -> tuple[Array, Array]:
    """Output and the number of rescalings of each row; `known` starts from the final maxima."""
    kind: Any = np.float64 if path.double else np.float32
    q, k, v = (np.asarray(x, dtype=kind) for x in (q, k, v))
    scale = kind(1 / np.sqrt(q.shape[1]))
    rows, r = len(q), path.state
    m = r((matmul(q, k.T) * scale).max(axis=1)) if known else np.full(rows, -np.inf, dtype=kind)
    l, o = _Sum(path, np.zeros(rows, dtype=kind)), _Sum(path, np.zeros((rows, v.shape[1]), dtype=kind))
    rescalings = np.zeros(rows, dtype=np.int64)
    for start in range(0, len(k), width):
        s = r(matmul(q, k[start : start + width].T) * scale)  # [M, N]
        m_new = np.maximum(m, s.max(axis=1))
        alpha = r(np.exp(m - m_new))
        p = r(np.exp(s - m_new[:, None]))
        rescalings += (alpha < 1) & np.isfinite(m)
        l.update(alpha, r(p.sum(axis=1, dtype=kind)))
        o.update(alpha[:, None], r(matmul(path.weights(p).astype(kind), v[start : start + width])))
        m = m_new
    return r(o.value / l.value[:, None]), rescalings


class _Sum:
    """alpha·sum + addend, rounded as the path says; compensated paths carry what each addition lost."""

    def __init__(self, path: Path, zero: Array) -> None:
        self.round, self.compensated = path.state, path.compensated
        self.value, self.lost = zero, np.zeros_like(zero)

    def update(self, alpha: Array, addend: Array) -> None:
        if not self.compensated:
            self.value = self.round(self.round(alpha * self.value) + addend)
            return
        scaled = self.round(alpha * self.value)
        # what the multiplication lost (exact in float64, as a fused multiply-add gives it) and what the addition loses
        product_error = self.round(alpha.astype(np.float64) * self.value.astype(np.float64) - scaled)
        y = self.round(addend + self.round(product_error + self.round(alpha * self.lost)))
        total = self.round(scaled + y)
        larger = np.abs(scaled) >= np.abs(y)
        self.lost = np.where(
            larger, self.round(self.round(scaled - total) + y), self.round(self.round(y - total) + scaled)
        )
        self.value = total


def _errors(out: Array, truth: Array) -> tuple[float, float]:
    """Largest absolute error, and the Frobenius norm of the error over that of the output."""
    error = np.abs(out.astype(np.float64) - truth)
    return float(error.max()), float(np.linalg.norm(error)) / float(np.linalg.norm(truth))


def experiment(
    n: int = 1024, d: int = 64, rows: int = 64, widths: tuple[int, ...] = WIDTHS, seed: int = 0
) -> list[Result]:
    """Every path, data and width."""
    results = []
    for kind in DATA:
        data = make_data(kind, rows, n, d, seed)
        for path in PATHS:
            q, k, v = (path.inputs(x) for x in data)
            truth = exact(q, k, v)
            for width in widths:
                out, rescalings = run(path, q, k, v, width)
                without, _ = run(path, q, k, v, width, known=True)
                figures = [figure for x in (out, without) for figure in _errors(x, truth)]
                results.append(Result(path.name, kind, width, -(-n // width), float(rescalings.mean()), *figures))
    return results
