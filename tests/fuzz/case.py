"""A case of the fuzz: one call of attention as plain data. Its repr is Python that makes it again."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

Expression = tuple[Any, ...]
"""A mask: ("causal", …), ("not", x), ("and", x, y), …; `masks` has the list."""


@dataclass(frozen=True, repr=False)
class Case:
    """Everything a call depends on. Any change of a field gives a case again, which is what shrinking needs."""

    seed: int  # of the numbers in the tensors
    lengths: tuple[tuple[int, int], ...]  # (queries, keys) of each sequence; all the same unless packed
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 8
    head_dim_v: int = 8
    dtype: str = "float32"
    packed: bool = False
    layout: str = "bhsd"
    mask: Expression | None = None
    bias: tuple[str, str, str] | None = None  # (kind, full axes among "bhqk", dtype); `tensors` has the kinds
    alibi: tuple[int, str] | None = None  # (rank of the slopes, dtype)
    sinks: tuple[str, str] | None = None  # (kind, dtype)
    softcap: float = 0.0
    scale: float | None = None
    dropout: tuple[float, int] | None = None  # (p, seed)
    precision: str = "default"
    deterministic: bool | None = None
    wanted: str = "qkvbs"  # gradients of these, if there are such tensors; none: a call for inference
    lse: str = "grad"  # "no": not returned; "yes": returned; "grad": with a gradient of its own
    shift: float = 0.0  # added to every logit, through q and k
    sizes: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)  # of q, k, v, dout
    strides: tuple[tuple[str, str], ...] = ()  # (tensor, kind) for those that do not lie plainly; `layouts` has the kinds
    poison: float | None = None  # in keys, values, rows and biases that nobody may look at
    fresh: bool = False  # torch's fresh memory comes filled with NaN
    quiet: bool = True  # no gradient comes back to rows whose logits are lost in a huge bias
    threads: int = 1
    small_tiles: bool = False  # of the tiled backend

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def totals(self) -> tuple[int, int]:
        """Queries and keys of the tensors: of one sequence, or of all if they are packed."""
        if self.packed:
            return sum(m for m, _ in self.lengths), sum(n for _, n in self.lengths)
        return self.lengths[0] if self.lengths else (0, 0)

    @property
    def longest(self) -> tuple[int, int]:
        return max((m for m, _ in self.lengths), default=0), max((n for _, n in self.lengths), default=0)

    def strides_of(self, name: str) -> str:
        return dict(self.strides).get(name, "plain")

    def starts(self, side: int) -> list[int]:
        """Where each sequence begins in packed tensors: queries (0) or keys (1)."""
        found = [0]
        for pair in self.lengths:
            found.append(found[-1] + pair[side])
        return found

    def __repr__(self) -> str:
        shown = [f for f in fields(self) if f.name in ("seed", "lengths") or getattr(self, f.name) != f.default]
        words = ", ".join(f"{f.name}={_literal(getattr(self, f.name))}" for f in shown)
        return f"Case({words})"


def _literal(value: Any) -> str:
    return f'float("{value}")' if isinstance(value, float) and not abs(value) < float("inf") else repr(value)


def snippet(case: Case, backend: str, device: str) -> str:
    """What to paste into a Python that runs in the root of the repository, with src on its path."""
    return (
        f"from tests.fuzz.case import Case\nfrom tests.fuzz.judge import judge\n"
        f"print(judge({case!r}, {backend!r}, {device!r}))"
    )
