"""Random caches, and what attention over them must give: the float64 oracle on the tokens that each sequence sees."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tilewise.api.options import DEFAULTS
from tilewise.api.parse import build_problem
from tilewise.backends.base import Inputs
from tilewise.numerics import bounds
from tilewise.numerics.oracle import oracle
from tilewise.numerics.rounding import Arithmetic, unit_roundoff


@dataclass
class Built:
    """A cache whose unused places hold NaN, queries for it, and the tokens as they are meant."""

    cache: tw.KVCache
    q: Tensor
    cu: Tensor
    k: list[Tensor]  # (length, Hk, D) of each sequence, float64
    v: list[Tensor]
    table: Tensor
    pages: tuple[Tensor, Tensor]


def build(
    rows: list[int],
    lengths: list[int],
    *,
    page: int = 16,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    scaled: str = "token",
    csr: bool = False,
    order: str = "nhd",
    latent: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Built:
    g, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    batch, most = len(lengths), max([1, *(-(-n // page) + rng.randrange(2) for n in lengths)])
    counts = [-(-n // page) for n in lengths]
    spare = 3
    total = sum(counts) + spare
    numbers = rng.sample(range(total), sum(counts))
    hq, hk = heads
    d, dv = dims
    kind = stored or dtype
    raw = [_empty((total, page, hk, n), kind, order) for n in (d, dv)]
    scales = [_scale(scaled, (total, page, hk), g) for _ in range(2)] if stored else [None, None]
    if latent:
        raw[1], scales[1] = raw[0][..., :dv], scales[0]
    table = torch.full((batch, most), -1, dtype=torch.int32)
    tokens: list[list[Tensor]] = [[], []]
    for b, n in enumerate(lengths):
        own = [numbers.pop() for _ in range(counts[b])]
        table[b, : len(own)] = torch.tensor(own, dtype=torch.int32)
        at = torch.tensor([own[p // page] * page + p % page for p in range(n)], dtype=torch.int64)
        for side in range(1 if latent else 2):
            values = torch.randn((n, hk, (d, dv)[side]), generator=g)
            if stored == torch.int8:
                values = (values * 40).clamp(-127, 127).round()
            raw[side][at // page, at % page] = values.to(kind)
        for side in range(2):
            seen = raw[side][at // page, at % page].double()
            scale = scales[side]
            tokens[side].append(seen if scale is None else seen * scale[at // page, at % page][..., None].double())
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    entries = torch.cat([table[b, :n] for b, n in enumerate(counts)]) if counts else table.new_zeros(0)
    given: Any = (indptr.to(device), entries.to(device)) if csr else table.to(device)
    k_pages, v_pages = (x.to(device) for x in raw)
    if latent:
        v_pages = k_pages[..., :dv]
    own_scales = [None if x is None else _narrow(x, scaled).to(device) for x in scales]
    cache = tw.KVCache.paged(
        k_pages, None if latent else v_pages, given, torch.tensor(lengths, dtype=torch.int32, device=device),
        value_dim=dv if latent else None, k_scale=own_scales[0], v_scale=None if latent else own_scales[1],
    )  # fmt: skip
    q = torch.randn((sum(rows), hq, d), generator=g).to(device, dtype)
    cu = torch.tensor([0, *rows]).cumsum(0).to(device, torch.int32)
    return Built(cache, q, cu, tokens[0], tokens[1], table, (k_pages, v_pages))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, order: str) -> Tensor:
    """Pages of any strides, full of NaN, or of the largest number where the dtype has none."""
    pages, page, heads, dim = shape
    sides = {"nhd": (0, 1, 2, 3), "hnd": (0, 2, 1, 3), "columns": (0, 1, 3, 2)}[order]
    x = torch.empty([(pages, page, heads, dim)[side] for side in sides], dtype=torch.float32)
    x = x.fill_(127 if dtype == torch.int8 else float("nan")).to(dtype)
    return x.permute([sides.index(n) for n in range(4)])


def _scale(kind: str, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    own = {"tensor": (), "head": shape[2:], "token": shape}[kind]
    return (torch.rand(own, generator=g) * 0.05 + 0.01).expand(shape)


def _narrow(scale: Tensor, kind: str) -> Tensor:
    return {"tensor": scale[0, 0, 0], "head": scale[0, 0], "token": scale}[kind].clone()


def worst(built: Built, out: Tensor, lse: Tensor, **options: Any) -> float:
    """The largest error of out (T, H, Dv) and lse (H, T) in its derived bound."""
    lengths = [len(k) for k in built.k]
    cu_k = torch.tensor([0, *lengths]).cumsum(0).int()
    k, v = (torch.cat(x).transpose(0, 1)[None] for x in (built.k, built.v))
    q = built.q.cpu().double().transpose(0, 1)[None]
    options = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    inputs = Inputs(q, k, v, cu_q=built.cu.cpu(), cu_k=cu_k)
    problem, inputs = build_problem(inputs, {**DEFAULTS, "mask": tw.causal(), **options})
    dtype = str(built.q.dtype).removeprefix("torch.")
    problem = replace(problem, dtype=dtype)
    want, want_lse = oracle(problem, inputs)
    arithmetic = Arithmetic.of(problem)
    if built.cache.pages.k_scale is not None:  # a number times its scale is rounded once
        arithmetic = replace(arithmetic, operand=unit_roundoff(torch.float32))
    limit = bounds.forward(problem, inputs, arithmetic)
    ratios = (
        bounds.ratios(out.cpu().transpose(0, 1)[None], want, limit.out),
        bounds.ratios(lse.cpu()[None], want_lse, limit.lse),
    )
    return max((float(x.max()) for x in ratios if x.numel()), default=0.0)
