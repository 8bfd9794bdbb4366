"""SDPA's signature and meaning on tilewise, and a context that routes other people's SDPA calls to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tilewise.api.attention import attention
from tilewise.api.names import BackendName
from tilewise.api.parse import autocast
from tilewise.errors import ArgumentError, ArgumentTypeError, DeviceError, TilewiseError
from tilewise.masks import Mask, causal, dense
from tilewise.ops.tensors import PLAIN

SDPA = torch.nn.functional.scaled_dot_product_attention


class SDPAError(ArgumentError, RuntimeError):
    """A call SDPA itself refuses; a RuntimeError, as SDPA raises."""


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, argument for argument.

    query: (…, H, L, E), with any leading dimensions, or none, that broadcast.
    key: (…, H, S, E).
    value: (…, H, S, Ev).
    attn_mask: broadcasts to (…, H, L, S); a boolean one is True where a query sees a key, a floating-point one is added to
        the scores and has a gradient. `causal_upper_left` and `causal_lower_right` of `torch.nn.attention.bias` are the masks
        they stand for.
    dropout_p: the probability with which a weight is dropped; the random numbers are tilewise's own.
    is_causal: causal, aligned to the top left; excludes `attn_mask`.
    scale: what scores are multiplied by; 1/√E if None.
    enable_gqa: allow fewer heads of key and value than of query.

    Returns (…, H, L, Ev). Under autocast all tensors are cast, also of different dtypes.

    >>> out = tw.sdpa(q, k, v, is_causal=True)
    """
    return _run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: BackendName = "auto",
) -> Tensor:
    """`sdpa` on a backend of one's choice, with all arguments by position or by name."""
    query, key, value = autocast((query, key, value))
    _check(query, key, value, attn_mask, is_causal)
    rank = max(query.ndim, key.ndim, value.ndim)
    lead, heads = _leading(query, key, value, enable_gqa)
    q, k, v = (_rank4(x, lead, heads_) for x, heads_ in zip((query, key, value), heads, strict=True))
    mask: Mask | None = causal(align="top_left") if is_causal else None
    bias = None
    if attn_mask is not None and type(attn_mask) not in PLAIN:
        mask, attn_mask = _subclass(attn_mask, q.shape[2], k.shape[2])
    if attn_mask is not None:
        extra = _mask_view(attn_mask, lead, heads[0], (q.shape[2], k.shape[2]), rank)
        if extra.dtype == torch.bool:
            mask = dense(extra)
        else:
            bias = extra
    out = attention(q, k, v, mask=mask, scale=scale, bias=bias, dropout_p=dropout_p, backend=backend)
    if rank > 4:
        return out.reshape(*lead, *out.shape[1:])
    return out if rank == 4 else out[(0,) * (4 - rank)]


def _check(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
    """What SDPA refuses before it computes."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(f"{name}: got {type(x).__name__}, need a torch.Tensor")
        if x.is_nested:
            raise ArgumentTypeError(f"{name}: a nested tensor; use tilewise.attention_varlen for ragged batches")
        if x.ndim < 2:
            raise SDPAError(f"{name}: shape {tuple(x.shape)}, need at least (length, dim)")
        if x.dtype != query.dtype:
            raise SDPAError(f"{name}: dtype {x.dtype}, but query has {query.dtype}; they must agree")
        if x.device != query.device:
            raise DeviceError(f"{name}: on {x.device}, but query is on {query.device}; they must agree")
    if attn_mask is None:
        return
    if is_causal:
        raise SDPAError("attn_mask: given together with is_causal=True; pass one of them")
    wanted = (torch.bool, torch.float32, query.dtype)
    if attn_mask.dtype not in wanted and autocast((attn_mask,))[0].dtype not in wanted:
        raise SDPAError(
            f"attn_mask: dtype {attn_mask.dtype}, need bool (True = attend), torch.float32 or {query.dtype}"
        )


def _subclass(attn_mask: Tensor, queries: int, keys: int) -> tuple[Mask | None, Tensor | None]:
    """A mask that is a tensor by name only, as a tilewise mask; or the tensor, if its class answers for its own memory."""
    from torch.nn.attention.bias import CausalBias, CausalVariant  # prototypes: few need them, and they may move

    kind = type(attn_mask)
    if isinstance(attn_mask, CausalBias):
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (queries, keys):
            raise SDPAError(
                f"attn_mask: a causal bias of {attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys, but the call has "
                f"{queries} and {keys}"
            )
        upper_left = attn_mask.variant == CausalVariant.UPPER_LEFT
        return causal(align="top_left" if upper_left else "bottom_right"), None
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        raise ArgumentTypeError(
            f"attn_mask: a {kind.__module__}.{kind.__qualname__}, a tensor whose meaning is not known here; pass a plain "
            "tensor, such as attn_mask.as_subclass(torch.Tensor) if its memory holds the mask"
        )
    return None, attn_mask


def _leading(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """The dimensions before the heads, broadcast, and the heads of q, k and v; one head where there is no such dimension."""
    shapes = [x.shape[:-2] for x in (query, key, value)]
    try:
        lead = torch.broadcast_shapes(*(shape[:-1] for shape in shapes))
    except RuntimeError as error:
        raise SDPAError(
            f"query, key, value: shapes {', '.join(str(tuple(x.shape)) for x in (query, key, value))}; "
            "the dimensions before the heads must broadcast"
        ) from error
    hq, hk, hv = heads = [shape[-1] if shape else 1 for shape in shapes]
    if enable_gqa:
        if min(query.ndim, key.ndim, value.ndim) < 3:
            raise SDPAError("enable_gqa: needs a dimension of heads, (…, heads, length, dim)")
        if hk == 0 or hq % hk or hk != hv:
            raise SDPAError(f"enable_gqa: {hq} query heads must be a multiple of the key and value heads {[hk, hv]}")
    elif not hq == hk == hv:  # all that can be asked of a size that data decide
        most = max(heads) if 0 not in heads else 0
        if any(h not in (1, most) for h in heads):
            raise SDPAError(f"heads: query, key and value have {heads}; they must agree, or set enable_gqa=True")
        hq = hk = hv = most
    return tuple(lead), (hq, hk, hv)


def _rank4(x: Tensor, lead: tuple[int, ...], heads: int) -> Tensor:
    """A view (B, H, S, D); a copy only if broadcast leading dimensions cannot be flattened in place."""
    if x.ndim == 4 and x.shape[0] == lead[0] and x.shape[1] == heads and len(lead) == 1:
        return x
    x = x.expand(*lead, heads, *x.shape[-2:])
    return x[None] if not lead else x.flatten(0, len(lead) - 1)


def _mask_view(mask: Tensor, lead: tuple[int, ...], heads: int, lengths: tuple[int, int], rank: int) -> Tensor:
    """The mask as (B or 1, H or 1, L or 1, S or 1), without the first where it has none: never expanded."""
    shape = (*lead, heads, *lengths) if rank > 2 else lengths
    sides = zip(reversed(mask.shape), reversed(shape), strict=False)
    if not (2 <= mask.ndim <= len(shape) and all(own == want or own == 1 for own, want in sides)):
        raise SDPAError(f"attn_mask: shape {tuple(mask.shape)} does not broadcast to {shape}")
    if mask.ndim <= 3:
        return mask
    mask = mask[(None,) * (len(lead) + 3 - mask.ndim)]
    outer = mask.shape[: len(lead)]
    if len(outer) > 1 and any(size != 1 for size in outer):
        mask = mask.expand(*lead, *mask.shape[len(lead) :])
    return mask.flatten(0, len(lead) - 1)


class replace_sdpa(TorchFunctionMode):  # a context manager, used like a function
    """Inside the context, this thread's calls of `F.scaled_dot_product_attention` run on tilewise, whoever makes them.

    It catches the call and not the name, so names imported earlier are caught too. A call that tilewise cannot serve runs on
    SDPA as before: `fallbacks` counts the reasons, `served` the calls that were.

    backend: "auto", or one by name, which every call then needs to suit.
    strict: raise where a call cannot be served, instead of running it on SDPA.

    >>> with tilewise.replace_sdpa() as routed:
    ...     model(x)
    >>> routed.served, routed.fallbacks
    """

    def __init__(self, *, backend: BackendName = "auto", strict: bool = False) -> None:
        super().__init__()
        self.backend, self.strict = backend, strict
        self.served = 0
        self.fallbacks: Counter[str] = Counter()
        # torch asks a mode once for this function as a whole, and runs its body with the mode off
        self._multi_head = _rebound(
            torch.nn.functional.multi_head_attention_forward,
            scaled_dot_product_attention=self._serve,
            has_torch_function=lambda tensors: False,
            _check_key_padding_mask=_check_key_padding_mask,
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is SDPA:
            return self._serve(*args, **(kwargs or {}))
        if func is torch.nn.functional.multi_head_attention_forward:
            func = self._multi_head
        return func(*args, **(kwargs or {}))

    def _serve(self, *args: Any, **kwargs: Any) -> Tensor:
        try:
            out = _run(*args, **{**kwargs, "backend": self.backend})
        except TilewiseError as error:
            if self.strict:
                raise
            self.fallbacks[str(error)] += 1
            fallback: Tensor = SDPA(*args, **kwargs)
            return fallback
        self.served += 1
        return out


def _rebound(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """The same code with some of its global names bound anew; the module it comes from stays as it is.

    Without the module's name among them, or the compiler would look the names up in the module.
    """
    assert isinstance(function, FunctionType)
    scope = {name: value for name, value in {**function.__globals__, **names}.items() if name != "__name__"}
    return FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)


def _check_key_padding_mask(key_padding_mask: Tensor, keys: int, batch: int) -> None:
    """torch's own check, whose message the compiler does not trace."""
    if tuple(key_padding_mask.shape) != (batch, keys):
        raise AssertionError(f"key_padding_mask: shape {tuple(key_padding_mask.shape)}, need {(batch, keys)}")

