"""The Hopper JVP's kernel, run as Python threads: right results in every tile, no role left waiting, nothing read too late.

What a GPU adds (the order of memory, products in flight, the assembler) is tried by test_hopper_jvp_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tests.backends.gluon_threads import Descriptor, kernels
from tests.backends.gluon_values import Value
from tests.backends.hopper_lists import order_of, owners_of
from tests.backends.test_hopper_backward_logic import PAD, Shape, build, start, wrapped
from tests.backends.test_hopper_forward_logic import extend
from tests.numerics import checks
from tests.numerics.second import drawn_like
from tilewise.backends.base import Inputs, Jvp, Tangents
from tilewise.backends.hopper.intervals import mask_of
from tilewise.backends.hopper.jvp import choose
from tilewise.backends.hopper.jvp.arguments import make_plan
from tilewise.backends.hopper.jvp.choose import Moving
from tilewise.backends.hopper.jvp.compile import tile_shapes
from tilewise.backends.hopper.launch import term_on
from tilewise.backends.hopper.structs import Rows, Term
from tilewise.hardware import lookup
from tilewise.problem import Problem

CAUSAL, WINDOW = "tw.causal()", "tw.causal() & tw.window(100)"
ALL = Moving()
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
SHAPES = [
    Shape(sq=300, h=2),
    Shape(64, sq=300, sk=500, h=2),
    Shape(128, CAUSAL, 300, h=2, hk=1),
    Shape(64, CAUSAL, 460, h=3),
    Shape(64, CAUSAL, 260, 333, h=2, hk=1),
    Shape(128, CAUSAL, 333, 200, h=2),
    Shape(128, WINDOW, 400),
    Shape(64, "tw.window(70, 20)", 300),
    Shape(128, "tw.causal() | tw.prefix(150)", 300),
    Shape(128, "tw.causal('top_left')", 100, 333, poison=(100, 333)),
    Shape(64, "tw.causal(offset=torch.tensor([3, 170]))", 200, 400, b=2),
    Shape(128, PAD.format("130, 77"), 100, 300, b=2, poison=(130, 300)),
    Shape(64, f"tw.causal() & {PAD.format('130, 77')}", 300, b=2, poison=(130, 300)),
    Shape(128, PAD.format("100, 100")[:-1] + ", torch.tensor([40, 40]))", 80, 200, b=2, poison=(0, 40)),
    Shape(128, "~tw.full()", 70, 130),
    Shape(128, scale=-0.2),
    Shape(96, CAUSAL, 140, dv=40),
    Shape(40, sq=150, sk=200, h=2),
    Shape(24, CAUSAL, 200, dv=128),
    Shape(128, CAUSAL, 200, dv=16, dtype=torch.float16),
    Shape(128, CAUSAL, lengths=((5, 133, 0, 170), (5, 140, 7, 170)), h=2, hk=1),
    Shape(64, lengths=((130, 3), (150, 200)), h=2),
    Shape(128, WINDOW, lengths=((200, 64), (200, 130))),
]


def directions(inputs: Inputs, moving: Moving) -> Tangents:
    g = torch.Generator().manual_seed(2)
    return Tangents(*(drawn_like(x, g) if moves else None for x, moves in zip(inputs[:3], moving, strict=True)))


def run(problem: Problem, inputs: Inputs, tangents: Tangents) -> Jvp:
    """All programs, one after the other."""
    moving = Moving(*(x is not None for x in tangents[:3]))
    plan = make_plan(problem, replace(lookup("h200"), units=3), lambda *_: None, moving)
    C, packed = plan.config, problem.varlen
    q, k, v = inputs[:3]
    out, out_t = (torch.full((*q.shape[:3], problem.head_dim_v), float("nan"), dtype=q.dtype) for _ in range(2))
    lse, lse_t = (torch.full(q.shape[:3], float("nan")) for _ in range(2))
    a = wrapped(
        plan.arguments._replace(
            lse_ptr=lse,
            lse_t_ptr=lse_t,
            cu_q=inputs.cu_q if packed else None,
            cu_k=inputs.cu_k if packed else None,
            terms=tuple(Term(*term_on(term, problem.batch, torch.device("cpu"))) for term in mask_of(problem).terms),
            order=order_of(plan.arguments),
            owners=owners_of(plan.arguments),
            out=Rows(out, out.stride(1), out.stride(2), out.shape[3]) if packed else None,
            out_t=Rows(out_t, out_t.stride(1), out_t.stride(2), out_t.shape[3]) if packed else None,
        )
    )
    tensors = (q, k, v, *tangents[:3], out, out_t)
    boxes = list(zip(tensors, tile_shapes(C).values(), strict=True))
    with kernels("tilewise.backends.hopper.jvp", "kernel", "mainloop") as (machine, modules):
        extend(modules["mainloop"].gl, machine)
        for program in range(plan.programs):
            start(machine, program)
            maps = [None if x is None or box is None else Descriptor(x, [1, 1, *box]) for x, box in boxes]
            modules["kernel"].jvp_kernel(*maps, a, C)
    return Jvp(out, lse, out_t, lse_t)


def excesses(problem: Problem, inputs: Inputs, tangents: Tangents, found: Jvp) -> list[checks.Excess]:
    upstream = torch.zeros_like(found.out), torch.zeros_like(found.lse)
    results = SimpleNamespace(out_t=found.out_t, lse_t=found.lse_t, **dict.fromkeys(GRADIENTS))
    forward = checks.check_forward(problem, inputs, found.out, found.lse)
    return forward + checks.check_second(problem, inputs, upstream, tangents, results)


def poisoned(x: torch.Tensor | None, keys: tuple[int, int] | None) -> torch.Tensor | None:
    if x is None or keys is None:
        return x
    x = x.clone()
    x[:, :, slice(*keys)] = float("nan")
    return x


def hidden(inputs: Inputs, tangents: Tangents, shape: Shape) -> tuple[Inputs, Tangents]:
    """The same with NaN in keys and values that no query sees."""
    k, v, k_t, v_t = (poisoned(x, shape.poison) for x in (*inputs[1:3], *tangents[1:3]))
    assert k is not None and v is not None
    return inputs._replace(k=k, v=v), tangents._replace(k=k_t, v=v_t)


@pytest.fixture(autouse=True)
def tensors_permute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Value, "permute", lambda x, order: Value(x.value.permute(order)), raising=False)


def check(shape: Shape, moving: Moving = ALL) -> None:
    problem, inputs = build(shape)
    assert list(choose.obstacles(problem)) == []
    tangents = directions(inputs, moving)
    assert excesses(problem, inputs, tangents, run(problem, *hidden(inputs, tangents, shape))) == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results(shape: Shape) -> None:
    check(shape)


@pytest.mark.parametrize("moving", ["q", "k", "v", "qk", "qv", "kv"])
def test_what_stays(moving: str) -> None:
    check(Shape(64, CAUSAL, 200, h=2), Moving(*(name in moving for name in "qkv")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("climb", [1.0, 20.0])
def test_sums_are_rescaled(climb: float, dtype: torch.dtype) -> None:
    """Scores of each tile of keys lie `climb` above those of the tile before (to base e; keys are walked from the right)."""
    problem, inputs = build(Shape(128, sq=128, sk=512, h=1, dtype=dtype))
    inputs.q[..., 0], inputs.q[..., 1:] = 8.0, inputs.q[..., 1:] / 4
    inputs.k[..., 0] = climb * 128**0.5 / 8 * torch.arange(7, -1, -1).repeat_interleave(64)
    tangents = directions(inputs, ALL)
    assert excesses(problem, inputs, tangents, run(problem, inputs, tangents)) == []


def test_what_a_packed_neighbour_holds_does_not_matter() -> None:
    problem, inputs = build(Shape(128, CAUSAL, lengths=((130, 100), (130, 100))))
    tangents = directions(inputs, ALL)
    clean = run(problem, inputs, tangents)
    k, v, k_t, v_t = (poisoned(x, (130, 230)) for x in (*inputs[1:3], *tangents[1:3]))
    assert k is not None and v is not None
    found = run(problem, inputs._replace(k=k, v=v), tangents._replace(k=k_t, v=v_t))
    for one, other in zip(clean, found, strict=True):
        assert torch.equal(one[:, :, :130], other[:, :, :130])
