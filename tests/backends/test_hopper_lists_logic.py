"""The Hopper kernels over tile lists, run as Python threads: every mask kind, awkward lists, NaN behind masks, empty rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.backends import test_hopper_backward_logic as backward_logic
from tests.backends import test_hopper_forward_logic as forward_logic
from tests.backends.gluon_threads import Descriptor, kernels
from tests.backends.gluon_values import Value
from tests.backends.hopper_lists import make_bounds, make_lists, make_order, make_words, visible
from tests.backends.test_hopper_backward_logic import Call, Shape, build, maps, start, wrapped
from tests.numerics import checks
from tilewise.backends.base import Grads, Inputs
from tilewise.backends.hopper import arguments
from tilewise.backends.hopper.backward import arguments as backward_arguments
from tilewise.backends.hopper.backward import choose
from tilewise.backends.hopper.backward.config import KeysConfig
from tilewise.backends.hopper.feature_launch import call_features, with_features
from tilewise.backends.hopper.list_plan import lists_of
from tilewise.backends.hopper.plan import supports
from tilewise.backends.hopper.structs import Lists, PrePostArguments
from tilewise.backends.tiled import backend as tiled
from tilewise.hardware import lookup
from tilewise.problem import Problem

IDS = "torch.arange({}).div({}, rounding_mode='floor').int()"
DOCUMENTS = f"tw.documents({IDS.format(400, 90)})"
CAUSAL_DOCUMENTS = f"tw.causal() & {DOCUMENTS}"
UNSORTED = "tw.causal() & tw.documents(torch.arange(300).remainder(7).int())"
BY_SEQUENCE = "tw.causal() & tw.documents(torch.stack([torch.arange(200) // 50, torch.arange(200) // 130]).int())"
CROSS = f"tw.documents({IDS.format(300, 70)}, q_ids={IDS.format(200, 60)} * 2)"
BLOCKS = "tw.blocks((torch.arange(9).reshape(1, 1, 3, 3) % 4 == 1), 128)"
BLOCKS_BY_HEAD = "tw.blocks((torch.arange(18).reshape(1, 2, 3, 3) % 4 == 1), 128) & tw.causal()"
LIVE = "tw.causal() & tw.blocks((torch.arange(9).reshape(1, 1, 3, 3) % 4 == 1), 128) | tw.prefix(40)"
FULL_FIRST = "tw.blocks(torch.eye(3, dtype=torch.bool)[None, None], 128) | tw.window(50)"
DENSE = "tw.dense(torch.rand(1, 1, 300, 333, generator=torch.Generator().manual_seed(1)) < 0.01)"
DENSE_TILES = "tw.causal() & tw.dense((torch.arange(300)[:, None] // 64 + torch.arange(300)[None] // 64) % 3 == 0)"
DENSE_BY_HEAD = "tw.causal() & ~tw.dense(torch.rand(1, 2, 1, 300, generator=torch.Generator().manual_seed(2)) < 0.3)"
UNION = "tw.causal() & (tw.prefix(4) | tw.window(70))"
PREFIX = f"(tw.prefix(64) | tw.causal()) & {DOCUMENTS}"
SHAPES = [
    Shape(128, CAUSAL_DOCUMENTS, 400, h=2),
    Shape(64, CAUSAL_DOCUMENTS, 400, h=2, hk=1),
    Shape(256, CAUSAL_DOCUMENTS, 400, h=2, hk=1),
    Shape(128, UNSORTED, 300, h=2),
    Shape(128, BY_SEQUENCE, 200, h=2, b=2),
    Shape(64, CROSS, 200, 300),
    Shape(128, CROSS, 200, 300),
    Shape(256, CROSS, 200, 300),
    Shape(128, BLOCKS, 384, 384, h=2, hk=1),
    Shape(64, BLOCKS_BY_HEAD, 300, 333, h=2, hk=2),
    Shape(128, LIVE, 384, 300),
    Shape(128, DENSE, 300, 333),
    Shape(64, DENSE_TILES, 300),
    Shape(256, DENSE_TILES, 300),
    Shape(64, UNION, 400, h=2),
    Shape(128, PREFIX, 400, h=4, hk=2),
    Shape(128, CAUSAL_DOCUMENTS, 400, h=2, hk=1, deterministic=True),
    Shape(64, DENSE, 300, 333, deterministic=True, dlse=True),
    Shape(128, f"{CAUSAL_DOCUMENTS} & tw.window(100)", 400, softcap=3.0),
    Shape(192, CAUSAL_DOCUMENTS, 400, dv=128),
    Shape(64, FULL_FIRST, 300),
    Shape(64, DENSE_BY_HEAD, 300, h=2, hk=2),
    Shape(128, "tw.dense(torch.arange(300)[:, None] % 7 < 3)", 300, 200, softcap=3.0),
]
FORWARD = [shape for shape in SHAPES if not shape.deterministic]
BACKWARD = [shape for i, shape in enumerate(SHAPES) if i not in (6, 12, 14, 19)]  # like others, and long


def name(shape: Shape) -> str:
    return f"d{shape.d}-{SHAPES.index(shape)}"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "FEW_KEYS", {})
    monkeypatch.setattr(Value, "permute", lambda x, order: Value(x.value.permute(order)), raising=False)


def spoiled(problem: Problem, inputs: Inputs, dout: torch.Tensor | None = None) -> tuple[Inputs, torch.Tensor | None]:
    """NaN in keys that no query sees and in queries that see no key."""
    shown = torch.from_numpy(visible(problem).copy())
    keys = shown.any(1).any(1)[:, None, :, None]
    rows = shown.any(1).any(2)[:, None, :, None]
    nan = torch.tensor(float("nan"), dtype=inputs.q.dtype)
    q, k, v = (torch.where(ok, x, nan) for ok, x in zip((rows, keys, keys), inputs[:3], strict=True))
    return inputs._replace(q=q, k=k, v=v), None if dout is None else torch.where(rows, dout, nan)


def listed(problem: Problem, config: Any, by_key: bool) -> Lists:
    """The lists of a pass."""
    lists = make_lists(problem, config, by_key)
    return lists_of(lists, make_words(problem, config), make_bounds(problem, lists, config, by_key))


def run_forward(
    problem: Problem, inputs: Inputs, stats: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = arguments.make_plan(problem, replace(lookup("h200"), units=3), lambda *_: None)
    C, (q, k, v) = plan.config, inputs[:3]
    out = torch.full((*q.shape[:3], problem.head_dim_v), float("nan"), dtype=q.dtype)
    lse = torch.full(q.shape[:3], float("nan"))
    lists = listed(problem, C, False)
    given = with_features(plan.arguments, call_features(problem, inputs) | (stats or {}))
    a = wrapped(given._replace(lse_ptr=lse, lists=lists, order=make_order(plan.arguments)))
    boxes = ((q, 64, C.BLOCK_D), (k, C.BLOCK_N, C.BLOCK_D), (v, C.BLOCK_N, C.BLOCK_DV), (out, 64, C.O_COLUMNS))
    with kernels("tilewise.backends.hopper", "kernel", "mainloop") as (machine, modules):
        forward_logic.extend(modules["mainloop"].gl, machine)
        for program in range(plan.programs):
            start(machine, program)
            modules["kernel"].forward_kernel(*(Descriptor(x, [1, 1, rows, width]) for x, rows, width in boxes), a, C)
    return out, lse


def run_backward(problem: Problem, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Grads:
    made = backward_arguments.make_plan(problem, replace(lookup("h200"), units=3), lambda *_: None, dlse is not None)
    nan = float("nan")
    grads = Grads(*(torch.full_like(x, nan) for x in inputs[:3]))
    scratch = [torch.full((size,), nan) for size in (made.stats, max(1, made.dq), made.stats // 2)]
    call = Call(inputs, out, lse, dout, dlse, grads, *scratch, {})
    with kernels("tilewise.backends.hopper.backward", "prepost", "kernel") as (machine, modules):
        for step in made.steps:
            function = getattr(modules["kernel"], step.name, None) or getattr(modules["prepost"], step.name)
            C = step.config
            if isinstance(step.arguments, PrePostArguments):
                a = wrapped(backward_logic.arguments(step, call, problem))
            else:
                lists = listed(problem, C, isinstance(C, KeysConfig))
                order = make_order(step.arguments)
                own = with_features(step.arguments, call_features(problem, inputs))
                a = wrapped(own._replace(stats_ptr=call.stats, dq_ptr=call.sums, lists=lists, order=order))
            for program in range(step.programs):
                start(machine, program)
                function(*maps(step, call), a, C)
    return grads


@pytest.mark.parametrize("shape", FORWARD, ids=name)
def test_results(shape: Shape) -> None:
    problem, inputs = build(shape)
    assert supports(problem, lookup("h200")).ok
    out, lse = run_forward(problem, spoiled(problem, inputs)[0])
    assert checks.check_forward(problem, inputs, out, lse) == []


@pytest.mark.parametrize("shape", BACKWARD, ids=name)
def test_gradients(shape: Shape) -> None:
    problem, inputs = build(shape)
    assert supports(problem, lookup("h200"), backward=True).ok
    out, lse = tiled.backend.forward(replace(problem, tile=()), inputs)
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g).bfloat16()
    dlse = torch.randn(lse.shape, generator=g) if shape.dlse else None
    given, poisoned = spoiled(problem, inputs, dout)
    found = run_backward(problem, given, out.contiguous(), lse, poisoned, dlse)
    assert checks.check_backward(problem, inputs, dout, dlse, found) == []
