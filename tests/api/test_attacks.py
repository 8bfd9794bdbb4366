"""Attacks on every backend: poisoned memory, garbage where nobody looks, empty rows and problems, huge logits, odd strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.conformance.cases import BY_NAME, MASKS, Built, Case, build
from tests.conformance.harness import (
    BACKENDS,
    attention,
    attention_varlen,
    excesses,
    exchanged,
    inner,
    skip_unless_served,
)
from tilewise import dispatch
from tilewise.backends.tiled import plan as tiled
from tilewise.numerics.oracle import pieces

NAN, INF = float("nan"), float("inf")
backends = pytest.mark.parametrize("backend", BACKENDS)
GPU = [name for name, entry in dispatch.REGISTRY.items() if "cuda" in entry.devices]
targets = pytest.mark.parametrize(
    ("backend", "device"),
    [
        *(pytest.param(name, "cpu", id=name) for name in BACKENDS),
        *(pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu) for name in GPU),
    ],
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 × 64 for `tiled`, so that short sequences have many."""
    monkeypatch.setattr(tiled, "TILE_BYTES", 1)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Every torch.empty comes filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


FRESH = ["plain", "mask-nothing", "mask-key-padding", "mask-blocks-heads", "cross-causal", "more-queries-causal", "gqa-bf16",
         "bias-1xxx", "sinks-empty-rows", "softcap", "dropout", "compensated", "varlen-cross", "everything"]  # fmt: skip


@targets
@pytest.mark.parametrize("name", FRESH)
def test_fresh_memory_is_never_read(backend: str, device: str, name: str, poisoned_memory: None) -> None:
    built = build(BY_NAME[name], device)
    skip_unless_served(built, backend)
    assert excesses(built, backend, lse_gradient=True) == []


def results(built: Built, backend: str, dout: torch.Tensor, dlse: torch.Tensor) -> list[torch.Tensor]:
    """out, lse and every gradient."""
    out, lse = built.call(backend, deterministic=True)
    return [out, lse, *torch.autograd.grad([out, lse], built.leaves, [dout, dlse])]


def upstream(built: Built) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = built.call("reference" if built.problem.precision == "default" else "tiled")
    g = torch.Generator().manual_seed(2)
    return torch.randn(out.shape, generator=g).to(out), torch.randn(lse.shape, generator=g).to(lse)


def same(found: list[torch.Tensor], clean: list[torch.Tensor]) -> None:
    for x, want in zip(found, clean, strict=True):
        assert not x.isnan().any()
        assert torch.equal(x, want)


UNSEEN = {
    "beyond padding": replace(BY_NAME["mask-key-padding"], heads=4, kv_heads=2),
    "left of padding": BY_NAME["mask-left-padding"],
    "outside the window": Case("", seqlen=20, kv_seqlen=150, mask=lambda s, g: tw.causal() & tw.window(40)),
    "beyond the prefix": Case("", mask=MASKS["prefix"], softcap=3.0),
    "beyond an offset": Case("", kv_seqlen=150, mask=MASKS["causal-offset"], sinks=True),
    "other documents": Case("", mask=lambda s, g: tw.documents(torch.arange(s[3]) % 5, q_ids=torch.arange(s[2]) % 2)),
    "blocks": Case("", heads=4, kv_heads=2, mask=lambda s, g: tw.blocks(torch.eye(5)[[0, 2, 4, 4, 0]].bool(), 16)),
    "dense": Case("", mask=lambda s, g: tw.dense(torch.rand((s[0], 1, 1, s[3]), generator=g) > 0.5), dropout_p=0.2),
    "nothing seen": Case("", mask=MASKS["nothing"], softcap=2.0),
    "varlen": BY_NAME["varlen-padding"],
    "bf16": Case("", mask=MASKS["key-padding"], dtype=torch.bfloat16, head_dim=32),
    "compensated": Case("", mask=MASKS["key-padding"], precision="compensated"),
    "compensated float64": Case("", mask=MASKS["key-padding"], precision="compensated", dtype=torch.float64),
    "double": Case("", mask=MASKS["key-padding"], precision="double", dtype=torch.bfloat16, softcap=3.0),
}


def unseen_keys(built: Built) -> torch.Tensor:
    """Which keys no query sees, in the inside layout: (B, Hk, N, 1), packed (1, Hk, T, 1)."""
    unseen = torch.ones_like(built.inputs.k[..., :1], dtype=torch.bool)
    for piece in pieces(built.problem, built.inputs):
        seen = piece.seen.unflatten(0, (-1, built.problem.group)).any(1).any(1)  # [Hk, N]
        unseen[piece.cols] = ~seen[..., None]
    return unseen


@targets
@pytest.mark.parametrize("garbage", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("name", UNSEEN)
def test_keys_nobody_sees_reach_nothing(backend: str, device: str, name: str, garbage: float) -> None:
    built = build(UNSEEN[name], device)
    skip_unless_served(built, backend)
    unseen = unseen_keys(built)
    assert unseen.any()
    spoiled = {}
    for key in ("k", "v"):
        x = getattr(built, key).detach().clone()
        view = inner(built, x)
        view.copy_(torch.where(unseen, garbage, view))
        spoiled[key] = x
    given = upstream(built)
    same(results(exchanged(built, **spoiled), backend, *given), results(built, backend, *given))


@targets
@pytest.mark.parametrize("sides", [(1, 1, 1, -1), (2, 4, -1, -1), (1, 4, -1, 1)], ids=str)
def test_a_bias_of_minus_infinity_is_a_mask(backend: str, device: str, sides: tuple[int, int, int, int]) -> None:
    """Columns (or rows) of −inf: what they hide never matters, and neither does garbage in the bias under the mask."""
    built = build(Case("", heads=4, kv_heads=2, bias=sides, mask=lambda s, g: tw.prefix(60), softcap=4.0), device)
    skip_unless_served(built, backend)
    bias = built.options["bias"].detach().clone()
    rows = sides[3] == 1
    (bias if rows else bias.mT)[:, :, 10:25] = -INF
    clean = exchanged(built, bias=bias)
    assert excesses(clean, backend) == []
    given = upstream(clean)
    want = results(clean, backend, *given)
    if rows:
        assert (want[0][:, :, 10:25] == 0).all() and (want[1][:, :, 10:25] == -INF).all()
        return
    k, v = built.k.detach().clone(), built.v.detach().clone()
    k[:, :, 10:25], v[:, :, 10:25] = NAN, INF
    if sides[2] != 1:
        bias[..., 60:] = NAN
    same(results(exchanged(clean, k=k, v=v, bias=bias), backend, *given), want)


DEAD = {
    "causal": Case("", seqlen=90, kv_seqlen=37, mask=MASKS["causal"]),
    "softcap": Case("", seqlen=90, kv_seqlen=37, mask=MASKS["causal"], softcap=2.0, heads=4, kv_heads=2),
    "sinks": Case("", seqlen=90, kv_seqlen=37, mask=MASKS["causal"], sinks=True),
    "sinks and documents": Case("", sinks=True, mask=lambda s, g: _thirds(s)),
    "sinks, bias": Case("", seqlen=90, kv_seqlen=37, bias=(1, 1, -1, -1), mask=MASKS["causal"], sinks=True),
    "padding": Case("", mask=lambda s, g: tw.key_padding([0, 40])),
    "padding with a start": Case("", mask=lambda s, g: tw.key_padding([70, 30], start=[0, 40]) & tw.causal()),
    "window beyond the keys": Case("", seqlen=200, kv_seqlen=70, mask=lambda s, g: tw.window(30, 0, align="top_left")),
    "documents": Case("", mask=lambda s, g: _thirds(s)),
    "varlen": BY_NAME["varlen-cross"],
    "bf16": Case("", dtype=torch.bfloat16, head_dim=64, seqlen=300, kv_seqlen=170, mask=MASKS["causal"]),
    "bf16-128": Case("", dtype=torch.bfloat16, head_dim=128, seqlen=300, kv_seqlen=170, mask=MASKS["causal"]),
    "bf16-256": Case("", dtype=torch.bfloat16, head_dim=256, seqlen=300, kv_seqlen=170, mask=MASKS["causal"]),
    "bf16-window": Case("", dtype=torch.bfloat16, head_dim=64, seqlen=400, kv_seqlen=170,
                        mask=lambda s, g: tw.window(30, 0, align="top_left")),
    "bf16-padding": Case("", dtype=torch.bfloat16, head_dim=64, mask=lambda s, g: tw.key_padding([0, 40]) & tw.causal()),
    "bf16-varlen": Case("", dtype=torch.bfloat16, head_dim=64, mask=MASKS["causal"], lengths=((300, 7, 90), (170, 40, 0))),
}  # fmt: skip


def _thirds(s: tuple[int, ...]) -> tw.Mask:
    """All keys are of document 0; every third query is of another."""
    return tw.documents(torch.zeros(s[3], dtype=torch.int32), q_ids=(torch.arange(s[2]) % 3 == 1).int())


@targets
@pytest.mark.parametrize("name", DEAD)
def test_rows_that_see_nothing_give_nothing(backend: str, device: str, name: str) -> None:
    """Output 0, LSE −inf (or the sink), gradients 0, whatever the row holds, and whatever comes back to it."""
    built = build(DEAD[name], device)
    skip_unless_served(built, backend)
    dead = torch.ones_like(built.inputs.q[..., :1], dtype=torch.bool)  # (B, Hq, M, 1)
    for piece in pieces(built.problem, built.inputs):
        dead[piece.rows] = ~piece.seen.any(-1, keepdim=True)
    assert dead.any() and not dead.all()
    dout, dlse = upstream(built)
    want = results(built, backend, dout, dlse)
    out, lse, dq = inner(built, want[0]), want[1], inner(built, want[2])
    assert (torch.where(dead, out, 0.0) == 0).all() and (torch.where(dead, dq, 0.0) == 0).all()
    flat = dead.squeeze(-1).reshape(lse.shape)
    sinks = built.options.get("sinks")
    q = built.q.detach().clone()
    inner(built, q).copy_(torch.where(dead, NAN, inner(built, q)))
    spoiled = dout.clone()
    inner(built, spoiled).copy_(torch.where(dead, INF, inner(built, dout)))
    if sinks is not None:
        torch.testing.assert_close(lse[flat], sinks.detach()[:, None].expand_as(lse)[flat])
    else:
        assert (lse == -INF)[flat].all()
        dlse = torch.where(flat, -INF, dlse)  # what the derivative of lse² gives
    same(results(exchanged(built, q=q), backend, spoiled, dlse), want)


EMPTY = {
    "batch": (0, 2, 2, 5, 6),
    "heads": (2, 0, 0, 5, 6),
    "queries": (2, 4, 2, 0, 6),
    "keys": (2, 4, 2, 5, 0),
    "all": (0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("name", EMPTY)
def test_empty_problems(backend: str, name: str, sinks: bool) -> None:
    b, hq, hk, sq, sk = EMPTY[name]
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in ((b, hq, sq, 8), (b, hk, sk, 8), (b, hk, sk, 3)))
    sink = torch.randn(hq, requires_grad=True) if sinks else None
    bias = torch.randn(sq, sk, requires_grad=True)
    leaves = [q, k, v, bias, *([] if sink is None else [sink])]
    out, lse = attention(
        q, k, v, mask=tw.causal(), bias=bias, sinks=sink, dropout_p=0.1, return_lse=True, backend=backend
    )  # fmt: skip
    assert out.shape == (b, hq, sq, 3) and lse.shape == (b, hq, sq)
    assert (out == 0).all()
    assert torch.equal(lse, torch.full_like(lse, -INF) if sink is None else sink[:, None].expand_as(lse))
    dlse = torch.randn_like(lse)
    grads = torch.autograd.grad([out, lse], leaves, [torch.randn_like(out), dlse])
    for grad, leaf in zip(grads[:4], leaves, strict=False):
        assert grad.shape == leaf.shape and (grad == 0).all()
    if sink is not None:
        torch.testing.assert_close(grads[4], dlse.sum((0, 2)))  # the sink is the whole of each row's denominator
    assert torch.autograd.grad(attention(q, k, v, sinks=sink, backend=backend).sum(), q)[0].shape == q.shape


@backends
@pytest.mark.parametrize("lengths", [(0, 0, 0), ()], ids=["zero-length", "no sequences"])
def test_empty_packed_batches(backend: str, lengths: tuple[int, ...]) -> None:
    q = torch.randn(sum(lengths), 2, 8, requires_grad=True)
    cu = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    out, lse = attention_varlen(q, q, q, cu, mask=tw.causal(), return_lse=True, backend=backend)
    assert out.shape == (0, 2, 8) and lse.shape == (2, 0)
    assert torch.autograd.grad(out.sum() + lse.sum(), q)[0].shape == q.shape


@targets
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["rising", "falling", "alternating"])
def test_huge_logits(backend: str, device: str, order: str, dtype: torch.dtype) -> None:
    """Scores from −1e4 to 1e4, so that each tile raises the maximum, or never does, or does in turns."""
    built = build(Case("", seqlen=40, kv_seqlen=200, scale=1.0, heads=1, dtype=dtype, lse_gradient=True), device)
    skip_unless_served(built, backend)
    ramp = torch.linspace(-1.0, 1.0, 200)
    ramp = {"rising": ramp, "falling": ramp.flip(0), "alternating": ramp * (-1) ** torch.arange(200)}[order]
    k = torch.zeros_like(built.k)
    k[..., 0] = (100 * ramp).to(dtype)
    q = torch.zeros_like(built.q)
    q[..., 0] = 100.0
    huge = exchanged(built, q=q, k=k)
    assert excesses(huge, backend, lse_gradient=True) == []


@backends
@pytest.mark.parametrize("sk", [1, 31, 63, 64, 65])
@pytest.mark.parametrize("sq", [1, 31, 32, 33])
def test_lengths_around_the_tile(backend: str, sq: int, sk: int) -> None:
    built = build(Case("", batch=1, heads=2, kv_heads=1, seqlen=sq, kv_seqlen=sk, head_dim=4, mask=MASKS["causal"]))
    skip_unless_served(built, backend)
    assert excesses(built, backend) == []


def _every_other(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((x.shape[0], x.shape[1], 2 * x.shape[2] + 3, x.shape[3] + 5), NAN, dtype=x.dtype)
    view = wide[:, :, 3::2, 2 : 2 + x.shape[3]]
    return view.copy_(x)


STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "head dim first": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "sequence first": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "heads inside": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "sliced with an offset": _every_other,
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "one sequence for all": lambda x: x[:1].expand_as(x),
    "one position for all": lambda x: x[:, :, :1].expand_as(x),
    "one number for all": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "overlapping windows": lambda x: x.flatten().as_strided(x.shape, (7, 3, 1, 1)),
}


@backends
@pytest.mark.parametrize("name", STRIDES)
def test_any_strides(backend: str, name: str) -> None:
    built = build(
        Case("", heads=4, kv_heads=2, seqlen=37, kv_seqlen=70, head_dim=10, head_dim_v=6, mask=MASKS["causal"])
    )
    tensors = {key: STRIDES[name](getattr(built, key).detach()) for key in ("q", "k", "v")}
    strided = exchanged(built, **tensors)
    skip_unless_served(strided, backend)
    before = [x.clone() for x in tensors.values()]
    assert excesses(strided, backend) == []
    assert all(torch.equal(x, y) for x, y in zip(tensors.values(), before, strict=True)), "inputs stay as they are"


@backends
def test_lazily_negated_tensors(backend: str) -> None:
    """conj().imag is a view whose numbers are the negatives of those in memory."""
    views = [torch.randn(1, 2, 9, 8, dtype=torch.complex64).conj().imag for _ in range(4)]
    assert all(x.is_neg() for x in views)
    results = []
    for q, k, v, dout in (views, [x.resolve_neg() for x in views]):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, backend=backend)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    torch.testing.assert_close(*results)


@backends
def test_output_is_laid_out_like_the_query(backend: str) -> None:
    b, s, h, d = 2, 40, 4, 16
    packed = torch.randn(b, s, 3, h, d)  # as a fused projection gives it
    q, k, v = packed.unbind(2)
    assert attention(q, k, v, layout="bshd", backend=backend).is_contiguous()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert attention(q, k, v, backend=backend).transpose(1, 2).is_contiguous()
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = attention(q, k, v[..., :5], return_lse=True, backend=backend)
    assert out.is_contiguous() and lse.is_contiguous()
    cu = torch.tensor([0, 10, 40])
    flat = packed[0].unbind(1)
    assert attention_varlen(*flat, cu, backend=backend).is_contiguous()


@backends
def test_offsets_beyond_32_bits(backend: str) -> None:
    """A view whose last rows lie 2³¹ elements after the first; only the pages it touches exist."""
    far = 2**31 + 64
    try:
        memory = torch.empty(far + 64, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no room for the address range: {error}")
    views = [memory.as_strided((1, 1, 2, 16), (16, 16, far, 1), 16 * i) for i in range(3)]
    small: list[Any] = [torch.randn(1, 1, 2, 16).bfloat16() for _ in range(3)]
    for view, x in zip(views, small, strict=True):
        view.copy_(x)
    torch.testing.assert_close(attention(*views, backend=backend), attention(*small, backend=backend), rtol=0, atol=0)
