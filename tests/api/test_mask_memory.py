"""Calls with more tensors than q, k and v are kept too, with each call's own tensors, and forgotten with a mask or its values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.api import call_cache, execute, mask_memory
from tilewise.errors import MaskError, TilewiseError
from tilewise.lab.bench.overhead import null_backend

S, H, D = 24, 2, 16


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(seed: int = 0) -> list[torch.Tensor]:
    return [drawn(2, H, S, D, seed=seed + i) for i in range(3)]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Says "parsed" for every call that no earlier one stands for. Masks are kept as on a GPU, where no values are checked."""
    seen: list[str] = []
    for module in (call_cache, execute):
        parse_call = module.parse_call

        def watched(*args: Any, parse_call: Any = parse_call, **options: Any) -> Any:
            seen.append("parsed")
            return parse_call(*args, **options)

        monkeypatch.setattr(module, "parse_call", watched)
    monkeypatch.setattr(call_cache, "_calls", {})
    monkeypatch.setattr(mask_memory, "checks_values", lambda device: False)
    mask_memory.forget()
    return seen


def options_of(seed: int) -> dict[str, dict[str, Any]]:
    """Options with tensors, drawn anew for each seed."""
    ids = torch.arange(S) // (5 + seed)
    return {
        "sinks": {"sinks": drawn(H, seed=seed)},
        "bias": {"bias": drawn(H, S, S, seed=seed)},
        "row bias": {"bias": drawn(S, seed=seed)},
        "alibi": {"bias": tw.alibi(drawn(H, seed=seed).abs())},
        "alibi per sequence": {"bias": tw.alibi(drawn(2, H, seed=seed).abs().half())},
        "dropout": {"dropout_p": 0.5, "seed": 3 + seed},
        "dropout by tensor": {"dropout_p": 0.5, "seed": torch.tensor(3 + seed)},
        "all": {"bias": drawn(1, 1, S, S, seed=seed), "sinks": drawn(H, seed=seed), "dropout_p": 0.25, "seed": seed},
        "documents": {"mask": tw.causal() & tw.documents(ids)},
        "padding": {"mask": tw.key_padding(torch.tensor([S, 7 + seed]))},
        "blocks": {"mask": ~tw.blocks(drawn(3, 3, seed=seed) > 0, 8) | tw.causal()},
        "selected": {"mask": tw.selected(torch.tensor([[0, seed], [1, seed]]), 8, 16)},
        "dense": {"mask": tw.dense(drawn(S, S, seed=seed) > 0)},
        "two masks": {"mask": tw.documents(ids) | tw.dense(drawn(S, S, seed=seed) > 0) & tw.window(3), "sinks": drawn(H)},
    }


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", list(options_of(0)))
def test_a_kept_call_reads_its_own_tensors(name: str, grad: bool, parsed: list[str]) -> None:
    def call(seed: int, options: dict[str, Any]) -> list[torch.Tensor]:
        tensors = [x.requires_grad_(grad) for x in qkv(seed)]
        out = tw.attention(*tensors, **options, backend="tiled")
        return [out, *torch.autograd.grad(out.square().sum(), tensors)] if grad else [out]

    calls = [(seed, options_of(seed)[name]) for seed in (0, 1)]
    kept = [call(*calls[i]) for i in (0, 1, 0, 1)]
    masked = "mask" in calls[0][1]
    assert len(parsed) == (2 if masked else 1), "one for each mask; other tensors are known by their facts"
    for found, again, (seed, options) in zip(kept, kept[2:], calls, strict=False):
        call_cache._calls.clear()
        mask_memory.forget()
        for a, b, c in zip(found, again, call(seed, options), strict=True):
            assert torch.equal(a, c) and torch.equal(b, c)


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("keys", [False, True], ids=["one cu_seqlens", "two"])
def test_packed_calls_are_kept(wide: bool, keys: bool, parsed: list[str]) -> None:
    tensors = [drawn(S, H, D, seed=i) for i in range(3)]

    def call(cut: int, **options: Any) -> torch.Tensor:
        cu = torch.tensor([0, cut, S], dtype=torch.int64 if wide else torch.int32)
        return tw.attention_varlen(*tensors, cu, cu.clone() if keys else None, mask=tw.causal(), **options)

    found = {cut: call(cut) for cut in (5, 9, 0)}
    assert parsed == ["parsed"]
    for cut, out in found.items():
        assert torch.allclose(out, call(cut, backend="reference"), atol=1e-5)
    with pytest.raises(TilewiseError, match="falls from 30 to 24"):
        call(30)
    assert isinstance(call(5, return_lse=True), tuple)


def outputs(mask: tw.Mask, **options: Any) -> torch.Tensor:
    return tw.attention(*qkv(), mask=mask, backend="tiled", **options)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "write": lambda ids: ids.__setitem__(slice(3, None), 9),
    "copy_": lambda ids: ids.copy_(torch.arange(S) // 2),
    "new memory": lambda ids: setattr(ids, "data", torch.arange(S, dtype=ids.dtype) // 3),
    "set_": lambda ids: ids.set_(torch.arange(S, dtype=ids.dtype) // 4),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["read as they are", "converted"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_changed_tensors_are_seen(change: str, dtype: torch.dtype, parsed: list[str]) -> None:
    ids = torch.zeros(S, dtype=dtype)
    mask = tw.causal() & tw.documents(ids)
    before = outputs(mask)
    assert torch.equal(outputs(mask), before) and len(parsed) == 1
    CHANGES[change](ids)
    after = outputs(mask)
    assert len(parsed) == 2 and not torch.equal(after, before)
    assert torch.equal(after, outputs(tw.causal() & tw.documents(ids.clone())))


def test_another_mask_of_the_same_leaf_is_another_call(parsed: list[str]) -> None:
    leaf, other = tw.documents(torch.arange(S) // 5), tw.documents(torch.arange(S) // 7)
    masks = [leaf, ~leaf, leaf & tw.causal(), leaf | tw.causal(), leaf & other, other & leaf, leaf & ~other]
    found = [outputs(mask) for mask in masks]
    assert len(parsed) == len(masks)
    for mask, out in zip(masks, found, strict=True):
        call_cache._calls.clear()
        mask_memory.forget()
        assert torch.equal(outputs(mask), out)
    parsed.clear()
    assert torch.equal(outputs(leaf & tw.causal()), found[2]), "a new value of the same leaves"
    outputs(leaf & tw.causal(), scale=0.5)
    assert len(parsed) == 2


def test_what_counts_no_versions_is_not_kept(parsed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        frozen = torch.arange(S) // 5
    dense = drawn(S, S) > 0
    for mask in (tw.documents(frozen), tw.documents(np.arange(S) // 5), tw.key_padding([3, 5]), dense):
        parsed.clear()
        for _ in range(2):
            tw.attention(*qkv(), mask=mask)  # type: ignore[arg-type]
        assert len(parsed) == 2, mask
    monkeypatch.undo()
    padding = torch.tensor([S, 3])
    mask = tw.key_padding(padding)
    tw.attention(*qkv(), mask=mask)
    padding.data[1] = 99  # counts no version, and a CPU's values are checked in each call
    with pytest.raises(MaskError, match=r"lengths\[1\] is 99"):
        tw.attention(*qkv(), mask=mask)


def test_nothing_is_kept_of_a_mask_that_is_gone(parsed: list[str]) -> None:
    ids, other = torch.arange(S, dtype=torch.int32) // 5, torch.arange(S, dtype=torch.int32) // 7
    tensors = [x.requires_grad_() for x in qkv()]
    gc.collect()
    gc.disable()  # no circle may hold memory until the next collection
    try:
        mask = tw.documents(ids) & tw.documents(other)
        for _ in range(2):
            tw.attention(*tensors, mask=mask, backend="tiled").sum().backward()
        gone = [weakref.ref(x) for x in (ids, other, mask)]
        del ids, other, mask
        assert [one() for one in gone] == [None] * 3 and not mask_memory._kept
    finally:
        gc.enable()


def test_a_backward_outlives_its_mask(parsed: list[str]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    ids = torch.arange(S) // 5
    out = tw.attention(q, k, v, mask=tw.documents(ids), backend="tiled")
    want = torch.autograd.grad(tw.attention(q, k, v, mask=tw.documents(ids), backend="tiled").sum(), q)[0]
    gc.collect()
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], want)


def test_masks_that_share_a_leaf_are_not_kept_without_end(parsed: list[str]) -> None:
    leaf = tw.documents(torch.arange(S) // 5)
    for n in range(1, 3 * mask_memory.MASKS):
        outputs(leaf & tw.window(n))
    assert len(mask_memory._kept[leaf]) <= mask_memory.MASKS


def test_modes_are_seen(parsed: list[str]) -> None:
    q, k, v = qkv()
    sinks = drawn(H)
    for _ in range(2):
        tw.attention(q, k, v, sinks=sinks)
    assert len(parsed) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.attention(q, k, v, sinks=sinks).dtype == torch.bfloat16
    got = torch.func.grad(lambda x: tw.attention(q, k, v, sinks=x).sum())(sinks)
    assert got.abs().sum() > 0
    assert tw.attention(q, k, v, sinks=sinks.clone().requires_grad_()).requires_grad
    with pytest.raises(TilewiseError, match="sinks"):
        tw.attention(q, k, v, sinks=drawn(H + 1))
    with pytest.raises(TilewiseError, match="seed"):
        tw.attention(q, k, v, dropout_p=0.5, seed="x")  # type: ignore[arg-type]


def test_a_seed_is_drawn_once_for_a_call(parsed: list[str]) -> None:
    q, k, v = qkv()
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append([tw.attention(q, k, v, dropout_p=0.5, backend="tiled") for _ in range(2)])
    assert len(parsed) == 1 and not torch.equal(*found[0])
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_kept_call_costs_few_function_calls(parsed: list[str]) -> None:
    """Counted, since times vary: a call is prepared once. Parsing alone makes about 150."""
    import cProfile
    import pstats

    q, k, v = qkv()
    packed, cu = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)], torch.tensor([0, 5, S], dtype=torch.int32)
    with null_backend() as backend:
        calls: dict[str, Callable[[], Any]] = {
            name: lambda options=options: tw.attention(q, k, v, backend=backend, **options)  # type: ignore[misc]
            for name, options in options_of(0).items()
        }
        calls["packed"] = lambda: tw.attention_varlen(*packed, cu, backend=backend)
        for name, call in calls.items():
            for _ in range(2):
                call()
            profile = cProfile.Profile()
            profile.runcall(call)
            made = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
            assert made < 130, (name, made)
