"""The bounds of second derivatives hold, and a result that is a little wrong lies outside them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.conformance.cases import Case, build
from tests.numerics import checks
from tests.numerics.second import drawn_like
from tilewise.backends.base import Inputs
from tilewise.numerics.oracle import oracle_second

NAMES = ("out_t", "lse_t", "dq", "dk", "dv", "dbias", "dsinks")
CASE = Case("", batch=1, seqlen=12, head_dim=8, bias=(1, -1, -1, -1), sinks=True, softcap=3.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 3e-3), (torch.bfloat16, 1.0)])
def test_what_is_off_is_seen(name: str, dtype: torch.dtype, off: float) -> None:
    built = build(CASE)
    inputs = Inputs(*(None if x is None else x.detach() for x in built.inputs))
    problem = replace(built.problem, dtype=str(dtype).removeprefix("torch."))
    inputs = inputs._replace(q=inputs.q.to(dtype), k=inputs.k.to(dtype), v=inputs.v.to(dtype))
    g = torch.Generator().manual_seed(1)
    tangents = [drawn_like(x, g) for x in (*inputs[:4], inputs.sinks)]
    dout, dlse = torch.randn(inputs.q.shape, generator=g), torch.randn(inputs.q.shape[:3], generator=g)
    out_t, lse_t, grads = oracle_second(problem, inputs, dout, dlse, tangents)
    exact = {"out_t": out_t, "lse_t": lse_t, **grads._asdict()}

    def excesses(found: dict[str, torch.Tensor]) -> list[checks.Excess]:
        return checks.check_second(problem, inputs, (dout, dlse), tangents, SimpleNamespace(**found))

    assert not excesses(exact)
    wrong = exact[name] + off * exact[name].abs().amax()
    assert [excess.name for excess in excesses({**exact, name: wrong})] == [name]
