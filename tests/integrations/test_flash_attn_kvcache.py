"""flash_attn_with_kvcache: against attention over the tokens that its documentation says are seen."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.errors import ArgumentError, LayoutError
from tilewise.integrations import flash_attn as fa
from tilewise.integrations.flash_attn import flash_attn_with_kvcache

PUBLISHED = (
    "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None "
    "block_table=None softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 rotary_interleaved=True "
    "alibi_slopes=None num_splits=0 return_softmax_lse=False"
)


def test_signature() -> None:
    found = inspect.signature(flash_attn_with_kvcache).parameters.values()
    shown = " ".join(one.name if one.default is one.empty else f"{one.name}={one.default}" for one in found)
    assert shown == PUBLISHED


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x (n, H, D) with the first columns turned, feature by feature."""
    out, half = x.clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[positions, i][:, None], sin[positions, i][:, None]
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3), rows=st.integers(1, 5), fresh=st.integers(0, 5), page=st.sampled_from([0, 1, 3, 8]),
    causal=st.booleans(), window=st.sampled_from([(-1, -1), (3, 0), (2, 2)]), rotary=st.sampled_from([0, 8, 16]),
    interleaved=st.booleans(), moved=st.booleans(), padded=st.booleans(), slopes=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_option(
    batch: int, rows: int, fresh: int, page: int, causal: bool, window: tuple[int, int], rotary: int, interleaved: bool,
    moved: bool, padded: bool, slopes: bool, seed: int,
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    room, heads, kv_heads, dim = 24, 4, 2, 16

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    before = torch.randint(rows, room - fresh + 1, (batch,), generator=g)
    q = randn(batch, rows, heads, dim)
    k, v = (randn(batch, fresh, kv_heads, dim) for _ in range(2))
    options: dict[str, Any] = {"cache_seqlens": before.int(), "causal": causal, "window_size": window}
    if page:
        table = torch.randperm(batch * -(-room // page), generator=g).reshape(batch, -1)
        k_cache, v_cache = (randn(table.numel(), page, kv_heads, dim) for _ in range(2))
        options["block_table"] = table.int()
        held = [[x[table[b]].flatten(0, 1) for x in (k_cache, v_cache)] for b in range(batch)]
        start = torch.zeros(batch, dtype=torch.int64)
    else:
        k_cache, v_cache = (randn(batch + 2, room, kv_heads, dim) for _ in range(2))
        index = torch.randperm(batch + 2, generator=g)[:batch] if moved else torch.arange(batch)
        start = torch.minimum(torch.randint(0, 4, (batch,), generator=g), before - rows) if padded else torch.zeros_like(before)
        options |= {"cache_batch_idx": index} if moved else {}
        options |= {"cache_leftpad": start} if padded else {}
        held = [[x[index[b]] for x in (k_cache, v_cache)] for b in range(batch)]
    if fresh:
        options |= {"k": k, "v": v}
        if rotary:
            angles = torch.arange(64)[:, None] * torch.rand(rotary // 2, generator=g, dtype=torch.float64)
            options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}
    if slopes:
        options["alibi_slopes"] = torch.rand(heads, generator=g)
    want = []
    for b in range(batch):
        old, (keys, values) = int(before[b]), [x.clone() for x in held[b]]
        queries, new = q[b], k[b]
        if "rotary_cos" in options:
            turned = (options["rotary_cos"], options["rotary_sin"])
            local = causal or window != (-1, -1)
            queries = turn(queries, *turned, old + torch.arange(rows) * local, interleaved)
            new = turn(new, *turned, old + torch.arange(fresh), interleaved)
        keys[old : old + fresh], values[old : old + fresh] = new, v[b]
        keys, values = (x[int(start[b]) : old + fresh][None] for x in (keys, values))
        left, right = (2**30 if side < 0 else side for side in window)
        mask = tw.window(left, 0 if causal else right)
        bias = tw.alibi(options["alibi_slopes"].double()) if slopes else None
        want.append(tw.attention(queries[None], keys, values, mask=mask, bias=bias, layout="bshd"))
    got, lse = flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=True, **options)
    assert got.shape == q.shape and lse.shape == (batch, heads, rows)
    # the slopes are those of float32, so distances of the ALiBi bias are as exact as these
    assert torch.allclose(got, torch.cat(want), atol=1e-12, rtol=1e-12)


def test_packed_queries_over_pages() -> None:
    cu_q, cu_k = torch.tensor([0, 3, 4]), torch.tensor([0, 9, 14])
    q, pages = torch.randn(4, 4, 16), [torch.randn(6, 4, 2, 16) for _ in range(2)]
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    got = fa.flash_attn_varlen_func(q, *pages, cu_q, cu_k, 3, 9, causal=True, block_table=table)
    packed = [torch.cat([x[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate((9, 5))]) for x in pages]
    want = fa.flash_attn_varlen_func(q, *packed, cu_q, cu_k, 3, 9, causal=True)
    assert torch.allclose(got, want, atol=1e-6)  # type: ignore[arg-type]


def test_a_full_cache_and_an_integer_length() -> None:
    q, cache = torch.randn(2, 1, 2, 16), torch.randn(2, 9, 2, 16)
    whole = flash_attn_with_kvcache(q, cache, cache)
    assert torch.equal(whole, flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9))
    assert torch.allclose(whole, tw.attention(q, cache, cache, layout="bshd"), atol=1e-6)


def test_what_is_refused() -> None:
    q, cache, table = torch.zeros(1, 1, 2, 8), torch.zeros(1, 4, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(LayoutError, match="q: got"):
        flash_attn_with_kvcache(q[0], cache, cache)
    with pytest.raises(ArgumentError, match="come together"):
        flash_attn_with_kvcache(q, cache, cache, k=q)
    with pytest.raises(ArgumentError, match="goes with new keys"):
        flash_attn_with_kvcache(q, cache, cache, rotary_cos=torch.ones(9, 4), rotary_sin=torch.ones(9, 4))
    with pytest.raises(ArgumentError, match="cache_seqlens: None, but pages"):
        flash_attn_with_kvcache(q, cache, cache, block_table=table)
    with pytest.raises(ArgumentError, match="the table says it all"):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=1, block_table=table, cache_batch_idx=table[0])
    with pytest.raises(ArgumentError, match="holds 4 tokens of a sequence, but cache_seqlens and the new tokens are 6"):
        flash_attn_with_kvcache(q, cache, cache, torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 2, 8), cache_seqlens=3)
