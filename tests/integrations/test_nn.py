"""`tilewise.nn`: torch's MultiheadAttention, parameter for parameter, and an attention layer of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise as tw
from tests.integrations.closeness import U, randn
from tilewise.errors import ArgumentError, LayoutError
from tilewise.nn import Attention, KeyValueCache, MultiheadAttention, Rotary

E, H, L, S, N = 16, 4, 5, 7, 2
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without bias": {"bias": False},
    "keys and values of other widths": {"kdim": 10, "vdim": 12},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv and zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
    "batch_first": {"batch_first": True},
}
HIDDEN = torch.rand(L, S, generator=torch.Generator().manual_seed(0)) > 0.7
HIDDEN[:, 0] = False
PADDING = torch.zeros(N, S, dtype=torch.bool)
PADDING[0, 4:] = True
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"key_padding_mask": PADDING},
    "hidden": {"attn_mask": HIDDEN},
    "hidden per head": {"attn_mask": torch.stack([HIDDEN, torch.zeros_like(HIDDEN)] * (N * H // 2))},
    "added": {"attn_mask": randn(L, S)},
    "padding and hidden": {"key_padding_mask": PADDING, "attn_mask": HIDDEN},
    "both added": {"key_padding_mask": randn(N, S), "attn_mask": randn(L, S)},
}


def near(a: Tensor, b: Tensor, terms: int) -> bool:
    """Two float64 results of sums of `terms` products, through at most four of them in a row."""
    return float((a - b).detach().abs().max()) <= 2 * 4 * terms * U * max(1.0, float(b.detach().abs().max()))


def torch_layer(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    for parameter in layer.parameters():  # torch starts the biases at 0, where a lost one is not noticed
        nn.init.normal_(parameter, std=0.5)
    return layer


def inputs(layer: nn.MultiheadAttention) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = randn(L, N, E), randn(S, N, layer.kdim, seed=1), randn(S, N, layer.vdim, seed=2)
    return (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)) if layer.batch_first else (q, k, v)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_multihead_is_torchs(options: dict[str, Any], call: dict[str, Any]) -> None:
    theirs = torch_layer(**options)
    ours = MultiheadAttention(E, H, dtype=torch.float64, **options)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    assert list(ours.state_dict()) == list(theirs.state_dict())
    q, k, v = inputs(theirs)
    want, _ = theirs(q, k, v, need_weights=False, **call)
    got, weights = ours(q, k, v, **call)
    assert weights is None
    assert near(got, want, E + S)
    dout = randn(*want.shape, seed=4)
    for a, b in zip(
        torch.autograd.grad(got, list(ours.parameters()), dout),
        torch.autograd.grad(want, list(theirs.parameters()), dout),
        strict=True,
    ):
        assert near(a, b, (E + S) * L * N)


def test_unbatched_and_from_torch() -> None:
    theirs = torch_layer(dropout=0.1).eval()
    ours = MultiheadAttention.from_torch(theirs)
    assert not ours.training
    q, k = randn(L, E), randn(S, E)
    padding = PADDING[0]
    want = theirs(q, k, k, key_padding_mask=padding, need_weights=False)[0]
    assert near(ours(q, k, k, key_padding_mask=padding)[0], want, E + S)


def test_causal_needs_no_mask_beside_it() -> None:
    theirs, x = torch_layer(), randn(L, N, E)
    ours = MultiheadAttention.from_torch(theirs)
    hidden = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    want = theirs(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]
    assert near(ours(x, x, x, is_causal=True)[0], want, E + L)
    assert near(ours(x, x, x, attn_mask=hidden, is_causal=True)[0], want, E + L)
    assert near(ours(x, x, x, mask=tw.causal())[0], want, E + L)


@pytest.mark.parametrize("training", [True, False])
def test_inside_torchs_encoder_layer(training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, dtype=torch.float64).train(training)
    x = randn(N, L, E)
    want = layer(x, src_key_padding_mask=PADDING[:, :L])
    layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
    assert near(layer(x, src_key_padding_mask=PADDING[:, :L]), want, 32 * E)


def test_multihead_says_what_is_wrong() -> None:
    layer, x = MultiheadAttention(E, H), torch.zeros(L, N, E)
    with pytest.raises(ArgumentError, match="never formed"):
        layer(x, x, x, need_weights=True)
    with pytest.raises(LayoutError, match="key_padding_mask"):
        layer(x, x, x, key_padding_mask=torch.zeros(N, L + 1, dtype=torch.bool))
    with pytest.raises(LayoutError, match="attn_mask"):
        layer(x, x, x, attn_mask=torch.zeros(L, L, dtype=torch.int64))
    with pytest.raises(LayoutError, match="ranks"):
        layer(x, x[0], x)
    with pytest.raises(ArgumentError, match="num_heads"):
        MultiheadAttention(10, 3)


def by_hand(layer: Attention, x: Tensor, positions: Tensor) -> Tensor:
    """The layer written out: complex rotation, repeated key heads, an explicit softmax."""
    b, s, _ = x.shape
    q, k, v = layer.qkv(x).split([layer.heads * 8, layer.kv_heads * 8, layer.kv_heads * 8], dim=-1)
    q, k, v = (t.reshape(b, s, -1, 8).transpose(1, 2) for t in (q, k, v))
    angle = positions.double()[:, None] * 100.0 ** (-torch.arange(0, 8, 2).double() / 8)
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.complex(*t.chunk(2, dim=-1)) * turn for t in (q, k))
    q, k = (torch.cat([t.real, t.imag], dim=-1) for t in (q, k))
    k, v = (t.repeat_interleave(layer.heads // layer.kv_heads, dim=1) for t in (k, v))
    hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
    p = (q @ k.mT / math.sqrt(8)).masked_fill(hidden, float("-inf")).softmax(-1)
    return layer.out((p @ v).transpose(1, 2).reshape(b, s, -1))


def test_attention_is_what_it_says() -> None:
    torch.manual_seed(0)
    layer = Attention(32, 4, kv_heads=2, rotary=100.0).double()
    x = randn(2, 9, 32)
    assert near(layer(x), by_hand(layer, x, torch.arange(9)), 64)
    later = torch.arange(50, 59)
    assert near(layer(x, positions=later), by_hand(layer, x, later), 64 * 50)


def test_rotary_depends_on_distance_only() -> None:
    rotary = Rotary(8)
    q, k = randn(1, 1, 1, 8), randn(1, 1, 1, 8, seed=1)

    def score(i: int, j: int) -> float:
        return float((rotary(q, torch.tensor([i])) * rotary(k, torch.tensor([j]))).sum())

    assert abs(score(3, 1) - score(1003, 1001)) <= 1003 * 8 * U * 8
    assert abs(score(3, 1) - score(4, 1)) > 1e-3
    with pytest.raises(ArgumentError, match="even"):
        Rotary(7)


def test_a_cache_continues_where_the_text_ended() -> None:
    torch.manual_seed(0)
    layer = Attention(32, 4, kv_heads=1, mask=tw.causal() & tw.window(4), softcap=5.0, sinks=True).double()
    assert layer.sinks is not None
    nn.init.normal_(layer.sinks)
    x = randn(2, 9, 32)
    cache = KeyValueCache()
    with torch.no_grad():
        whole = layer(x)
        parts = [layer(x[:, i:j], cache=cache) for i, j in ((0, 4), (4, 5), (5, 6), (6, 9))]
    assert len(cache) == 9
    assert near(torch.cat(parts, dim=1), whole, 64)


def test_gradients_reach_every_parameter() -> None:
    layer = Attention(32, 4, kv_heads=2, bias=True, sinks=True, dropout=0.1)
    layer(torch.randn(2, 9, 32)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_attention_says_what_is_wrong() -> None:
    with pytest.raises(ArgumentError, match="multiple"):
        Attention(32, 4, kv_heads=3)
    with pytest.raises(ArgumentError, match="head_dim"):
        Attention(30, 4)
    with pytest.raises(LayoutError, match="32"):
        Attention(32, 4)(torch.zeros(2, 9, 31))


def test_the_module_is_reached_by_attribute() -> None:
    assert tw.nn.Attention is Attention
