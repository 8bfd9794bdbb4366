"""The Hopper forward's kernel, run as Python threads: right results in every tile, no role left waiting, nothing read too late.

What a GPU adds (the order of memory, products in flight, the assembler) is tried by test_hopper_gpu.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from tests.backends.gluon_threads import Descriptor, Machine, halves, kept_words, kernels
from tests.backends.gluon_values import Value, tensor_of
from tests.backends.hopper_lists import order_of, owners_of
from tests.backends.test_hopper_backward_logic import PAD, Shape, build, start, wrapped
from tests.backends.test_hopper_host import most_skipped
from tests.numerics import checks
from tilewise.backends.base import Inputs
from tilewise.backends.hopper import arguments
from tilewise.backends.hopper.choose import compiled_for, unseen_by_all
from tilewise.backends.hopper.compiler import newer_registers
from tilewise.backends.hopper.config import NARROW, TABLE, THREE_SHORT, Config, shortened
from tilewise.backends.hopper.feature_launch import bias_form, call_features, with_features
from tilewise.backends.hopper.intervals import mask_of
from tilewise.backends.hopper.launch import term_on
from tilewise.backends.hopper.structs import Rows, Term
from tilewise.hardware import lookup
from tilewise.numerics.philox import WORD
from tilewise.problem import Problem

CAUSAL, WINDOW = "tw.causal()", "tw.causal() & tw.window(100)"
WIDE, TILE = TABLE[64, 64], TABLE[128, 128]
CASES: list[tuple[Shape, Config | None]] = [
    (Shape(sq=300, h=2), None),
    (Shape(64, sq=500, h=2), WIDE),
    (Shape(256, sq=200, h=3), None),
    (Shape(64, CAUSAL, 600, h=2), WIDE),
    (Shape(64, CAUSAL, 450, 777), WIDE),
    (Shape(64, CAUSAL, 777, 450, h=2), WIDE),
    (Shape(64, CAUSAL, 500, h=2), NARROW),
    (Shape(64, CAUSAL, 400, h=3), shortened(NARROW)),
    (Shape(64, CAUSAL, 460, h=3), THREE_SHORT[64, 64][0]),
    (Shape(128, CAUSAL, 460, 333, h=2), THREE_SHORT[128, 128][0]),
    (Shape(128, sq=300, sk=170, h=3), THREE_SHORT[128, 128][0]),
    (Shape(128, CAUSAL, 520, h=4, hk=2), TILE),
    (Shape(128, CAUSAL, 300, 421), shortened(TILE)),
    (Shape(128, CAUSAL, 421, 300), TILE._replace(PINGPONG=False)),
    (Shape(256, CAUSAL, 333, h=2), None),
    (Shape(256, CAUSAL, 130, 300, h=2), None),
    (Shape(256, sq=300, sk=2500, h=2), None),
    (Shape(256, sq=130, sk=500, h=3), TABLE[256, 256]._replace(Q_IN_REGISTERS=96)),
    (Shape(256, CAUSAL, 300, 30, h=3), None),
    (Shape(256, sq=130, sk=4096), None),
    (Shape(128, CAUSAL, 140, 4200, h=2, hk=1), None),
    (Shape(128, WINDOW, 500), None),
    (Shape(128, WINDOW, 500), TILE),
    (Shape(256, "tw.window(70, 20)", 300), None),
    (Shape(64, "tw.window(70) & tw.prefix(190)", 300), None),
    (Shape(128, "tw.causal() | tw.prefix(150)", 300), TILE),
    (Shape(64, "tw.causal() | tw.prefix(150)", 500), WIDE),
    (Shape(128, "tw.causal('top_left')", 200, 333, poison=(200, 333)), TILE),
    (Shape(64, "tw.causal(offset=torch.tensor([3, 170]))", 200, 400, b=2), None),
    (Shape(128, PAD.format("130, 77"), 100, 300, b=2, poison=(130, 300)), None),
    (Shape(64, f"tw.causal() & {PAD.format('130, 77')}", 300, b=2, poison=(130, 300)), None),
    (Shape(256, PAD.format("100, 100")[:-1] + ", torch.tensor([40, 40]))", 80, 200, b=2, poison=(0, 40)), None),
    (Shape(128, "~tw.full()", 70, 130), None),
    (Shape(64, CAUSAL, 200, softcap=3.0), None),
    (Shape(128, scale=-0.2), None),
    (Shape(192, CAUSAL, 300, dv=128, h=2), None),
    (Shape(96, CAUSAL, 140, dv=40), None),
    (Shape(80, sq=150, h=2), None),
    (Shape(80, CAUSAL, 460, h=2), THREE_SHORT[128, 128][0]),
    (Shape(96, sq=300, sk=170, h=3), THREE_SHORT[128, 128][0]),
    (Shape(24, CAUSAL, 400), WIDE),
    (Shape(208, CAUSAL, 140), None),
    (Shape(64, sq=300, dv=256), None),
    (Shape(128, CAUSAL, lengths=((5, 133, 0, 270), (5, 140, 7, 270)), h=2, hk=1), None),
    (Shape(64, lengths=((130, 3), (150, 200)), h=2), None),
    (Shape(256, WINDOW, lengths=((300, 64), (300, 130))), None),
]


def assembly(machine: Machine, text: str, constraints: str, args: list[Any], **more: Any) -> Any:
    """The forward's own instructions."""
    if text.startswith("{ .reg .b32 w, t;") or text.startswith("{ cvt.f32.f16"):
        return tuple(Value(x.value.float()) for x in args)
    if "selp.f32" in text and "mul.wide.u32" in text:
        kept = kept_words(*args[4:]).value
        return tuple(Value(torch.where((kept >> i) & 1 != 0, x.value, 0.0)) for i, x in enumerate(args[:4]))
    if "FAR_" in text:
        return Value((args[0].value - args[1].value) * 1.4426950408889634)
    if "LOW0_" in text:
        return weighed(*args, text.count("@!any bra.uni LOW"))
    if "vote.sync" in text:
        return rescaled(*args)
    if text.startswith("cvt.rn."):
        kind = torch.bfloat16 if "bf16" in text else torch.float16
        return Value(torch.stack([x.value for x in args], -1).to(kind).view(torch.int32)[..., 0])
    if text.startswith("mov.b32 {"):
        return tuple(Value(part) for part in halves(args[0].value, torch.int16).unbind(-1))
    if "prmt.b32 both" in text:
        return kept_pairs(*args)
    if ".b32 drawn" in text:
        return drawn_words(text.count("add.u32 drawn"), *(tensor_of(x).to(torch.int64) & WORD for x in args))
    if text.count("mul.wide.u32") == 1:
        factor = int(re.findall(r"0x[0-9A-F]+", text)[0], 16)
        return tuple(map(Value, products(tensor_of(args[0]), factor)))
    if text.startswith("bar."):
        word, _, threads = text.split(";")[0].partition(",")
        kind_, ident = word.split()
        return meet(machine, int(ident), int(threads) // 128, waits=kind_ == "bar.sync")
    return machine.assembly(text, constraints, args, **more)


def products(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The halves of products of 32-bit words, the low one first."""
    wide = (x.to(torch.int64) & WORD) * factor
    return wide & WORD, wide >> 32 & WORD


def drawn_words(fours: int, words: torch.Tensor, high: Any, low: Any, first: Any, below: Any, *key: Any) -> Value:
    """`draw.draw_words`'s assembly: from the third round of Philox on, with what is shared of the ones before."""
    third, second, *keys = key
    for e in range(fours):
        f0, t = products(first + e & WORD, 0xD2511F53)
        f1, t = products(t ^ third, 0xCD9E8D57)
        f3, f2 = products(t ^ second, 0xD2511F53)
        c1, t = products(high ^ f0 ^ keys[0], 0xCD9E8D57)
        c = [t ^ f1 ^ keys[1], c1, low ^ f2 ^ keys[2], f3]
        for one, other in zip(keys[3::2], keys[4::2], strict=True):
            (l0, h0), (l1, h1) = products(c[0], 0xD2511F53), products(c[2], 0xCD9E8D57)
            c = [h1 ^ c[1] ^ one, l1, h0 ^ c[3] ^ other, l0]
        words = words >> 4
        for i, word in enumerate(c):
            words = words | ((word >= below).to(torch.int64) << 28 + i)
    return Value(words)


def kept_pairs(pairs: Value, even: Value, odd: Value, signs: Value) -> Value:
    """Words of two 16-bit numbers, of which remain whose byte's sign is set: those that `signs` names, as prmt.b32 has it."""
    given = even.value & WORD | (odd.value & WORD) << 32
    kept = torch.zeros_like(given)
    for i in range(4):
        chosen = signs.value >> 4 * i & 15
        assert (chosen >= 8).all(), "a byte rather than its sign"
        kept = kept | (given >> 8 * (chosen & 7) + 7 & 1) * 0xFF << 8 * i
    return Value((pairs.value & kept.to(torch.uint32).view(torch.int32)).to(torch.int32))


def rescaled(o_tile: Value, factor: Value) -> Value:
    """Each warp has 16 rows; it multiplies them if one of its factors is not 1."""
    rows = factor.value.expand_as(o_tile.value).unflatten(0, (4, 16))
    moved = (rows != 1).any(dim=(1, 2), keepdim=True)
    return Value(
        torch.where(moved, o_tile.value.unflatten(0, (4, 16)) * rows, o_tile.value.unflatten(0, (4, 16))).flatten(0, 1)
    )


def weighed(even: Value, odd: Value, m: Value, scale: Any, pieces: int) -> tuple[Value, Value, Value]:
    """`quick_softmax_step`'s assembly: weights, and a thread's sums, m and factors, which stand in its first three groups of
    columns. A warp has 16 rows."""
    scores = torch.stack([even.value, odd.value], -1) * getattr(scale, "value", scale)  # [64, groups, lanes, 2]
    largest, total, weights = m.value.expand(64, 1, 1)[..., None].clone(), torch.zeros(64, 4), torch.zeros(64, 0, 4, 2)
    factors = torch.ones(64, 1, 1, 1)
    fours = scores.shape[1] // 2
    for piece in scores.tensor_split([i * fours // pieces * 2 for i in range(1, pieces)], dim=1):
        found = torch.exp2(piece - largest)
        low = (found.unflatten(1, (-1, 2)).sum(dim=(2, 4)) < 256).flatten(1).all(1)
        high = ~low.unflatten(0, (4, 16)).all(1).repeat_interleave(16)[:, None, None, None]
        top = piece.where(~piece.isnan(), -torch.inf).amax(dim=(1, 2, 3), keepdim=True)  # as max.f32 has it
        raised = torch.where(high & (top > largest + 8), top, largest)
        shift = torch.where(high & (raised == -torch.inf), 0.0, raised)
        factor = torch.where(high, torch.exp2(largest - shift), 1.0)
        found = torch.where(high, torch.exp2(piece - shift), found)
        weights, factors = torch.cat([weights * factor, found], 1), factors * factor
        total, largest = total * factor[:, 0, :, 0] + found.sum(dim=(1, 3)), raised
    told = torch.zeros_like(even.value)
    told[:, 0], told[:, 1], told[:, 2] = total, largest[:, 0, :, 0].expand(64, 4), factors[:, 0, :, 0].expand(64, 4)
    return Value(weights[..., 0]), Value(weights[..., 1]), Value(told)


def meet(machine: Machine, ident: int, parties: int, waits: bool) -> None:
    """A named barrier: who arrives counts like who waits."""
    state = machine.named.setdefault(ident, [0, 0])  # arrived, rounds
    with machine.changed:
        mine = state[1]
        state[0] += 1
        if state[0] == parties:
            state[0], state[1] = 0, mine + 1
        machine.changed.notify_all()
    if waits:
        machine.wait_for(lambda: state[1] != mine)


def extend(gl: Any, machine: Machine) -> None:
    """What the forward asks of the language beside what the backward does."""
    gl.max = lambda x, axis: Value(x.value.amax(axis))
    gl.log2 = lambda x: Value(torch.log2(x.value))
    gl.full_like = lambda x, y: Value(torch.full_like(x.value, y))
    gl.int16 = torch.int16
    gl.inline_asm_elementwise = lambda *args, **more: assembly(machine, *args, **more)


def config_with(tile: Config, problem: Problem, _: Any) -> Config:
    """Any config, also one that is no tile of the plan."""
    mask = mask_of(problem)
    return compiled_for(problem, mask, unseen_by_all(problem, mask), tile, newer_registers())


def run(
    problem: Problem, inputs: Inputs, tile: Config | None, stats: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """All programs, one after the other; `stats`: the arguments that statistics are written to."""
    form = mask_of(problem)
    with patch.object(arguments, "config_of", arguments.config_of if tile is None else partial(config_with, tile)):
        plan = arguments.make_plan(problem, replace(lookup("h200"), units=3), lambda *_: None, bias_form(inputs.bias))
    C, packed = plan.config, problem.varlen
    q, k, v = inputs[:3]
    out = torch.full((*q.shape[:3], problem.head_dim_v), float("nan"), dtype=q.dtype)
    lse = torch.full(q.shape[:3], float("nan"))
    terms = tuple(Term(*term_on(term, problem.batch, torch.device("cpu"))) for term in form.terms)
    features = call_features(problem, inputs, C.BIAS_STAGES > 0) | (stats or {})
    features |= {"bias_flag": torch.zeros(1, dtype=torch.int64), "bias_again": 0}
    a = wrapped(
        with_features(plan.arguments, features)._replace(
            lse_ptr=lse,
            cu_q=inputs.cu_q if packed else None,
            cu_k=inputs.cu_k if packed else None,
            terms=terms,
            order=order_of(plan.arguments),
            owners=owners_of(plan.arguments),
            out=Rows(out, out.stride(1), out.stride(2), out.shape[3]) if packed else None,
        )
    )
    width = C.QK_UNIT or C.BLOCK_D
    boxes = ((q, 64, width), (k, C.BLOCK_N, width), (v, C.BLOCK_N, C.BLOCK_DV), (out, 64, C.O_COLUMNS))
    fours = [1, 1, C.BLOCK_N // 4, 2, 64]
    with kernels("tilewise.backends.hopper", "kernel", "mainloop") as (machine, modules):
        extend(modules["mainloop"].gl, machine)
        for program in range(plan.programs):
            start(machine, program)
            maps = [Descriptor(x, [1, 1, rows, width]) for x, rows, width in boxes]
            if C.QUADS:
                maps[1:3] = (Descriptor(x.unflatten(2, (-1, 4)), fours) for x in (k, v))
            if C.BIAS_STAGES:
                maps.insert(3, Descriptor(inputs.bias, [1, 1, 64, C.BLOCK_N]))
                modules["kernel"].biased_kernel(*maps, a, C)
            else:
                modules["kernel"].forward_kernel(*maps, a, C)
    return out, lse


@pytest.fixture(autouse=True)
def tensors_permute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Value, "permute", lambda x, order: Value(x.value.permute(order)), raising=False)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("rise", [3.0, 20.0, 400.0, -20.0])
@pytest.mark.parametrize("mask", ["None", "tw.causal()"])
def test_scores_that_rise_from_tile_to_tile(d: int, rise: float, mask: str) -> None:
    """Key tiles are visited from the right: weights of the next may be far above the m that is there, or overflow."""
    problem, inputs = build(Shape(d=d, mask=mask, sq=200, sk=700))
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., 0] = 1
    steps = torch.arange(700, 0, -1) // 32
    k[..., 0] += (rise * steps / problem.scale / 4).to(k.dtype)
    inputs = inputs._replace(q=q, k=k)
    out, lse = run(problem, inputs, None)
    assert checks.check_forward(problem, inputs, out, lse) == []


@pytest.mark.parametrize(("shape", "tile"), CASES, ids=lambda x: "" if x is None else str(x)[:90])
def test_results(shape: Shape, tile: Config | None) -> None:
    problem, inputs = build(shape)
    given = inputs
    if shape.poison is not None:
        k, v = inputs.k.clone(), inputs.v.clone()
        k[:, :, slice(*shape.poison)] = float("nan")
        v[:, :, slice(*shape.poison)] = float("nan")
        given = inputs._replace(k=k, v=v)
    out, lse = run(problem, given, tile)
    assert checks.check_forward(problem, inputs, out, lse) == []


COLUMNS = [
    Shape(96, CAUSAL, 300, h=2, hk=1),
    Shape(80, sq=150, sk=270, h=2),
    Shape(64, CAUSAL, 200, dv=224),
    Shape(32, CAUSAL, 500, h=2),
    Shape(24, sq=300, sk=600, dv=32),
    Shape(128, CAUSAL, 200, dv=16),
    Shape(32, CAUSAL, lengths=((5, 133, 0, 270), (5, 140, 7, 270))),
    Shape(32, PAD.format("130, 77"), 100, 300, b=2, poison=(130, 300)),
    Shape(192, CAUSAL, 420, dv=128, h=3),
    Shape(192, sq=300, sk=170, dv=128),
    Shape(176, CAUSAL, 150, 300, dv=96),
    Shape(192, CAUSAL, lengths=((5, 133, 0, 270), (5, 140, 7, 270)), dv=128),
    Shape(160, PAD.format("130, 77"), 100, 300, b=2, dv=128, poison=(130, 300)),
]
"""Head dims between the tiles' own: columns left out, or in units."""


@pytest.mark.parametrize("shape", COLUMNS, ids=str)
def test_columns(shape: Shape) -> None:
    test_results(shape, None)


SOFTCAPS = [
    Shape(64, CAUSAL, 200, softcap=3.0),
    Shape(256, CAUSAL, 200, h=2, hk=1, softcap=50.0),
    Shape(128, sq=100, sk=300, softcap=30.0, sinks=True),
    Shape(128, CAUSAL, 200, softcap=3.0, alibi=1),
    Shape(64, CAUSAL, 200, softcap=256.0),
    Shape(64, CAUSAL, 200, softcap=1000.0),
]


@pytest.mark.parametrize("shape", SOFTCAPS, ids=str)
def test_softcaps(shape: Shape) -> None:
    test_results(shape, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("climb", [0.0, 1.0, 20.0])
def test_the_output_is_rescaled_only_when_scores_leave_their_reference_far_behind(
    climb: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of each tile of keys lie `climb` above those of the tile before (to base e; keys are walked from the right)."""
    calls = []
    original = rescaled

    def watched(o_tile: Value, factor: Value) -> Value:
        calls.append(bool((factor.value != 1).any()))
        return original(o_tile, factor)

    monkeypatch.setitem(globals(), "rescaled", watched)
    problem, inputs = build(Shape(128, sq=128, sk=1024, h=1, dtype=dtype))
    inputs.q[..., 0], inputs.q[..., 1:] = 8.0, inputs.q[..., 1:] / 4
    inputs.k[..., 0] = climb * 128**0.5 / 8 * torch.arange(7, -1, -1).repeat_interleave(128)
    assert checks.check_forward(problem, inputs, *run(problem, inputs, None)) == []
    moved = sum(calls) / len(calls)
    # two warpgroups, eight tiles, of which the first needs nothing; a climb of 1 adds up to 8 / log2(e) after six tiles
    assert len(calls) == 16 and {0.0: moved == 0, 1.0: 0 < moved <= 0.25, 20.0: moved >= 0.75}[climb]


def test_what_a_packed_neighbour_holds_does_not_matter() -> None:
    problem, inputs = build(Shape(128, CAUSAL, lengths=((130, 100), (130, 100))))
    clean = run(problem, inputs, None)[0][:, :, :130]
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, 130:] = v[:, :, 130:] = float("nan")
    assert torch.equal(run(problem, inputs._replace(k=k, v=v), None)[0][:, :, :130], clean)


def test_a_tile_too_few_in_the_ring_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """That fewer tiles are skipped than there are stages for a reason."""
    monkeypatch.setattr("tests.backends.gluon_threads.LIMIT_S", 1.0)
    tile = WIDE._replace(BLOCK_N=64)
    assert most_skipped(tile) == tile.KV_STAGES
    problem, inputs = build(Shape(64, CAUSAL, 600, h=4))
    with pytest.raises((TimeoutError, RuntimeError)):
        run(problem, inputs, tile)
