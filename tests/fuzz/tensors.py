"""The tensors of a case: their numbers, the poison where nobody may look, and how they lie in memory.

Kinds of bias: "normal"; "far X": around X; "holes": −inf here and there; "rows": whole rows (columns, if there is one row) of
−inf; "lowest": finfo.min here and there, as many models write a mask; "lowest rows", "huge rows": whole rows of finfo.min or
2.4e38. Kinds of sinks: "normal", "far X", "none" (−inf), "some" (−inf for every other head), "huge" (3e38), "infinite" (+inf).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.fuzz import masks
from tests.fuzz.case import Case
from tests.fuzz.layouts import laid, shared

INF = float("inf")
SATURATED = 2.0**60
"""A bias at least so large swallows every score that is added to it in float32 (in float64 it takes its own, larger, limits)."""


class Tensors(NamedTuple):
    """As a user passes them, on the CPU and without a gradient; `seen` by sequence, (heads, M, N)."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    alibi: Tensor | None
    sinks: Tensor | None
    dout: Tensor
    dlse: Tensor
    seen: list[Tensor]


def user_shape(case: Case, heads: int, length: int, dim: int) -> tuple[int, ...]:
    if case.packed:
        return length, heads, dim
    return (case.batch, length, heads, dim) if case.layout == "bshd" else (case.batch, heads, length, dim)


def inside(case: Case, x: Tensor) -> Tensor:
    """A tensor in the user's layout as (B, H, S, D), packed (1, H, T, D)."""
    if case.packed:
        return x.transpose(0, 1).unsqueeze(0)
    return x.transpose(1, 2) if case.layout == "bshd" else x


def outside(case: Case, x: Tensor) -> Tensor:
    """The way back."""
    if case.packed:
        return x.squeeze(0).transpose(0, 1)
    return x.transpose(1, 2) if case.layout == "bshd" else x


def place(case: Case, b: int, side: int) -> tuple[int, slice, slice]:
    """Where sequence b lies in a tensor of the inside layout: queries (0) or keys (1)."""
    start = case.starts(side)
    return (0, slice(None), slice(start[b], start[b + 1])) if case.packed else (b, slice(None), slice(None))


def bias_part(bias: Tensor, m: int, n: int, b: int) -> tuple[Any, ...]:
    """Where the scores of sequence b lie in a bias of rank 4; what is 1 long broadcasts."""
    rows, cols = (slice(size if side > 1 else None) for side, size in zip(bias.shape[2:], (m, n), strict=True))
    return (b if bias.shape[0] > 1 else 0, slice(None), rows, cols)


def build(case: Case) -> Tensors:
    made = _Numbers(case)
    seen = [torch.from_numpy(masks.visible(case, case.mask, b).copy()) for b in range(case.batch)]
    bias = None if case.bias is None else made.bias()
    hidden = None if bias is None else _hidden(case, bias, seen)
    if bias is not None:
        for b, (m, n) in enumerate(case.lengths):
            seen[b] = seen[b] & (bias[bias_part(bias, m, n, b)] != -INF)
    unseen, blind, swallowed = _nobody(case, seen, bias)
    q, k, v, dout = (made.rows(name) for name in ("q", "k", "v", "dout"))
    dlse = made.normal((case.heads, case.totals[0]) if case.packed else tuple(blind.shape), "dlse", _work(case))
    lost, none = (x[0] if case.packed else x for x in (swallowed, blind))
    if case.quiet:
        dout, dlse = torch.where(swallowed[..., None], 0.0, dout), torch.where(lost, 0.0, dlse)
    if case.poison is not None:
        q, dout = (_spoiled(case, x, blind[..., None], name) for x, name in ((q, "q"), (dout, "dout")))
        k, v = (_spoiled(case, x, unseen[..., None], name) for x, name in ((k, "k"), (v, "v")))
        if case.sinks is None:
            dlse = torch.where(shared(none, case.strides_of("dlse")), case.poison, dlse)
        if bias is not None and hidden is not None:
            bias = torch.where(shared(hidden, case.strides_of("bias")), case.poison, bias)
    if bias is not None:
        bias = laid(bias, case.strides_of("bias"))
        while bias.ndim > 1 and bias.shape[0] == 1 and case.seed % 2:
            bias = bias[0]
    named = {"q": q, "k": k, "v": v, "dout": dout}
    flat = {name: laid(outside(case, x), case.strides_of(name)) for name, x in named.items()}
    return Tensors(
        **flat,
        bias=bias,
        alibi=made.slopes() if case.alibi else None,
        sinks=laid(made.sinks(), case.strides_of("sinks")) if case.sinks else None,
        dlse=laid(dlse, case.strides_of("dlse")),
        seen=seen,
    )


def _work(case: Case) -> torch.dtype:
    return torch.float64 if case.dtype == "float64" else torch.float32


class _Numbers:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.dtype: torch.dtype = getattr(torch, case.dtype)

    def random(self, name: str) -> np.random.RandomState:
        return np.random.RandomState([self.case.seed % 2**32, *name.encode()])

    def normal(self, shape: tuple[int, ...], name: str, dtype: torch.dtype, size: float = 1.0) -> Tensor:
        x = torch.from_numpy(np.asarray(self.random(name).standard_normal(shape) * size)).to(dtype)
        return shared(x, self.case.strides_of(name))

    def rows(self, name: str) -> Tensor:
        """q, k, v or dout, in the inside layout; made in the user's, since that is how strides are shared."""
        case = self.case
        size = case.sizes[("q", "k", "v", "dout").index(name)]
        heads = case.heads if name in ("q", "dout") else case.kv_heads
        dim = case.head_dim if name in ("q", "k") else case.head_dim_v
        shape = user_shape(case, heads, case.totals[name in ("k", "v")], dim)
        x = torch.from_numpy(np.asarray(self.random(name).standard_normal(shape) * size))
        if name in ("q", "k"):
            x = x + self.shift(name)
        return inside(case, shared(x.to(self.dtype), case.strides_of(name)))

    def shift(self, name: str) -> float:
        """What q and k are moved by so that each score moves by `case.shift`, give or take."""
        case = self.case
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        if not scale or not case.shift:
            return 0.0
        each = (abs(case.shift / scale) / case.head_dim) ** 0.5
        return each if name == "q" else float(np.copysign(each, case.shift / scale))

    def bias(self) -> Tensor:
        """Rank 4."""
        assert self.case.bias is not None
        kind, axes, dtype_name = self.case.bias
        dtype: torch.dtype = getattr(torch, dtype_name)
        full = zip("bhqk", (self.case.batch, self.case.heads, *self.case.longest), strict=True)
        shape = tuple(size if axis in axes else 1 for axis, size in full)
        r = self.random("bias")
        x = r.standard_normal(shape)
        some = r.random_sample(shape) < 0.25
        whole = r.random_sample(shape[2:]) < 0.4
        lines = np.broadcast_to(whole[:, :1] if shape[2] > 1 else whole[:1, :], shape)
        lowest = max(torch.finfo(dtype).min, torch.finfo(_work(self.case)).min)
        if kind.startswith("far"):
            x = x + float(kind.split()[1])
        where = {"holes": some, "lowest": some, "rows": lines, "lowest rows": lines, "huge rows": lines}.get(kind)
        if where is not None:
            x = np.where(where, {"h": -INF, "l": lowest, "r": -INF}[kind[0]] if kind != "huge rows" else -0.7 * lowest, x)
        return shared(torch.from_numpy(np.asarray(x)).to(dtype), self.case.strides_of("bias"))

    def slopes(self) -> Tensor:
        assert self.case.alibi is not None
        rank, dtype = self.case.alibi
        shape = (self.case.batch, self.case.heads)[2 - rank :]
        return torch.from_numpy(self.random("alibi").random_sample(shape)).to(getattr(torch, dtype))

    def sinks(self) -> Tensor:
        assert self.case.sinks is not None
        kind, dtype = self.case.sinks
        x = self.random("sinks").standard_normal((self.case.heads,))
        if kind.startswith("far"):
            x = x + float(kind.split()[1])
        elif kind != "normal":
            x[:: 2 if kind == "some" else 1] = {"huge": 3e38, "infinite": INF}.get(kind, -INF)
        return torch.from_numpy(x).to(getattr(torch, dtype))


def _hidden(case: Case, bias: Tensor, seen: list[Tensor]) -> Tensor:
    """Entries of the bias that meet nothing but masked scores."""
    hidden = torch.ones(bias.shape, dtype=torch.bool)
    for b, (m, n) in enumerate(case.lengths):
        at = bias_part(bias, m, n, b)
        part = ~seen[b]
        for axis in range(3):
            if hidden[at].shape[axis] == 1:
                part = part.all(axis, keepdim=True)
        hidden[at] = hidden[at] & part
    return hidden


def _nobody(case: Case, seen: list[Tensor], bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys that no query sees (B, Hk, N), rows that see no key and rows whose scores a bias swallows (B, H, M)."""
    first = 1 if case.packed else case.batch
    total_q, total_k = case.totals
    unseen = torch.ones((first, case.kv_heads, total_k), dtype=torch.bool)
    blind = torch.ones((first, case.heads, total_q), dtype=torch.bool)
    swallowed = torch.zeros_like(blind)
    for b, (m, n) in enumerate(case.lengths):
        own = seen[b].reshape(case.kv_heads, case.group * m, n)
        unseen[place(case, b, 1)] = ~own.any(1)
        blind[place(case, b, 0)] = ~seen[b].any(-1)
        if bias is not None:
            large = bias[bias_part(bias, m, n, b)].double().abs() >= SATURATED
            swallowed[place(case, b, 0)] = (seen[b] & large).any(-1)
    return unseen, blind, swallowed


def _spoiled(case: Case, x: Tensor, where: Tensor, name: str) -> Tensor:
    """Poison where nobody looks, as far as the strides let single entries differ."""
    spots = shared(outside(case, where.expand(x.shape)), case.strides_of(name))
    return torch.where(inside(case, spots), case.poison or 0.0, x)
