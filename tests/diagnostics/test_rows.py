"""Rows recomputed over chunks of keys are what the oracle and the bounds say, whatever the call holds."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.cases import CASES, Case, build
from tilewise.numerics import bounds, rows
from tilewise.numerics.oracle import oracle, spans

TOLD = [case for case in CASES if not case.name.startswith(("edge", "head-dim", "dtype"))]


@pytest.mark.parametrize("case", TOLD, ids=lambda case: case.name)
def test_chunks_give_the_oracle_and_its_bounds(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK", 24)
    built = build(case)
    problem, inputs = built.problem, built.inputs
    with torch.no_grad():
        out, lse = oracle(problem, inputs)
        bound = bounds.forward(problem, inputs)
    # a bound holds the difference of two numbers as large as the log-sum-exp, each a few roundings of float64 off
    largest = float(lse.masked_fill(~lse.isfinite(), 0.0).abs().max()) * float(inputs.v.detach().abs().max())
    noise = 8 * torch.finfo(torch.float64).eps * largest
    for span in spans(problem, inputs, range(problem.batch)):
        for h in range(problem.heads):
            # every row, out of order: positions must not be taken for a range
            positions = torch.randperm(span.lengths[0], generator=torch.Generator().manual_seed(h))
            found = rows.exact_rows(problem, inputs, rows.Rows(span.sequence, h, positions))
            at = (span.batch, h, span.q.start + positions)
            for name, got, want in (
                ("out", found.out, out[at]),
                ("lse", found.lse, lse[at]),
                ("bound of out", found.out_bound, bound.out[at]),
                ("bound of lse", found.lse_bound, bound.lse[at]),
            ):
                atol = 1e-14 + (noise if name.startswith("bound") else 0.0)
                torch.testing.assert_close(got, want, rtol=1e-9, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
