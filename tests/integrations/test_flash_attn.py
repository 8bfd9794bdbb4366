"""flash_attn's functions against a dense float64 reference written from their published descriptions."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.integrations.closeness import apart, randn
from tilewise.errors import ArgumentError, LayoutError
from tilewise.integrations import flash_attn as fa
from tilewise.integrations.flash_attn.bert_padding import pad_input, unpad_input

B, HQ, HK, D = 2, 4, 2, 8
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])


def reference(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """out (B, Sq, H, D) and lse (B, H, Sq) of q, k, v in the package's layout (B, S, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    m, n = q.shape[2], k.shape[2]
    scale = options.get("softmax_scale")
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if cap := options.get("softcap", 0.0):
        s = cap * torch.tanh(s / cap)
    place, key = torch.arange(m)[:, None] + n - m, torch.arange(n)
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        s = s - (slopes.double() if slopes.ndim == 1 else slopes[:, :].double())[..., None, None] * (place - key).abs()
    left, right = options.get("window_size", (-1, -1))
    if options.get("causal"):
        right = 0
    hidden = torch.zeros(m, n, dtype=torch.bool)
    if left >= 0:
        hidden |= key < place - left
    if right >= 0:
        hidden |= key > place + right
    s = s.masked_fill(hidden, float("-inf"))
    p = torch.where(hidden.all(-1)[:, None], 0.0, s.softmax(-1))
    return (p @ v).transpose(1, 2), s.logsumexp(-1)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.2},
    "window": {"window_size": (2, 1)},
    "window to the left": {"window_size": (2, -1)},
    "window to the right": {"window_size": (-1, 0)},
    "own key only": {"window_size": (0, 0)},
    "causal window": {"causal": True, "window_size": (3, 5)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi per sequence": {"alibi_slopes": torch.stack([SLOPES, SLOPES.flip(0)]), "causal": True},
    "deterministic": {"deterministic": True},
}
each = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@each
@pytest.mark.parametrize(("m", "n"), [(5, 9), (9, 5), (7, 7)])
def test_flash_attn_func(options: dict[str, Any], m: int, n: int) -> None:
    q, k, v = randn(B, m, HQ, D), randn(B, n, HK, D, seed=1), randn(B, n, HK, D, seed=2)
    want, want_lse = reference(q, k, v, **options)
    out, lse, probabilities = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    by_heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    assert apart(out, want, *by_heads) <= 1
    seen = want_lse.isfinite()
    assert torch.equal(lse[~seen], want_lse[~seen])
    assert apart(lse[seen], want_lse[seen], *by_heads) <= 1
    assert probabilities is None
    assert torch.equal(fa.flash_attn_func(q, k, v, **options), out)


@each
def test_gradients_and_packed_arguments(options: dict[str, Any]) -> None:
    qkv = randn(B, 7, 3, HQ, D).requires_grad_()
    want, _ = reference(*qkv.unbind(2), **options)
    dout = randn(*want.shape, seed=3)
    (exact,) = torch.autograd.grad(want, qkv, dout)
    parts = [x.transpose(1, 2) for x in qkv.detach().unbind(2)]
    for call in (
        lambda: fa.flash_attn_qkvpacked_func(qkv, **options),
        lambda: fa.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], **options),
        lambda: fa.flash_attn_func(*qkv.unbind(2), **options),
    ):
        out = call()
        assert apart(out, want, *parts) <= 1
        (grad,) = torch.autograd.grad(out, qkv, dout)
        assert apart(grad, exact, *parts, cotangent=float(dout.abs().max())) <= 1


LENGTHS_Q, LENGTHS_K = [3, 0, 7], [5, 4, 6]


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@each
def test_varlen_is_each_sequence_alone(options: dict[str, Any]) -> None:
    slopes = options.get("alibi_slopes")
    if slopes is not None and slopes.ndim == 2:
        slopes = torch.cat([slopes, slopes[:1]])
        options = {**options, "alibi_slopes": slopes}
    cu_q, cu_k = cumulative(LENGTHS_Q), cumulative(LENGTHS_K)
    q, k, v = randn(10, HQ, D), randn(15, HK, D, seed=1), randn(15, HK, D, seed=2)
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 6, return_attn_probs=True, **options)
    kv = torch.stack([k, v], dim=1)
    packed = fa.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 7, 6, **options)
    assert torch.equal(packed, out)
    for b, ((i, j), (x, y)) in enumerate(zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)):
        own = options if slopes is None or slopes.ndim == 1 else {**options, "alibi_slopes": slopes[b : b + 1]}
        if i == j:
            continue
        want, want_lse = reference(q[None, i:j], k[None, x:y], v[None, x:y], **own)
        assert apart(out[None, i:j], want, q[None, i:j].mT, k[None, x:y].transpose(1, 2), v) <= 1
        seen = want_lse[0].isfinite()
        assert torch.equal(lse[:, i:j].isfinite(), seen)


def test_varlen_qkvpacked() -> None:
    cu = cumulative([3, 0, 7])
    qkv = randn(10, 3, HQ, D)
    want = fa.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 7, 7, causal=True)
    assert torch.equal(fa.flash_attn_varlen_qkvpacked_func(qkv, cu, 7, causal=True), want)


@pytest.mark.parametrize("p", [0.2, 0.7])
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["causal window"], OPTIONS["alibi per sequence"]])
def test_the_dropout_mask_explains_the_output(p: float, options: dict[str, Any]) -> None:
    """S_dmask: the probabilities, negative where dropped. What is kept, over 1 − p, times V is the output."""
    q, k, v = randn(B, 24, HQ, D), randn(B, 32, HK, D, seed=1), randn(B, 32, HK, D, seed=2)
    out, lse, signed = fa.flash_attn_func(q, k, v, dropout_p=p, return_attn_probs=True, **options)
    values = v.transpose(1, 2).repeat_interleave(HQ // HK, dim=1)
    want = (signed.clamp(min=0) / (1 - p)) @ values
    by_heads = (q.transpose(1, 2), k.transpose(1, 2), values / (1 - p))
    assert apart(out.transpose(1, 2), want, *by_heads) <= 1
    _, want_lse = reference(q, k, v, **options)
    assert apart(lse, want_lse, *by_heads) <= 1
    drawn = int((signed != 0).sum())
    dropped = int((signed < 0).sum())
    assert abs(dropped - p * drawn) <= 6 * (drawn * p * (1 - p)) ** 0.5  # six deviations of a binomial
    again = fa.flash_attn_func(q, k, v, dropout_p=p, return_attn_probs=True, **options)[2]
    assert not torch.equal(again, signed), "each call draws anew"
    torch.manual_seed(5)
    first = fa.flash_attn_func(q, k, v, dropout_p=p)
    torch.manual_seed(5)
    assert torch.equal(first, fa.flash_attn_func(q, k, v, dropout_p=p))


def test_the_dropout_mask_of_a_packed_batch() -> None:
    p = 0.5
    cu_q, cu_k = cumulative(LENGTHS_Q), cumulative(LENGTHS_K)
    q, k, v = randn(10, HQ, D), randn(15, HK, D, seed=1), randn(15, HK, D, seed=2)
    out, _, signed = fa.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 7, 6, dropout_p=p, causal=True, return_attn_probs=True
    )
    assert signed.shape == (3, HQ, 7, 6)
    for b, ((i, j), (x, y)) in enumerate(zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)):
        values = v[x:y].transpose(0, 1).repeat_interleave(HQ // HK, dim=0)
        want = (signed[b, :, : j - i, : y - x].clamp(min=0) / (1 - p)) @ values
        if i < j:
            assert (
                apart(out[i:j].transpose(0, 1), want, q[i:j].transpose(0, 1), k[x:y].transpose(0, 1), values / p) <= 1
            )
        assert not signed[b, :, j - i :].any()


def test_alibi_and_low_precision() -> None:
    q = randn(1, 16, 2, 8).bfloat16()
    out = fa.flash_attn_func(q, q, q, causal=True, alibi_slopes=torch.tensor([0.5, 0.1]))
    assert out.dtype == torch.bfloat16


def test_unpad_and_pad_are_inverse() -> None:
    x = randn(3, 6, 2, 4).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]])
    tokens, indices, cu, longest, used = unpad_input(x, mask)
    assert tokens.shape == (8, 2, 4)
    assert cu.tolist() == [0, 3, 3, 8]
    assert cu.dtype == torch.int32
    assert (longest, used.tolist()) == (5, [3, 0, 5])
    back = pad_input(tokens, indices, 3, 6)
    assert torch.equal(back, x * mask[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[..., None, None].expand_as(x).double())
    unused = torch.zeros_like(mask)
    unused[0, 3] = 1
    tokens, _, cu, longest, used = unpad_input(x, mask, unused)
    assert cu.tolist() == [0, 4, 4, 9]
    assert used.tolist() == [3, 0, 5]
    assert torch.equal(tokens[3], x[0, 3])


def test_the_unpadded_model_way() -> None:
    """Unpad, attend, pad: what a padded batch gives with its padding masked."""
    x = randn(2, 6, 3, HQ, D)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    tokens, indices, cu, longest, _ = unpad_input(x, mask)
    out = pad_input(fa.flash_attn_varlen_qkvpacked_func(tokens, cu, longest, causal=True), indices, 2, 6)
    short = fa.flash_attn_qkvpacked_func(x[:1, :4], causal=True)
    assert apart(out[:1, :4], short, *(t.transpose(1, 2) for t in x.unbind(2))) <= 1
    assert not out[0, 4:].any()


PUBLISHED = {
    "flash_attn_func": "q k v",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_kvpacked_func": "q kv",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
}
SHARED = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_signatures(name: str) -> None:
    want = {**dict.fromkeys(PUBLISHED[name].split(), inspect.Parameter.empty), **SHARED}
    if name == "flash_attn_varlen_func":
        want |= {"block_table": None, "seqused_q": None, "seqused_k": None}  # the last two by name only: they are 3's
    found = inspect.signature(getattr(fa, name)).parameters
    assert {n: p.default for n, p in found.items()} == want
    assert list(found) == list(want)


@pytest.mark.parametrize(
    "sides",
    [torch.tensor([2, 1]), (np.int64(2), np.int32(1)), np.array([2, 1]), (torch.tensor(2), 1), [2, 1]],
    ids=["tensor", "numpy scalars", "array", "tensor scalar", "list"],
)
def test_numbers_of_any_kind(sides: Any) -> None:
    """flash_attn's own tests pass a tensor of two sides."""
    q = randn(2, 7, 4, 8)
    want = fa.flash_attn_func(q, q, q, softmax_scale=0.25, window_size=(2, 1), softcap=3.0)
    got = fa.flash_attn_func(
        q, q, q, softmax_scale=np.float32(0.25), window_size=sides, softcap=torch.tensor(3.0), dropout_p=np.float64(0)
    )
    assert torch.equal(got, want)
    cu = torch.tensor([0, 3, 7])
    packed = fa.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4, window_size=sides)
    assert torch.equal(packed, fa.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4, window_size=(2, 1)))


@pytest.mark.parametrize("sides", [torch.tensor([2.0, 1.0]), torch.tensor([1, 2, 3]), 5, None, ("2", "1"), (-2, 0)], ids=str)
def test_a_window_that_is_no_pair_of_integers_is_named(sides: Any) -> None:
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ArgumentError, match="window_size"):
        fa.flash_attn_func(x, x, x, window_size=sides)


def test_what_cannot_be_honoured_raises() -> None:
    q = randn(4, 2, 8)
    cu = cumulative([4])
    pages = randn(1, 4, 2, 8)
    with pytest.raises(ArgumentError, match="block_table"):
        fa.flash_attn_varlen_func(q, pages, pages, cu, cu, 4, 4, 0.1, block_table=torch.zeros(1, 1, dtype=torch.int32))
    x = randn(1, 4, 2, 8)
    with pytest.raises(ArgumentError, match="window_size"):
        fa.flash_attn_func(x, x, x, window_size=(-2, 0))
    with pytest.raises(ArgumentError, match="window_size"):
        fa.flash_attn_func(x, x, x, window_size=3)
    with pytest.raises(LayoutError, match="qkv"):
        fa.flash_attn_qkvpacked_func(x)
    with pytest.raises(ArgumentError, match="dropout_p"):
        fa.flash_attn_func(x, x, x, dropout_p=1.5)
    with pytest.raises(LayoutError, match="attention_mask"):
        unpad_input(x, torch.ones(2, 4))
