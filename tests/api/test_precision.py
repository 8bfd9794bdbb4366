"""`precision=`: results in double are the exact ones, rounded once; neither it nor compensated sums is ever less exact than the
default, whatever the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.conformance.harness import BACKENDS
from tilewise import dispatch
from tilewise.backends.cpu import plan as cpu
from tilewise.errors import BackendError
from tilewise.hardware import lookup
from tilewise.numerics.oracle import Inputs, oracle, oracle_gradients
from tilewise.numerics.rounding import floor, unit_roundoff
from tilewise.problem import WIDE, Problem

NARROW = (torch.float32, torch.bfloat16, torch.float16)
SERVED = [name for name in ("cpu", "tiled") if dispatch.usable(name, "cpu").ok]


def rising(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Scores climb along the keys: every tile brings a new maximum."""
    n, d = k.shape[-2:]
    return 0.1 * q + 4 / d**0.5, 0.1 * k + torch.linspace(0.0, 16.0, n)[:, None] / d**0.5, v


def slow(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Scores climb from 0 to 0.05: every tile rescales sums that hardly shrink."""
    n, d = k.shape[-2:]
    return torch.ones_like(q), torch.linspace(0.0, 0.05, n)[:, None].expand_as(k) / d**0.5, v


def cancelling(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Large values of changing sign."""
    signs = torch.where(torch.arange(v.shape[-2]) % 2 == 0, 1.0, -1.0)[:, None]
    return 0.01 * q, k, v + 1e4 * signs


KINDS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "random": lambda q, k, v: (q, k, v),
    "rising": rising,
    "slowly rising": slow,
    "cancelling": cancelling,
    "offset": lambda q, k, v: (q, k, v + 100.0),
    "peaked": lambda q, k, v: (4 * q, k, v),
}


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    seqlen: int
    keys: int
    dim: int
    causal: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"mask": tw.causal()} if self.causal else {}


SHAPES = {
    "square": Shape(2, 2, 100, 100, 64),
    "causal": Shape(2, 1, 130, 130, 32, causal=True),
    "many keys": Shape(2, 1, 20, 700, 64),
    "decode": Shape(4, 2, 1, 600, 64),
    "decode one head": Shape(2, 2, 1, 600, 32),
}


def tensors(kind: str, shape: Shape, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v and dout."""
    g = torch.Generator().manual_seed(seed)
    q, dout = (torch.randn(1, shape.heads, shape.seqlen, shape.dim, generator=g) for _ in range(2))
    k, v = (torch.randn(1, shape.kv_heads, shape.keys, shape.dim, generator=g) for _ in range(2))
    return tuple(x.to(dtype).contiguous() for x in (*KINDS[kind](q, k, v), dout))


def run(given: tuple[Tensor, ...], shape: Shape, **options: Any) -> list[Tensor]:
    """out and the gradients of q, k and v."""
    *qkv, dout = given
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = tw.attention(*leaves, **shape.options, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def exact(given: tuple[Tensor, ...], shape: Shape) -> list[Tensor]:
    q, k, v, dout = given
    problem = Problem.of(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        seqlen=shape.seqlen,
        kv_seqlen=shape.keys,
        head_dim=shape.dim,
        dtype=str(q.dtype)[6:],
        **shape.options,
    )
    inputs = Inputs(q, k, v)
    grads = oracle_gradients(problem, inputs, dout)
    return [oracle(problem, inputs)[0], grads.dq, grads.dk, grads.dv]


def errors(result: Tensor, want: Tensor) -> tuple[float, float]:
    """The largest error, and the Frobenius norm of all relative to that of the result."""
    error = (result.double() - want).abs()
    return error.max().item(), (error.norm() / want.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("backend", SERVED)
def test_double_is_the_exact_result_rounded_once(backend: str, dtype: torch.dtype, kind: str) -> None:
    """Within 1 % of half a unit in the last place, gradients too: δ is not taken from the rounded out."""
    for shape in SHAPES.values():
        given = tensors(kind, shape, dtype)
        for result, want in zip(
            run(given, shape, precision="double", backend=backend), exact(given, shape), strict=True
        ):
            assert result.dtype == dtype
            # what nearly cancels is not known to 2⁻⁵³ of itself, but of the largest
            allowed = 1.01 * unit_roundoff(dtype) * want.abs() + floor(dtype) + 1e-9 * want.abs().max()
            assert ((result.double() - want).abs() <= allowed).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("precision", WIDE)
def test_never_less_exact_than_the_default(precision: str, dtype: torch.dtype, kind: str) -> None:
    for name, shape in SHAPES.items():
        for seed in range(3):
            given = tensors(kind, shape, dtype, seed)
            want, usual = exact(given, shape), run(given, shape)
            for backend in SERVED:
                careful = run(given, shape, precision=precision, backend=backend)
                for what, x, y, z in zip(("out", "dq", "dk", "dv"), careful, usual, want, strict=True):
                    for ours, default in zip(errors(x, z), errors(y, z), strict=True):
                        assert ours <= default, (name, seed, backend, what)


def wide_exact(given: tuple[Tensor, ...], shape: Shape) -> list[np.ndarray]:
    """The same in numpy's long double."""
    q, k, v, dout = (np.asarray(x.numpy(), dtype=np.longdouble) for x in given)
    k, v = (np.repeat(x, shape.heads // shape.kv_heads, axis=1) for x in (k, v))
    scale = 1 / np.sqrt(np.longdouble(shape.dim))
    s = np.einsum("bhmd,bhnd->bhmn", q, k) * scale
    if shape.causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], dtype=bool)), s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    dp = np.einsum("bhmd,bhnd->bhmn", dout, v)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
    both = (np.einsum("bhmn,bhmd->bhnd", x, y) for x, y in ((ds, q), (p, dout)))
    dk, dv = (x.reshape(1, shape.kv_heads, -1, *x.shape[-2:]).sum(axis=2) for x in both)
    return [np.einsum("bhmn,bhnd->bhmd", p, v), np.einsum("bhmn,bhnd->bhmd", ds, k), dk, dv]


@pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="long double is no wider than double here")
def test_compensated_sums_of_float64() -> None:
    """There is no wider type to sum in, so a single result may be unlucky; over all data errors are less."""
    shapes = (Shape(1, 1, 40, 40, 32, causal=True), Shape(2, 1, 8, 300, 32), Shape(1, 1, 1, 400, 64))
    ratios = []
    for kind in KINDS:
        total = np.zeros((2, 4))
        for shape in shapes:
            for seed in range(2):
                given = tensors(kind, shape, torch.float64, seed)
                want = wide_exact(given, shape)
                for row, options in enumerate(({}, {"precision": "compensated"})):
                    results = zip(run(given, shape, **options), want, strict=True)
                    total[row] += [float(((x.numpy() - y) ** 2).sum() / (y**2).sum()) for x, y in results]
        ratios.append(np.sqrt(total[1] / total[0]))
    mean = np.exp(np.log(ratios).mean(axis=0))
    assert (mean < 0.8).all(), mean  # of out, dq, dk and dv


def test_double_is_the_default_of_float64() -> None:
    shape = SHAPES["causal"]
    given = tensors("random", shape, torch.float64)
    for x, y in zip(run(given, shape, precision="double"), run(given, shape), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("backend", SERVED)
@pytest.mark.parametrize("queries", [1, 20])
def test_a_result_is_not_rounded_twice(backend: str, dtype: torch.dtype, queries: int) -> None:
    """Just above the middle of two neighbours, by less than float32 can tell: the upper one is nearer."""
    upper = 1 + torch.finfo(dtype).eps
    q = torch.full((1, 1, queries, 8), 2.0**-8, dtype=dtype)
    k = torch.tensor([0.0, 2.0**-14], dtype=dtype)[:, None].expand(2, 8)[None, None].contiguous()
    v = torch.tensor([1.0, upper], dtype=dtype)[:, None].expand(2, 8)[None, None].contiguous()
    for sign in (1, -1):
        out = tw.attention(q, k, sign * v, scale=1.0, precision="double", backend=backend)
        assert (out == sign * upper).all()


@pytest.mark.parametrize("precision", WIDE)
@pytest.mark.parametrize("backend", SERVED)
def test_the_log_sum_exp_is_float64(backend: str, precision: str) -> None:
    shape = SHAPES["square"]
    q, k, v, _ = tensors("random", shape, torch.bfloat16)
    out, lse = tw.attention(q.requires_grad_(), k, v, precision=precision, backend=backend, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float64)
    want = torch.logsumexp(q.double() @ k.double().mT / shape.dim**0.5, dim=-1)
    torch.testing.assert_close(lse, want, rtol=1e-14, atol=1e-14)
    (dq,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
    (exact_dq,) = torch.autograd.grad(want.sum(), q)
    assert dq.dtype == torch.bfloat16 and torch.equal(dq, exact_dq)
    empty = tw.attention(q[:, :, :0], k, v, precision=precision, return_lse=True)[1]
    assert empty.dtype == torch.float64


@pytest.mark.parametrize("precision", WIDE)
def test_compiled_and_exported(precision: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            options: Any = {"mask": tw.causal(), "precision": precision, "return_lse": True}
            return tw.attention(q, k, v, **options)

    shape = SHAPES["causal"]
    q, k, v, dout = tensors("random", shape, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch._dynamo.reset()
    fast = torch.compile(Model(), fullgraph=True, backend="aot_eager")
    for (a, a_lse), (b, b_lse) in [(fast(*leaves), Model()(*leaves))]:
        assert torch.equal(a, b) and torch.equal(a_lse, b_lse) and a_lse.dtype == torch.float64
        upstream = (dout, torch.ones_like(a_lse))
        pairs = zip(
            torch.autograd.grad((a, a_lse), leaves, upstream),
            torch.autograd.grad((b, b_lse), leaves, upstream),
            strict=True,
        )
        assert all(torch.equal(x, y) for x, y in pairs)
    plain = tuple(x.detach() for x in leaves)
    program = torch.export.export(Model(), plain)
    assert all(torch.equal(x, y) for x, y in zip(program.module()(*plain), Model()(*plain), strict=True))


def test_certified() -> None:
    q, k, v, _ = tensors("random", SHAPES["square"], torch.float32)
    out, lse = tw.attention(q, k, v, precision="double", return_lse=True)
    assert tw.certify(q, k, v, out=out, lse=lse, precision="double").ok
    plain = tw.attention(q, k, v)
    assert not tw.certify(q, k, v, out=plain, precision="double").ok, "the default is not so exact"


@pytest.mark.parametrize("key", ["altra-q80", "xeon-8480"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plans_know_it(key: str, dtype: str) -> None:
    """Half the lanes, more bytes, no matrix unit, more time; and explanations name it."""
    spec = lookup(key)
    usual, double = (
        Problem.of(heads=64, seqlen=4096, head_dim=64, dtype=dtype, precision=precision)
        for precision in ("default", "double")
    )
    assert cpu.tiles(usual, spec)["forward"].kernel == (
        "forward_amx" if spec.matrix_unit and dtype != "float32" else "forward"
    )
    for pass_, tile in cpu.tiles(double, spec).items():
        assert tile.kernel == pass_ and tile.register_tile is not None
        assert tile.register_tile[0] % spec.lanes(8) == 0
        cells = sum(bytes_ for _, bytes_ in tile.on_chip) / (tile.block_q * tile.block_k)
        same = cpu.tiles(replace(usual, dtype="float32"), spec)[pass_]
        assert cells > sum(bytes_ for _, bytes_ in same.on_chip) / (same.block_q * same.block_k)
    assert tw.plan(double, device=key).seconds > 1.8 * tw.plan(replace(usual, dtype="float32"), device=key).seconds
    assert "(double)" in str(tw.plan(double, device=key))


@pytest.mark.parametrize("precision", WIDE)
def test_who_refuses_says_why(precision: str) -> None:
    problem = Problem.of(heads=1, head_dim=64, seqlen=64, dtype="bfloat16", precision=precision, device="cuda")
    for backend in ("triton", "hopper"):
        assert any(precision in reason for reason in dispatch.get(backend).supports(problem).reasons)
    q = torch.randn(1, 1, 8, 16)
    with pytest.raises(BackendError, match=precision):
        tw.attention(q, q, q, precision=precision, backend="aten")  # type: ignore[call-overload]


def test_float64_sums_beyond_float64_are_left_to_tiled() -> None:
    q = torch.randn(1, 1, 8, 16, dtype=torch.float64)
    for backend in set(BACKENDS) - {"tiled"}:
        with pytest.raises(BackendError, match="compensated"):
            tw.attention(q, q, q, precision="compensated", backend=backend)  # type: ignore[call-overload]
    assert tw.attention(q, q, q, precision="compensated").dtype == torch.float64
