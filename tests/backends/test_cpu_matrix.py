"""Kernels on matrix tiles. Here tiles are loops over memory, as they are on any machine; what a processor with AMX would execute
is seen in its assembly."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("llvmlite")

import tests.backends.plain_tiles  # noqa: F401 - the unit "plain"
import tilewise as tw
from tests.backends.test_cpu_assembly import LINUX, STACK, innermost_loops
from tests.backends.test_cpu_limits import HIDING
from tests.conformance.cases import CASES, build
from tests.conformance.harness import excesses
from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu import plan
from tilewise.backends.cpu.spec import Kernel, Register
from tilewise.hardware import amx
from tilewise.hardware.host import Host
from tilewise.hardware.probe import probe_cpu
from tilewise.hardware.spec import DeviceSpec
from tilewise.problem import Problem

CHOSEN = re.compile(
    r"plain|mask-(causal|window|key-padding|documents|blocks-heads|dense|three-terms|nothing)$|cross-causal|more-queries-causal$"
    r"|edge-(1|31|33|64|129)$|edge-keys-(1|33|65)$|head-dim-(1|3|80|128|256)$|value-dim|gqa$|bshd|bias-(xxxx|x11x)|alibi-batch"
    r"|softcap-bias|sinks-empty|dropout|scale-negative|lse-gradient|huge-logits$|varlen(-cross|-documents|-everything)?$|everything"
)
BF16 = [replace(case, dtype=torch.bfloat16) for case in CASES if CHOSEN.match(case.name)]


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def unit(problem: Problem, kind: str, spec: DeviceSpec) -> str:
        return "plain" if kind in plan.MATRIX_KINDS and problem.dtype == "bfloat16" else ""

    monkeypatch.setattr(plan, "matrix_unit", unit)
    monkeypatch.setattr("tilewise.api.call_cache._calls", {})  # a call like one before would find its kernels ready


def draw(*shape: int, seed: int = 0, count: int = 3) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).bfloat16() for _ in range(count)]


def gradients(qkv: list[torch.Tensor], dout: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in qkv]
    return torch.autograd.grad(tw.attention(*leaves, backend="cpu", **options), leaves, dout)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", BF16, ids=lambda case: case.name)
def test_conformance_on_tiles(tiles: None, case: object) -> None:
    built = build(case, "cpu")  # type: ignore[arg-type]
    for kind in plan.MATRIX_KINDS:
        assert plan.planned(built.problem, probe_cpu(), kind, built.problem.seqlen_q).kernel == f"{kind}_plain"
    assert excesses(built, "cpu", lse_gradient=case.lse_gradient) == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", HIDING)
def test_hidden_keys_never_reach_anything(tiles: None, name: str) -> None:
    n = 53
    mask = HIDING[name](n)
    q, k, v, dout = draw(1, 2, n, 16, count=4)
    clean = gradients([q, k, v], dout, mask=mask)
    k, v = k.clone(), v.clone()
    k[:, :, -7:], v[:, :, -7:] = math.nan, math.inf
    for before, after in zip(clean, gradients([q, k, v], dout, mask=mask), strict=True):
        assert torch.equal(before, after)


def test_any_strides(tiles: None) -> None:
    """Columns apart, rows an odd number of values apart, a start in the middle: pairs are never taken for granted."""
    *qkv, dout = draw(1, 2, 40, 19, count=4)
    wanted = gradients(qkv, dout)
    columns, middle, padded = (
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat([x, x], -1)[..., 19:],
        lambda x: F.pad(x, (1, 1))[..., 1:-1],
    )
    for change in (columns, middle, padded):
        for one, other in zip(wanted, gradients([change(x) for x in qkv], change(dout)), strict=True):
            assert torch.equal(one, other)


def test_the_same_bits_for_any_number_of_threads(tiles: None) -> None:
    *qkv, dout = draw(1, 2, 700, 32, count=4)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gradients(qkv, dout, mask=tw.causal()))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_no_larger_than_torchs(tiles: None, causal: bool) -> None:
    """Output and gradients. torch rounds P and dS too: the output and dQ have the same errors, but for chance. It also rounds dK
    and dV block by block, and theirs are larger."""
    ours, theirs = torch.zeros(2, 4), torch.zeros(2, 4)
    for seed in range(8):
        *qkv, dout = draw(1, 1, 160, 64, seed=seed, count=4)

        def results(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
            leaves = [x.to(dtype).detach().requires_grad_() for x in qkv]  # noqa: B023 - called at once
            out = attend(*leaves)
            return out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))  # noqa: B023

        def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        def mine(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return tw.attention(q, k, v, mask=tw.causal() if causal else None, backend="cpu")

        exact = results(torchs, torch.float64)
        for total, found in ((ours, results(mine, torch.bfloat16)), (theirs, results(torchs, torch.bfloat16))):
            errors = [x.double() - y for x, y in zip(found, exact, strict=True)]
            total[0] += torch.tensor([e.norm() / y.norm() for e, y in zip(errors, exact, strict=True)])
            total[1] += torch.tensor([e.abs().max() for e in errors])
    assert (ours[0] <= torch.tensor([1.01, 1.01, 1.0, 1.0]) * theirs[0]).all()
    assert (ours[1] <= 1.1 * theirs[1]).all(), "the maximum of a few draws still varies by a tenth"


PRODUCTS = {"forward": {"scores", "values"}, "backward": {"product", "accumulate"}}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_amx_instructions(kind: str) -> None:
    """Four products for four loads in the inner loops, none of which touches the stack; tiles set up once and given back."""
    kernel = Kernel(kind, "bfloat16", Register(16, 2, 32), "b", matrix="amx")
    text = compiler.assembly(kernel, compiler.Machine("x86_64" + LINUX, "sapphirerapids", ""))
    found = set()
    for function, body in innermost_loops(text):
        count = {name: sum(bool(re.match(rf"\s+{name}\b", line)) for line in body) for name in ("tdpbf16ps", "tileloadd")}
        if not count["tdpbf16ps"]:
            continue
        found.add(function)
        assert count == {"tdpbf16ps": 4, "tileloadd": 4}
        assert not [line for line in body if STACK.search(line)], f"{function} spills"
    assert found == PRODUCTS[kind]
    for once in ("ldtilecfg", "tilerelease"):
        assert len(re.findall(rf"^\s+{once}\b", text, re.MULTILINE)) == 1
    assert "vcvtne2ps2bf16" in text, "rounding is one instruction there"
    own = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    assert set(re.findall(r"^\s+callq?\s+(\w+)", text, re.MULTILINE)) <= own | {"memset", "memcpy"}


@pytest.mark.parametrize(
    ("flags", "answer", "reason"),
    [
        (("avx512f", "avx512_bf16"), 0, "the processor has no amx_tile, amx_bf16"),
        (amx.FLAGS, -1, "the system refuses"),
        (amx.FLAGS, 0, None),
    ],
    ids=["no tiles", "refused", "granted"],
)
def test_tiles_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], answer: int, reason: str | None
) -> None:
    """Without permission the first tile instruction would end the process: then there are vectors, and a reason."""
    asked = []

    def syscall(*numbers: ctypes.c_long) -> int:
        asked.append([n.value for n in numbers])
        return answer

    for module in (amx, import_module("tilewise.hardware.probe")):
        monkeypatch.setattr(module, "read_host", lambda: Host(flags=frozenset(flags), machine="x86_64"))
    monkeypatch.setattr(amx, "CDLL", lambda *args, **options: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(amx.sys, "platform", "linux")
    amx.obstacle.cache_clear()
    try:
        said = amx.obstacle()
        assert said is None if reason is None else said is not None and said.startswith(reason)
        problem = Problem.of(heads=1, head_dim=64, seqlen=64, dtype="bfloat16")
        spec = probe_cpu.__wrapped__()
        assert plan.matrix_unit(problem, "backward", spec) == ("" if reason else "amx")
        assert plan.matrix_unit(replace(problem, dtype="float16"), "backward", spec) == ""
        assert plan.matrix_unit(problem, "decode", spec) == ""
    finally:
        amx.obstacle.cache_clear()
    assert asked == ([] if "amx_tile" not in flags else [[158, 0x1023, 18]])
