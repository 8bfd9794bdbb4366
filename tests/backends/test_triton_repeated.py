"""A repeated call of the Triton backend has that call's own tensors, whatever features the calls have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.test_gpu_record import Compiled, collect, kernel, plain, replayed
from tests.conformance.cases import CASES, Built, Case, build
from tilewise.backends.base import BackwardInputs, empty_lse, empty_out
from tilewise.hardware import lookup

pytest.importorskip("triton")

from tilewise.backends.triton import run

__all__ = ["kernel"]
SERVED = [case for case in CASES if case.dtype != torch.float64 and case.precision not in ("compensated", "double")]
H200 = lookup("h200")


def perform(built: Built, lse_gradient: bool) -> None:
    """Forward and backward, except that kernels are collected and not run."""
    inputs = built.inputs._replace(q=built.inputs.q.detach(), k=built.inputs.k.detach(), v=built.inputs.v.detach())
    out, lse = empty_out(inputs.q, built.problem.head_dim_v), empty_lse(inputs.q)
    dlse = torch.zeros_like(lse) if lse_gradient else None
    run.run_forward(built.problem, inputs, out, lse)
    run.run_backward(built.problem, inputs, BackwardInputs(out, lse, torch.zeros_like(out), dlse))


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_a_repeated_call_has_its_own_tensors(monkeypatch: pytest.MonkeyPatch, kernel: Compiled, case: Case) -> None:
    found: list[Any] = collect(monkeypatch)
    monkeypatch.setattr(run, "spec_of", lambda device: H200)
    first, second = build(case, seed=0), build(case, seed=1)
    for built in (first, second):
        perform(built, case.lse_gradient)
    assert len(found) == 4
    for (key, moving, launches), (other_key, other, others) in zip(found[:2], found[2:], strict=True):
        assert key == other_key and (first.problem.program.tensors or first.problem == second.problem)
        kernel.launched.clear()
        replayed(launches, moving, other)
        assert [launched[9:] for launched in kernel.launched] == [plain(launch) for launch in others]
