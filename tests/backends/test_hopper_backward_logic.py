"""The Hopper backward's kernels, run as Python threads: right gradients, no role left waiting, nothing read that is not written.

What a GPU adds (the order of memory, products in flight) is tried by test_hopper_gpu.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tests.backends.gluon_threads import Descriptor, Machine, kernels
from tests.backends.gluon_values import Shared, Value, pointer
from tests.backends.hopper_lists import order_of, owners_of
from tests.numerics import checks
from tilewise.api.options import DEFAULTS
from tilewise.api.parse import build_problem
from tilewise.backends.base import Grads, Inputs
from tilewise.backends.hopper.backward import choose
from tilewise.backends.hopper.backward.arguments import Step, make_plan
from tilewise.backends.hopper.backward.config import QueriesConfig
from tilewise.backends.hopper.feature_launch import (
    backward_form,
    bias_gradient,
    call_features,
    rounded_gradient,
    sink_gradient,
    with_features,
)
from tilewise.backends.hopper.intervals import IntervalMask, interval_mask
from tilewise.backends.hopper.launch import term_on
from tilewise.backends.hopper.structs import Plane, PrePostArguments, Rows, Term
from tilewise.backends.tiled import backend as tiled
from tilewise.hardware import lookup
from tilewise.problem import Problem

PAD = "tw.key_padding(torch.tensor([{}]))"


class Shape(NamedTuple):
    d: int = 128
    mask: str = "None"
    sq: int = 200
    sk: int | None = None
    h: int = 1
    hk: int = 1
    b: int = 1
    dv: int | None = None
    softcap: float = 0.0
    scale: float | None = None
    deterministic: bool = False
    poison: tuple[int, int] | None = None  # keys [first, last) that no query sees hold NaN
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    dlse: bool = False
    dtype: torch.dtype = torch.bfloat16
    tile: tuple[tuple[str, int, int], ...] = ()
    sinks: bool = False
    alibi: int = 0  # rank of the slopes
    dropout: float = 0.0
    bias: str = ""  # which sides are full, such as "hqk"
    bias_dtype: torch.dtype = torch.bfloat16


SHORT, SPLIT = (("backward_dkdv", 64, 128), ("backward_dq", 128, 64)), (("backward_dkdv", 64, 64),)
SUMS = (("backward", 64, 128),)
SHAPES = [
    Shape(),
    Shape(64, sq=300, b=2),
    Shape(256, sq=130),
    Shape(128, "tw.causal()", 200, h=3, hk=1, dlse=True),
    Shape(64, "tw.causal()", 300, h=4, hk=2),
    Shape(256, "tw.causal()", 150, h=2, hk=1, dlse=True),
    Shape(128, "tw.causal()", 150, 400, dlse=True),
    Shape(64, "tw.causal()", 400, 150),
    Shape(128, "tw.causal()", 200, h=4, hk=2, deterministic=True),
    Shape(128, sq=300, sk=170, h=4, hk=2, deterministic=True),
    Shape(64, "tw.window(100)", 300, 350, h=3, hk=1, deterministic=True),
    Shape(128, "tw.window(70, 20)", 300),
    Shape(64, "tw.window(70) & tw.prefix(190)", 300),
    Shape(128, "tw.causal() | tw.prefix(150)", 300),
    Shape(128, PAD.format("130, 77"), 100, 300, b=2, poison=(130, 300)),
    Shape(64, f"tw.causal() & {PAD.format('130, 77')}", 200, 300, b=2, poison=(130, 300), deterministic=True),
    Shape(256, PAD.format("100, 100")[:-1] + ", torch.tensor([40, 40]))", 80, 200, b=2, poison=(0, 40)),
    Shape(128, "~tw.full()", 70, 130),
    Shape(128, "~tw.causal()", 300, h=2),
    Shape(64, "tw.causal()", 200, softcap=3.0),
    Shape(128, softcap=3.0, dlse=True),
    Shape(64, scale=-0.2),
    Shape(192, "tw.causal()", 140, dv=128, h=2),
    Shape(96, "tw.causal()", 140, dv=40),
    Shape(64, sq=100, dv=256),
    Shape(80, "tw.causal()", 150, h=2, hk=1, deterministic=True),
    Shape(32, "tw.causal()", 140, dlse=True),
    Shape(24, sq=150, dv=96, softcap=3.0),
    Shape(160, "tw.causal()", lengths=((5, 133), (5, 140)), dv=72),
    Shape(128, "tw.causal()", lengths=((5, 133, 0, 70), (5, 140, 7, 70)), h=2, hk=1),
    Shape(64, lengths=((130, 3), (150, 200)), h=2, dlse=True),
    Shape(128, "tw.causal()", lengths=((5, 133, 0, 70), (5, 140, 7, 70)), deterministic=True),
    Shape(64, "tw.causal()", lengths=((5, 133, 0, 170), (5, 140, 7, 170)), h=2, hk=1, deterministic=True),
    Shape(256, "tw.causal()", lengths=((5, 133, 0, 70), (5, 140, 7, 70)), h=2, hk=1, dlse=True),
    Shape(256, lengths=((130, 3), (90, 200)), dv=128),
    Shape(64, "tw.causal()", 300, h=2, hk=1, tile=SHORT, dlse=True),
    Shape(64, "tw.causal()", 300, h=2, hk=1, tile=SUMS, dlse=True),
    Shape(56, "tw.window(70, 20)", 300, tile=SUMS, dv=40),
    Shape(64, lengths=((130, 3), (150, 200)), h=2, hk=1, scale=-0.3),
    Shape(64, f"tw.causal() & {PAD.format('130, 77')}", 200, 300, b=2, poison=(130, 300), softcap=3.0),
    Shape(128, sq=200, sk=170, tile=SHORT),
    Shape(64, "tw.causal()", lengths=((5, 133, 0, 70), (5, 140, 7, 70)), h=2, hk=1, tile=SHORT),
    Shape(64, "tw.window(100)", 300, 350, h=2, hk=1, tile=SPLIT),
    Shape(128, "tw.causal()", 200, h=2, hk=1, softcap=3.0, tile=SPLIT, dlse=True),
    Shape(128, PAD.format("130, 77"), 100, 300, b=2, poison=(130, 300), tile=SPLIT),
    Shape(256, "tw.window(50)", lengths=((200, 3, 64), (100, 80, 64)), h=2, hk=1),
]


def build(shape: Shape) -> tuple[Problem, Inputs]:
    g = torch.Generator().manual_seed(0)
    packed = shape.lengths is not None
    sq, sk = map(sum, shape.lengths) if shape.lengths is not None else (shape.sq, shape.sk or shape.sq)

    def normal(h: int, s: int, d: int) -> torch.Tensor:
        return torch.randn((1 if packed else shape.b, h, s, d), generator=g).to(shape.dtype)

    qkv = normal(shape.h, sq, shape.d), normal(shape.hk, sk, shape.d), normal(shape.hk, sk, shape.dv or shape.d)
    starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in shape.lengths or ()] or [None, None]
    mask = eval(shape.mask, {"tw": tw, "torch": torch})
    options: dict[str, Any] = {"mask": mask, "scale": shape.scale, "softcap": shape.softcap, "deterministic": shape.deterministic}
    inputs = Inputs(*qkv, cu_q=starts[0], cu_k=starts[1])
    if shape.sinks:
        options["sinks"] = torch.randn(shape.h, generator=g)
    if shape.dropout:
        options |= {"dropout_p": shape.dropout, "seed": 1234567890123}
    if shape.alibi:
        sides = (len(shape.lengths[0]) if shape.lengths else shape.b, shape.h)[2 - shape.alibi :]
        options["bias"] = tw.alibi(torch.rand(sides, generator=g) - 0.2)
    if shape.bias:
        longest = [max(lengths) for lengths in shape.lengths or ()] or [sq, sk]
        sides = (len(shape.lengths[0]) if shape.lengths else shape.b, shape.h, *longest)
        full = [side if letter in shape.bias else 1 for letter, side in zip("bhqk", sides, strict=True)]
        options["bias"] = torch.randn(full, generator=g).to(shape.bias_dtype)
    problem, inputs = build_problem(inputs, {**DEFAULTS, **options, "return_lse": True})  # type: ignore[typeddict-item]
    return replace(problem, tile=shape.tile), inputs


def wrapped(x: Any) -> Any:
    """Numbers as the kernels see them, tensors as pointers."""
    if isinstance(x, tuple):
        parts = [wrapped(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if isinstance(x, torch.Tensor):
        return pointer(x)
    return Value(torch.tensor(x)) if isinstance(x, int | float) else x


class Call(NamedTuple):
    """The tensors of a backward."""

    inputs: Inputs
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    grads: Grads
    stats: torch.Tensor
    sums: torch.Tensor
    dsinks: torch.Tensor
    dbias: dict[str, Any]
    flag: torch.Tensor | None = None


def plane(x: torch.Tensor) -> Plane:
    return Plane(x, *x.stride()[:3], x.shape[3])


def arguments(step: Step, call: Call, problem: Problem) -> Any:
    features = call_features(problem, call.inputs) | {"dsinks_ptr": call.dsinks} | call.dbias
    features |= {"bias_flag": call.flag, "bias_again": 0}
    a = with_features(step.arguments, features)
    packed = problem.varlen
    if isinstance(a, PrePostArguments):
        dq = call.grads.dq
        assert dq is not None
        return a._replace(
            out=plane(call.out), dout=plane(call.dout), dq=plane(dq), lse_ptr=call.lse, dlse_ptr=call.dlse,
            lse_b=call.lse.stride(0), lse_h=call.lse.stride(1),
            stats_ptr=call.stats, dq_ptr=call.sums, cu_q=call.inputs.cu_q if packed else None,
        )  # fmt: skip
    form = interval_mask(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
    assert isinstance(form, IntervalMask)
    terms = tuple(term_on(term, problem.batch, torch.device("cpu")) for term in form.terms)
    rows = [Rows(x, x.stride(1), x.stride(2), x.shape[3]) if packed and x is not None else None for x in call.grads[:3]]
    return a._replace(
        cu_q=call.inputs.cu_q if packed else None, cu_k=call.inputs.cu_k if packed else None,
        order=order_of(a), owners=owners_of(a), terms=tuple(Term(*term) for term in terms),
        stats_ptr=call.stats, dq_ptr=call.sums, dq=rows[0], dk=rows[1], dv=rows[2],
    )  # fmt: skip


def maps(step: Step, call: Call) -> list[Descriptor]:
    if isinstance(step.arguments, PrePostArguments):
        return []
    C, inputs, (dq, dk, dv, *_) = step.config, call.inputs, call.grads
    assert dq is not None and dk is not None and dv is not None
    queries = isinstance(C, QueriesConfig)
    rows = 64 if queries else C.BLOCK_M

    def tile(x: torch.Tensor, rows: int, width: int) -> Descriptor:
        return Descriptor(x, [1, 1, rows, width])

    result = [tile(inputs.q, rows, C.BLOCK_D), tile(call.dout, rows, C.BLOCK_DV)]
    result += [tile(inputs.k, C.BLOCK_N, C.BLOCK_D), tile(inputs.v, C.BLOCK_N, C.BLOCK_DV)]
    if queries:
        return [*result, tile(dq, 64, C.BLOCK_D)]
    return [*result, Descriptor(call.stats, [2 * rows]), tile(dk, 64, C.BLOCK_D), tile(dv, 64, C.BLOCK_DV)]


def run(
    problem: Problem, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any, wanted: bool = True, flag: Any = None
) -> Grads:
    """`wanted`: whether the gradient of a bias is; `flag`: what is raised where something infinite comes out."""
    form = backward_form(problem, inputs.bias, wanted)
    if inputs.bias is not None and wanted:
        problem = choose.with_bias_gradient(problem)
    made = make_plan(problem, replace(lookup("h200"), units=3), lambda *_: None, dlse is not None, form)
    nothing = float("nan")
    grads = Grads(*(torch.full_like(x, nothing) for x in inputs[:3]))
    scratch = [torch.full((size,), nothing) for size in (made.stats, max(1, made.dq), made.stats // 2)]
    dbias: Any = (None, {}) if inputs.bias is None or not wanted else bias_gradient(problem, inputs.bias)
    flag = torch.zeros(1, dtype=torch.int64) if flag is None else flag
    call = Call(inputs, out, lse, dout, dlse, grads, *scratch, dbias[1], flag)
    with kernels("tilewise.backends.hopper.backward", "prepost", "kernel") as (machine, modules):
        for step in made.steps:
            function = getattr(modules["kernel"], step.name, None) or getattr(modules["prepost"], step.name)
            a = wrapped(arguments(step, call, problem))
            for program in range(step.programs):
                start(machine, program)
                function(*maps(step, call), a, step.config)
    if inputs.bias is not None and wanted:
        grads = grads._replace(dbias=rounded_gradient(dbias[0], inputs.bias))
    if inputs.sinks is not None:
        grads = grads._replace(dsinks=sink_gradient(call.dsinks, inputs.sinks, inputs.q.shape[0]))
    return grads


def start(machine: Machine, program: int) -> None:
    machine.program = program
    machine.named.clear()


@pytest.fixture(autouse=True)
def sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows take the kernel that adds dQ up too, unless bits must repeat."""
    monkeypatch.setattr(choose, "FEW_KEYS", {})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape: Shape) -> None:
    problem, inputs = build(shape)
    out, lse = tiled.backend.forward(replace(problem, tile=()), inputs)
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g).bfloat16()
    dlse = torch.randn(lse.shape, generator=g) if shape.dlse else None
    given = inputs
    if shape.poison is not None:
        k, v = inputs.k.clone(), inputs.v.clone()
        k[:, :, slice(*shape.poison)] = float("nan")
        v[:, :, slice(*shape.poison)] = float("nan")
        given = inputs._replace(k=k, v=v)
    found = run(problem, given, out.contiguous(), lse, dout, dlse)
    assert checks.check_backward(problem, inputs, dout, dlse, found) == []


def test_the_log_sum_exp_may_lie_within_that_of_more_queries() -> None:
    problem, inputs = build(Shape(64, "tw.causal()", 150, h=2, b=2))
    out, lse = tiled.backend.forward(problem, inputs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    more = torch.full((2, 2, 170), float("nan"))
    more[:, :, 7:157] = lse
    found = [run(problem, inputs, out, part, dout, None) for part in (lse, more[:, :, 7:157])]
    for x, y in zip(*(grads[:3] for grads in found), strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


COLUMNS = [
    Shape(96, "tw.causal()", 200, h=2, hk=1, dlse=True),
    Shape(80, "tw.causal()", 150, 300),
    Shape(32, "tw.causal()", 300),
    Shape(80, "tw.causal()", 150, h=2, hk=1, deterministic=True),
    Shape(32, sq=150, deterministic=True),
    Shape(192, "tw.causal()", 140, dv=128, h=2),
    Shape(24, sq=150, dv=96),
    Shape(96, "tw.causal()", lengths=((5, 133, 0, 70), (5, 140, 7, 70))),
    Shape(80, PAD.format("130, 77"), 100, 300, b=2, poison=(130, 300)),
    Shape(96, "tw.causal()", 200, h=2, hk=1),
    Shape(80, "tw.causal()", 150, 300, h=2, hk=1),
    Shape(192, "tw.causal()", 200, dv=128, h=2, hk=1),
    Shape(80, sq=100, sk=150, deterministic=True),
    Shape(192, "tw.causal()", 250, dv=128, h=2),
    Shape(256, "tw.causal()", 150, softcap=30.0),
    Shape(64, "tw.causal()", 200, softcap=3.0),
    Shape(128, softcap=3.0, dlse=True),
    Shape(256, "tw.causal()", 200, h=2, hk=1, softcap=50.0),
    Shape(96, "tw.causal()", 200, softcap=30.0, sinks=True),
]
"""Head dims between the tiles' own, whose columns are left out, and softcaps."""


@pytest.mark.parametrize("shape", COLUMNS, ids=str)
def test_columns(shape: Shape) -> None:
    test_gradients(shape)


@pytest.mark.parametrize(("d", "deterministic"), [(128, False), (128, True), (64, True), (256, False)], ids=str)
def test_what_a_packed_neighbour_holds_does_not_matter(d: int, deterministic: bool) -> None:
    problem, inputs = build(Shape(d, "tw.causal()", lengths=((100, 60), (100, 60)), deterministic=deterministic))
    out, lse = tiled.backend.forward(problem, inputs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    clean = run(problem, inputs, out, lse, dout, None)
    poisoned = [x.clone() for x in (*inputs[:3], dout)]
    for x in poisoned:
        x[:, :, 100:] = float("nan")
    given = inputs._replace(q=poisoned[0], k=poisoned[1], v=poisoned[2])
    found = run(problem, given, out, lse, poisoned[3], None)
    for x, y in zip(found[:3], clean[:3], strict=True):
        assert x is not None and y is not None
        assert torch.equal(x[:, :, :100], y[:, :, :100])


def test_a_missing_arrival_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the threads would hang where a GPU does."""
    monkeypatch.setattr("tests.backends.gluon_threads.LIMIT_S", 0.5)
    problem, inputs = build(Shape(sq=300))
    out, lse = tiled.backend.forward(problem, inputs)
    arrive = Machine.arrive
    monkeypatch.setattr(
        Machine, "arrive", lambda self, barrier, count=1, pred=True: arrive(self, barrier, count, False)
    )
    with pytest.raises((TimeoutError, RuntimeError)):
        run(problem, inputs, out, lse, torch.ones_like(out), None)


def test_products_are_computed_as_late_as_their_waits() -> None:
    """That a place which is refilled too early would show."""
    machine = Machine()
    place, none = Shared(torch.ones(2, 2)), Value(torch.zeros(2, 2))
    token = machine.product(Value(torch.eye(2)), place, none, use_acc=False, is_async=True)
    with pytest.raises(AssertionError, match="before it is waited for"):
        _ = token + 1
    machine.product_wait(1, [none])
    place.store(Value(torch.full((2, 2), 3.0)))
    assert machine.product_wait(0, [token]).value.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_modules_that_were_played_are_gone_afterwards() -> None:
    """A test that compiles kernels later in the process finds those in Triton's language, not the functions of threads."""
    code = """
import tilewise.backends.hopper.backward.choose
from tests.backends.gluon_threads import kernels
with kernels("tilewise.backends.hopper.backward", "kernel") as (_, modules):
    played = modules["kernel"].keys_kernel
from tilewise.backends.hopper.backward import kernel
assert kernel.keys_kernel is not played and hasattr(kernel.keys_kernel, "cache_key")
"""
    paths = {"PYTHONPATH": os.pathsep.join(("src", "."))}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], env=os.environ | paths)
