"""The Hopper kernels over tile lists on a GPU: the shapes that run as threads elsewhere, longer ones, replays, changed ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tests.backends.test_hopper_backward_logic import Shape, build
from tests.backends.test_hopper_lists_logic import SHAPES, spoiled
from tests.numerics import checks
from tilewise import dispatch
from tilewise.backends.base import BackwardInputs, Inputs
from tilewise.backends.tiled import backend as tiled
from tilewise.problem import Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not dispatch.usable("hopper", "cuda").ok, reason="hopper is not usable here"),
]
LENGTHS = "torch.tensor([3, 200, 1, 700, 128, 129, 512, 64, 263])"
LONG = f"{LENGTHS}.repeat_interleave({LENGTHS}).int()"
TABLE = "torch.rand(1, {}, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.25"
LONGER = [
    *(Shape(d, f"tw.causal() & tw.documents({LONG})", 2000, h=4, hk=2) for d in (64, 128, 256)),
    *(Shape(d, f"tw.documents({LONG})", 2000, h=2, dtype=torch.float16) for d in (64, 128)),
    Shape(128, f"tw.causal() & tw.window(300) & tw.documents({LONG})", 2000, h=2, deterministic=True),
    Shape(128, f"tw.blocks({TABLE.format(1)}, 128)", 2048, h=2),
    Shape(64, f"tw.causal() & tw.blocks({TABLE.format(4)}, 128)", 2048, h=4, hk=4),
    Shape(128, "tw.causal() & (tw.prefix(4) | tw.window(300))", 2000, h=2),
    Shape(128, "tw.documents(torch.arange(1500).int())", 1500),  # one token each
]


def on_gpu(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    return replace(problem, device="cuda"), Inputs(*(None if x is None else x.cuda() for x in inputs))


@pytest.mark.parametrize("shape", [*SHAPES, *LONGER], ids=lambda shape: f"d{shape.d} {shape.mask[:60]}")
def test_right_forward_and_backward(shape: Shape) -> None:
    problem, inputs = build(shape)
    dout = torch.randn((*inputs.q.shape[:3], problem.head_dim_v), generator=torch.Generator().manual_seed(1)).to(shape.dtype)
    given, poisoned = spoiled(problem, inputs, dout)
    assert poisoned is not None
    there, device_inputs = on_gpu(problem, given)
    assert dispatch.judge("hopper", there, device_inputs, backward=True).ok
    backend = dispatch.get("hopper")
    clean = tiled.backend.forward(replace(problem, tile=()), inputs)
    for _ in range(3):  # as it comes, recorded, repeated
        out, lse = backend.forward(there, device_inputs)
        assert checks.check_forward(problem, inputs, out.cpu(), lse.cpu()) == []
        saved = BackwardInputs(clean[0].contiguous().cuda(), clean[1].cuda(), poisoned.cuda())
        found = backend.backward(there, device_inputs, saved)
        grads = type(found)(*(None if x is None else x.cpu() for x in found))
        assert checks.check_backward(problem, inputs, dout, None, grads) == []


def test_a_replayed_graph_reads_the_ids_of_its_time() -> None:
    q, k, v = (torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = (torch.arange(1024, device="cuda") // 300).int()
    others = (torch.arange(1024, device="cuda") // 170).int()
    mask = tw.causal() & tw.documents(ids)
    tw.attention(q, k, v, mask=mask, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention(q, k, v, mask=mask, backend="hopper")
    ids.copy_(others)
    graph.replay()
    assert torch.equal(out, tw.attention(q, k, v, mask=tw.causal() & tw.documents(others), backend="hopper"))


def test_changed_ids_are_seen() -> None:
    q, k, v = (torch.randn(1, 4, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = (torch.arange(1024, device="cuda") // 300).int()
    mask = tw.causal() & tw.documents(ids)
    before = tw.attention(q, k, v, mask=mask, backend="hopper")
    ids.div_(2, rounding_mode="floor")
    after = tw.attention(q, k, v, mask=mask, backend="hopper")
    assert not torch.equal(before, after)
    assert torch.equal(after, tw.attention(q, k, v, mask=tw.causal() & tw.documents(ids.clone()), backend="hopper"))
