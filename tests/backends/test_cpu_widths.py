"""Kernels with the vectors and register tiles of other processors: LLVM makes them of what this one has, so they run anywhere."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("llvmlite")

import tests.backends.plain_tiles  # noqa: F401 - the unit "plain"
from tests.backends.test_cpu_memory import pretend
from tests.conformance.cases import CASES, Case, build
from tests.conformance.harness import excesses
from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu import plan
from tilewise.backends.cpu.spec import Kernel

CHOSEN = re.compile(
    r"(mask-(causal|dense)|double-(float16|decode)|dtype-float(16|64)|edge-(17|129)|head-dim-(3|24|80|128)|value-dim-larger|mqa|decode-few|bshd|varlen)$"
)
SOME = [case for case in CASES if CHOSEN.match(case.name)]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that were asked for."""
    asked: list[Kernel] = []
    original = compiler.worker
    monkeypatch.setattr(compiler, "worker", lambda kernel: (asked.append(kernel), original(kernel))[1])
    return asked


@pytest.mark.parametrize("processor", ["neon", "avx2", "avx512"])
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_conformance(monkeypatch: pytest.MonkeyPatch, kernels: list[Kernel], case: Case, processor: str) -> None:
    pretend(monkeypatch, processor)
    built = build(case, "cpu")
    assert excesses(built, "cpu", lse_gradient=case.lse_gradient) == []
    lanes = {"neon": 4, "avx2": 8, "avx512": 16}[processor] // (2 if built.problem.arithmetic == "float64" else 1)
    assert kernels and {kernel.tile.lanes for kernel in kernels} == {lanes}


BRAIN = [case for case in CASES if "bf" in case.name and case.precision == "default"]


@pytest.mark.parametrize("case", BRAIN, ids=lambda case: case.name)
def test_matrix_tiles_beside_wide_vectors(monkeypatch: pytest.MonkeyPatch, kernels: list[Kernel], case: Case) -> None:
    """As with AMX, but that tiles are loops over memory."""
    pretend(monkeypatch, "avx512")
    monkeypatch.setattr(plan, "matrix_unit", lambda problem, kind, spec: "plain" if kind in plan.MATRIX_KINDS else "")
    assert excesses(build(case, "cpu"), "cpu", lse_gradient=case.lse_gradient) == []
    assert {(kernel.matrix, kernel.tile.lanes) for kernel in kernels} == {("plain", 16)}
