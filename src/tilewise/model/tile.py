"""TilePlan: the sizes one kernel runs with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tilewise.errors import PlanError

PASSES = (
    *("forward", "decode", "merge", "backward", "backward_dkdv", "backward_dq", "backward_dbias"),
    *("backward_preprocess", "backward_postprocess"),
)


@dataclass(frozen=True)
class TilePlan:
    """A kernel's tile: `block_q` query rows against `block_k` keys.

    `stages` K/V tiles (Q and dO tiles in `backward_dkdv`) are in flight at once, `warps` warps share a tile, and the
    keys are cut into `splits` parts that are merged afterwards. With `pack_gqa` the rows of a tile are the query
    heads of one key head (times the queries), so that few queries still fill it.
    """

    block_q: int
    block_k: int
    stages: int = 2
    warps: int = 4
    splits: int = 1
    pack_gqa: bool = False
    pass_: str = "forward"
    source: str = "model"
    """`model`, `tuned` (the table of measured overrides) or `user`."""
    kernel: str = ""
    register_tile: tuple[int, int] | None = None
    heads: int = 1
    outer: str = "queries"
    on_chip: tuple[tuple[str, int], ...] = ()
    registers: int = 0
    resident: int = 0
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.pass_ not in PASSES:
            raise PlanError(f"pass: got {self.pass_!r}, need one of {', '.join(PASSES)}")
        for name in ("block_q", "block_k", "stages", "warps", "splits"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise PlanError(f"{name}: got {value!r}, need an integer of at least 1")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.block_q}×{self.block_k}"


def refusal(name: str, pass_: str, asked: tuple[int, int], choices: list[TilePlan], why: str) -> str:
    return f"tile: {name} has no {pass_} tile {asked[0]}×{asked[1]}: {why}; it has {', '.join(map(str, choices))}"
