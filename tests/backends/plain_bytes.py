"""VPDPBUSD as any processor can compute it: kernels of x86 that multiply bytes run wherever the tests do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tests.backends.plain_tiles  # noqa: F401 - the unit "plain"
from tests.backends.test_cpu_memory import pretend
from tilewise.backends.cpu import backend, emitters, plan, prepare
from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.ir import I8, I32, Value, vector_of
from tilewise.hardware.cache import CACHE_VARIABLE
from tilewise.hardware.spec import DeviceSpec
from tilewise.problem import Problem

NAME = "llvm.x86.avx512.vpdpbusd."
FLAGS = {"avx512": "avx512_vnni", "avx2": "avx_vnni"}
_intrinsic, _emit, _matrix_unit = Emit.intrinsic, emitters.emit, plan.matrix_unit


def dot(e: Emit, acc: Value, unsigned: Value, signed: Value) -> Value:
    """Unsigned by signed bytes; four products each join a sum of 32 bits, which wraps around."""
    lanes = acc.lanes
    left, right = (Value(e, e.ir.bitcast(x.raw, vector_of(I8, 4 * lanes))) for x in (unsigned, signed))
    products = left.zext(I32) * right.sext(I32)
    for n in range(4):
        acc = acc + products.pick(range(n, 4 * lanes, 4))
    return acc


def intrinsic(e: Emit, name: str, result: Any, args: Sequence[Any], flags: Sequence[str] = ()) -> Value:
    return dot(e, *args) if name.startswith(NAME) else _intrinsic(e, name, result, args, flags)


def pretend_vnni(monkeypatch: pytest.MonkeyPatch, isa: str, directory: Path, tiles: bool = False) -> None:
    """Plan and emit for a processor of x86 with VPDPBUSD, compile for this one; kernels are kept in a directory of their own.
    `tiles`: it has AMX for bytes, too, whose tiles are loops over memory here."""
    pretend(monkeypatch, isa)
    spec = replace(backend.probe_cpu(), isa_flags=(FLAGS[isa], *(("amx_tile", "amx_int8") if tiles else ())))

    def matrix_unit(problem: Problem, kind: str, spec: DeviceSpec) -> str:
        return "plain" if _matrix_unit(problem, kind, spec) else ""

    monkeypatch.setattr(plan, "matrix_unit", matrix_unit)
    for module in (backend, prepare):
        monkeypatch.setattr(module, "probe_cpu", lambda threads=0: replace(spec, threads=threads))
    monkeypatch.setenv(CACHE_VARIABLE, str(directory))
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(emitters, "emit", lambda kernel, arch: _emit(kernel, "x86_64"))
    monkeypatch.setattr(Emit, "intrinsic", intrinsic)
