"""tilewise behind torch's own switch for flash attention, where torch has one.

>>> from tilewise.integrations.torch_switch import register
>>> register()
>>> torch.nn.attention.activate_flash_attention_impl("tilewise")
>>> torch.nn.attention.restore_flash_attention_impl()

While it is active, torch's flash attention on GPUs is tilewise's: `scaled_dot_product_attention` where torch chooses flash, with
and without `torch.compile`, and `torch.nn.attention.varlen.varlen_attn` with pages and gradients. The latter has no kernels on
CPUs otherwise; with the switch it has. `scaled_dot_product_attention` on CPUs stays as it is: `tw.replace_sdpa()` serves it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from tilewise.api.bias import alibi
from tilewise.api.options import DEFAULTS, ParsedOptions
from tilewise.api.parse import build_problem
from tilewise.backends.base import BackwardInputs, Inputs, Needs
from tilewise.errors import ArgumentError, MissingPackageError
from tilewise.integrations.flash_attn.in_use import Batch, attend_in_use
from tilewise.integrations.flash_attn.options import Window, sides
from tilewise.ops import run
from tilewise.problem import Problem

NAME = "tilewise"


def register(name: str = NAME) -> None:
    """Enter tilewise into torch's list of flash attention implementations. Nothing changes until it is activated.

    name: what `torch.nn.attention.activate_flash_attention_impl` calls it; those of torch's own are refused.

    >>> register()
    >>> torch.nn.attention.activate_flash_attention_impl("tilewise")
    """
    switch = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if switch is None:
        raise MissingPackageError(
            f"torch {torch.__version__} has no switch for flash attention (torch.nn.attention.register_flash_attention_impl); "
            "a newer one has, and tilewise.replace_sdpa() needs none"
        )
    if name in ("FA2", "FA3", "FA4"):
        raise ArgumentError(f"name: {name!r} is torch's own; choose another, such as {NAME!r}")
    switch(name, register_fn=activate)


class Handle:
    """What torch holds while the implementation is active."""

    def __init__(self, library: Library) -> None:
        self.library: Library | None = library

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None


def activate() -> Handle:
    """Put tilewise's functions into torch's operators."""
    library = Library("aten", "IMPL")
    for key in ("CUDA", "CPU"):
        library.impl("_flash_attention_forward", _forward, key)
        if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):  # not in every torch that has the switch
            library.impl("_flash_attention_forward_no_dropout_inplace", _forward_into, key)
        library.impl("_flash_attention_backward", _backward, key)
    library.impl("_scaled_dot_product_flash_attention", _sdpa, "CUDA")
    library.impl("_scaled_dot_product_flash_attention_backward", _sdpa_backward, "CUDA")
    return Handle(library)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v (B, S, H, D), or packed (T, H, D); lse (B, H, Sq), or (H, T)."""
    if return_debug_mask:
        raise ArgumentError("return_debug_mask: tilewise does not form the weights; pass False")
    window = _window(window_size_left, window_size_right, is_causal)
    state = torch.zeros(2, dtype=torch.int64, device=query.device)
    bias = None if alibi_slopes is None else alibi(alibi_slopes.float())
    if block_table is not None or seqused_k is not None:
        if dropout_p:
            raise ArgumentError("dropout_p: goes with neither block_table nor seqused_k, which are for inference")
        q, k, v = (x.detach() for x in (query, key, value))
        batch = Batch(q, k, v, cum_seq_q, cum_seq_k, used_k=seqused_k)
        options = {"scale": scale, "bias": bias}
        out, lse = attend_in_use(batch, window, options, table=block_table, most_q=max_q)
    else:
        if dropout_p:
            state[0] = torch.randint(2**62, (), device=query.device)
        problem, inputs = _problem((query, key, value), (cum_seq_q, cum_seq_k), window, dropout_p, scale, state[0], bias)
        out, lse = _restored(*run.forward(problem, inputs), cum_seq_q is not None)
    return out, lse, state.view(torch.uint64), state.new_zeros(()).view(torch.uint64), query.new_empty(0)


def _forward_into(out: Tensor, *args: Any, **options: Any) -> Tensor:
    found, lse, *_ = _forward(*args, **options)
    out.copy_(found)
    return lse


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    window, packed = _window(window_size_left, window_size_right, is_causal), cum_seq_q is not None
    seed = rng_state.view(torch.int64)[0] if dropout_p else None
    bounds = (cum_seq_q, cum_seq_k)
    problem, inputs = _problem((query, key, value), bounds, window, dropout_p, scale, seed, None)
    lse = logsumexp.detach()[None] if packed else logsumexp.detach()
    inside = [_inside(x.detach(), packed) for x in (out, grad_out)]
    needs = Needs(dq=True, dk=True, dv=True, dbias=False, dsinks=False)
    grads = run.backward(problem, inputs, BackwardInputs(out=inside[0], lse=lse, dout=inside[1], dlse=None, needs=needs))
    dq, dk, dv = (_outside(x, packed) for x in grads[:3])
    return dq, dk, dv


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """q, k, v (B, H, S, D), as SDPA has them."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    sizes = query.shape[2], key.shape[2]
    out, lse, *rest = _forward(q, k, v, None, None, *sizes, dropout_p, is_causal, return_debug_mask, scale=scale)
    return out.transpose(1, 2), lse, None, None, *sizes, *rest


def _sdpa_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor,
    philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    sizes, state = (max_q, max_k, dropout_p, is_causal), (philox_seed, philox_offset)
    grads = _backward(dout, q, k, v, o, logsumexp, None, None, *sizes, *state, scale=scale)
    return tuple(x.transpose(1, 2) for x in grads)


def _window(left: int | None, right: int | None, causal: bool) -> Window:
    return sides((left, right), causal)


def _problem(
    tensors: tuple[Tensor, ...], bounds: tuple[Tensor | None, Tensor | None], window: Window, dropout_p: float,
    scale: float | None, seed: Tensor | None, bias: Any,
) -> tuple[Problem, Inputs]:  # fmt: skip
    packed = bounds[0] is not None
    q, k, v = (_inside(x.detach(), packed) for x in tensors)
    options: ParsedOptions = {
        **DEFAULTS, "mask": window.mask(), "scale": scale, "dropout_p": dropout_p, "seed": seed, "bias": bias, "return_lse": True,
    }  # fmt: skip
    return build_problem(Inputs(q, k, v, cu_q=bounds[0], cu_k=bounds[1] if packed else None), options)


def _inside(x: Tensor, packed: bool) -> Tensor:
    """(B, H, S, D), packed with a batch of one."""
    return x.transpose(0, 1)[None] if packed else x.transpose(1, 2)


def _outside(x: Tensor | None, packed: bool) -> Tensor:
    assert x is not None
    return x[0].transpose(0, 1) if packed else x.transpose(1, 2)


def _restored(out: Tensor, lse: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    return _outside(out, packed), lse[0] if packed else lse
