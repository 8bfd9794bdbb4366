"""Repeated calls over a cache: the second like the first takes the short way, and gives what the long way gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.api import cached, call_cache
from tilewise.errors import TilewiseError

PAGE, HEADS, DIM = 16, 4, 32


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    call_cache._calls.clear()
    yield
    call_cache._calls.clear()


def make(batch: int = 3, most: int = 5, dtype: torch.dtype = torch.bfloat16, lengths: Any = None, **more: Any) -> tw.KVCache:
    torch.manual_seed(0)
    k, v = (torch.randn(batch * most, PAGE, HEADS, DIM) for _ in range(2))
    if dtype == torch.int8:
        more |= {"k_scale": k.abs().amax(-1) / 127, "v_scale": v.abs().amax(-1) / 127}
        k, v = (x / more[f"{name}_scale"][..., None] for name, x in (("k", k), ("v", v)))
        k, v = k.round(), v.round()
    table = torch.randperm(batch * most).reshape(batch, most).int()
    lengths = torch.tensor([70, 0, 33][:batch], dtype=torch.int32) if lengths is None else lengths
    return tw.KVCache.paged(k.to(dtype), v.to(dtype), table, lengths, **more)


def queries(cache: tw.KVCache, rows: int = 1, heads: int = 8) -> Tensor:
    dtype = torch.bfloat16 if cache.pages.k_scale is not None else cache.pages.k.dtype
    return torch.randn(cache.pages.starts.shape[0], rows, heads, DIM).to(dtype)


def long_way(call: Callable[[], Any]) -> Any:
    """The result as if no call had come before."""
    with mock.patch.object(cached, "repeated", lambda *_: None):
        return call()


def is_short(call: Callable[[], Any]) -> bool:
    """Does the call go to its launch without being prepared?"""
    with mock.patch.object(cached, "attended", side_effect=AssertionError("the long way")):
        try:
            call()
        except AssertionError:
            return False
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("rows", "mask"), [(1, tw.causal()), (1, None), (3, tw.causal() & tw.window(20))])
def test_the_same_bits(dtype: torch.dtype, rows: int, mask: tw.Mask | None) -> None:
    cache = make(dtype=dtype)
    for turn in range(3):
        q = queries(cache, rows)

        def call(lse: bool, q: Tensor = q) -> Any:
            return tw.attention_cached(q, cache, mask=mask, return_lse=lse)

        want, want_lse = long_way(lambda: call(True))
        assert is_short(lambda: call(False)), turn  # kept by the long way
        out, lse = call(True)
        assert torch.equal(out, want) and torch.equal(lse, want_lse) and torch.equal(call(False), want)
        assert out.shape == want.shape and out.stride() == want.stride() and lse.shape == want_lse.shape
        cache.pages.lengths.copy_(torch.tensor([71 + turn, turn, 80]))
        cache.pages.table.copy_(cache.pages.table.roll(1, 0))


def test_another_cache_of_the_same_form() -> None:
    first, second = make(), make()
    second.pages.k.mul_(2), second.pages.lengths.fill_(50)
    q = queries(first)
    tw.attention_cached(q, first)
    assert is_short(lambda: tw.attention_cached(q, second))
    assert torch.equal(tw.attention_cached(q, second), long_way(lambda: tw.attention_cached(q, second)))


def test_what_is_out_of_range_is_named() -> None:
    cache = make()
    q = queries(cache)
    tw.attention_cached(q, cache)
    lengths, table = cache.pages.lengths, cache.pages.table
    for x, value, word in ((lengths, 81, "lengths"), (lengths, -1, "lengths"), (table, 15, "table")):
        old = x.clone()
        x.view(-1)[0] = value
        with pytest.raises(TilewiseError, match=word):
            tw.attention_cached(q, cache)
        x.copy_(old)
    table[0, 4] = -1  # behind the last key
    lengths[0] = 60
    want = long_way(lambda: tw.attention_cached(q, cache))
    assert torch.equal(tw.attention_cached(q, cache), want)
    assert is_short(lambda: tw.attention_cached(q, cache))
    table[0, 3] = -1
    with pytest.raises(TilewiseError, match="sees page 3"):
        tw.attention_cached(q, cache)
    table[0, 3] = 3
    table.data = table.clone()  # other memory than there was
    table[0, 0] = 1000
    with pytest.raises(TilewiseError, match="sees page 0"):
        tw.attention_cached(q, cache)


def test_other_calls_take_the_long_way() -> None:
    cache = make()
    q = queries(cache)
    tw.attention_cached(q, cache)
    assert is_short(lambda: tw.attention_cached(q, cache))
    others: dict[str, Callable[[], Any]] = {
        "scale": lambda: tw.attention_cached(q, cache, scale=0.5),
        "scale of another type": lambda: tw.attention_cached(q, cache, scale=1),
        "softcap": lambda: tw.attention_cached(q, cache, softcap=5.0),
        "splits": lambda: tw.attention_cached(q, cache, splits=2),
        "backend": lambda: tw.attention_cached(q, cache, backend="cpu"),
        "shape": lambda: tw.attention_cached(q[:, :, :4], cache),
        "strides": lambda: tw.attention_cached(torch.stack((q, q), -1)[..., 0], cache),
        "cache": lambda: tw.attention_cached(queries(make(batch=2)), make(batch=2)),
        "sinks": lambda: tw.attention_cached(q, cache, sinks=torch.zeros(8)),
    }
    for name, call in others.items():
        assert not is_short(call), name
    with torch.autocast("cpu", torch.float16), pytest.raises(TilewiseError, match="the cache holds"):
        tw.attention_cached(q, cache)
    with pytest.raises(TilewiseError, match="requires a gradient"):
        tw.attention_cached(q.clone().requires_grad_(), cache)
    with pytest.raises(TilewiseError):
        tw.attention_cached(q.numpy() if q.dtype == torch.float32 else [1], cache)
    assert is_short(lambda: tw.attention_cached(q, cache))


def test_forms_in_turn() -> None:
    """Layers of two forms, and batches of two sizes: each is found again."""
    calls = [(queries(cache, rows), cache) for cache in (make(), make(batch=2)) for rows in (1, 2)]
    wants = [tw.attention_cached(q, cache) for q, cache in calls]
    for _ in range(2):
        for (q, cache), want in zip(calls, wants, strict=True):
            assert is_short(lambda q=q, cache=cache: tw.attention_cached(q, cache))
            assert torch.equal(tw.attention_cached(q, cache), want)


def test_values_that_torch_negates_by_a_bit() -> None:
    """Kernels read memory: of queries, pages and scales."""
    for dtype in (torch.float32, torch.int8):
        cache = make(dtype=dtype)
        q = queries(cache)
        want = tw.attention_cached(-q, cache)
        lazy = torch._neg_view(q)
        for _ in range(2):
            assert torch.equal(tw.attention_cached(lazy, cache), want)
    cache = make(dtype=torch.float32)
    pages, q = cache.pages, queries(cache)
    negated = tw.KVCache.paged(torch._neg_view(pages.k), torch._neg_view(pages.v), pages.table, pages.lengths)
    want = tw.attention_cached(-q, cache)
    for _ in range(2):
        assert torch.equal(tw.attention_cached(q, negated), -want)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
def test_no_new_tokens_at_all(batch: int, turned: bool) -> None:
    cache = make(batch=batch, lengths=torch.full((batch,), 40, dtype=torch.int32))
    q, none = queries(cache), torch.empty(batch, 0, HEADS, DIM).bfloat16()
    rotary = tw.rotary(torch.rand(90, DIM // 2), torch.rand(90, DIM // 2)) if turned else None
    before = cache.pages.k.clone()
    want = tw.attention_cached(q, cache, rotary=rotary)
    assert torch.equal(tw.attention_cached(q, cache, new=(none, none), rotary=rotary), want)
    assert torch.equal(cache.pages.k, before)


def test_threads_and_inference_mode() -> None:
    cache, threads = make(), torch.get_num_threads()
    q = queries(cache)
    want = tw.attention_cached(q, cache)
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(tw.attention_cached(q, cache), want)
    finally:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        assert tw.attention_cached(q, cache).is_inference() and torch.equal(tw.attention_cached(q, cache), want)
    assert not tw.attention_cached(q, cache).is_inference()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("wide", [False, True])
def test_new_tokens_are_written_first(dtype: torch.dtype, wide: bool) -> None:
    """Also where some of them have no place to go, and where lengths are int64."""
    rotary = tw.rotary(torch.rand(90, DIM // 2), torch.rand(90, DIM // 2))
    lengths = torch.tensor([5, 16, 33], dtype=torch.int64 if wide else torch.int32)
    ours, theirs = make(dtype=dtype, lengths=lengths.clone()), make(dtype=dtype, lengths=lengths.clone())
    for _ in range(4):
        q, k, v = queries(ours), *(torch.randn(3, 1, HEADS, DIM).bfloat16() for _ in range(2))
        for cache in (ours, theirs):
            cache.pages.lengths.add_(1)
        got = tw.attention_cached(q, ours, new=(k, v), rotary=rotary)
        want = long_way(lambda q=q, k=k, v=v: tw.attention_cached(q, theirs, new=(k, v), rotary=rotary))
        assert torch.equal(got, want)
        for x, y in zip(ours.pages, theirs.pages, strict=True):
            assert not isinstance(x, Tensor) or torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_slots_as_torch_finds_them() -> None:
    """Numbers at hand are looked up by numpy; those of a GPU, or traced, by torch."""
    from tilewise.backends import pages as module

    cache = make()
    cache.pages.table[0, 2] = -1
    cu = torch.tensor([0, 40, 43, 50], dtype=torch.int32)
    cache.pages.lengths.copy_(torch.tensor([70, 2, 33]))
    found = module.slots_of(cache.pages, cu, 50)
    with mock.patch.object(module, "is_at_hand", lambda x: False):
        assert torch.equal(found, module.slots_of(cache.pages, cu, 50))
        k, v = torch.randn(50, HEADS, DIM).bfloat16(), torch.randn(50, HEADS, DIM).bfloat16()
        other = make()
        other.pages.write(k, v, found)
    cache = make()
    cache.pages.write(k, v, found)
    assert (found == -1).sum() == 17 and torch.equal(cache.pages.k, other.pages.k) and torch.equal(cache.pages.v, other.pages.v)


def test_transforms_are_refused_by_name() -> None:
    """They wrap tensors, whose memory is not there to read: functionalize would end the process."""
    cache = make()
    q = queries(cache)
    want = tw.attention_cached(q, cache)
    calls: dict[str, Callable[[], Any]] = {
        "functionalize": lambda: torch.func.functionalize(lambda q: tw.attention_cached(q, cache))(q),
        "vmap": lambda: torch.func.vmap(lambda q: tw.attention_cached(q, cache))(q[None]),
        "jvp": lambda: torch.func.jvp(lambda q: tw.attention_cached(q, cache), (q,), (q,)),
        "grad": lambda: torch.func.grad(lambda x: x * tw.attention_cached(q, cache).float().sum())(torch.ones(())),
    }
    for name, call in calls.items():
        with pytest.raises(TilewiseError, match="a transform of torch"):
            call()
        assert torch.equal(tw.attention_cached(q, cache), want), name
