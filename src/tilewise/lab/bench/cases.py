"""A case is data: what is measured, against whom, and the ratio it must reach."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.errors import ArgumentError
from tilewise.masks import parse
from tilewise.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.api.names import Layout


PASSES = {"forward": "fwd", "training": "fwd+bwd", "backward": "bwd"}
"""What is timed, and its short name; `backward` has the forward outside the clock."""


class Tensors(NamedTuple):
    """The inputs of a case, in the order of its layout, and the gradient that comes in from above."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True)
class Case:
    """One thing to measure. `floor` and `aim` are ratios to the fastest of `against`, in one interleaved run; with `accurate` its
    errors must not be larger than that contender's either."""

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

    @property
    def trains(self) -> bool:
        return self.passes != "forward"

    def problem(self) -> Problem:
        """The case without its tensors; raises for sizes, dtypes or masks that make no sense."""
        if self.passes not in PASSES:
            raise ArgumentError(f"passes: got {self.passes!r}, need one of {', '.join(PASSES)}")
        return Problem.of(
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            seqlen=self.seqlen,
            kv_seqlen=self.kv_seqlen,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            mask=parse(self.mask),
            device=self.device,
            needs_grad=self.trains,
            needs_lse=False,
        )

    def tensors(self, seed: int = 0) -> Tensors:
        """Unit-normal inputs: the same on every machine for the same seed."""
        p = self.problem()

        def shape(heads: int, length: int, dim: int) -> tuple[int, ...]:
            return (p.batch, heads, length, dim) if self.layout == "bhsd" else (p.batch, length, heads, dim)

        shapes = (
            shape(p.heads, p.seqlen_q, p.head_dim),
            shape(p.kv_heads, p.seqlen_k, p.head_dim),
            shape(p.kv_heads, p.seqlen_k, p.head_dim_v),
            shape(p.heads, p.seqlen_q, p.head_dim_v),
        )
        drawn = _normal(tuple(math.prod(sides) for sides in shapes), p.dtype, self.device, seed)
        return Tensors(*(x.view(sides) for x, sides in zip(drawn, shapes, strict=True)))

    def words(self) -> str:
        """The case in one line for a person."""
        problem = self.problem()
        heads = f"{problem.heads}/{problem.kv_heads}" if problem.group > 1 else str(problem.heads)
        lengths = (
            f"{problem.seqlen_q}" if problem.seqlen_q == problem.seqlen_k else f"{problem.seqlen_q}→{problem.seqlen_k}"
        )
        dims = (
            f"{problem.head_dim}"
            if problem.head_dim == problem.head_dim_v
            else f"{problem.head_dim}/{problem.head_dim_v}"
        )
        parts = [f"{problem.batch}×{heads}×{lengths}×{dims}", problem.dtype]
        parts += [self.mask] if self.mask != "full" else []
        parts += [self.layout] if self.layout != "bhsd" else []
        return " ".join([*parts, PASSES[self.passes]])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@lru_cache(maxsize=1)
def _normal(sizes: tuple[int, ...], dtype: str, device: str, seed: int) -> tuple[Tensor, ...]:
    """Unit-normal numbers; the last ones are kept, for the cases of a suite often differ in shape alone."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, generator=generator).to(device, getattr(torch, dtype)) for size in sizes)
