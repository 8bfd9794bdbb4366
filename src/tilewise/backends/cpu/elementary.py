"""2**x, tanh and log2 on vectors, from polynomials fitted here: no call into a maths library."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from tilewise.backends.cpu.ir import DOUBLE, F64, I32, I64, Emit, Value

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


def horner(e: Emit, xs: list[Value], coefficients: tuple[float, ...]) -> list[Value]:
    """The polynomial at several vectors, step by step over all of them: narrow out-of-order cores need them interleaved."""
    lanes = xs[0].type.count
    totals = [e.const(coefficients[-1], lanes)] * len(xs)
    for c in reversed(coefficients[:-1]):
        addends = [e.addend(c, lanes) for _ in xs]
        totals = [e.mad(total, x, a) for total, x, a in zip(totals, xs, addends, strict=True)]
    return totals


def exp2(e: Emit, xs: list[Value], degree: int = 0) -> list[Value]:
    """2**x for x below the largest exponent; exactly 0 at or below the floor (so for -inf), NaN for NaN."""
    lanes = xs[0].type.count
    if e.arch != "aarch64" and len(xs) > 1:  # wide out-of-order cores find the parallelism themselves; AVX2 lacks the registers
        return [y for x in xs for y in exp2(e, [x], degree)]
    xs = [e.at_least(x, e.const(e.real.floor, lanes)) for x in xs]
    return exp2_near(e, xs, [e.const(e.real.magic, lanes)] * len(xs), degree)


def exp2_near(e: Emit, xs: list[Value], levels: list[Value], degree: int = 0) -> list[Value]:
    """2**(x - m) where x - m lies between the floor and the largest exponent; a level is magic - m, m a small integer.

    x = n + f with n an integer and |f| <= 1/2: 2**f is a polynomial and n - m is added to its exponent bits. Adding the level
    rounds to n and leaves n - m in the low bits. These additions must stay as written: no fast-math flag may touch them.
    """
    real, lanes = e.real, xs[0].type.count
    kind, shift = e.vtype(real.bits, lanes), e.iconst(real.mantissa, lanes=lanes)
    shifted = [e.fadd(x, level) for x, level in zip(xs, levels, strict=True)]
    whole = [e.fsub(s, level) for s, level in zip(shifted, levels, strict=True)]
    fractions = [e.fsub(x, n) for x, n in zip(xs, whole, strict=True)]  # exact
    constant, *rest = fit(_exp2, -0.5, 0.5, degree or real.degree)
    # the constant must be 1 exactly, or masked weights are the least subnormal and not 0; a common factor cancels in softmax
    powers = horner(e, fractions, (1.0, *(c / constant for c in rest)))
    exponents = [e.shl(e.bitcast(s, kind), shift) for s in shifted]
    return [
        e.bitcast(e.add(e.bitcast(p, kind), n), e.vtype(lanes=lanes)) for p, n in zip(powers, exponents, strict=True)
    ]


def exp2_integer(e: Emit, xs: list[Value]) -> list[Value]:
    """2**n for integers n <= 0, exactly; 0 at or below the floor."""
    real, lanes = e.real, xs[0].type.count
    kind, shift = e.vtype(real.bits, lanes), e.iconst(real.mantissa, lanes=lanes)
    bounded = [e.at_least(x, e.const(real.floor, lanes)) for x in xs]
    biased = [e.fadd(x, e.const(real.magic - real.floor, lanes)) for x in bounded]  # n - floor in the low bits
    return [e.bitcast(e.shl(e.bitcast(b, kind), shift), e.vtype(lanes=lanes)) for b in biased]


def tanh(e: Emit, x: Value) -> Value:
    """An odd polynomial near 0, where the quotient would cancel; (1 - t) / (1 + t) with t = exp(-2|x|) elsewhere."""
    lanes = x.type.count
    size = e.intrinsic(e._named("fabs", x.type), x.type, [x])
    (t,) = exp2(e, [e.fmul(size, e.const(-2 * LOG2E, lanes))])
    one = e.const(1.0, lanes)
    far = e.fdiv(e.fsub(one, t), e.fadd(one, t))
    far = e.intrinsic(e._named("copysign", x.type), x.type, [far, x])
    (ratio,) = horner(e, [e.fmul(x, x)], fit(_tanh_ratio, 0.0, 0.36, 12 if e.real is DOUBLE else 6))
    near = e.fmul(x, ratio)
    return e.select(e.fcmp_ordered("<", size, e.const(0.6, lanes)), near, far)


def log2(e: Emit, x: Value) -> Value:
    """log2 of one positive normal double: exponent bits plus 2/ln2·artanh((y - 1) / (y + 1)), y in [√½, √2)."""
    bits = e.bitcast(x, I64)
    # Adding 2**52 - mantissa(√½) carries into the exponent exactly when the mantissa reaches √2.
    carried = e.sub(bits, I64(0x3FE6A09E667F3BCD))
    n = e.ashr(carried, I64(52))
    y = e.bitcast(e.sub(bits, e.shl(n, I64(52))), F64)
    z = e.fdiv(e.fsub(y, F64(1.0)), e.fadd(y, F64(1.0)))
    u = e.fmul(z, z)
    total = F64(2 * LOG2E / 21)
    for k in range(19, 0, -2):
        total = e.fadd(e.fmul(total, u), F64(2 * LOG2E / k))
    return e.fadd(e.sitofp(n, F64), e.fmul(total, z))


def philox(e: Emit, counter: list[Value], key: tuple[Value, Value]) -> list[Value]:
    """Philox4x32-10 on vectors of 32-bit words: four words for each lane's counter."""
    lanes = counter[0].type.count
    wide = e.vtype(I64, lanes)
    low, high = key
    c = list(counter)
    for _ in range(10):
        left = e.mul(e.zext(c[0], wide), e.iconst(0xD2511F53, I64, lanes))
        right = e.mul(e.zext(c[2], wide), e.iconst(0xCD9E8D57, I64, lanes))
        left_high, right_high = (e.trunc(e.lshr(w, e.iconst(32, I64, lanes)), e.vtype(I32, lanes)) for w in (left, right))
        left_low, right_low = (e.trunc(w, e.vtype(I32, lanes)) for w in (left, right))
        c = [
            e.xor(e.xor(right_high, c[1]), e.splat(low, lanes)),
            right_low,
            e.xor(e.xor(left_high, c[3]), e.splat(high, lanes)),
            left_low,
        ]
        low, high = e.add(low, I32(0x9E3779B9)), e.add(high, I32(0xBB67AE85))
    return c
