"""Cases of context parallelism as data: one axis at a time, then corners. Lengths are uneven, so that no number divides them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tilewise.backends.base import Inputs
from tilewise.problem import Problem

LENGTH = 61


@dataclass(frozen=True)
class Case:
    """One call: shapes, a mask, and options; `shards` of its plan."""

    name: str
    mask: Callable[[], tw.Mask] = tw.full
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    length: int = LENGTH
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = ()
    shards: str = "balanced"
    share: int = 1  # ranks that share heads
    bias: tuple[int, ...] = ()  # sides of the whole bias; 0 stands for the length
    alibi: bool = False
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    lse_gradient: bool = False

    def runs_on(self, ranks: int) -> bool:
        """Masks run on every group, cases of shared heads where ranks can share them, the others on one group in turn."""
        if self.share > 1:
            return ranks % self.share == 0
        return self.name.startswith(("mask-", "shards-")) or ranks == 2 + sum(map(ord, self.name)) % 3

    @property
    def packed(self) -> bool:
        return bool(self.lengths)


def ids(batch: int = 1, length: int = LENGTH) -> Tensor:
    g = torch.Generator().manual_seed(5)
    return torch.randint(0, 5, (batch, length), generator=g).sort(dim=1).values


def table(*sides: int) -> Tensor:
    g = torch.Generator().manual_seed(6)
    return torch.rand(sides, generator=g) < 0.5


def chosen(*sides: int) -> Tensor:
    return torch.randint(-1, 8, sides, generator=torch.Generator().manual_seed(7))


MASKS: dict[str, Callable[[], tw.Mask]] = {
    "full": tw.full,
    "causal": tw.causal,
    "anti-causal": lambda: ~tw.causal(),
    "window": lambda: tw.causal() & tw.window(9),
    "two-sided-window": lambda: tw.window(5, 3),
    "top-left": lambda: tw.causal(align="top_left"),
    "offset": lambda: tw.causal(offset=3),
    "offsets": lambda: tw.causal(offset=torch.tensor([2, -4])),
    "prefix": lambda: tw.causal() | tw.prefix(13),
    "padding": lambda: tw.causal() & tw.key_padding(torch.tensor([LENGTH, 20])),
    "left-padding": lambda: tw.key_padding(torch.tensor([30, 11]), start=torch.tensor([31, 0])),
    "documents": lambda: tw.causal() & tw.documents(ids(2)),
    "scattered-documents": lambda: tw.documents(ids(1)[:, torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))]),
    "other-documents": lambda: ~tw.documents(ids()) & tw.causal(),
    "blocks": lambda: tw.blocks(table(1, 4, -(-LENGTH // 8), -(-LENGTH // 16)), (8, 16)),
    "blocks-and-causal": lambda: tw.causal() & tw.blocks(table(2, 1, -(-LENGTH // 5), -(-LENGTH // 7)), (5, 7)),
    "dense": lambda: tw.dense(table(2, 4, LENGTH, LENGTH)),
    "not-dense": lambda: ~tw.dense(table(1, 1, 1, LENGTH)) & tw.window(20, 20),
    "selected": lambda: tw.causal() & (tw.selected(chosen(2, 2, -(-LENGTH // 16), 3), block=8, per=16) | tw.window(3)),
    "not-selected": lambda: ~tw.selected(chosen(1, 1, -(-LENGTH // 16), 3), block=12, per=16),
    "tree": lambda: tw.tree(torch.tensor([[-1, 0, 0, 1, 2, 2, -1], [-1, 0, 1, 2, 3, 4, 5]])),
    "window-and-sink-tokens": lambda: tw.causal() & (tw.window(7) | tw.prefix(3)),
    "nothing": lambda: tw.causal() & tw.window(0, 20) & ~tw.causal(),
}

CASES = [
    *(Case(f"mask-{name}", mask, batch=2) for name, mask in MASKS.items()),
    *(Case(f"shards-{name}", tw.causal, shards=name) for name in ("contiguous", "head_tail", "zigzag")),
    *(Case(f"length-{n}", tw.causal, length=n) for n in (1, 2, 3, 5, 129)),
    Case("mha", tw.causal, heads=3, kv_heads=3),
    Case("mqa", tw.causal, heads=8, kv_heads=1),
    Case("value-dim-larger", tw.causal, dims=(8, 24)),
    Case("value-dim-smaller", tw.causal, dims=(24, 8)),
    *(Case(f"dtype-{d}", tw.causal, dtype=getattr(torch, d)) for d in ("float16", "bfloat16", "float64")),
    Case("softcap", tw.causal, options={"softcap": 2.0}),
    Case("scale", tw.causal, options={"scale": 0.7}),
    Case("sinks", lambda: tw.causal() & tw.window(9), sinks=True),
    Case("sinks-nothing-seen", lambda: ~tw.causal(), sinks=True),
    Case("alibi", tw.causal, batch=2, alibi=True),
    Case("alibi-both-sides", tw.full, alibi=True),
    Case("dropout", tw.causal, batch=2, options={"dropout_p": 0.3, "seed": 9}),
    Case("dropout-documents", lambda: tw.documents(ids()), options={"dropout_p": 0.3, "seed": 9}),
    Case("bias", tw.causal, bias=(1, 4, 0, 0)),
    Case("bias-rows", tw.causal, batch=2, bias=(2, 1, 0, 1)),
    Case("bias-keys", lambda: tw.window(9, 9), batch=2, bias=(1, 1, 1, 0)),
    Case("lse-gradient", tw.causal, sinks=True, lse_gradient=True),
    Case("packed", tw.causal, lengths=(17, 0, 30, 5, 9)),
    Case("packed-window", lambda: tw.causal() & tw.window(6), lengths=(40, 21)),
    Case("packed-documents", lambda: tw.documents(ids()), lengths=(25, 36)),
    Case("packed-padding", lambda: tw.key_padding(torch.tensor([3, 30])), lengths=(25, 36)),
    Case("packed-everything", lambda: tw.causal() & tw.window(20), lengths=(30, 31), heads=8, kv_heads=2, dims=(16, 24),
         alibi=True, sinks=True, lse_gradient=True, options={"dropout_p": 0.2, "seed": 3, "softcap": 5.0}),
    Case("everything", lambda: tw.causal() & tw.documents(ids(2)), batch=2, heads=8, kv_heads=2, dims=(24, 16), bias=(2, 8, 0, 0),
         sinks=True, lse_gradient=True, options={"dropout_p": 0.2, "seed": 3, "softcap": 5.0}),
    Case("double", tw.causal, dtype=torch.bfloat16, options={"precision": "double"}, lse_gradient=True),
    Case("compensated", tw.causal, dtype=torch.float64, options={"precision": "compensated"}),
    Case("tiled", lambda: tw.causal() & tw.window(9), options={"backend": "tiled", "dropout_p": 0.3, "seed": 2}, alibi=True),
    *(
        Case(f"heads-over-{n}", lambda: tw.causal() & tw.documents(ids(2)), batch=2, heads=2 * n, kv_heads=n, share=n)
        for n in (2, 3, 4)
    ),
    Case("heads-everything", lambda: tw.causal() & tw.blocks(table(1, 12, 8, 8), 8), batch=2, heads=12, kv_heads=6, share=2,
         dims=(16, 24), alibi=True, sinks=True, lse_gradient=True, options={"dropout_p": 0.2, "seed": 3, "softcap": 5.0}),
    Case("heads-packed", tw.causal, lengths=(17, 30, 14), heads=4, kv_heads=4, share=2, sinks=True),
    Case("heads-bias", tw.causal, heads=4, kv_heads=4, share=2, bias=(1, 4, 1, 0)),
    Case("bshd", tw.causal, batch=2, options={"layout": "bshd"}),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Whole:
    """The whole problem of a case and its tensors, the same on every rank."""

    problem: Problem
    inputs: Inputs
    dout: Tensor
    dlse: Tensor | None

    @classmethod
    def of(cls, case: Case) -> Whole:
        g = torch.Generator().manual_seed(len(case.name))

        def draw(*sides: int) -> Tensor:
            return torch.randn(sides, generator=g).to(case.dtype)

        length = sum(case.lengths) if case.packed else case.length
        batch = 1 if case.packed else case.batch
        dim, dim_v = case.dims
        q = draw(batch, case.heads, length, dim)
        k, v = draw(batch, case.kv_heads, length, dim), draw(batch, case.kv_heads, length, dim_v)
        bias = draw(*(side or length for side in case.bias)) if case.bias else None
        real = torch.float64 if case.dtype == torch.float64 or case.options.get("precision") == "double" else torch.float32
        alibi = torch.rand((1, case.heads), generator=g).to(real) if case.alibi else None
        sinks = draw(case.heads) if case.sinks else None
        seed = torch.tensor(case.options["seed"]) if "seed" in case.options else None
        cu = torch.tensor([0, *case.lengths]).cumsum(0).int() if case.packed else None
        inputs = Inputs(q, k, v, bias, alibi, sinks, seed, cu, cu)
        features = {name: case.options[name] for name in ("softcap", "scale", "dropout_p", "precision") if name in case.options}
        problem = Problem.of(
            batch=len(case.lengths) if case.packed else case.batch,
            heads=case.heads, kv_heads=case.kv_heads, seqlen=length, head_dim=dim, head_dim_v=dim_v,
            dtype=str(case.dtype).removeprefix("torch."), mask=case.mask(), varlen=case.packed,
            bias=None if bias is None else tuple(bias.shape), alibi=case.alibi, sinks=case.sinks, needs_grad=True, **features,
        )  # fmt: skip
        dlse = torch.randn((batch, case.heads, length), generator=g).to(real) if case.lse_gradient else None
        return cls(problem, inputs, draw(batch, case.heads, length, dim_v), dlse)
