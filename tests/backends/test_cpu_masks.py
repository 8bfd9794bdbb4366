"""Masks of CPU kernels: ends of rows and classes of tiles give what the elements give, and are those of what tensors hold now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.backends.test_cpu_memory import pretend
from tilewise.api.parse import parse_call
from tilewise.backends.cpu import lowering
from tilewise.masks import Mask

N = 300
LENGTHS = (70, 1, 129, 60, 40)


def ids(lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def tensors(heads: int = 2, requires_grad: bool = False) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, h, N, 32, generator=g).requires_grad_(requires_grad) for h in (2 * heads, heads, heads))


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    lowering._kept.clear()
    yield
    lowering._kept.clear()


ROWS: dict[str, Callable[[], Mask]] = {
    "documents": lambda: tw.documents(ids()),
    "causal documents": lambda: tw.causal() & tw.documents(ids()),
    "ids in any order": lambda: tw.causal() & tw.documents(torch.tensor([7, -3, 5, 0, 2])[ids()]),
    "one token each": lambda: tw.causal() & tw.documents(torch.arange(N)),
    "documents of each sequence": lambda: tw.window(50) & tw.documents(torch.stack([ids(), ids((100, 200))])),
    "prefix-LM": lambda: tw.causal() | tw.prefix(90),
    "documents and padding": lambda: tw.causal() & tw.documents(ids()) & tw.key_padding([250, 0]),
}
TILES: dict[str, Callable[[], Mask]] = {
    "a document in two places": lambda: tw.causal() & tw.documents(ids() % 3),
    "other documents": lambda: ~tw.documents(ids()),
    "documents behind the query": lambda: tw.documents(ids()) & tw.causal(offset=-3),
    "blocks with an empty row": lambda: tw.blocks(torch.eye(5, dtype=torch.bool) & (torch.arange(5) != 2), 64),
    "blocks of each head": lambda: tw.blocks(torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(1)) > 0.5, 128),
    "selected": lambda: tw.selected(torch.tensor([[0, 2, 2], [-1, -1, -1], [1, 0, -1]]), 128, 128),
    "selected of each key head": lambda: tw.causal() & tw.selected(torch.tensor([[[0], [1], [0]], [[2], [1], [2]]]), 128, 128),
    "sinks and a window": lambda: tw.causal() & (tw.prefix(4) | tw.window(20)),
    "dense": lambda: tw.dense(torch.rand(N, N, generator=torch.Generator().manual_seed(1)) > 0.9),
    "dense by halves": lambda: tw.dense((torch.arange(N) < 150)[:, None] == (torch.arange(N) < 150)),
}


@pytest.mark.parametrize("name", [*ROWS, *TILES])
def test_which_way_a_mask_goes(name: str) -> None:
    q, k, v = tensors()
    problem, inputs = parse_call(q, k, v, {"mask": {**ROWS, **TILES}[name]()})
    assert (lowering.lowered(problem, inputs).program.structure == "j") == (name in ROWS)


@pytest.mark.parametrize("name", [*ROWS, *TILES])
def test_what_nobody_sees_is_not_there(name: str) -> None:
    """NaN in every key and value that no query of any head of its group sees; gradients too."""
    mask = {**ROWS, **TILES}[name]()
    q, k, v = tensors(requires_grad=True)
    seen = torch.as_tensor(mask.to_dense(N)).expand(2, -1, N, N)
    seen = seen.repeat_interleave(4 // seen.shape[1], 1).unflatten(1, (2, 2)).any(2).any(2)[..., None]
    poisoned = [x.detach().where(seen, torch.nan).requires_grad_() for x in (k, v)]
    want, got = (tw.attention(q, *pair, mask=mask, backend=b) for b, pair in (("reference", (k, v)), ("cpu", poisoned)))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad(out, (q, *pair), dout) for out, pair in ((want, (k, v)), (got, poisoned))]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a, atol=5e-5, rtol=5e-5)


def _computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is classified from here on."""
    made: list[str] = []
    for name in ("_ends", "_classes"):
        original = getattr(lowering, name)
        monkeypatch.setattr(lowering, name, lambda *args, name=name, original=original: made.append(name) or original(*args))
    return made


def test_layers_share_what_was_classified(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _computed(monkeypatch)
    q, k, v = tensors(requires_grad=True)
    for _ in range(3):
        tw.attention(q, k, v, mask=tw.causal() & tw.documents(ids()), backend="cpu").sum().backward()
    assert made == ["_ends"]
    made.clear()
    for _ in range(3):
        tw.attention(q.detach(), k.detach(), v.detach(), mask=tw.blocks(torch.eye(3, dtype=torch.bool), 128), backend="cpu")
    assert made == ["_ends", "_classes"]


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copy_": lambda x, new: x.copy_(new),
    "data": lambda x, new: x.data.copy_(new),
    "numpy": lambda x, new: np.copyto(x.numpy(), new.numpy()),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_seen_however_it_is_done(write: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        q, k, v = tensors()
        table = torch.eye(3, dtype=torch.bool).repeat_interleave(1, 0)
        held = {"documents": ids().clone(), "blocks": table, "selected": torch.tensor([[0], [1], [2]])}
        new = {"documents": ids((100, 200)), "blocks": ~table, "selected": torch.tensor([[2], [0], [1]])}
        masks: dict[str, Callable[[torch.Tensor], Mask]] = {
            "documents": lambda x: tw.causal() & tw.documents(x),
            "blocks": lambda x: tw.blocks(x, 128),
            "selected": lambda x: tw.selected(x, 128, 128),
        }
        for name, build in masks.items():
            mask = build(held[name])
            before = tw.attention(q, k, v, mask=mask, backend="cpu")
            WRITES[write](held[name], new[name])
            after = tw.attention(q, k, v, mask=mask, backend="cpu")
            assert not torch.equal(before, after)
            assert torch.equal(after, tw.attention(q, k, v, mask=build(new[name].clone()), backend="cpu"))


def test_packed_documents_are_ends_of_rows() -> None:
    """Each sequence counts for itself: the same id in two of them is two documents."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 200, 2, 32, generator=g)
    cu, own = torch.tensor([0, 120, 120, 200], dtype=torch.int32), torch.tensor([0] * 50 + [1] * 90 + [0] * 60)
    problem, inputs = parse_call(q, k, v, {"mask": tw.documents(own), "cu_seqlens_q": cu, "cu_seqlens_k": cu})
    assert lowering.lowered(problem, inputs).program.structure == "j"
    for mask in (tw.documents(own), tw.causal() & tw.documents(own)):
        got, want = (tw.attention_varlen(q, k, v, cu, cu, mask=mask, backend=b) for b in ("cpu", "reference"))
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_large_tensors_are_not_kept() -> None:
    made = lowering.keep("key", (torch.zeros(lowering.KEPT_BYTES, dtype=torch.float64),), lambda: 1)
    assert made == 1 and not lowering._kept


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("processor", ["neon", "avx2", "avx512"])
def test_documents_that_end_inside_a_strip(
    monkeypatch: pytest.MonkeyPatch, processor: str, dtype: torch.dtype, causal: bool
) -> None:
    """At each of its rows: the keys before and behind are those of one half of the strip, of the other or of both."""
    pretend(monkeypatch, processor)
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 210, 32, generator=g, dtype=dtype)
    for end in range(64, 129):
        mask = tw.documents(ids((end, 210 - end)))
        mask = tw.causal() & mask if causal else mask
        got = tw.attention(q, k, v, mask=mask, backend="cpu")
        want = tw.attention(q.double(), k.double(), v.double(), mask=mask, backend="reference")
        close = 1e-13 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(got.double(), want, atol=close, rtol=close)


def test_blocks_that_see_most_keys_start_first() -> None:
    lo, hi = torch.zeros(1, 10, dtype=torch.int32), torch.tensor([[1, 1, 9, 9, 0, 0, 5, 5, 3, 100]], dtype=torch.int32)
    order = lowering._order(lo, hi, 9, 2)  # what follows the ninth row is room for a strip
    assert order is not None and order.dtype == torch.int32 and order.tolist() == [1, 3, 4, 0, 2]
    assert lowering._order(lo, lo + 7, 8, 2) is None
    assert lowering._order(lo, lo, 8, 2) is None


def test_any_order_of_blocks_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are started in the order that the host says, each of them once."""
    q, k, v = tensors()
    mask, made, threads = tw.causal() & tw.documents(ids((250, 50))), [], torch.get_num_threads()
    want = tw.attention(q, k, v, mask=mask, backend="reference")

    def ordered(lo: torch.Tensor, hi: torch.Tensor, seqlen: int, rows: int) -> torch.Tensor:
        made.append(-(-seqlen // rows))
        return torch.arange(made[-1], dtype=torch.int32).flip(0)

    torch.set_num_threads(4)
    try:
        for function in (lowering._order, ordered):
            monkeypatch.setattr(lowering, "_order", function)
            lowering._kept.clear()
            torch.testing.assert_close(tw.attention(q, k, v, mask=mask, backend="cpu"), want, atol=2e-5, rtol=2e-5)
    finally:
        torch.set_num_threads(threads)
    assert made and made[0] > 1
