"""`tilewise.nn`: torch's MultiheadAttention, parameter for parameter, and an attention layer of its own."""

from __future__ import annotations

import copy
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


SQUARE = HIDDEN[:, :L]
PAST_END = PADDING[:, :L] | (torch.arange(L) >= 3) & torch.tensor([[True], [False]])
LAYER_CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"src_key_padding_mask": PAST_END},
    "hidden": {"src_mask": SQUARE},
    "added": {"src_mask": randn(L, L)},
    "padding and hidden": {"src_mask": SQUARE, "src_key_padding_mask": PAST_END},
    "causal": {"src_mask": nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64), "is_causal": True},
}


def swapped(module: nn.Module) -> nn.Module:
    """A copy of the module with every MultiheadAttention of torch's replaced by ours."""
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                setattr(parent, name, MultiheadAttention.from_torch(child))
    return module


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, dtype=torch.float64, **{"batch_first": True, **options})


@pytest.mark.parametrize("call", LAYER_CALLS.values(), ids=LAYER_CALLS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norm first", "norm last"])
def test_inside_torchs_encoder_layer(norm_first: bool, training: bool, grad: bool, call: dict[str, Any]) -> None:
    """At inference torch's layer takes the weights and computes by itself; ours must be asked instead."""
    theirs = encoder_layer(norm_first=norm_first).train(training)
    ours = swapped(theirs)
    asked: list[tuple[int, ...]] = []
    ours.self_attn.forward = counting(ours.self_attn.forward, asked)  # type: ignore[union-attr, assignment]
    x = randn(N, L, E)
    with torch.set_grad_enabled(grad):
        assert near(ours(x, **call), step_by_step(theirs, x, **call), 32 * E)
    assert asked == [(N, L, E)]


def step_by_step(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Without torch's fast path, which takes an added mask for a boolean one."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        out: Tensor = module(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return out


def counting(function: Any, asked: list[tuple[int, ...]]) -> Any:
    def count(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.append(tuple(query.shape) if not query.is_nested else (query.size(0),))
        return function(query, *args, **kwargs)

    return count


@pytest.mark.parametrize("late", [True, False], ids=["swapped late", "swapped early"])
@pytest.mark.parametrize("call", LAYER_CALLS.values(), ids=LAYER_CALLS)
@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_inside_torchs_encoder_at_inference(call: dict[str, Any], late: bool) -> None:
    """Of padded batches torch makes nested tensors, if the layers were its own when the encoder was made."""
    call = {"mask" if name == "src_mask" else name: value for name, value in call.items()}
    layer = encoder_layer()
    theirs = nn.TransformerEncoder(layer, 2).eval()
    ours = swapped(theirs) if late else nn.TransformerEncoder(swapped(layer), 2).eval()  # type: ignore[arg-type]
    ours.load_state_dict(theirs.state_dict())
    x = randn(N, L, E)
    with torch.no_grad():
        got, want = ours(x, **call), step_by_step(theirs, x, **call)
    padding = call.get("src_key_padding_mask")
    if padding is not None:  # what stands at the padding is zero or anything
        got, want = got[~padding], want[~padding]
    assert near(got, want, 2 * 32 * E)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_inside_torchs_transformer(batch_first: bool, training: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.Transformer(E, H, 1, 1, 32, dropout=0.0, batch_first=batch_first, dtype=torch.float64).train(training)
    ours = swapped(theirs)
    src, tgt = randn(N, S, E), randn(N, L, E, seed=1)
    if not batch_first:
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
    call = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64),
        "memory_mask": HIDDEN,
        "src_key_padding_mask": PADDING,
        "memory_key_padding_mask": PADDING,
    }
    with torch.set_grad_enabled(training):
        assert near(ours(src, tgt, **call), theirs(src, tgt, **call), 4 * 32 * E)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors_are_their_sequences(layout: torch.layout) -> None:
    layer = MultiheadAttention.from_torch(torch_layer(batch_first=True))
    rows = [randn(n, E, seed=n) for n in (3, 5, 1)]
    x = torch.nested.nested_tensor(rows, layout=layout)
    for call in ({}, {"is_causal": True}, {"mask": tw.window(2)}):
        out = layer(x, x, x, **call)[0]
        assert out.layout == layout
        for got, row in zip(out.unbind(), rows, strict=True):
            assert near(got, layer(row, row, row, **call)[0], E + L)
    with pytest.raises(LayoutError, match="no padding"):
        layer(x, x, x, key_padding_mask=PADDING)
    with pytest.raises(LayoutError, match="nested all three"):
        layer(x, rows[0][None], rows[0][None])


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_cast_model_turns_by_the_same_angles(dtype: torch.dtype) -> None:
    """Each result is rounded a few times in its own dtype; frequencies that were rounded too are off by whole turns."""
    positions = torch.arange(0, 4096, 63)
    x = randn(1, len(positions), 1, 64).to(dtype)
    want = Rotary(64)(x.double(), positions)
    got = Rotary(64).to(dtype)(x, positions)
    assert got.dtype == dtype
    assert float((got.double() - want).abs().max()) <= 4 * torch.finfo(dtype).eps * float(x.double().abs().max())


def test_a_model_made_on_the_meta_device_turns_by_the_same_angles() -> None:
    torch.manual_seed(0)
    want = Attention(32, 4).double()
    with torch.device("meta"):
        made = Attention(32, 4).double()
    made = made.to_empty(device="cpu")
    assert str(made.load_state_dict(want.state_dict())) == "<All keys matched successfully>"
    x = randn(2, 9, 32)
    assert torch.equal(made(x), want(x))


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


def test_a_layer_generates_over_pages() -> None:
    """Prompts of two lengths, then single tokens: as the whole texts at once."""
    torch.manual_seed(0)
    layer = Attention(32, heads=4, kv_heads=2, sinks=True, mask=tw.causal() & tw.window(6)).eval()
    x = torch.randn(2, 9, 32)
    pages = [torch.full((6, 4, 2, 8), float("nan")) for _ in range(2)]
    lengths = torch.zeros(2, dtype=torch.int32)
    cache = tw.KVCache.paged(pages[0], pages[1], torch.tensor([[4, 0, 2], [1, 5, 3]]), lengths)
    parts = []
    with torch.no_grad():
        for i, j in ((0, 4), (4, 5), (5, 6), (6, 9)):
            lengths += j - i
            parts.append(layer(x[:, i:j], cache=cache))
        assert torch.allclose(torch.cat(parts, 1), layer(x), atol=1e-5)
