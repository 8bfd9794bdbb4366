"""2**x, tanh and log2 as the kernels compute them, against exact values."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from llvmlite import binding

from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu import elementary
from tilewise.backends.cpu.builder import Unit
from tilewise.backends.cpu.ir import I64, PTR, REALS, Value
from tilewise.backends.cpu.spec import Register

DTYPES = {"float32": np.float32, "float64": np.float64}


def compiled(real: str, body: Callable[[Value], Value]) -> Callable[[np.ndarray], np.ndarray]:
    """`body` on vectors of four, as a function on arrays."""
    unit = Unit("test", REALS[real], Register(4, 1, 4), compiler.host().arch)
    e, (source, target, count), _ = unit.function("run", [PTR, PTR, I64], public=True)
    with e.range(0, count, 4) as n:
        target[n] = body(source.vector(n))
    e.ret()
    module = binding.parse_assembly(str(unit.module))
    engine = binding.create_mcjit_compiler(module, compiler.target_machine(compiler.host()))
    engine.finalize_object()
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(engine.get_function_address("run"))

    def run(x: np.ndarray, engine: Any = engine) -> np.ndarray:
        x = np.ascontiguousarray(x, dtype=DTYPES[real])
        assert len(x) % 4 == 0
        out = np.empty_like(x)
        call(x.ctypes.data, out.ctypes.data, len(x))
        return out

    return run


@pytest.fixture(params=["float32", "float64"])
def real(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_exp2_is_within_two_units_in_the_last_place(real: str) -> None:
    run = compiled(real, elementary.exp2)
    x = np.linspace(-100, 30, 40_000).astype(DTYPES[real])
    exact = np.exp2(x.astype(np.longdouble))
    assert np.max(np.abs(run(x) - exact) / exact) <= 2 * np.finfo(DTYPES[real]).eps


def test_exp2_has_no_bias() -> None:
    """Errors of one sign add up over a row: a polynomial one degree lower is nearly as close, but fails here."""
    run = compiled("float32", elementary.exp2)
    x = np.random.default_rng(0).uniform(-0.25, 0.25, 40_000).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    assert abs(np.mean((run(x) - exact) / exact)) <= 0.1 * np.finfo(np.float32).eps


def test_exp2_at_the_edges(real: str) -> None:
    run = compiled(real, elementary.exp2)
    floor = REALS[real].floor
    out = run(np.array([0.0, -math.inf, floor, math.nan, 1.0, -1.0, 10.0, 2 * floor]))
    assert out[[1, 2, 7]].tolist() == [0.0, 0.0, 0.0], "hidden scores must weigh exactly nothing"
    assert math.isnan(out[3]), "a NaN must not vanish"
    eps = np.finfo(DTYPES[real]).eps
    np.testing.assert_allclose(out[[0, 4, 5, 6]], [1.0, 2.0, 0.5, 1024.0], rtol=2 * eps)


def test_tanh_keeps_its_relative_accuracy_near_zero(real: str) -> None:
    run = compiled(real, elementary.tanh)
    x = np.concatenate([np.linspace(-9, 9, 4000), np.logspace(-6, 0, 4000)]).astype(DTYPES[real])
    exact = np.tanh(x.astype(np.longdouble))
    assert np.max(np.abs(run(x) - exact) / np.maximum(np.abs(exact), 1e-30)) <= 4 * np.finfo(DTYPES[real]).eps


def test_log2_in_double() -> None:
    def body(x: Value) -> Value:
        for lane in range(4):
            x = x.with_lane(lane, elementary.log2(x.lane(lane)))
        return x

    run = compiled("float64", body)
    x = np.exp2(np.linspace(-120, 120, 8000))
    np.testing.assert_allclose(run(x), np.log2(x), rtol=1e-14, atol=1e-15)
