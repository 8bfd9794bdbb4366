"""2**x, tanh and log2 on vectors, from polynomials fitted here: no call into a maths library."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from tilewise.backends.cpu.ir import DOUBLE, F64, I32, I64, Strip, Value

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LOG2E_PARTS = {"float32": (1.44269502162933349609375, 1.925962991126617e-8), "float64": (LOG2E, 2.0355273740931033e-17)}
"""log2(e) as a number of the type and what is left of it."""


@cache
def fit(function: Callable[[float], float], low: float, high: float, degree: int) -> tuple[float, ...]:
    """Power coefficients of the interpolant at Chebyshev nodes, within a few percent of the minimax polynomial."""
    middle, half = (low + high) / 2, (high - low) / 2
    nodes = [middle + half * math.cos((2 * i + 1) * math.pi / (2 * degree + 2)) for i in range(degree + 1)]
    table = [function(x) for x in nodes]  # Newton's divided differences, then expanded into powers
    for order in range(1, degree + 1):
        for i in range(degree, order - 1, -1):
            table[i] = (table[i] - table[i - 1]) / (nodes[i] - nodes[i - order])
    powers = [table[degree]]
    for i in range(degree - 1, -1, -1):
        shifted = [0.0, *powers]
        for n, c in enumerate(powers):
            shifted[n] -= nodes[i] * c
        shifted[0] += table[i]
        powers = shifted
    return tuple(powers)


def _exp2(x: float) -> float:
    return math.exp2(x)


def _tanh_ratio(u: float) -> float:
    """tanh(x) / x as a function of u = x²."""
    x = math.sqrt(u)
    return math.tanh(x) / x


def horner(xs: Strip, coefficients: tuple[float, ...]) -> Strip:
    """The polynomial at several vectors, step by step over all of them: narrow out-of-order cores need them interleaved."""
    e, lanes = xs.e, xs[0].lanes
    totals = Strip([e.vector(coefficients[-1], lanes)] * len(xs))
    for c in reversed(coefficients[:-1]):
        totals = e.fma(totals, xs, Strip([e.addend(c, lanes) for _ in xs]))
    return totals


def exp2(xs: Any, degree: int = 0) -> Any:
    """2**x for x below the largest exponent; exactly 0 at or below the floor (so for -inf), NaN for NaN."""
    if isinstance(xs, Value):
        return exp2(Strip([xs]), degree)[0]
    e = xs.e
    if e.arch != "aarch64" and len(xs) > 1:  # wide out-of-order cores find the parallelism themselves; AVX2 lacks the registers
        return Strip(exp2(x, degree) for x in xs)
    return exp2_near(e.at_least(xs, e.real.floor), Strip([e.vector(e.real.magic, xs[0].lanes)] * len(xs)), degree)


def exp2_near(xs: Strip, levels: Strip, degree: int = 0) -> Strip:
    """2**(x - m) where x - m lies between the floor and the largest exponent; a level is magic - m, m a small integer.

    x = n + f with n an integer and |f| <= 1/2: 2**f is a polynomial and n - m is added to its exponent bits. Adding the level
    rounds to n and leaves n - m in the low bits. These additions must stay as written: no fast-math flag may touch them.
    """
    e, real = xs.e, xs.e.real
    shifted = xs + levels
    fractions = xs - (shifted - levels)  # exact
    constant, *rest = fit(_exp2, -0.5, 0.5, degree or real.degree)
    # the constant must be 1 exactly, or masked weights are the least subnormal and not 0; a common factor cancels in softmax
    powers = horner(fractions, (1.0, *(c / constant for c in rest)))
    exponents = e.each(lambda s: s.bitcast(real.bits) << real.mantissa, shifted)
    return e.each(lambda p, n: (p.bitcast(real.bits) + n).bitcast(real.type), powers, exponents)  # type: ignore[no-any-return]


def exp2_integer(xs: Any) -> Any:
    """2**n for integers n <= 0, exactly; 0 at or below the floor."""
    e, real = xs.e, xs.e.real
    biased = e.at_least(xs, real.floor) + (real.magic - real.floor)  # n - floor in the low bits
    return e.each(lambda b: (b.bitcast(real.bits) << real.mantissa).bitcast(real.type), biased)


def tanh(x: Value) -> Any:
    """An odd polynomial near 0, where the quotient would cancel; (1 - t) / (1 + t) with t = exp(-2|x|) elsewhere."""
    e, size = x.e, abs(x)
    t = exp2(size * (-2 * LOG2E))
    far = e.math("copysign", (1.0 - t) / (1.0 + t), x)
    (ratio,) = horner(Strip([x * x]), fit(_tanh_ratio, 0.0, 0.36, 12 if e.real is DOUBLE else 6))
    near = x * ratio
    return e.select(size < 0.6, near, far)


def log2(x: Value) -> Any:
    """log2 of positive normal doubles: exponent bits plus 2/ln2·artanh((y - 1) / (y + 1)), y in [√½, √2)."""
    bits: Any = x.bitcast(I64)
    # Adding 2**52 - mantissa(√½) carries into the exponent exactly when the mantissa reaches √2.
    n = (bits - 0x3FE6A09E667F3BCD) >> 52
    y = (bits - (n << 52)).bitcast(F64)
    z = (y - 1.0) / (y + 1.0)
    u = z * z
    total: Any = x.e.const(2 * LOG2E / 21, x.type)
    for k in range(19, 0, -2):
        total = total * u + 2 * LOG2E / k
    return n.to_real(F64) + total * z


def philox(counter: list[Any], key: tuple[Any, Any]) -> list[Any]:
    """Philox4x32-10 on vectors of 32-bit words: four words for each lane's counter."""
    (low, high), c = key, list(counter)
    for _ in range(10):
        left, right = c[0].zext(I64) * 0xD2511F53, c[2].zext(I64) * 0xCD9E8D57
        left_high, right_high = (product.lshr(32).trunc(I32) for product in (left, right))
        left_low, right_low = (product.trunc(I32) for product in (left, right))
        c = [right_high ^ c[1] ^ low.splat(), right_low, left_high ^ c[3] ^ high.splat(), left_low]
        low, high = low + 0x9E3779B9, high + 0xBB67AE85
    return c
