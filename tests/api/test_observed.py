"""What watches a call from outside: profilers, counters of FLOPs, and devices without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.errors import ArgumentError
from tilewise.ops import library  # noqa: F401  (the operators' names)

B, H, S, D, DV = 2, 4, 40, 16, 8
CU = torch.tensor([0, 7, S], dtype=torch.int32)


def drawn(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_(grad)


def qkv(grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return drawn(B, H, S, D, grad=grad), drawn(B, 2, S, D, grad=grad), drawn(B, 2, S, DV, grad=grad)


def packed(grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return drawn(S, H, D, grad=grad), drawn(S, 2, D, grad=grad), drawn(S, 2, DV, grad=grad)


# -- profilers


def ranges(call: Callable[[], Any]) -> dict[str, int]:
    with profile() as recorded:
        call()
    return {event.key: event.count for event in recorded.key_averages() if event.key.startswith("tilewise::")}


def test_every_call_is_a_range() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: tw.attention(*qkv()),
        lambda: tw.attention(*qkv(), mask=tw.causal(), layout="bhsd", return_lse=True),
        lambda: tw.attention(*qkv(), sinks=torch.ones(H)),
        lambda: tw.attention_varlen(*packed(), CU),
        lambda: tw.sdpa(*(drawn(B, H, S, D) for _ in range(3))),
    ]
    for call in calls:
        for _ in range(3):  # the first is prepared, the last takes the short way
            assert ranges(call) == {"tilewise::attention": 1}


def test_a_backward_is_one_too() -> None:
    q, k, v = qkv(grad=True)
    found = ranges(lambda: tw.attention(q, k, v).sum().backward())
    assert found == {"tilewise::attention": 1, "tilewise::attention_backward": 1}


def test_the_operator_is_not_shown_twice() -> None:
    compiled = torch.compile(lambda *x: tw.attention(*x), backend="eager")
    compiled(*qkv())
    assert ranges(lambda: compiled(*qkv())) == {"tilewise::attention": 1}


# -- FLOPs


def visible(mask: tw.Mask, batch: int = 1) -> int:
    """By attention itself: the share of each key in equal weights."""
    q = torch.zeros(batch, 1, S, 4)
    out = tw.attention(q, q, torch.eye(S).expand(batch, 1, S, S), mask=mask, backend="reference")
    return int((out > 0).sum())


DOCUMENTS, DENSE = torch.arange(S) // 7, torch.rand(S, S, generator=torch.Generator().manual_seed(0)) < 0.3
MASKS: dict[str, tuple[Any, int]] = {
    "full": (None, B * S * S),
    "causal": (tw.causal(), B * S * (S + 1) // 2),
    "window": (tw.window(5), B * (5 * S - 10)),
    "prefix": (tw.causal() | tw.prefix(9), B * visible(tw.causal() | tw.prefix(9))),
    "padding": (tw.key_padding(torch.tensor([3, 30])), S * 33),
    "documents": (tw.documents(DOCUMENTS), B * visible(tw.documents(DOCUMENTS))),
    "dense": (DENSE, B * int(DENSE.sum())),
    "nothing": (~tw.full(), 0),
}


@pytest.mark.parametrize("name", list(MASKS))
def test_flops_of_masks(name: str) -> None:
    mask, pairs = MASKS[name]
    q, k, v = qkv(grad=True)
    with FlopCounterMode(display=False) as counter:
        out = tw.attention(q, k, v, mask=mask)
    assert counter.get_total_flops() == 2 * H * pairs * (D + DV)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * H * pairs * (3 * D + 2 * DV)


def test_flops_of_a_backward_alone_and_of_what_it_needs() -> None:
    q, k, v = qkv(grad=True)
    out = tw.attention(q, k.detach(), v.detach()).sum()  # no counter yet: no operator
    with FlopCounterMode(display=False) as counter:
        out.backward()
    assert counter.get_total_flops() == 2 * B * H * S * S * (2 * D + DV)
    out = tw.attention(q.detach(), k.detach(), v).sum()
    with FlopCounterMode(display=False) as counter:
        out.backward()
    assert counter.get_total_flops() == 2 * B * H * S * S * (D + DV)


def test_flops_of_packed_batches_and_of_what_cannot_be_read() -> None:
    pairs = 7 * 8 // 2 + 33 * 34 // 2
    with FlopCounterMode(display=False) as counter:
        tw.attention_varlen(*packed(), CU, mask=tw.causal())
    assert counter.get_total_flops() == 2 * H * pairs * (D + DV)
    with FlopCounterMode(display=False) as counter:
        tw.attention_varlen(*(x.to("meta") for x in packed()), CU.to("meta"), mask=tw.causal())
    assert counter.get_total_flops() == 2 * H * S * S * (D + DV)


def test_a_counter_made_before_anything_knows_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = FlopCounterMode(display=False)
    for operator in (torch.ops.tilewise.attention, torch.ops.tilewise.attention_backward):
        counter.flop_registry.pop(operator, None)
    with counter:
        tw.attention(*qkv())
    assert counter.get_total_flops() == 2 * B * H * S * S * (D + DV)


def test_flops_of_a_compiled_call() -> None:
    compiled = torch.compile(lambda *x: tw.attention(*x, mask=tw.causal()), backend="eager")
    compiled(*qkv())
    with FlopCounterMode(display=False) as counter:
        compiled(*qkv())
    assert counter.get_total_flops() == H * B * S * (S + 1) * (D + DV)


# -- meta tensors


META: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "causal": {"mask": tw.causal(), "return_lse": True},
    "padding": {"mask": tw.key_padding([5, 9])},
    "dense": {"mask": DENSE},
    "bias": {"bias": drawn(S, S), "return_lse": True},
    "alibi": {"bias": tw.alibi(torch.ones(H))},
    "sinks": {"sinks": drawn(H)},
    "dropout": {"dropout_p": 0.5},
    "seeded": {"dropout_p": 0.5, "seed": torch.tensor(3)},
    "named": {"backend": "tiled"},
}


def to_meta(value: Any) -> Any:
    if isinstance(value, tw.Mask):
        return value.to("meta")
    if hasattr(value, "slopes"):
        return tw.alibi(value.slopes.to("meta"))
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def alike(found: Any, expected: Any) -> None:
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    for a, b in pairs:
        assert a.is_meta and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("name", list(META))
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_meta_tensors_give_shapes(name: str, layout: str) -> None:
    q, k, v = (x.detach() if layout == "bhsd" else x.detach().transpose(1, 2) for x in qkv())
    leaves = [x.to("meta").requires_grad_() for x in (q, k, v)]
    options = {key: to_meta(value) for key, value in META[name].items()}
    found = tw.attention(*leaves, layout=layout, **options)
    alike(found, tw.attention(q, k, v, layout=layout, **META[name]))
    out = found[0] if isinstance(found, tuple) else found
    for grad, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert grad.is_meta and grad.shape == leaf.shape and grad.dtype == leaf.dtype


@pytest.mark.parametrize("return_lse", [False, True])
def test_packed_meta_tensors_too(return_lse: bool) -> None:
    found = tw.attention_varlen(*(x.to("meta") for x in packed()), CU.to("meta"), return_lse=return_lse)
    alike(found, tw.attention_varlen(*packed(), CU, return_lse=return_lse))


def test_meta_calls_are_checked_all_the_same() -> None:
    q, k, v = (x.to("meta") for x in qkv())
    with pytest.raises(ArgumentError, match="backend"):
        tw.attention(q, k, v, backend="tyled")
    with pytest.raises(tw.TilewiseError, match="keys"):
        tw.attention(q, k, v[:, :, :3])
    assert tw.attention(q[:, :, :0], k, v).shape == (B, H, 0, DV)
    assert tw.sdpa(*[q] * 3).shape == q.shape


# -- numpy's numbers


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.array], ids=lambda kind: kind.__name__)
def test_numbers_of_numpy(kind: Callable[[float], Any]) -> None:
    q, k, v = qkv()
    expected = tw.attention(q, k, v, scale=0.25, softcap=4.0, dropout_p=0.5, seed=3)
    options = {"scale": kind(0.25), "softcap": kind(4.0), "dropout_p": kind(0.5), "seed": np.int64(3)}
    for _ in range(2):
        assert torch.equal(tw.attention(q, k, v, **options), expected)
    problem = tw.Problem.of(heads=1, head_dim=8, seqlen=4, scale=kind(0.25), softcap=kind(4.0), dropout_p=kind(0.5))
    assert problem == tw.Problem.of(heads=1, head_dim=8, seqlen=4, scale=0.25, softcap=4.0, dropout_p=0.5)
