"""What may be handed over in place of plain tensors, and what happens to a cache's tensors after it was made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError


class Named(Tensor):
    """No more than its memory."""


class Halved(Tensor):
    """Numbers that are twice what the memory holds: only its functions know."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


SIDES = ("q", "k_pages", "v_pages", "table", "lengths")


def given() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    pages = {name: torch.randn(6, 16, 2, 32, generator=g) for name in ("k_pages", "v_pages")}
    table = torch.randperm(6, generator=g).reshape(2, 3).int()
    return {"q": torch.randn(2, 1, 4, 32, generator=g), **pages, "table": table, "lengths": torch.tensor([20, 47])}


def attend(given: dict[str, Tensor]) -> Tensor:
    pages = [given[side] for side in SIDES[1:]]
    return tw.attention_cached(given["q"], tw.KVCache.paged(*pages))


@pytest.mark.parametrize("side", SIDES)
def test_a_subclass_that_is_its_memory_is_read(side: str) -> None:
    tensors = given()
    want = attend(tensors)
    for _ in range(2):  # once like the call before
        out = attend(tensors | {side: tensors[side].as_subclass(Named)})
        assert torch.equal(out.as_subclass(Tensor), want)


@pytest.mark.parametrize("side", SIDES)
def test_a_subclass_that_nobody_knows_is_refused(side: str) -> None:
    tensors = given()
    with pytest.raises(ArgumentTypeError, match=r"Halved, a tensor subclass that attention does not know"):
        attend(tensors | {side: tensors[side].as_subclass(Halved)})


@pytest.mark.parametrize("kind", [Named, Halved])
def test_new_tokens_of_a_subclass(kind: type[Tensor]) -> None:
    tensors = given()
    k, v = (torch.randn(2, 1, 2, 32) for _ in range(2))
    cache = tw.KVCache.paged(*(tensors[side] for side in SIDES[1:]))
    before = tensors["k_pages"].clone()
    if kind is Halved:
        with pytest.raises(ArgumentTypeError, match="k: got a Halved"):
            cache.append(k.as_subclass(kind), v)
        assert torch.equal(tensors["k_pages"], before)
        return
    cache.append(k.as_subclass(kind), v.as_subclass(kind))
    assert torch.equal(tensors["k_pages"][tensors["table"][0, 1], 3], k[0, 0])


def test_a_table_with_other_memory_is_seen() -> None:
    tensors = given()
    cache = tw.KVCache.paged(*(tensors[side] for side in SIDES[1:]))
    other = tensors["table"].flip(0).contiguous()
    want = attend(tensors | {"table": other})
    for _ in range(2):
        tw.attention_cached(tensors["q"], cache)
    tensors["table"].set_(other)  # type: ignore[call-overload]
    assert torch.equal(tw.attention_cached(tensors["q"], cache), want)
    tensors["table"].set_(torch.full((2, 3), 99, dtype=torch.int32))  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="which is 99"):
        tw.attention_cached(tensors["q"], cache)


@pytest.mark.parametrize("side", ["table", "lengths"])
def test_another_shape_is_refused(side: str) -> None:
    tensors = given()
    cache = tw.KVCache.paged(*(tensors[side] for side in SIDES[1:]))
    tw.attention_cached(tensors["q"], cache)
    tensors[side].resize_(1, *tensors[side].shape[1:])
    with pytest.raises(LayoutError, match=rf"{side}: shape \(1,.*make a new KVCache"):
        tw.attention_cached(tensors["q"], cache)
    with pytest.raises(LayoutError, match="make a new KVCache"):
        cache.append(torch.randn(2, 1, 2, 32), torch.randn(2, 1, 2, 32))
