"""An attention layer for new models: grouped heads, rotary positions, any tilewise mask, and a cache for generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilewise.api.attention import attention
from tilewise.api.cache import KVCache
from tilewise.api.cached import attention_cached
from tilewise.api.names import BackendName
from tilewise.errors import ArgumentError, LayoutError
from tilewise.masks import Mask, causal
from tilewise.nn.rotary import Rotary


class KeyValueCache:
    """The keys and values of the tokens a layer has seen.

    >>> cache = tw.nn.KeyValueCache()
    >>> for token in tokens:                      # (B, 1, dim) each
    ...     out = layer(token, cache=cache)       # a tw.nn.Attention
    """

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.k is None else self.k.shape[1]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values.

        k, v: (B, S, H, D).

        Returns all keys and values there are.
        """
        if self.k is not None and self.v is not None:
            k, v = torch.cat([self.k, k], dim=1), torch.cat([self.v, v], dim=1)
        self.k, self.v = k, v
        return k, v


class Attention(nn.Module):
    """Self-attention of x (B, S, dim): projections, rotary positions, exact attention tile by tile.

    dim: features of x and of the output.
    heads: query heads.
    kv_heads: key heads, each shared by heads / kv_heads query heads; as many as `heads` if None.
    head_dim: features of a head; dim / heads if None.
    bias: give the projections a bias.
    rotary: the base of the angles by which positions turn queries and keys; None for no positions.
    mask: a tilewise mask; causal if None, `tw.full()` for encoders.
    softcap: scores become softcap · tanh(score / softcap); 0 for none.
    dropout: the probability with which a weight is dropped in training.
    sinks: learn one more score for each head, which takes part in the softmax and has no value.
    backend: "auto", or one by name.

    >>> layer = tw.nn.Attention(512, heads=8, kv_heads=2, mask=tw.causal() & tw.window(1024))
    >>> out = layer(x)                            # x and out (B, S, 512)
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        rotary: float | None = 10000.0,
        mask: Mask | None = None,
        softcap: float = 0.0,
        dropout: float = 0.0,
        sinks: bool = False,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ArgumentError(f"heads: {heads} query heads must be a multiple of {kv_heads} key heads")
        if head_dim is None:
            if dim % heads:
                raise ArgumentError(f"dim: {dim} is not divisible by {heads} heads; pass head_dim")
            head_dim = dim // heads
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.mask = causal() if mask is None else mask
        self.softcap, self.dropout = softcap, dropout
        self.backend: BackendName = backend
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * head_dim, bias=bias)
        self.out = nn.Linear(heads * head_dim, dim, bias=bias)
        self.rotary = None if rotary is None else Rotary(head_dim, rotary)
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        positions: Tensor | None = None,
        cache: KeyValueCache | KVCache | None = None,
    ) -> Tensor:
        """Attention of x to itself and, with a cache, to the tokens before it.

        x: (B, S, dim).
        mask: takes the place of the layer's own.
        positions: (S,) or (B, S); None counts on from the cache.
        cache: the keys and values of earlier tokens, to which those of x are appended. A `tw.KVCache`, whose lengths count the
            tokens of x already, has no gradient.

        Returns (B, S, dim).
        """
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise LayoutError(f"x: shape {tuple(x.shape)}, need (batch, sequence, {self.dim})")
        split = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv(x).unflatten(-1, (sum(split), self.head_dim)).split(split, dim=-2)  # (B, S, H, D) each
        if self.rotary is not None:
            if positions is None:
                positions = _positions(x, cache)
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        if isinstance(cache, KVCache):
            mask = self.mask if mask is None else mask
            options: Any = {"mask": mask, "softcap": self.softcap, "sinks": self.sinks, "backend": self.backend}
            cached: Tensor = self.out(attention_cached(q, cache, new=(k, v), **options).flatten(-2))
            return cached
        if cache is not None:
            k, v = cache.extend(k, v)
        out = attention(
            q,
            k,
            v,
            mask=self.mask if mask is None else mask,
            softcap=self.softcap,
            sinks=self.sinks,
            dropout_p=self.dropout if self.training else 0.0,
            layout="bshd",
            backend=self.backend,
        )
        projected: Tensor = self.out(out.flatten(-2))
        return projected

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, mask={self.mask}"


def _positions(x: Tensor, cache: KeyValueCache | KVCache | None) -> Tensor:
    """Those of x's tokens: the first ones, or the next after the cache's."""
    steps = torch.arange(x.shape[1], device=x.device)
    if isinstance(cache, KVCache):
        return cache.lengths[:, None] - x.shape[1] + steps
    return steps if cache is None else len(cache) + steps
