"""torch.nn.MultiheadAttention's parameters, arguments and meaning, computed by tilewise."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise.api.attention import attention
from tilewise.api.varlen import attention_varlen
from tilewise.errors import ArgumentError, LayoutError
from tilewise.masks import Mask, causal, dense, full, prefix


class MultiheadAttention(nn.Module):
    """Loads the state dict of a `torch.nn.MultiheadAttention` made with the same arguments, and gives the same outputs.

    embed_dim: features of queries and of the output; `kdim`, `vdim`: those of keys and values, `embed_dim` if None.
    num_heads: heads, of `embed_dim` / `num_heads` features each.
    dropout: the probability with which a weight is dropped in training.
    bias: give the projections a bias; `add_bias_kv`: learn one more key and value; `add_zero_attn`: add one of zeros.
    batch_first: (batch, sequence, features) instead of (sequence, batch, features).
    device: of the parameters, as is `dtype`.

    As in torch, `key_padding_mask` and a boolean `attn_mask` are True where a key must NOT be seen, and floating-point ones are
    added to the scores. Two things differ: the weights are never formed, so `need_weights` is False and the second result
    None; and `is_causal=True` needs no `attn_mask` beside it. `mask` takes a tilewise mask (True = attend) as well.

    Inside torch's encoder and decoder layers it is called in training and at inference alike. Nested tensors, which
    `nn.TransformerEncoder` makes of padded batches, are served without padding.

    >>> layer = tw.nn.MultiheadAttention(512, 8, batch_first=True)
    >>> layer.load_state_dict(theirs.state_dict())
    >>> out, _ = layer(x, x, x, is_causal=True)
    """

    _qkv_same_embed_dim = False
    """What torch's encoder layers ask before they take the weights and compute the layer themselves: here they must not."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ArgumentError(f"embed_dim: {embed_dim} must be a positive multiple of num_heads, {num_heads}")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim

        def parameter(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **made)) if wanted else None

        joint = self.kdim == self.vdim == embed_dim
        self.in_proj_weight = parameter(joint, 3 * embed_dim, embed_dim)
        self.q_proj_weight = parameter(not joint, embed_dim, embed_dim)
        self.k_proj_weight = parameter(not joint, embed_dim, self.kdim)
        self.v_proj_weight = parameter(not joint, embed_dim, self.vdim)
        self.in_proj_bias = parameter(bias, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **made)
        self.bias_k, self.bias_v = (parameter(add_bias_kv, 1, 1, embed_dim) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """torch's initialisation."""
        for name, parameter in self.named_parameters():
            if name.endswith("proj_weight"):
                nn.init.xavier_uniform_(parameter)
            elif name in ("bias_k", "bias_v"):
                nn.init.xavier_normal_(parameter)
            elif name in ("in_proj_bias", "out_proj.bias"):
                nn.init.zeros_(parameter)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiheadAttention:
        """The same layer on tilewise.

        module: torch's layer, whose parameters are copied.

        >>> layer = tw.nn.MultiheadAttention.from_torch(torch.nn.MultiheadAttention(512, 8))
        """
        same = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
        own = cls(
            **{name: getattr(module, name) for name in same},
            bias=module.in_proj_bias is not None,
            add_bias_kv=module.bias_k is not None,
            device=module.out_proj.weight.device,
            dtype=module.out_proj.weight.dtype,
        )
        own.load_state_dict(module.state_dict())
        return own.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: Mask | None = None,
    ) -> tuple[Tensor, None]:
        """Attend from the query to key and value.

        query: (L, N, E), (N, L, E) with `batch_first`, or (L, E).
        key: the same with S instead of L, and kdim features.
        value: like the key, with vdim features.
        key_padding_mask: (N, S), True where a key is hidden, or floats that are added to its scores.
        need_weights: refused unless False: the weights are never formed.
        attn_mask: (L, S) or (N · heads, L, S), True where a pair is hidden, or floats that are added to the scores.
        average_attn_weights: without meaning here.
        is_causal: causal, aligned to the top left; `attn_mask` is then not read.
        mask: a tilewise mask, in addition.

        Returns the output in the shape of the query, and None.
        """
        if need_weights:
            raise ArgumentError("need_weights: True, but the weights are never formed; pass need_weights=False")
        if query.is_nested or key.is_nested or value.is_nested:
            return self._nested((query, key, value), key_padding_mask, attn_mask, is_causal, mask), None
        batched = query.ndim == 3
        if query.ndim not in (2, 3) or key.ndim != query.ndim or value.ndim != query.ndim:
            raise LayoutError(
                f"query, key, value: ranks {query.ndim}, {key.ndim}, {value.ndim}; need 3 each (batched), or 2 each"
            )
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._project(query, key, value)  # (N, S, H, D) each
        seen, bias = self._masks(key_padding_mask, attn_mask, is_causal, mask, (q.shape[1], key.shape[1], k.shape[1]))
        out = attention(q, k, v, mask=seen, bias=bias, dropout_p=self.dropout if self.training else 0.0, layout="bshd")
        out = self.out_proj(out.flatten(-2))
        if not batched:
            return out[0], None
        return (out if self.batch_first else out.transpose(0, 1)), None

    def _nested(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        mask: Mask | None,
    ) -> Tensor:
        """Nested (N, L*, E) → the same: the sequences packed, without padding. Masks of one shape for all do not apply."""
        if not all(x.is_nested and x.ndim == 3 for x in inputs) or not self.batch_first:
            raise LayoutError("query, key, value: nested tensors must be nested all three, (N, L, E) with batch_first=True")
        if key_padding_mask is not None or (attn_mask is not None and not is_causal):
            raise LayoutError("key_padding_mask, attn_mask: nested sequences have no padding; pass mask=, a tilewise mask")
        if self.bias_k is not None or self.add_zero_attn:
            raise LayoutError("query: nested tensors do not go with add_bias_kv and add_zero_attn; pass padded tensors")
        rows = [x.unbind() for x in inputs]
        if [len(x) for x in rows[1]] != [len(x) for x in rows[2]] or len(rows[0]) != len(rows[1]):
            raise LayoutError("key, value: the lengths of their sequences must agree, and query have as many sequences")
        q, k, v = (x[0] for x in self._project(*(torch.cat(x)[None] for x in rows)))  # (tokens, H, D) each
        lengths = [[len(x) for x in part] for part in rows[:2]]
        cu_q, cu_k = (torch.tensor([0, *accumulate(part)], dtype=torch.int32, device=q.device) for part in lengths)
        seen, _ = self._masks(None, None, is_causal, mask, (0, 0, 0))
        out = attention_varlen(q, k, v, cu_q, cu_k, mask=seen, dropout_p=self.dropout if self.training else 0.0)
        out = self.out_proj(out.flatten(-2))
        if inputs[0].layout == torch.jagged:
            offsets: Tensor = inputs[0].offsets()  # type: ignore[attr-defined]  # jagged tensors have it
            return torch.nested.nested_tensor_from_jagged(out, offsets)
        return torch.nested.as_nested_tensor(list(out.split(lengths[0])))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by heads, with the extra keys that `add_bias_kv` and `add_zero_attn` append."""
        if self.in_proj_weight is not None:
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        batch = k.shape[0]
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(batch, -1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.expand(batch, -1, -1)], dim=1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        split = (self.num_heads, self.head_dim)
        return q.unflatten(-1, split), k.unflatten(-1, split), v.unflatten(-1, split)

    def _masks(
        self,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        mask: Mask | None,
        lengths: tuple[int, int, int],
    ) -> tuple[Mask, Tensor | None]:
        """torch's masks as a tilewise mask and bias; `lengths` are queries, keys, and keys with the appended ones.

        The appended keys are seen by all. As in torch, `is_causal` says that `attn_mask` is the causal one, so it is not read.
        """
        queries, keys, total = lengths
        extra = total - keys
        seen, bias = full() if mask is None else mask, None
        if is_causal:
            seen, attn_mask = seen & causal(align="top_left"), None
        for name, given in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
            if given is None:
                continue
            table = self._rank4(name, given, queries, keys)
            if table.dtype == torch.bool:
                seen = seen & dense(F.pad(~table, (0, extra), value=True))
            else:
                table = F.pad(table, (0, extra))
                bias = table if bias is None else bias + table
        return (seen | ~prefix(keys) if extra else seen), bias

    def _rank4(self, name: str, table: Tensor, queries: int, keys: int) -> Tensor:
        """attn_mask (L, S) or (N·H, L, S), key_padding_mask (N, S), as (N or 1, H or 1, L or 1, S)."""
        if table.dtype != torch.bool and not table.is_floating_point():
            raise LayoutError(f"{name}: dtype {table.dtype}, need bool (True = hidden) or floating point (added)")
        if name == "key_padding_mask" and table.ndim == 2 and table.shape[1] == keys:
            return table[:, None, None, :]
        if name == "attn_mask" and table.ndim in (2, 3) and tuple(table.shape[-2:]) == (queries, keys):
            return table if table.ndim == 2 else table.unflatten(0, (-1, self.num_heads))
        want = f"(batch, {keys})" if name == "key_padding_mask" else f"({queries}, {keys}) or (batch · heads, …) of it"
        raise LayoutError(f"{name}: shape {tuple(table.shape)}, need {want}")
