"""torch's switch for flash attention: what it turns on is exact, and turning it off leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.integrations.closeness import randn
from tilewise.errors import ArgumentError, MissingPackageError
from tilewise.integrations import torch_switch

OPERATORS = ("_flash_attention_forward", "_flash_attention_backward", "_scaled_dot_product_flash_attention")
switch = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"), reason="this torch has no switch that can be turned off"
)


def takes(*names: str) -> pytest.MarkDecorator:
    """Skipped where torch's function for packed batches does not take these."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return pytest.mark.skip(reason="this torch has no varlen_attn")
    missing = set(names) - set(signature(varlen_attn).parameters)
    return pytest.mark.skipif(bool(missing), reason=f"this torch's varlen_attn takes no {', '.join(sorted(missing))}")


def has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key))


@pytest.fixture
def active() -> Iterator[None]:
    torch_switch.register()
    torch.nn.attention.activate_flash_attention_impl("tilewise")
    yield
    torch.nn.attention.restore_flash_attention_impl()


@switch
def test_on_and_off() -> None:
    before = [has_kernel(name, key) for name in OPERATORS for key in ("CPU", "CUDA")]
    torch_switch.register()
    assert "tilewise" in torch.nn.attention.list_flash_attention_impls()
    assert [has_kernel(name, key) for name in OPERATORS for key in ("CPU", "CUDA")] == before
    torch.nn.attention.activate_flash_attention_impl("tilewise")
    assert torch.nn.attention.current_flash_attention_impl() == "tilewise"
    assert all(has_kernel(name, "CUDA") for name in OPERATORS) and has_kernel(OPERATORS[0], "CPU")
    torch.nn.attention.restore_flash_attention_impl()
    assert [has_kernel(name, key) for name in OPERATORS for key in ("CPU", "CUDA")] == before


@switch
@takes("window_size", "enable_gqa")
@pytest.mark.parametrize(
    ("window", "compiled"), [((-1, -1), False), ((-1, 0), False), ((2, 0), True), ((1, 3), False)], ids=str
)
def test_varlen_attn(window: tuple[int, int], compiled: bool, active: None) -> None:
    """torch's function for packed batches, which has no kernels of its own on a CPU, and its gradients."""
    from torch.nn.attention.varlen import varlen_attn

    cu = torch.tensor([0, 5, 5, 12]).int()
    tensors = [randn(12, heads, 16, seed=heads).float().requires_grad_() for heads in (4, 2, 2)]

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen_attn(q, k, v, cu, cu, 7, 7, window_size=window, enable_gqa=True)

    sides = tuple(2**20 if side < 0 else side for side in window)
    mask = None if window == (-1, -1) else tw.window(*sides)
    want = tw.attention_varlen(*tensors, cu, cu, mask=mask)
    got = torch.compile(theirs, backend="aot_eager")(*tensors) if compiled else theirs(*tensors)
    weight = randn(*want.shape, seed=7).float()
    assert torch.allclose(got, want, atol=1e-6)
    for mine, other in zip(torch.autograd.grad(got, tensors, weight), torch.autograd.grad(want, tensors, weight), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


@switch
@takes("window_size", "enable_gqa", "seqused_k", "block_table")
def test_varlen_attn_over_pages(active: None) -> None:
    from torch.nn.attention.varlen import varlen_attn

    cu, lengths, table = torch.tensor([0, 3, 4]).int(), torch.tensor([9, 5]).int(), torch.tensor([[5, 0, 3], [1, 4, 2]]).int()
    q, k, v = randn(4, 4, 16).float(), randn(6, 4, 2, 16, seed=1).float(), randn(6, 4, 2, 16, seed=2).float()
    options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": lengths, "block_table": table}
    with torch.no_grad():
        got = varlen_attn(q, k, v, cu, None, 3, 9, **options)
    want = tw.attention_cached(q, tw.KVCache.paged(k, v, table, lengths), cu_seqlens_q=cu)
    assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_operators_of_sdpa(causal: bool, dropout: float) -> None:
    """Called as a GPU would: there is none here."""
    q, k, v = (randn(2, heads, 9, 16, seed=heads).requires_grad_() for heads in (4, 2, 2))
    torch.manual_seed(0)
    out, lse, _, _, rows, keys, state, unused, _ = torch_switch._sdpa(q, k, v, dropout, causal)
    assert (rows, keys) == (9, 9) and state.dtype == torch.uint64 and state.shape == (2,)
    seed = state.view(torch.int64)[0]
    want, want_lse = tw.attention(
        q, k, v, mask=tw.causal() if causal else None, dropout_p=dropout, seed=seed, return_lse=True
    )
    assert torch.allclose(out, want, atol=1e-13) and torch.allclose(lse, want_lse, atol=1e-13)
    weight = randn(*out.shape, seed=3)
    grads = torch_switch._sdpa_backward(weight, q, k, v, out, lse, None, None, 9, 9, dropout, causal, state, unused)
    for mine, other in zip(grads, torch.autograd.grad(want, (q, k, v), weight), strict=True):
        assert torch.allclose(mine, other, atol=1e-12)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ArgumentError, match="return_debug_mask"):
        torch_switch._sdpa(x, x, x, 0.0, False, True)
    if hasattr(torch.nn.attention, "register_flash_attention_impl"):
        with pytest.raises(ArgumentError, match="'FA3' is torch's own"):
            torch_switch.register("FA3")
    monkeypatch.setattr(torch.nn, "attention", SimpleNamespace())
    with pytest.raises(MissingPackageError, match="has no switch"):
        torch_switch.register()
