"""What a backward reads again must not have changed since the forward: an error, as of autograd, never a wrong gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw

S, D = 24, 16
Call = Callable[[torch.Tensor], torch.Tensor]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def plain(**options: Any) -> Call:
    return lambda q: tw.attention(q, drawn(2, 2, S, D), drawn(2, 2, S, D), **options)


def packed(cu: torch.Tensor, **options: Any) -> Call:
    return lambda q: tw.attention_varlen(*(x[0].transpose(0, 1) for x in (q, q, q)), cu, **options)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cases(backend: str) -> dict[str, tuple[torch.Tensor, Call]]:
    """A tensor, and a call that reads it."""
    dense, table = torch.ones(S, S, dtype=torch.bool), torch.ones(3, 3, dtype=torch.bool)
    ids, slopes, seed, cu = integers(*range(S)) // 5, torch.ones(2), torch.tensor(7), integers(0, 5, S)
    own = {"backend": backend}
    return {
        "dense": (dense, plain(mask=tw.dense(dense), **own)),
        "bare": (dense, plain(mask=dense, **own)),
        "combined": (dense, plain(mask=tw.causal() & ~tw.dense(dense) | tw.prefix(3), **own)),
        "blocks": (table, plain(mask=tw.blocks(table, 8), **own)),
        "documents": (ids, plain(mask=tw.documents(ids), **own)),
        "alibi": (slopes, plain(bias=tw.alibi(slopes), **own)),
        "seed": (seed, plain(dropout_p=0.5, seed=seed, **own)),
        "cu_seqlens": (cu, packed(cu, **own)),
        "packed ids": (ids, packed(cu, mask=tw.documents(ids), **own)),
    }


def change(x: torch.Tensor) -> None:
    x.logical_not_() if x.dtype == torch.bool else x.mul_(0)


@pytest.mark.parametrize("backend", ["auto", "cpu", "tiled", "reference"])
@pytest.mark.parametrize("case", list(cases("auto")))
def test_a_change_is_refused(case: str, backend: str) -> None:
    if backend == "cpu":
        pytest.importorskip("llvmlite")
    tensor, call = cases(backend)[case]
    q = drawn(2, 2, S, D).requires_grad_()
    for _ in range(2):  # the second call may be one that is remembered
        out = call(q).sum()
    torch.autograd.grad(out, q, retain_graph=True)
    change(tensor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, q)


@pytest.mark.parametrize("what", ["offset", "lengths", "start", "wide ids", "array"])
def test_what_was_copied_may_change(what: str) -> None:
    x: Any = torch.tensor([3, 5])
    ids = torch.arange(S) // 5
    array = np.tril(np.ones((S, S), dtype=bool))
    masks: dict[str, tuple[Any, Callable[[], tw.Mask]]] = {
        "offset": (x, lambda: tw.causal(offset=x)),
        "lengths": (x, lambda: tw.key_padding(x)),
        "start": (x, lambda: tw.key_padding(integers(9, 9), x)),
        "wide ids": (ids, lambda: tw.documents(ids)),
        "array": (array, lambda: tw.dense(array)),
    }
    tensor, make = masks[what]
    q = drawn(2, 2, S, D).requires_grad_()
    expected = torch.autograd.grad(plain(mask=make())(q).sum(), q)[0]
    out = plain(mask=make())(q).sum()
    if isinstance(tensor, np.ndarray):
        tensor[:] = True
    else:
        change(tensor)
    assert torch.equal(torch.autograd.grad(out, q)[0], expected)


def test_hooks_on_saved_tensors_get_the_mask_too() -> None:
    """They may keep a copy; then that is what the backward reads."""
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    q = drawn(2, 2, S, D).requires_grad_()
    expected = torch.autograd.grad(plain(mask=mask.clone())(q).sum(), q)[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        out = plain(mask=mask)(q).sum()
    change(mask)
    assert torch.equal(torch.autograd.grad(out, q)[0], expected)


def test_masks_made_in_inference_mode_train() -> None:
    with torch.inference_mode():
        mask, ids = torch.ones(S, S, dtype=torch.bool).tril(), torch.arange(S, dtype=torch.int32) // 5
    q = drawn(2, 2, S, D).requires_grad_()
    for made in (mask, tw.documents(ids), tw.causal() & tw.documents(ids)):
        assert torch.autograd.grad(plain(mask=made)(q).sum(), q)[0].isfinite().all()
