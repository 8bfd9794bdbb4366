"""Conformance cases as data: one axis at a time, then hard corners. Every backend runs every case it says it supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import tilewise as tw
from tilewise.api.parse import parse_call
from tilewise.backends.base import Inputs
from tilewise.masks import Mask
from tilewise.problem import Problem

Shape = tuple[int, int, int, int]
MakeMask = Callable[[Shape, torch.Generator], Mask | torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One call. Lengths are small, and chosen around the tile sizes that backends use."""

    name: str
    batch: int = 2
    heads: int = 2
    kv_heads: int | None = None
    seqlen: int = 70
    kv_seqlen: int | None = None
    head_dim: int = 16
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    mask: MakeMask | None = None
    bias: Shape | None = None  # sides of -1 mean full
    alibi: int = 0  # rank of the slopes
    sinks: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0
    scale: float | None = None
    layout: str = "bhsd"
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # packed: query and key lengths
    precision: str = "default"
    deterministic: bool | None = None
    magnitude: float = 1.0  # of q: large values give huge logits
    lse_gradient: bool = False
    tags: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Built:
    """The tensors of a case as a user would pass them, and what they mean inside."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    packed: tuple[torch.Tensor, torch.Tensor] | None
    options: dict[str, Any]
    problem: Problem
    inputs: Inputs

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What gradients are taken for."""
        rest = [self.options.get("bias"), self.options.get("sinks")]
        return [self.q, self.k, self.v, *(t for t in rest if isinstance(t, torch.Tensor))]

    def call(self, backend: str, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse in the user's layout."""
        options = {**self.options, **more}
        if self.packed is None:
            return tw.attention(self.q, self.k, self.v, return_lse=True, backend=backend, **options)  # type: ignore[return-value]
        return tw.attention_varlen(self.q, self.k, self.v, *self.packed, return_lse=True, backend=backend, **options)  # type: ignore[return-value]


def build(case: Case, device: str = "cpu", seed: int = 0) -> Built:
    g = torch.Generator().manual_seed(seed)
    kv_heads, kv_seqlen = case.kv_heads or case.heads, case.seqlen if case.kv_seqlen is None else case.kv_seqlen
    batch, dim_v = case.batch, case.head_dim_v or case.head_dim
    packed = None
    if case.lengths is not None:
        batch = len(case.lengths[0])
        packed = tuple(_cumulative(lengths).to(device) for lengths in case.lengths)
        q_shape, k_shape = (sum(case.lengths[0]), case.heads), (sum(case.lengths[1]), kv_heads)
        full = (batch, case.heads, max(case.lengths[0]), max(case.lengths[1]))
        mask_shape = (batch, case.heads, *map(sum, case.lengths))
    else:
        q_shape, k_shape = (batch, case.heads, case.seqlen), (batch, kv_heads, kv_seqlen)
        full = mask_shape = (batch, case.heads, case.seqlen, kv_seqlen)
    if case.layout == "bshd":
        q_shape, k_shape = (q_shape[0], q_shape[2], q_shape[1]), (k_shape[0], k_shape[2], k_shape[1])

    def normal(shape: tuple[int, ...], dtype: torch.dtype, factor: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=g) * factor).to(dtype).to(device).requires_grad_()

    q = normal((*q_shape, case.head_dim), case.dtype, case.magnitude)
    k = normal((*k_shape, case.head_dim), case.dtype)
    v = normal((*k_shape, dim_v), case.dtype)
    options: dict[str, Any] = {"softcap": case.softcap, "scale": case.scale, "precision": case.precision}
    if case.deterministic is not None:
        options["deterministic"] = case.deterministic
    if case.mask is not None:
        options["mask"] = case.mask(mask_shape, g).to(device)
    if case.bias is not None:
        sides = tuple(n if side == -1 else side for side, n in zip(case.bias, full, strict=True))
        options["bias"] = normal(sides, torch.float64 if case.dtype == torch.float64 else torch.float32)
    if case.alibi:
        slopes = torch.rand((batch, case.heads)[2 - case.alibi :], generator=g).to(device)
        options["bias"] = tw.alibi(slopes)
    if case.sinks:
        options["sinks"] = normal((case.heads,), torch.float32)
    if case.dropout_p:
        options |= {"dropout_p": case.dropout_p, "seed": 1234567890123}
    if case.layout != "bhsd":
        options["layout"] = case.layout
    problem, inputs = inside(q, k, v, packed, options)
    return Built(q, k, v, packed, options, problem, inputs)


def inside(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Any, options: dict[str, Any]
) -> tuple[Problem, Inputs]:
    """What the call means inside, for the oracle."""
    lengths = {} if packed is None else dict(zip(("cu_seqlens_q", "cu_seqlens_k"), packed, strict=True))
    return parse_call(q, k, v, {**options, **lengths, "return_lse": True})  # type: ignore[typeddict-item]


def _cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def _ids(n: int, batch: int, g: torch.Generator) -> torch.Tensor:
    """Sorted document ids, as packing makes them."""
    return torch.randint(0, 4, (batch, n), generator=g).sort(dim=-1).values.int()


def _table(shape: Shape, size: int, g: torch.Generator, heads: bool = False) -> torch.Tensor:
    sides = (-(-shape[2] // size), -(-shape[3] // size))
    return torch.rand((shape[1], *sides) if heads else sides, generator=g) > 0.5


def _lists(shape: Shape, block: int, g: torch.Generator, lead: tuple[int, ...] = (), per: int = 16) -> torch.Tensor:
    """Three blocks of each list, or fewer: some name none, some the same."""
    return torch.randint(-1, -(-shape[3] // block), (*lead, -(-shape[2] // per), 3), generator=g).int()


def _offsets(shape: Shape, g: torch.Generator) -> torch.Tensor:
    return torch.randint(-5, shape[3], (shape[0],), generator=g).int()


def _lengths(shape: Shape, g: torch.Generator) -> torch.Tensor:
    return torch.randint(0, shape[3] + 1, (shape[0],), generator=g).int()


MASKS: dict[str, MakeMask] = {
    "causal": lambda s, g: tw.causal(),
    "causal-top-left": lambda s, g: tw.causal("top_left"),
    "causal-offset": lambda s, g: tw.causal(offset=7),
    "causal-offset-tensor": lambda s, g: tw.causal(offset=_offsets(s, g)),
    "window": lambda s, g: tw.window(9),
    "window-two-sided": lambda s, g: tw.window(11, 20),
    "window-top-left": lambda s, g: tw.window(3, 3, align="top_left"),
    "causal-window": lambda s, g: tw.causal() & tw.window(33),
    "prefix": lambda s, g: tw.prefix(13),
    "prefix-lm": lambda s, g: tw.causal() | tw.prefix(20),
    "prefix-tensor": lambda s, g: tw.causal() | tw.prefix(_lengths(s, g)),
    "key-padding": lambda s, g: tw.key_padding(_lengths(s, g)),
    "left-padding": lambda s, g: (
        tw.causal() & tw.key_padding(torch.tensor([s[3] - 9] * s[0]), torch.tensor([9] * s[0]))
    ),
    "documents": lambda s, g: tw.documents(_ids(s[3], s[0], g), q_ids=_ids(s[2], s[0], g)),
    "causal-documents": lambda s, g: tw.causal() & tw.documents(_ids(s[3], 1, g)[0], q_ids=_ids(s[2], 1, g)[0]),
    "blocks": lambda s, g: tw.blocks(_table(s, 16, g), 16),
    "blocks-heads": lambda s, g: tw.blocks(_table(s, 24, g, heads=True), 24),
    "selected": lambda s, g: tw.selected(_lists(s, 8, g), block=8, per=16),
    "selected-all": lambda s, g: tw.causal() & tw.selected(_lists(s, 24, g, s[:2], per=20), block=24, per=20),
    "not-selected": lambda s, g: tw.prefix(5) | ~tw.selected(_lists(s, 16, g, (s[0], 1)), block=16, per=16) & tw.causal(),
    "dense": lambda s, g: torch.rand(s, generator=g) > 0.5,
    "dense-broadcast": lambda s, g: tw.dense(torch.rand((s[0], 1, 1, s[3]), generator=g) > 0.3),
    "not-window": lambda s, g: ~tw.window(15, 15),
    "not-documents": lambda s, g: ~tw.documents(_ids(s[3], 1, g)[0], q_ids=_ids(s[2], 1, g)[0]),
    "three-terms": lambda s, g: (tw.causal() & tw.window(5)) | tw.prefix(4) | tw.blocks(_table(s, 32, g), 32),
    "nothing": lambda s, g: ~tw.full(),
}

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32, torch.float64)
CROSS = ("causal", "window-two-sided", "prefix-lm", "documents")
MORE_QUERIES = ("causal", "causal-top-left", "window", "key-padding")
BIASES: tuple[tuple[Shape, MakeMask | None], ...] = (
    ((-1, -1, -1, -1), None),
    ((1, -1, -1, -1), MASKS["causal"]),
    ((1, 1, -1, -1), None),
    ((-1, 1, 1, -1), None),
    ((1, -1, -1, 1), None),
)
EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)

CASES: list[Case] = [
    Case("plain"),
    *(Case(f"mask-{name}", mask=mask) for name, mask in MASKS.items()),
    *(Case(f"cross-{name}", seqlen=37, kv_seqlen=90, mask=MASKS[name]) for name in CROSS),
    *(Case(f"more-queries-{name}", seqlen=90, kv_seqlen=37, mask=MASKS[name]) for name in MORE_QUERIES),
    *(Case(f"dtype-{str(t)[6:]}", dtype=t, mask=MASKS["causal"], lse_gradient=True) for t in DTYPES),
    *(Case(f"dtype-{str(t)[6:]}-full", dtype=t, head_dim=64, seqlen=130) for t in (*HALF, torch.float64)),
    *(Case(f"edge-{n}", batch=1, heads=1, seqlen=n, mask=MASKS["causal"]) for n in EDGES),
    *(Case(f"edge-keys-{n}", batch=1, heads=1, seqlen=5, kv_seqlen=n) for n in EDGES),
    *(Case(f"head-dim-{d}", batch=1, seqlen=34, head_dim=d, mask=MASKS["causal"]) for d in (1, 3, 8, 24, 64, 80, 96, 128)),
    Case("head-dim-256", batch=1, heads=1, seqlen=34, head_dim=256),
    Case("head-dim-512", batch=1, heads=1, seqlen=20, head_dim=512),
    Case("value-dim-smaller", head_dim=24, head_dim_v=10, mask=MASKS["causal"]),
    Case("value-dim-tiny", head_dim=64, head_dim_v=10, mask=MASKS["causal"]),
    Case("value-dim-smaller-bf16", head_dim=24, head_dim_v=12, mask=MASKS["causal"], dtype=torch.bfloat16),
    Case("value-dim-larger", head_dim=16, head_dim_v=40),
    Case("gqa", heads=6, kv_heads=2, mask=MASKS["causal"]),
    Case("mqa", heads=4, kv_heads=1, mask=MASKS["blocks-heads"]),
    Case("gqa-selected", heads=6, kv_heads=2, mask=lambda s, g: tw.selected(_lists(s, 16, g, (s[0], 2)), block=16, per=16)),
    Case("gqa-bf16", heads=4, kv_heads=2, dtype=torch.bfloat16, head_dim=64, mask=MASKS["causal-window"]),
    Case("decode", heads=4, kv_heads=2, seqlen=1, kv_seqlen=150, mask=MASKS["causal"]),
    Case("decode-few", heads=4, kv_heads=2, seqlen=3, kv_seqlen=150, mask=MASKS["key-padding"], dtype=torch.bfloat16),
    Case("bshd", layout="bshd", heads=4, kv_heads=2, mask=MASKS["causal"]),
    *(
        Case(f"bias-{''.join('x1'[side == 1] for side in sides)}", bias=sides, mask=mask)
        for sides, mask in BIASES
    ),
    Case("bias-gqa-bf16", heads=4, kv_heads=2, dtype=torch.bfloat16, bias=(1, -1, -1, -1)),
    Case("alibi", alibi=1, heads=4, mask=MASKS["causal"]),
    Case("alibi-batch-cross", alibi=2, kv_seqlen=45),
    Case("softcap", softcap=2.0, mask=MASKS["causal"]),
    Case("softcap-bias", softcap=3.0, bias=(1, -1, -1, -1)),
    Case("sinks", sinks=True, mask=MASKS["causal"], lse_gradient=True),
    Case("sinks-empty-rows", sinks=True, mask=MASKS["key-padding"], lse_gradient=True),
    Case("sinks-bf16", sinks=True, dtype=torch.bfloat16),
    Case("dropout", dropout_p=0.3, lse_gradient=True),
    Case("dropout-gqa-causal", dropout_p=0.5, heads=4, kv_heads=2, mask=MASKS["causal"]),
    Case("scale", scale=0.7, mask=MASKS["causal"]),
    Case("scale-negative", scale=-0.3),
    Case("lse-gradient", lse_gradient=True, mask=MASKS["key-padding"]),
    Case("huge-logits", magnitude=1e4, mask=MASKS["causal"]),
    Case("huge-logits-bf16", magnitude=1e4, dtype=torch.bfloat16),
    Case("deterministic", deterministic=True, heads=4, kv_heads=2, mask=MASKS["causal"]),
    Case("compensated", precision="compensated", seqlen=150, mask=MASKS["causal"]),
    Case("compensated-float64", precision="compensated", dtype=torch.float64, seqlen=150, mask=MASKS["causal"]),
    Case("tf32", precision="tf32", mask=MASKS["causal"]),
    *(
        Case(f"double-{str(t)[6:]}", precision="double", dtype=t, seqlen=150, mask=MASKS["causal"], lse_gradient=True)
        for t in DTYPES
    ),
    Case("double-decode", precision="double", heads=4, kv_heads=2, seqlen=1, kv_seqlen=150, head_dim=64),
    Case("double-decode-single", precision="double", dtype=torch.bfloat16, seqlen=1, kv_seqlen=300, head_dim=32),
    Case("double-alibi", precision="double", alibi=1, heads=4, dtype=torch.float16, mask=MASKS["causal"]),
    Case("double-huge-logits", precision="double", magnitude=1e4, mask=MASKS["causal"]),
    Case("double-blocks", precision="double", heads=4, kv_heads=1, mask=MASKS["blocks-heads"], dtype=torch.bfloat16),
    Case(
        "double-varlen", precision="double", lengths=((21, 0, 50), (33, 4, 50)), heads=4, kv_heads=2, mask=MASKS["causal"],
        bias=(1, -1, -1, -1), sinks=True, softcap=5.0, dropout_p=0.2, dtype=torch.bfloat16,
    ),
    Case(
        "double-everything", precision="double", heads=4, kv_heads=2, head_dim=24, head_dim_v=40, seqlen=45, kv_seqlen=77,
        mask=MASKS["prefix-lm"], bias=(1, -1, -1, -1), sinks=True, softcap=4.0, dropout_p=0.25, scale=0.4, layout="bshd",
        lse_gradient=True,
    ),
    Case("varlen", lengths=((5, 33, 1, 64), (5, 33, 1, 64)), mask=MASKS["causal"]),
    Case("varlen-cross", lengths=((7, 0, 40, 3), (50, 4, 0, 3)), heads=4, kv_heads=2, mask=MASKS["causal"], lse_gradient=True),
    Case("varlen-window", lengths=((70, 20), (70, 20)), mask=MASKS["window"], dtype=torch.bfloat16),
    Case("varlen-padding", lengths=((9, 30), (44, 60)), mask=lambda s, g: tw.key_padding(torch.tensor([20, 50]))),
    Case("varlen-documents", lengths=((40, 30), (40, 30)), mask=lambda s, g: tw.causal() & tw.documents(_ids(s[3], 1, g)[0])),
    Case("varlen-blocks", lengths=((9, 0, 30), (44, 4, 60)), mask=lambda s, g: tw.blocks(_table((3, 2, 30, 60), 8, g), 8)),
    Case(
        "varlen-selected", lengths=((9, 0, 30), (44, 4, 60)), heads=4, kv_heads=2,
        mask=lambda s, g: tw.causal() | tw.selected(_lists((3, 4, 30, 1), 8, g, (3, 2)), block=8, per=16),
    ),
    Case("varlen-offsets", lengths=((9, 30), (44, 60)), mask=lambda s, g: tw.causal(offset=torch.tensor([3, 17]))),
    Case(
        "varlen-everything", lengths=((21, 50), (33, 50)), heads=4, kv_heads=2, mask=MASKS["causal"], bias=(1, -1, -1, -1),
        sinks=True, softcap=5.0, dropout_p=0.2,
    ),
    Case("varlen-alibi", lengths=((21, 50), (33, 50)), alibi=2, mask=MASKS["causal"]),
    Case(
        "everything", heads=4, kv_heads=2, head_dim=24, head_dim_v=40, seqlen=45, kv_seqlen=77, mask=MASKS["prefix-lm"],
        bias=(1, -1, -1, -1), sinks=True, softcap=4.0, dropout_p=0.25, scale=0.4, layout="bshd", lse_gradient=True,
    ),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
