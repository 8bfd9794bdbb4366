"""Masks built inside a compiled function, whatever they are built of; replaced SDPA and sizes that data decide, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.masks import Mask

Make = Callable[[Tensor, dict[str, Tensor]], Mask]
B, H, D = 3, 2, 8


def data(n: int) -> dict[str, Tensor]:
    """Tensors that masks are made of, for n queries and keys."""
    generator = torch.Generator().manual_seed(n)
    return {
        "lengths": torch.randint(1, n, (B,), dtype=torch.int32, generator=generator),
        "start": torch.randint(0, 3, (B,), generator=generator),
        "offset": torch.randint(0, 5, (B,), generator=generator),
        "one": torch.tensor(4),
        "ids": torch.arange(n) // 5,
        "table": torch.rand(-(-n // 8), -(-n // 8), generator=generator) > 0.4,
        "seen": torch.rand(B, 1, n, n, generator=generator) > 0.5,
    }


FIXED = torch.tensor([2, 3, 1])
OUTSIDE = tw.window(3)
MASKS: dict[str, Make] = {
    "full": lambda q, t: tw.full(),
    "~causal": lambda q, t: ~tw.causal(),
    "~~causal": lambda q, t: ~~tw.causal(),
    "~ of one made outside": lambda q, t: tw.causal() & ~OUTSIDE,
    "~(causal & window)": lambda q, t: ~(tw.causal() & tw.window(4)),
    "~(window | prefix)": lambda q, t: ~(tw.window(4) | tw.prefix(2)),
    "~key_padding": lambda q, t: ~tw.key_padding(t["lengths"]),
    "~documents": lambda q, t: tw.causal() | ~tw.documents(t["ids"]),
    "~blocks": lambda q, t: ~tw.blocks(t["table"], 8),
    "~dense": lambda q, t: ~tw.dense(t["seen"]),
    "~causal(offset)": lambda q, t: ~tw.causal(offset=t["offset"]),
    "causal of a length": lambda q, t: tw.causal(offset=q.shape[2] - 3),
    "causal(offset)": lambda q, t: tw.causal(offset=t["offset"]),
    "causal(offset of all)": lambda q, t: tw.causal(offset=t["one"]),
    "causal(offset made outside)": lambda q, t: tw.causal(offset=FIXED),
    "causal(offset made inside)": lambda q, t: tw.causal(offset=torch.full((q.shape[0],), 3)),
    "causal(offset written inside)": lambda q, t: tw.causal(offset=torch.tensor([2, 3, 1])),
    "window(offset)": lambda q, t: tw.window(4, 2, offset=t["offset"]),
    "window of a length": lambda q, t: tw.window(q.shape[2] // 2),
    "prefix": lambda q, t: tw.causal() | tw.prefix(t["lengths"]),
    "prefix of a length": lambda q, t: tw.causal() | tw.prefix(q.shape[2] // 2),
    "key_padding": lambda q, t: tw.key_padding(t["lengths"]),
    "key_padding(start)": lambda q, t: tw.key_padding(t["lengths"], t["start"]),
    "key_padding made outside": lambda q, t: tw.key_padding(FIXED),
    "key_padding written inside": lambda q, t: tw.key_padding(torch.tensor([4, 5, 6])),
    "key_padding of a list": lambda q, t: tw.key_padding([4, 5, 6]),
    "key_padding of a sum": lambda q, t: tw.key_padding(t["seen"][:, 0, 0].sum(-1)),
    "documents": lambda q, t: tw.documents(t["ids"].expand(B, -1)),
    "documents(q_ids)": lambda q, t: tw.documents(t["ids"], q_ids=t["ids"] + 1),
    "blocks": lambda q, t: tw.blocks(t["table"], (8, 8)),
    "dense": lambda q, t: tw.dense(t["seen"]),
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


FIRST_STATIC = ("~documents", "causal(offset)", "key_padding", "dense")
"""These also with lengths that are constants at first and move later."""


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, True) for name in MASKS), *((name, None) for name in FIRST_STATIC)]
)
def test_masks_built_inside(name: str, dynamic: bool | None) -> None:
    make = MASKS[name]

    def attend(q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        return tw.attention(q, k, v, mask=make(q, tensors))

    fast = compiled(attend, dynamic=dynamic)
    for n in (17, 24):
        q, k, v = (torch.randn(B, H, n, D, requires_grad=True) for _ in range(3))
        got, want = fast(q, k, v, data(n)), attend(q, k, v, data(n))
        assert torch.equal(got, want)
        upstream = torch.randn_like(got)
        grads = (torch.autograd.grad(out, (q, k, v), upstream) for out in (got, want))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"attn_mask": torch.ones(9, 9, dtype=torch.bool).triu(1), "is_causal": True},
        {"key_padding_mask": torch.arange(9) >= torch.tensor([[7], [9]])},
    ],
    ids=["plain", "causal", "padding"],
)
@pytest.mark.parametrize("inside", [True, False], ids=["mode inside", "mode outside"])
def test_replaced_sdpa_in_torchs_multihead_attention(inside: bool, call: dict[str, Any]) -> None:
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 9, 16)
    mode = tw.replace_sdpa(strict=True)

    def plain(x: Tensor) -> Tensor:
        out: Tensor = layer(x, x, x, need_weights=False, **call)[0]
        return out

    def routed(x: Tensor) -> Tensor:
        with mode:
            return plain(x)

    if inside:
        got = compiled(routed)(x)
    else:
        with mode:
            got = compiled(plain)(x)
    assert mode.served == 1
    assert torch.allclose(got, plain(x), rtol=0, atol=2**-24 * 64 * float(plain(x).detach().abs().max()))


class Chosen(nn.Module):
    """Attention over the sequences that a boolean tensor chooses: their number is data."""

    def __init__(self, attend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.attend(x[keep])


def masked(*shape: int, dtype: torch.dtype = torch.bool) -> Callable[[Tensor], Tensor]:
    """`tw.sdpa` with a mask of this shape, −1 standing for the number of sequences."""

    def attend(x: Tensor) -> Tensor:
        mask = torch.ones([x.shape[0] if n < 0 else n for n in shape], dtype=dtype)
        return tw.sdpa(x, x, x, mask)

    return attend


EXPORTED: dict[str, Callable[[Tensor], Tensor]] = {
    "sdpa": lambda x: tw.sdpa(x, x, x),
    "sdpa causal": lambda x: tw.sdpa(x, x, x, is_causal=True),
    "sdpa grouped": lambda x: tw.sdpa(x, x[:, :1], x[:, :1], enable_gqa=True),
    "sdpa mask (L, S)": masked(9, 9),
    "sdpa mask (N, 1, L, S)": masked(-1, 1, 9, 9),
    "sdpa mask (N, H, L, S)": masked(-1, H, 9, 9),
    "sdpa mask (N, 1, 1, S)": masked(-1, 1, 1, 9),
    "sdpa added (N, 1, L, S)": masked(-1, 1, 9, 9, dtype=torch.float32),
    "sdpa added (L, S)": masked(9, 9, dtype=torch.float32),
    "attention": lambda x: tw.attention(x, x, x, mask=tw.causal()),
    "key_padding": lambda x: tw.attention(x, x, x, mask=tw.key_padding(torch.full((x.shape[0],), 5))),
    "key_padding of all": lambda x: tw.attention(x, x, x, mask=tw.key_padding(torch.tensor(5))),
    "documents": lambda x: tw.attention(x, x, x, mask=tw.documents(torch.arange(9) // 4)),
    "bias": lambda x: tw.attention(x, x, x, bias=torch.zeros(x.shape[0], 1, 9, 9)),
    "bias of all": lambda x: tw.attention(x, x, x, bias=torch.zeros(9)),
    "alibi": lambda x: tw.attention(x, x, x, bias=tw.alibi(torch.ones(H))),
}


TRACED = ("sdpa causal", "sdpa mask (N, H, L, S)", "sdpa added (L, S)", "key_padding")
"""These also by way of the compiler."""


@pytest.mark.parametrize(
    ("name", "strict"), [*((name, False) for name in EXPORTED), *((name, True) for name in TRACED)]
)
def test_export_with_a_batch_that_data_decide(name: str, strict: bool) -> None:
    model, x = Chosen(EXPORTED[name]), torch.randn(6, H, 9, D)
    program = torch.export.export(model, (x, torch.tensor([True, False] * 3)), strict=strict).module()
    for keep in ([True, False, True, True, False, True], [False] * 5 + [True], [True] * 6):
        chosen = torch.tensor(keep)
        assert torch.equal(program(x, chosen), model(x, chosen))
