"""`tilewise.sdpa` is SDPA, and `replace_sdpa` routes calls to it and nothing else."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_early

import tilewise as tw
from tests.integrations.closeness import apart, randn
from tilewise.errors import TilewiseError

MASK = torch.rand(5, 7, generator=torch.Generator().manual_seed(3)) > 0.4
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "scale zero": {"scale": 0.0},
    "boolean mask": {"attn_mask": MASK},
    "a row that sees nothing": {"attn_mask": MASK & (torch.arange(5) != 2)[:, None]},
    "mask per head": {"attn_mask": torch.stack([MASK, ~MASK, MASK, MASK])},
    "mask per batch": {"attn_mask": torch.stack([MASK, ~MASK])[:, None]},
    "mask of keys": {"attn_mask": torch.tensor([[True, True, False, True, False, True, True]])},
    "float mask": {"attn_mask": randn(5, 7)},
    "float mask with -inf": {"attn_mask": randn(5, 7).masked_fill(~MASK | torch.eye(5, 7).bool(), float("-inf"))},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_same_as_sdpa(call: dict[str, Any]) -> None:
    q, k, v = (randn(2, 4, s, d).requires_grad_() for s, d in ((5, 8), (7, 8), (7, 6)))
    mask = call.get("attn_mask")
    leaves = [q, k, v]
    if mask is not None and mask.is_floating_point():
        mask = mask.clone().requires_grad_()
        call = {**call, "attn_mask": mask}
        leaves.append(mask)
    want, got = imported_early(q, k, v, **call), tw.sdpa(q, k, v, **call)
    assert apart(got, want, q, k, v) <= 1
    dout = randn(*want.shape, seed=1)
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, dout), torch.autograd.grad(want, leaves, dout), strict=True
    ):
        assert apart(ours, theirs, q, k, v, float(dout.abs().max())) <= 1


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 8), (7, 8), (7, 6)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
        ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6)),
        ((2, 4, 5, 8), (1, 4, 7, 8), (2, 1, 7, 6)),
        ((2, 4, 5, 8), (7, 8), (4, 7, 6)),
        ((0, 4, 5, 8), (0, 4, 7, 8), (0, 4, 7, 6)),
        ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_any_leading_dimensions(shapes: tuple[tuple[int, ...], ...], masked: bool) -> None:
    q, k, v = (randn(*shape) for shape in shapes)
    mask = MASK[: q.shape[-2]] if masked else None
    want = imported_early(q, k, v, attn_mask=mask)
    got = tw.sdpa(q, k, v, attn_mask=mask)
    assert got.shape == want.shape
    if want.numel():
        assert apart(got, want, q, k, v) <= 1


def test_masks_over_five_dimensions() -> None:
    q, k, v = (randn(2, 3, 4, s, 8) for s in (5, 7, 7))
    for mask in (torch.rand(2, 1, 1, 5, 7) > 0.3, torch.rand(1, 1, 4, 5, 7) > 0.3, torch.rand(2, 3, 4, 5, 7) > 0.3):
        mask = mask | torch.eye(5, 7, dtype=torch.bool)
        assert apart(tw.sdpa(q, k, v, mask), imported_early(q, k, v, mask), q, k, v) <= 1


def test_grouped_heads() -> None:
    q, k, v = randn(2, 6, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 8)
    want = imported_early(q, k, v, enable_gqa=True)
    assert apart(tw.sdpa(q, k, v, enable_gqa=True), want, q, k, v) <= 1
    with pytest.raises(RuntimeError, match="enable_gqa=True"):
        tw.sdpa(q, k, v)


def test_dropout_is_dropout() -> None:
    """Values of 1: a row's output is the kept share over 1 − p; its mean over N·H·M draws is 1 within 6 deviations."""
    n, p = 4096, 0.25
    x = torch.zeros(1, 4, n // 16, 8)
    out = tw.sdpa(x, torch.zeros(1, 4, n, 8), torch.ones(1, 4, n, 1), dropout_p=p)
    draws = x.shape[1] * x.shape[2] * n
    assert abs(float(out.double().mean()) - 1) <= 6 * (p / (1 - p) / draws) ** 0.5
    assert float(out.std()) > 0


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ({"attn_mask": MASK, "is_causal": True}, "together with is_causal"),
        ({"attn_mask": MASK.int()}, "dtype torch.int32"),
        ({"attn_mask": torch.ones(4, 7, dtype=torch.bool)}, "does not broadcast"),
        ({"attn_mask": torch.ones(7, dtype=torch.bool)}, "does not broadcast"),
        ({"key": randn(3, 4, 7, 8)}, "must broadcast"),
        ({"key": randn(2, 4, 7, 8).float()}, "dtype torch.float32"),
        ({"query": torch.zeros(8, dtype=torch.float64)}, "at least"),
    ],
)
def test_misuse_raises_as_sdpa_does(call: dict[str, Any], complaint: str) -> None:
    given = {"query": randn(2, 4, 5, 8), "key": randn(2, 4, 7, 8), "value": randn(2, 4, 7, 8), **call}
    with pytest.raises(RuntimeError, match=complaint) as caught:
        tw.sdpa(**given)
    assert isinstance(caught.value, TilewiseError)


def test_the_signature_is_the_published_one() -> None:
    """torch documents it in the first lines of the function's text."""
    text = imported_early.__doc__ or ""
    published = text[text.index("(") + 1 : text.index(")")].replace("\n", " ").split(",")
    own = [str(p).split(":")[0] + ("" if p.default is p.empty else f"={p.default}") for p in parameters(tw.sdpa)]
    assert [p.strip() for p in published] == own


def parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


Q = randn(1, 2, 5, 8)


def test_every_way_to_call_is_routed() -> None:
    with tw.replace_sdpa() as routed:
        imported_early(Q, Q, Q)
        torch.nn.functional.scaled_dot_product_attention(Q, Q, Q, None, 0.0, True, scale=0.5)
        torch._C._nn.scaled_dot_product_attention(query=Q, key=Q, value=Q)
    assert routed.served == 3
    assert not routed.fallbacks


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_torch_modules_are_routed(grad: bool) -> None:
    """torch's modules, whose fast path and whose own check for modes would go around it."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=torch.float64).eval()
    x = randn(2, 5, 16)
    with torch.set_grad_enabled(grad):
        want = layer(x)
        with tw.replace_sdpa() as routed:
            got = layer(x)
    assert routed.served == 1
    assert torch.allclose(got, want, rtol=0, atol=2**-53 * 1024 * float(want.detach().abs().max()))


def test_a_call_that_cannot_be_served_falls_back_with_the_reason() -> None:
    wide = randn(1, 1, 3, 600)  # no backend takes a head dim above 512
    with tw.replace_sdpa() as routed:
        out = imported_early(wide, wide, wide)
        again = imported_early(wide, wide, wide)
    assert torch.equal(out, imported_early(wide, wide, wide))
    assert torch.equal(out, again)
    assert routed.served == 0
    ((reason, count),) = routed.fallbacks.items()
    assert "head_dim" in reason
    assert count == 2


def test_misuse_inside_the_context_is_sdpas_own_error() -> None:
    with tw.replace_sdpa() as routed, pytest.raises(RuntimeError) as caught:
        imported_early(Q, Q[..., :4], Q)
    assert not isinstance(caught.value, TilewiseError)
    assert routed.fallbacks.total() == 1


def test_strict_raises_instead() -> None:
    wide = randn(1, 1, 3, 600)
    with tw.replace_sdpa(strict=True), pytest.raises(TilewiseError, match="head_dim"):
        imported_early(wide, wide, wide)


def test_restored_on_exit_after_an_exception_and_when_nested() -> None:
    def served_now() -> int:
        probe = tw.replace_sdpa()
        before = outer.served
        imported_early(Q, Q, Q)
        assert probe.served == 0
        return outer.served - before

    outer = tw.replace_sdpa()
    with pytest.raises(KeyError), outer:
        assert served_now() == 1
        raise KeyError
    assert served_now() == 0
    with outer:
        with tw.replace_sdpa() as inner:
            assert served_now() == 0  # the inner one takes it
            assert inner.served == 1
        assert served_now() == 1
    assert served_now() == 0


def test_other_threads_are_left_alone() -> None:
    def work() -> None:
        imported_early(Q, Q, Q)
        with tw.replace_sdpa() as own:
            imported_early(Q, Q, Q)
        counts.append(own.served)
        imported_early(Q, Q, Q)

    counts: list[int] = []
    with tw.replace_sdpa() as routed:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        imported_early(Q, Q, Q)
    assert counts == [1]
    assert routed.served == 1


def test_the_backend_can_be_chosen() -> None:
    with tw.replace_sdpa(backend="reference") as routed:
        imported_early(Q, Q, Q)
    assert routed.served == 1
    with tw.replace_sdpa(backend="no such thing") as routed:
        imported_early(Q, Q, Q)
    assert routed.served == 0
    assert "no such thing" in next(iter(routed.fallbacks))


def causal_biases() -> dict[str, Any]:
    return {"upper left": causal_upper_left, "lower right": causal_lower_right}


@pytest.mark.parametrize("lengths", [(16, 16), (5, 7)], ids=str)
@pytest.mark.parametrize("bias", causal_biases().values(), ids=causal_biases())
def test_torchs_causal_biases_are_the_masks_they_stand_for(bias: Any, lengths: tuple[int, int]) -> None:
    """They are tensors by name only: their memory is whatever was there before."""
    q, k, v = (randn(2, 4, n, 8) for n in (lengths[0], lengths[1], lengths[1]))
    want = imported_early(q, k, v, attn_mask=bias(*lengths)._materialize())
    assert apart(tw.sdpa(q, k, v, attn_mask=bias(*lengths)), want, q, k, v) <= 1
    with tw.replace_sdpa() as routed:
        got = imported_early(q, k, v, attn_mask=bias(*lengths))
    assert apart(got, want, q, k, v) <= 1
    assert routed.served == 1 and not routed.fallbacks


def test_a_causal_bias_of_other_lengths_is_refused() -> None:
    with pytest.raises(TilewiseError, match="16 queries and 16 keys"):
        tw.sdpa(Q, Q, Q, attn_mask=causal_upper_left(16, 16))
    with pytest.raises(TilewiseError, match="is_causal"):
        tw.sdpa(Q, Q, Q, attn_mask=causal_upper_left(5, 5), is_causal=True)


class Unknown(torch.Tensor):
    """A tensor whose numbers may mean anything."""


def test_a_mask_of_an_unknown_kind_is_refused() -> None:
    for mask in (randn(5, 5), randn(5, 5) > 0):
        with pytest.raises(TilewiseError, match="Unknown"):
            tw.sdpa(Q, Q, Q, attn_mask=mask.as_subclass(Unknown))
        assert torch.equal(tw.sdpa(Q, Q, Q, torch.nn.Parameter(mask, requires_grad=False)), tw.sdpa(Q, Q, Q, mask))


def transforms() -> dict[str, Any]:
    """What `torch.func` makes of SDPA, each giving one tensor."""
    sdpa = imported_early

    def per_sample() -> Any:
        return torch.func.vmap(torch.func.grad(lambda a: sdpa(a[None], Q, Q).square().sum()))(Q)

    return {
        "grad": lambda: torch.func.grad(lambda a: sdpa(a, Q, Q).square().sum())(Q),
        "vmap": lambda: torch.func.vmap(lambda a: sdpa(a, Q[0], Q[0]))(torch.cat([Q, Q + 1])),
        "jacrev": lambda: torch.func.jacrev(lambda a: sdpa(a, Q, Q).sum((0, 1, 3)))(Q),
        "vjp": lambda: torch.func.vjp(lambda a: sdpa(a, Q, Q), Q)[1](Q)[0],
        "per-sample gradients": per_sample,
    }


@pytest.mark.parametrize("transform", transforms().values(), ids=transforms())
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_are_served(transform: Any) -> None:
    want = transform()
    with tw.replace_sdpa(strict=True) as routed:
        got = transform()
    assert torch.allclose(got, want, atol=1e-6)
    assert routed.served == 1


def test_forward_derivatives_are_served() -> None:
    def tangent() -> torch.Tensor:
        return torch.func.jvp(lambda a: imported_early(a, Q, Q), (Q,), (Q,))[1]

    with sdpa_kernel(SDPBackend.MATH):  # the one that has them
        want = tangent()
        with tw.replace_sdpa(strict=True) as routed:
            got = tangent()
    assert torch.allclose(got, want, atol=1e-6)
    assert routed.served == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_gradients() -> None:
    """The forward is served; its gradients come in a batch, without memory of their own."""
    q, k, v = (randn(2, 2, 5, 8, seed=i).requires_grad_() for i in range(3))
    upstream = randn(3, 2, 2, 5, 8, seed=9)

    def gradients(out: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        return [
            torch.autograd.grad(out, (q, k, v), upstream, is_grads_batched=True, retain_graph=True),
            torch.func.vmap(lambda g: torch.autograd.grad(out, (q, k, v), g, retain_graph=True))(upstream),
            (torch.autograd.functional.jacobian(lambda a: imported_early(a, k, v).sum((0, 1)), q, vectorize=True),),
        ]

    want = gradients(imported_early(q, k, v, is_causal=True))
    with tw.replace_sdpa() as routed:
        got = gradients(imported_early(q, k, v, is_causal=True))
    assert routed.served == 2 and not routed.fallbacks
    for ours, theirs in zip(got, want, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert apart(a, b, q, k, v, float(upstream.abs().max())) <= 1


@pytest.mark.parametrize("mask", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_takes_mixed_dtypes(mask: torch.dtype | None) -> None:
    """SDPA casts all of them; in bfloat16 the results may differ by its rounding."""
    q, k, v = randn(2, 4, 5, 8).float(), randn(2, 4, 7, 8).float(), randn(2, 4, 7, 8).bfloat16()
    attn_mask = None if mask is None else randn(5, 7).to(mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = imported_early(q, k, v, attn_mask), tw.sdpa(q, k, v, attn_mask)
        with tw.replace_sdpa() as routed:
            routed_out = imported_early(q, k, v, attn_mask)
        ours = tw.attention(q, k, v)
    assert got.dtype == want.dtype == ours.dtype == torch.bfloat16
    assert routed.served == 1 and torch.equal(routed_out, got)
    assert float((got - want).abs().max()) <= 8 * torch.finfo(torch.bfloat16).eps * float(v.abs().max())
    assert torch.equal(ours, tw.attention(q.bfloat16(), k.bfloat16(), v))
    with pytest.raises(TilewiseError, match="dtype"):
        tw.sdpa(q, k, v)
