"""A case is data: one call, against whom it is measured, and the ratio it must reach. Checks and compilers read it too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise import masks
from tilewise.errors import ArgumentError
from tilewise.masks import Binding, Lowered, Mask, MaskShape
from tilewise.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.api.names import Layout
    from tilewise.backends.base import Inputs


OURS = "tilewise"
PASSES = {"forward": "fwd", "training": "fwd+bwd", "backward": "bwd"}
"""What is timed, and its short name; `backward` has the forward outside the clock."""
SEED = 2026
"""Of dropout."""
OF_PROBLEM = (
    *("heads", "kv_heads", "kv_seqlen", "head_dim", "head_dim_v", "dtype", "device"),
    *("scale", "softcap", "alibi", "sinks", "dropout_p", "deterministic"),
)
"""Fields of a case that a problem has by the same name."""


@dataclass(frozen=True)
class Cache:
    """Keys and values of a case that lie in a cache, and what `attention_cached` is asked for. The case's `seqlen` are queries of
    a sequence, `kv_seqlen` the tokens it holds."""

    page: int = 16  # tokens of a page; 0: a row of memory for each sequence
    stored: str = ""  # int8 or float8_e4m3fn, with scales; "": the case's dtype
    in_order: bool = False  # pages follow each other; else they lie at random places
    heads_first: bool = False  # in memory (page, head, token), else (page, token, head)
    mixed: bool = False  # sequences hold from a sixteenth of `kv_seqlen` to all of it
    shared: int = 0  # leading tokens that all sequences share
    plan: bool = False  # with `plan_cached`: what is shared is read once
    new: bool = False  # the last tokens are written by the call, with rotary position embedding
    invariant: bool = False
    graph: bool = False  # on a GPU in a CUDA graph: what a call costs the host is not timed

    @property
    def words(self) -> list[str]:
        named = {f"pages of {self.page}": self.page, self.stored: self.stored, "in order": self.in_order}
        named |= {"heads first": self.heads_first, "mixed lengths": self.mixed, f"{self.shared} shared": self.shared}
        named |= {"plan": self.plan, "append and rotary": self.new, "invariant": self.invariant, "graph": self.graph}
        return ["cache", *(name for name, given in named.items() if given)]


class Tensors(NamedTuple):
    """The inputs of a case, in the order of its layout, the gradient that comes in from above, and what its features read."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    cu: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """One call. `floor` and `aim` are ratios to the fastest of `against`, in one interleaved run; with `accurate` its errors
    must not be larger than that contender's either. `least` has floors beside contenders one by one, `rate` is one of bytes of
    K and V read a second."""

    name: str
    heads: int = 8
    seqlen: int = 1024
    head_dim: int = 64
    batch: int = 1
    kv_heads: int | None = None
    kv_seqlen: int | None = None
    head_dim_v: int | None = None
    dtype: str = "float32"
    mask: str = "full"
    layout: Layout = "bhsd"
    passes: str = "forward"
    device: str = "cpu"
    threads: int | None = None
    against: tuple[str, ...] = ("sdpa",)
    floor: float | None = None
    aim: float | None = None
    accurate: bool = False
    group: str = ""  # cases of a group have a geometric mean
    backend: str = "auto"  # whose speed plain `tilewise` stands for
    data: str = ""  # a mask of tensors, of DATA, that must allow a pair too
    lengths: tuple[int, ...] = ()  # packed: the tokens of each sequence, in the place of batch and seqlen
    bias: tuple[int, int, int, int] | None = None
    bias_gradient: bool = False
    alibi: bool = False
    sinks: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0
    scale: float | None = None
    deterministic: bool = False
    tile: tuple[tuple[str, int, int], ...] = ()  # of a pass: its queries and keys; others are the planner's
    cache: Cache | None = None
    least: tuple[tuple[str, float], ...] = ()
    rate: float | None = None

    @property
    def rivals(self) -> tuple[str, ...]:
        """Whom a promise of the case names."""
        return (*self.against, *(name for name, _ in self.least))

    @property
    def trains(self) -> bool:
        return self.passes != "forward"

    @property
    def features(self) -> list[str]:
        """What a plain function of q, k, v and a mask does not know."""
        named: dict[str, Any] = {"bias": self.bias, "ALiBi": self.alibi, "sinks": self.sinks, "softcap": self.softcap}
        named |= {"dropout": self.dropout_p, "packed sequences": self.lengths, self.data: self.data, "scale": self.scale}
        return [*(self.cache.words if self.cache else ()), *(name for name, given in named.items() if given)]

    @property
    def shape(self) -> MaskShape:
        batch, queries = (len(self.lengths), sum(self.lengths)) if self.lengths else (self.batch, self.seqlen)
        return MaskShape(batch, self.heads, queries, self.kv_seqlen or queries)

    def data_mask(self) -> tuple[str, tuple[Any, ...]] | None:
        """A function of `tilewise.masks` and its arguments."""
        if not self.data:
            return None
        import torch

        return DATA[self.data](self.shape, partial(torch.arange, device=self.device))

    def whole_mask(self) -> Mask:
        mask = masks.parse(self.mask)
        if data := self.data_mask():
            mask = mask & getattr(masks, data[0])(*data[1])
        return mask

    def problem(self) -> Problem:
        """The case without its tensors; raises for sizes, dtypes or masks that make no sense."""
        if self.passes not in PASSES:
            raise ArgumentError(f"passes: got {self.passes!r}, need one of {', '.join(PASSES)}")
        mask = self.whole_mask()
        if self.data:
            import torch

            binding = Binding(self.shape, bool(self.lengths), partial(torch.as_tensor, device=self.device))
            mask = Lowered(mask.lower(binding))
        return Problem.of(
            **{name: getattr(self, name) for name in OF_PROBLEM},
            batch=self.shape.batch,
            seqlen=self.shape.seqlen_q,
            mask=mask,
            bias=tuple(self.bias) if self.bias else None,
            varlen=bool(self.lengths),
            needs_grad=self.trains,
            needs_lse=False,
            tile={pass_: (m, n) for pass_, m, n in self.tile},
        )

    def tensors(self, seed: int = 0) -> Tensors:
        """Unit-normal inputs: the same on every machine for the same seed."""
        import torch

        p = self.problem()

        def shape(heads: int, length: int, dim: int) -> tuple[int, ...]:
            if p.varlen:
                return (length, heads, dim)
            return (p.batch, heads, length, dim) if self.layout == "bhsd" else (p.batch, length, heads, dim)

        shapes: list[tuple[int, ...]] = [
            shape(p.heads, p.seqlen_q, p.head_dim),
            shape(p.kv_heads, p.seqlen_k, p.head_dim),
            shape(p.kv_heads, p.seqlen_k, p.head_dim_v),
            shape(p.heads, p.seqlen_q, p.head_dim_v),
            tuple(self.bias or (0,)),
            (p.heads if self.sinks else 0,),
        ]
        drawn = _normal(tuple(math.prod(sides) for sides in shapes), p.dtype, self.device, seed)
        q, k, v, dout, bias, sinks = (x.view(sides) for x, sides in zip(drawn, shapes, strict=True))
        slopes = 2.0 ** (-8.0 * torch.arange(1, p.heads + 1, device=self.device) / p.heads)
        cu = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)
        return Tensors(
            *(q, k, v, dout),
            bias=bias.detach().requires_grad_(self.bias_gradient) if self.bias else None,
            slopes=slopes if self.alibi else None,
            sinks=sinks.float() if self.sinks else None,
            cu=cu if p.varlen else None,
        )

    def inputs(self, tensors: Tensors) -> Inputs:
        """As a backend gets them."""
        import torch

        from tilewise.backends.base import Inputs

        return Inputs(
            *(self.rank4(tensors.q), self.rank4(tensors.k), self.rank4(tensors.v)),
            bias=None if tensors.bias is None else tensors.bias.detach(),
            alibi=None if tensors.slopes is None else tensors.slopes[None],
            sinks=tensors.sinks,
            seed=torch.tensor(SEED) if self.dropout_p else None,
            cu_q=tensors.cu,
            cu_k=tensors.cu,
        )

    def rank4(self, x: Tensor) -> Tensor:
        """A tensor of the case's layout as (B, H, S, D), without its history; a packed batch as (1, H, T, D)."""
        if self.lengths:
            return x.detach().transpose(0, 1)[None]
        return x.detach().transpose(1, 2) if self.layout == "bshd" else x.detach()

    def options(self, tensors: Tensors) -> dict[str, Any]:
        """The options of the call in plain values and tensors, for `child.tilewise_call`."""
        keywords = {name: getattr(self, name) for name in ("scale", "softcap", "dropout_p", "deterministic")}
        keywords |= {"tile": tuple(map(tuple, self.tile)) or None}
        keywords |= {"bias": tensors.bias, "sinks": tensors.sinks, "seed": SEED if self.dropout_p else None}
        return {
            **{"mask": self.mask, "data": self.data_mask(), "layout": self.layout, "backend": self.backend},
            **{"slopes": tensors.slopes, "cu": tensors.cu},
            "keywords": {name: value for name, value in keywords.items() if value is not None and value is not False},
        }

    def words(self) -> str:
        """The case in one line for a person."""
        p = replace(self, device="cpu").problem()  # a mask of tensors asks for no GPU
        heads = f"{p.heads}/{p.kv_heads}" if p.group > 1 else str(p.heads)
        lengths = f"{p.seqlen_q}" if p.seqlen_q == p.seqlen_k else f"{p.seqlen_q}→{p.seqlen_k}"
        dims = f"{p.head_dim}" if p.head_dim == p.head_dim_v else f"{p.head_dim}/{p.head_dim_v}"
        parts = [f"{p.batch}×{heads}×{lengths}×{dims}", p.dtype]
        parts += [self.mask] if self.mask != "full" else []
        parts += [self.layout] if self.layout != "bhsd" else []
        parts += [f"{pass_} tile {m}×{n}" for pass_, m, n in self.tile]
        return " ".join([*parts, *self.features, PASSES[self.passes]])

    def scores_bytes(self, seqlen: int) -> int:
        """All scores at that length, once: what standard attention stores at least."""
        problem = self.problem()
        return problem.batch * problem.heads * seqlen * seqlen * problem.itemsize

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _documents(shape: MaskShape, arange: Callable[[int], Tensor]) -> tuple[str, tuple[Any, ...]]:
    """Three documents and a half in every sequence."""
    ids = arange(shape.seqlen_q) // max(1, shape.seqlen_q * 2 // 7)
    return "documents", (ids.expand(shape.batch, -1),)


def _padding(shape: MaskShape, arange: Callable[[int], Tensor]) -> tuple[str, tuple[Any, ...]]:
    """Every second sequence is padding alone."""
    return "key_padding", ((1 - arange(shape.batch) % 2) * (shape.seqlen_k * 7 // 13),)


def _blocks(shape: MaskShape, arange: Callable[[int], Tensor]) -> tuple[str, tuple[Any, ...]]:
    i, j = arange(-(-shape.seqlen_q // 32))[:, None], arange(-(-shape.seqlen_k // 32))[None, :]
    return "blocks", (((i - j).abs() % 3 == 0)[None, None], 32)


def _dense(shape: MaskShape, arange: Callable[[int], Tensor]) -> tuple[str, tuple[Any, ...]]:
    i, j = arange(shape.seqlen_q)[:, None], arange(shape.seqlen_k)[None, :]
    return "dense", ((i * j % 3 == 0)[None, None],)


def _offsets(shape: MaskShape, arange: Callable[[int], Tensor]) -> tuple[str, tuple[Any, ...]]:
    return "causal", ("bottom_right", arange(shape.batch) + 1)


def long_tailed(tokens: int, least: int = 128, most: int = 2047) -> tuple[int, ...]:
    """Lengths of documents that fill so many tokens: drawn evenly in their logarithm, the same on every machine."""
    numbers, lengths = Random(2026), list[int]()
    while sum(lengths) < tokens:
        drawn = int(least * (most / least) ** numbers.random())
        lengths.append(min(drawn, tokens - sum(lengths)))
    return tuple(lengths)


def _packing(shape: MaskShape, arange: Callable[[int], Tensor]) -> tuple[str, tuple[Any, ...]]:
    """Documents of 128 to 2,047 tokens, as a packed pretraining batch has them."""
    token = arange(shape.seqlen_q)
    ends = token.new_tensor([*accumulate(long_tailed(shape.seqlen_q))])
    return "documents", ((token[:, None] >= ends).sum(1)[None].int(),)


def _some(shape: MaskShape, arange: Callable[[int], Tensor], tile: int, every: int) -> Tensor:
    """One in `every` of the blocks of `tile` positions, and all on the diagonal."""
    i, j = arange(-(-shape.seqlen_q // tile))[:, None], arange(-(-shape.seqlen_k // tile))[None, :]
    return ((i * 7919 + j * 104729) % (every * 31) < 31) | (i == j)


def _quarter(shape: MaskShape, arange: Callable[[int], Tensor]) -> tuple[str, tuple[Any, ...]]:
    """A quarter of the blocks of 128."""
    return "blocks", (_some(shape, arange, 128, 4)[None, None], 128)


def _selected(shape: MaskShape, arange: Callable[[int], Tensor]) -> tuple[str, tuple[Any, ...]]:
    """16 blocks of 128 keys for each 128 queries, spread over the sequence, its own among them."""
    count = -(-shape.seqlen_k // 128)
    own = arange(-(-shape.seqlen_q // 128))[:, None]
    return "selected", (((own + arange(16) * max(1, count // 16)) % count)[None, None].int(), 128, 128)


def _half_dense(shape: MaskShape, arange: Callable[[int], Tensor]) -> tuple[str, tuple[Any, ...]]:
    """Half of the tiles of 128 are empty, the others have holes."""
    i, j = arange(shape.seqlen_q)[:, None], arange(shape.seqlen_k)[None, :]
    some = _some(shape, arange, 128, 2)
    whole = some.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape.seqlen_q, : shape.seqlen_k]
    return "dense", ((whole & ((i + j) % 5 != 0))[None, None],)


DATA = {
    "documents": _documents,
    "padding": _padding,
    "blocks": _blocks,
    "dense": _dense,
    "offsets": _offsets,
    "packing": _packing,
    "quarter": _quarter,
    "selected": _selected,
    "half dense": _half_dense,
}


@lru_cache(maxsize=1)
def _normal(sizes: tuple[int, ...], dtype: str, device: str, seed: int) -> tuple[Tensor, ...]:
    """Unit-normal numbers; the last ones are kept, for the cases of a suite often differ in shape alone."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, generator=generator).to(device, getattr(torch, dtype)) for size in sizes)
