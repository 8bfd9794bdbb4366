"""A backend's JVP and double backward of one problem, held to the oracle."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.numerics import checks
from tilewise import dispatch
from tilewise.backends.base import BackwardInputs, Direction, Inputs, Needs, Tangents
from tilewise.problem import Problem


def drawn_like(x: torch.Tensor | None, g: torch.Generator) -> torch.Tensor | None:
    return None if x is None else torch.randn(x.shape, generator=g).to(x)


def derivatives(
    problem: Problem, inputs: Inputs, backend: str, moving: str = "qkvbs"
) -> list[checks.Excess]:
    """What out_t, lse_t and the derivative of all gradients are outside their bounds; `moving` names what has a tangent. A
    backend that finds out_t and lse_t itself is asked with them and without."""
    inputs = Inputs(*(None if x is None else x.detach() for x in inputs))
    g = torch.Generator().manual_seed(2)
    given = (*inputs[:4], inputs.sinks)
    tangents = Tangents(*(drawn_like(x, g) if n in moving else None for x, n in zip(given, "qkvbs", strict=True)))
    server = dispatch.get(backend)
    out, lse, out_t, lse_t = server.jvp(problem, inputs, tangents)
    dout, dlse = drawn_like(out, g), drawn_like(lse, g)
    assert dout is not None
    needs = Needs(True, True, True, inputs.bias is not None, inputs.sinks is not None)
    upstream = BackwardInputs(out, lse, dout, dlse, needs)
    directions = [Direction(tangents, out_t, lse_t), *[Direction(tangents)] * server.finds_direction]
    excesses = checks.check_forward(problem, inputs, out, lse)
    for direction in directions:
        grads = server.double_backward(problem, inputs, upstream, direction)
        found = SimpleNamespace(out_t=out_t, lse_t=lse_t, **grads._asdict())
        excesses += checks.check_second(problem, inputs, (dout, dlse), tangents, found)
    return excesses
