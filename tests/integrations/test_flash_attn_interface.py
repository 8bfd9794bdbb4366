"""FlashAttention-3's and -4's functions against a dense float64 reference written from their published descriptions."""

from __future__ import annotations

import inspect
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.integrations.closeness import randn
from tests.integrations.test_flash_attn_kvcache import turn
from tilewise.errors import ArgumentError, LayoutError
from tilewise.integrations import flash_attn as fa2
from tilewise.integrations import flash_attn_interface as fa3
from tilewise.integrations.flash_attn import cute as fa4

DESCALE = "q_descale=None k_descale=None v_descale=None"
CALLABLES = "score_mod=None score_mod_bwd=None mask_mod=None"
SIGNATURES: dict[tuple[ModuleType, str], str] = {
    (fa3, "flash_attn_func"): f"q k v softmax_scale=None causal=False qv=None {DESCALE} window_size=(-1, -1) attention_chunk=0 "
    "softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False",
    (fa3, "flash_attn_qkvpacked_func"): f"qkv softmax_scale=None causal=False {DESCALE} window_size=(-1, -1) attention_chunk=0 "
    "softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False",
    (fa3, "flash_attn_varlen_func"): "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None "
    f"softmax_scale=None causal=False qv=None {DESCALE} window_size=(-1, -1) attention_chunk=0 softcap=0.0 num_splits=1 "
    "pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False",
    (fa3, "flash_attn_with_kvcache"): "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None "
    f"max_seqlen_q=None rotary_seqlens=None {DESCALE} softmax_scale=None causal=False window_size=(-1, -1) attention_chunk=0 "
    "softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 "
    "return_softmax_lse=False",
    (fa4, "flash_attn_func"): "q k v qv=None gather_kv_indices=None softmax_scale=None causal=False window_size=(None, None) "
    f"learnable_sink=None softcap=0.0 num_splits=1 pack_gqa=None deterministic=False {CALLABLES} aux_tensors=None "
    "aux_scalars=None block_sparse_tensors=None block_sparse_tensors_bwd=None return_lse=False",
    (fa4, "flash_attn_varlen_func"): "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None max_seqlen_k=None "
    "min_seqlen_k=None seqused_q=None seqused_k=None gather_kv_indices=None page_table=None softmax_scale=None causal=False "
    "window_size=(None, None) learnable_sink=None softcap=0.0 num_splits=1 pack_gqa=None deterministic=False "
    f"{CALLABLES} block_sparse_tensors=None aux_tensors=None aux_scalars=None return_lse=False scheduler_metadata=None "
    "seqlen_k_per_split=None disable_scheduler_metadata=False",
}


@pytest.mark.parametrize("where", SIGNATURES, ids=lambda where: f"{where[0].__name__.split('.')[-1]}.{where[1]}")
def test_signatures(where: tuple[ModuleType, str]) -> None:
    found = inspect.signature(getattr(*where)).parameters.values()
    shown = " ".join(one.name if one.default is one.empty else f"{one.name}={one.default}" for one in found)
    assert shown == SIGNATURES[where]


def one_sequence(
    q: Tensor, k: Tensor, v: Tensor, *, left: int | None = None, right: int | None = None, chunk: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (n, H, Dv) and lse (H, n) of one sequence, whose last query stands at its last key."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[-1])
    at, key = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], torch.arange(k.shape[1])
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    if left is not None:
        hidden |= key < at - left
    if right is not None:
        hidden |= key > at + right
    if chunk:
        hidden |= key.div(chunk, rounding_mode="floor") != at.div(chunk, rounding_mode="floor")
    s = s.masked_fill(hidden, float("-inf"))
    lse = s.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None])
    p = torch.where(s == float("-inf"), 0.0, (s - torch.where(lse == float("-inf"), 0.0, lse)[..., None]).exp())
    return (p @ v).transpose(0, 1), lse


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.integers(0, 6), min_size=1, max_size=3), fresh=st.booleans(), page=st.sampled_from([0, 1, 3, 8]),
    packed=st.booleans(), causal=st.booleans(), window=st.sampled_from([(-1, -1), (3, 0), (2, 2), (None, 1)]),
    chunk=st.sampled_from([0, 1, 5]), rotary=st.booleans(), moved=st.booleans(), padded=st.booleans(), latent=st.booleans(),
    apart=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_option_over_a_cache(
    rows: list[int], fresh: bool, page: int, packed: bool, causal: bool, window: tuple[int | None, int], chunk: int, rotary: bool,
    moved: bool, padded: bool, latent: bool, apart: bool, seed: int,
) -> None:  # fmt: skip
    """Also more queries than keys, without which non-causal queries would never stand before the first."""
    g = torch.Generator().manual_seed(seed)
    rows = rows if packed else [max(rows)] * len(rows)
    room, heads, kv_heads, dim, value_dim = 24, 4, 2, 16, 8
    batch, columns = len(rows), dim + value_dim

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    fresh_rows = [(n if apart else max(0, n - 1)) if fresh else 0 for n in rows]
    before = torch.tensor([int(torch.randint(0, room - n + 1, (), generator=g)) for n in fresh_rows])
    table = torch.randperm((batch + 2) * -(-room // (page or room)), generator=g).reshape(batch + 2, -1).int()
    table = table if page else torch.arange(batch + 2)[:, None].int()
    memory = randn(table.numel(), page or room, kv_heads, columns)
    v_cache, k_cache = memory.split([value_dim, dim], -1)  # a cache of latents: nothing is copied
    index = torch.randperm(batch + 2, generator=g)[:batch].int() if moved else torch.arange(batch).int()
    pad = torch.minimum(torch.randint(0, 4, (batch,), generator=g), before) if padded else torch.zeros_like(before)
    q, qv = randn(sum(rows), heads, dim), randn(sum(rows), heads, value_dim)
    k, v = randn(sum(fresh_rows), kv_heads, dim), randn(sum(fresh_rows), kv_heads, value_dim)
    options: dict[str, Any] = {"cache_seqlens": before.int(), "causal": causal, "window_size": window, "attention_chunk": chunk}
    options |= {"page_table": table if moved else table[:batch]} if page else {}
    options |= {"cache_batch_idx": index} if moved else {}
    options |= {"cache_leftpad": pad.int()} if padded else {}
    options |= {"cu_seqlens_q": cumulative(rows), "max_seqlen_q": max(rows) or None} if packed else {}
    left, right = (None if side in (-1, None) else side for side in window)
    right = 0 if causal else right
    angles = torch.arange(64)[:, None] * torch.rand(4, generator=g, dtype=torch.float64)
    rotary, start = rotary and fresh, before // 2 if apart else before
    if rotary:
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_seqlens": start.int() if apart else None}
    want, held = [], memory.clone()
    for b, (mine, news) in enumerate(zip(q.split(rows), k.split(fresh_rows), strict=True)):
        if rotary:
            step = int((left, right) != (None, None))
            mine = turn(mine, angles.cos(), angles.sin(), start[b] + torch.arange(rows[b]) * step, True)
            news = turn(news, angles.cos(), angles.sin(), start[b] + torch.arange(fresh_rows[b]), True)
        at = before[b] + torch.arange(fresh_rows[b])
        pages, place = table[index[b]].long(), at % (page or room)
        held[pages[at // (page or room)], place] = torch.cat([v.split(fresh_rows)[b], news], -1)
        own = held[pages].flatten(0, 1)[int(pad[b]) : int(before[b]) + fresh_rows[b]]
        values, keys = own.split([value_dim, dim], -1)
        if latent:
            mine, keys = torch.cat([qv.split(rows)[b], mine], -1), own
        want.append(one_sequence(mine, keys, values, left=left, right=right, chunk=chunk))
    shape = (sum(rows),) if packed else (batch, rows[0])
    if fresh:
        form = (sum(fresh_rows),) if packed else (batch, fresh_rows[0])
        options |= {"k": k.reshape(*form, kv_heads, dim), "v": v.reshape(*form, kv_heads, value_dim)}
        options |= {"cu_seqlens_k_new": cumulative(fresh_rows)} if packed else {}
    options |= {"qv": qv.reshape(*shape, heads, value_dim)} if latent else {}
    got, lse = fa3.flash_attn_with_kvcache(q.reshape(*shape, heads, dim), k_cache, v_cache, return_softmax_lse=True, **options)
    assert torch.equal(v_cache, held[..., :value_dim]) and torch.allclose(k_cache, held[..., value_dim:], atol=1e-14)
    assert torch.allclose(got.reshape(-1, heads, value_dim), torch.cat([one for one, _ in want]), atol=1e-12)
    lse = lse if packed else lse.transpose(0, 1).flatten(1)
    assert torch.allclose(lse, torch.cat([one for _, one in want], 1), atol=1e-12)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=3),
    q_packed=st.booleans(), k_packed=st.booleans(), q_part=st.booleans(), k_part=st.booleans(),
    window=st.sampled_from([(None, None), (3, 1), (None, 0), (-1, 4), (4, -2), (2, -3)]), causal=st.booleans(),
    chunk=st.sampled_from([0, 3]), sinks=st.booleans(), latent=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_option_of_a_batch(
    sizes: list[tuple[int, int]], q_packed: bool, k_packed: bool, q_part: bool, k_part: bool, window: tuple[Any, Any],
    causal: bool, chunk: int, sinks: bool, latent: bool, seed: int,
) -> None:  # fmt: skip
    """Either side packed or padded, with a part of it in use; outputs, LSE and gradients. What is not in use holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim, value_dim = 4, 2, 8, 8
    if chunk:
        window, sinks, q_packed, k_packed = (-1, -1) if causal else (3, 1), False, True, True
    room_q, room_k = max(m for m, _ in sizes) + 1, max(n for _, n in sizes) + 1
    left, right = (None if chunk and side == -1 else side for side in window)
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        left, right = None, 0 if causal else None

    def side(lengths: list[int], packed: bool, part: bool, room: int, *shape: int) -> tuple[Tensor, list[Tensor]]:
        """The tensor of a call, and the tokens in use of each sequence, as views of it."""
        spare = [room - n if not packed else n % 2 if part else 0 for n in lengths]
        whole = torch.full((sum(lengths) + sum(spare), *shape), float("nan"), dtype=torch.float64)
        parts, at = [], 0
        for n, more in zip(lengths, spare, strict=True):
            whole[at : at + n] = torch.randn((n, *shape), generator=generator, dtype=torch.float64)
            parts.append((at, at + n))
            at += n + more
        whole = whole if packed else whole.reshape(len(lengths), room, *shape)
        whole.requires_grad_()
        flat = whole if packed else whole.flatten(0, 1)
        return whole, [flat[a:b] for a, b in parts]

    rows, keys = [m for m, _ in sizes], [n for _, n in sizes]
    q, q_parts = side(rows, q_packed, q_part, room_q, heads, dim)
    k, k_parts = side(keys, k_packed, k_part, room_k, kv_heads, dim)
    v, v_parts = side(keys, k_packed, k_part, room_k, kv_heads, value_dim)
    leaves, options = [q, k, v], {"causal": causal, "window_size": window}
    if latent:
        qv, qv_parts = side(rows, q_packed, q_part, room_q, heads, value_dim)
        leaves.append(qv)
        options["qv"] = qv
        q_parts = [torch.cat(both, -1) for both in zip(q_parts, qv_parts, strict=True)]
        k_parts = [torch.cat(both, -1) for both in zip(k_parts, v_parts, strict=True)]
    sink = torch.randn(heads, generator=generator, dtype=torch.float64).requires_grad_() if sinks else None
    leaves += [] if sink is None else [sink]
    bounds = {}
    for name, packed, part, lengths in (("q", q_packed, q_part, rows), ("k", k_packed, k_part, keys)):
        lent = [n + n % 2 if part else n for n in lengths]
        bounds[f"cu_seqlens_{name}"] = cumulative(lent) if packed else None
        bounds[f"seqused_{name}"] = torch.tensor(lengths).int() if part or not packed else None
    if chunk:
        out, lse = fa3.flash_attn_varlen_func(  # type: ignore[misc]
            q, k, v, bounds["cu_seqlens_q"], bounds["cu_seqlens_k"], room_q, room_k, bounds["seqused_q"], bounds["seqused_k"],
            attention_chunk=chunk, return_attn_probs=True, **options,
        )  # fmt: skip
    else:
        out, lse = fa4.flash_attn_varlen_func(q, k, v, learnable_sink=sink, return_lse=True, **bounds, **options)
    if not q_packed:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    want_out, want_lse = torch.zeros_like(out), torch.full_like(lse, float("-inf"))
    at = 0
    for b, m in enumerate(rows):
        own = one_sequence(q_parts[b], k_parts[b], v_parts[b], left=left, right=right, chunk=chunk, sinks=sink)
        want_out, want_lse = want_out.clone(), want_lse.clone()
        want_out[at : at + m], want_lse[:, at : at + m] = own
        at += (m + (m % 2 if q_part else 0)) if q_packed else room_q
    assert torch.allclose(out, want_out, atol=1e-12) and torch.allclose(lse, want_lse, atol=1e-12)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad(out, leaves, weight, allow_unused=True),
        torch.autograd.grad(want_out, leaves, weight, allow_unused=True), strict=True,
    ):  # fmt: skip
        mine, theirs = (torch.zeros(()) if x is None else x for x in (mine, theirs))
        assert torch.allclose(mine.nan_to_num(9.0), theirs.nan_to_num(0.0), atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("latent", [False, True])
def test_pages_of_fa4(causal: bool, latent: bool) -> None:
    """Queries in use, sinks, and sequences with more queries than keys, over pages."""
    rows, used, lengths = [5, 1, 4], [3, 1, 4], [9, 12, 2]
    q, qv, sink = randn(10, 4, 16, seed=1), randn(10, 4, 8, seed=2), randn(4, seed=3)
    k, v, table = randn(12, 3, 2, 16, seed=4), randn(12, 3, 2, 8, seed=5), torch.randperm(12).reshape(3, 4).int()
    out, lse = fa4.flash_attn_varlen_func(
        q, k, v, qv if latent else None, cu_seqlens_q=cumulative(rows), seqused_q=torch.tensor(used), page_table=table,
        seqused_k=torch.tensor(lengths), causal=causal, learnable_sink=sink, window_size=(None, None) if causal else (None, 1),
    )  # fmt: skip
    for b, (mine, also) in enumerate(zip(q.split(rows), qv.split(rows), strict=True)):
        keys, values = (x[table[b].long()].flatten(0, 1)[: lengths[b]] for x in (k, v))
        mine, keys = (torch.cat([mine, also], -1), torch.cat([keys, values], -1)) if latent else (mine, keys)
        want = one_sequence(mine[: used[b]], keys, values, right=0 if causal else 1, sinks=sink)
        assert torch.allclose(out.split(rows)[b][: used[b]], want[0], atol=1e-12)
        assert torch.allclose(lse.split(rows, 1)[b][:, : used[b]], want[1], atol=1e-12)
        assert (out.split(rows)[b][used[b] :] == 0).all()


def test_tokens_in_use_over_pages_of_fa2() -> None:
    rows, used, lengths = [4, 2], [3, 2], [7, 5]
    q, pages = randn(6, 4, 16), [randn(6, 4, 2, 16, seed=s) for s in (1, 2)]
    table, slopes = torch.tensor([[5, 0], [1, 4]]).int(), torch.rand(2, 4)
    cu_k = cumulative(lengths)
    got, lse, none = fa2.flash_attn_varlen_func(
        q, *pages, cumulative(rows), cu_k, 4, 7, causal=True, alibi_slopes=slopes, return_attn_probs=True, block_table=table,
        seqused_q=torch.tensor(used),
    )  # type: ignore[misc]  # fmt: skip
    assert none is None and lse.shape == (4, 6)
    for b, mine in enumerate(q.split(rows)):
        keys = [x[table[b].long()].flatten(0, 1)[None, : lengths[b]] for x in pages]
        want = fa2.flash_attn_func(mine[None, : used[b]], *keys, causal=True, alibi_slopes=slopes[b : b + 1])
        assert torch.allclose(got.split(rows)[b][: used[b]], want[0], atol=1e-12)  # type: ignore[index]
    whole = fa2.flash_attn_varlen_func(q, *pages, cumulative(rows), cu_k, 4, 7, causal=True, block_table=table)
    apart = fa2.flash_attn_varlen_func(
        q, *pages, cumulative(rows), cumulative([8, 8]), 4, 7, causal=True, block_table=table, seqused_k=torch.tensor(lengths)
    )
    assert torch.equal(whole, apart)  # type: ignore[arg-type]


def test_float8() -> None:
    """A cache of float8 stays one; what it stands for is multiplied by the factors of each sequence and head."""
    batch, heads, kv_heads, dim, room, rows = 2, 4, 2, 32, 20, 3
    shapes = {"q": (batch, rows, heads, dim), "k": (batch, room, kv_heads, dim), "v": (batch, room, kv_heads, dim)}
    given = {n: randn(*shape, seed=i).to(torch.float8_e4m3fn) for i, (n, shape) in enumerate(shapes.items())}
    factors = {f"{name}_descale": torch.rand(batch, kv_heads) + 0.5 for name in "qkv"}
    exact = []
    for n, x in given.items():
        each = factors[f"{n}_descale"].repeat_interleave(x.shape[2] // kv_heads, 1)
        exact.append(x.double() * each[:, None, :, None])
    want = torch.stack([one_sequence(*(x[b] for x in exact), right=0)[0] for b in range(batch)])
    out = fa3.flash_attn_with_kvcache(given["q"], given["k"], given["v"], cache_seqlens=room, causal=True, **factors)
    assert out.dtype == torch.bfloat16 and (out.double() - want).abs().max() < 2**-8 * want.abs().max()
    out = fa3.flash_attn_func(given["q"], given["k"], given["v"], causal=True, **factors)
    assert out.dtype == torch.bfloat16 and (out.double() - want).abs().max() < 2**-5 * want.abs().max()


def test_qkvpacked_and_hints() -> None:
    q, k, v = (randn(2, 7, 4, 8, seed=s) for s in range(3))
    want = fa3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(want, fa3.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True))
    assert torch.equal(want, fa3.flash_attn_func(q, k, v, causal=True, num_splits=3, pack_gqa=True, sm_margin=4))
    grouped = torch.cat([q, k[:, :, :2], v[:, :, :2]], 2)
    assert torch.equal(
        fa3.flash_attn_qkvpacked_func(grouped, num_heads_q=4), fa3.flash_attn_func(q, k[:, :, :2], v[:, :, :2])
    )
    hint = fa3.get_scheduler_metadata(2, 7, 7, 4, 4, 8, torch.tensor([7, 7]), causal=True)
    assert torch.equal(want, fa3.flash_attn_with_kvcache(q, k, v, causal=True, scheduler_metadata=hint, num_splits=2))
    tensor = fa3.flash_attn_func(q, k, v, window_size=torch.tensor([2, 1]))  # type: ignore[arg-type]
    assert torch.equal(tensor, fa4.flash_attn_func(q, k, v, window_size=(2, 1))[0])


def test_what_is_refused() -> None:
    x, pages = torch.zeros(1, 4, 2, 8), torch.zeros(1, 1).int()
    with pytest.raises(ArgumentError, match=r"attention_chunk: got -1"):
        fa3.flash_attn_func(x, x, x, attention_chunk=-1)
    with pytest.raises(ArgumentError, match=r"window_size: got \(-3, 0\)"):
        fa3.flash_attn_func(x, x, x, window_size=(-3, 0))
    with pytest.raises(ArgumentError, match=r"window_size: got \(1.5, None\).*None meaning no limit"):
        fa4.flash_attn_func(x, x, x, window_size=(1.5, None))  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="seqused_k"):
        fa4.flash_attn_varlen_func(x, x, x, seqused_k=torch.tensor([1, 2]))
    with pytest.raises(LayoutError, match=r"q: got \(1, 4, 2, 8\), need \(tokens"):
        fa4.flash_attn_varlen_func(x, x, x, cu_seqlens_q=torch.tensor([0, 4]))
    with pytest.raises(ArgumentError, match="2, 1, 1 sequences"):
        fa4.flash_attn_varlen_func(x[0], x, x, cu_seqlens_q=torch.tensor([0, 2, 4]))
    with pytest.raises(LayoutError, match="qv: got"):
        fa3.flash_attn_with_kvcache(x, x, x, qv=x[..., :3])
    with pytest.raises(LayoutError, match="qkv: got"):
        fa3.flash_attn_qkvpacked_func(x)
    with pytest.raises(ArgumentError, match="block_table: holds 4 tokens"):
        fa3.flash_attn_with_kvcache(x, x, x, x, x, cache_seqlens=3, page_table=pages)
    with pytest.raises(ArgumentError, match="alibi_slopes: goes with no seqused"):
        fa2.flash_attn_varlen_func(
            x[0], x[0], x[0], cumulative([4]), cumulative([4]), 4, 4, alibi_slopes=torch.ones(2), seqused_k=torch.tensor([3])
        )
    for name in ("score_mod", "mask_mod", "gather_kv_indices", "block_sparse_tensors"):
        with pytest.raises(ArgumentError, match=f"{name}: is not offered"):
            fa4.flash_attn_func(x, x, x, **{name: x})  # type: ignore[arg-type]
