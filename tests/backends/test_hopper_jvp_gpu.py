"""The JVP's kernel on a Hopper GPU: edges of tiles, what stays, and many launches that give the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tests.backends.test_hopper_backward_logic import PAD, Shape, build
from tests.backends.test_hopper_jvp_logic import ALL, SHAPES, directions, excesses, hidden
from tilewise import dispatch
from tilewise.backends.base import Inputs, Jvp, Tangents
from tilewise.backends.hopper.jvp.choose import Moving
from tilewise.problem import Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not dispatch.usable("hopper", "cuda").ok, reason="hopper is not usable here"),
]
CAUSAL, WINDOW = "tw.causal()", "tw.causal() & tw.window(100)"
MASKS = (WINDOW, "tw.window(70, 20)", "tw.causal() | tw.prefix(150)")
DIMS = (40, 64, 96, 128)
LAUNCHES = 300
EDGES = ((64, 64), (65, 63), (129, 127), (500, 65), (257, 1000), (1000, 257))
CASES = [
    *SHAPES,
    *(Shape(d, mask, m, n, h=2) for d in DIMS for m, n in EDGES for mask in ("None", CAUSAL)),
    *(Shape(d, mask, 500, 700, h=4, hk=2) for d in DIMS for mask in MASKS),
    *(Shape(d, CAUSAL, 300, h=8, hk=2, b=2, dtype=torch.float16) for d in DIMS),
    *(Shape(d, PAD.format("130, 0"), 100, 300, b=2, poison=(130, 300)) for d in (64, 128)),
    *(Shape(d, CAUSAL, lengths=((5, 133, 0, 600), (5, 140, 7, 600)), h=4, hk=2) for d in DIMS),
    *(Shape(d, CAUSAL, 1100, h=40) for d in (64, 128)),
]


def moved(xs: Inputs | Tangents, device: str = "cuda") -> list[torch.Tensor | None]:
    return [None if x is None else x.to(device) for x in xs]


def on_gpu(problem: Problem, inputs: Inputs, tangents: Tangents) -> Jvp:
    """Three times: as it comes, recorded, repeated; fresh memory holds NaN. The last one's."""
    there, given, along = replace(problem, device="cuda"), Inputs(*moved(inputs)), Tangents(*moved(tangents))
    verdict = dispatch.judge("hopper", there, given, derivative="jvp")
    assert verdict.ok, verdict.reasons
    for _ in range(3):
        block = torch.full((1 << 24,), float("nan"), device="cuda")
        del block
        found = dispatch.get("hopper").jvp(there, given, along)
    return Jvp(*(x.cpu() for x in found))


def check(shape: Shape, moving: Moving = ALL) -> None:
    problem, inputs = build(shape)
    tangents = directions(inputs, moving)
    assert excesses(problem, inputs, tangents, on_gpu(problem, *hidden(inputs, tangents, shape))) == []


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_right_at_the_edges_of_tiles(shape: Shape) -> None:
    check(shape)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("moving", ["q", "k", "v", "qk", "qv", "kv"])
def test_what_stays(moving: str, d: int) -> None:
    check(Shape(d, CAUSAL, 333, h=2), Moving(*(name in moving for name in "qkv")))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", ["None", CAUSAL])
def test_the_same_bits_every_time(d: int, mask: str) -> None:
    problem, inputs = build(Shape(d, mask, 1000, h=30))
    there, given = replace(problem, device="cuda"), Inputs(*moved(inputs))
    along = Tangents(*moved(directions(inputs, ALL)))
    first = dispatch.get("hopper").jvp(there, given, along)
    for _ in range(LAUNCHES):
        again = dispatch.get("hopper").jvp(there, given, along)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_torch_func_takes_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a tangent of any strides; what the kernel does not serve is another's."""
    calls = []
    backend = dispatch.get("hopper")
    original = type(backend).jvp
    monkeypatch.setattr(type(backend), "jvp", lambda *args: calls.append(1) or original(*args))
    q, k, v = (torch.randn(1, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flat = torch.randn(1, 4, 1, 64, device="cuda", dtype=torch.bfloat16).expand(1, 4, 200, 64)
    turned = torch.randn(1, 4, 64, 200, device="cuda", dtype=torch.bfloat16).mT
    results = [
        torch.func.jvp(lambda *x, one=one: tw.attention(*x, mask=tw.causal(), backend=one), (q, k, v), (flat, turned, q))
        for one in ("auto", "triton")
    ]
    assert len(calls) == 1
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.05, atol=0.05)
    torch.func.jvp(lambda x: tw.attention(x, k, v, softcap=20.0), (q,), (q,))
    assert len(calls) == 1
