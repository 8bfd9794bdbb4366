"""TilePlan: the sizes one kernel runs with, what they take on the chip, and why they were chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from tilewise.errors import PlanError
from tilewise.problem import PASSES as PASSES

SOURCES = ("model", "table", "tuned", "user")
PLAIN = "torch"
"""The kernel of a tile that operations of torch compute: its tiles are tensors, nothing is kept on the chip by our doing."""
AS_FAST, RESOLUTION = "as fast", 0.1
"""What is said of predicted times that differ by less: the model does not tell them apart."""
SHOWN = 16
"""Tiles that a refusal names."""


class WorkOrder(NamedTuple):
    """Which work tiles the programs of a persistent kernel take, and how they go through what streams past them."""

    tiles: Any
    """int32 [rounds, programs]: numbers that count through each head's tiles, -1 for none."""
    from_last: bool = False
    """Do they count from a head's last tile?"""
    back: bool = False
    """Is the stream read from its last tile to its first?"""
    heads_inside: bool = False
    """Of each streamed tile all heads of a group one after the other, in every second round from the last tile to the first; else
    head by head from the first tile to the last."""


OrderOf = Callable[[Any, int], WorkOrder | None]


@dataclass(frozen=True)
class TilePlan:
    """A kernel's tile: `block_q` query rows against `block_k` keys.

    `stages` K/V tiles (Q and dO tiles where keys are held) are in flight at once, `warps` warps share a tile, and the keys are
    cut into `splits` parts that are merged afterwards. With `pack_gqa` the rows of a tile are the query heads of one key head
    (times the queries), so that few queries still fill it.
    """

    block_q: int
    block_k: int
    stages: int = 2
    warps: int = 4
    splits: int = 1
    pack_gqa: bool = False
    pass_: str = "forward"
    source: str = "model"
    """`model` (the least predicted time), `table` (the kernel has few tiles), `tuned` (measured exceptions) or `user`."""
    kernel: str = ""
    """The kernel's name in its backend."""
    register_tile: tuple[int, int] | None = None
    """On a CPU: query rows and keys whose scores are held in registers."""
    half_rows: int = 0
    """On a CPU: rows of half a register tile, which has steps of its own where it alone sees keys. 0: there are none."""
    heads: int = 1
    """Query heads of a task that share its K and V."""
    groups: int = 1
    """Such groups of heads in a task, each with K and V of its own."""
    outer: str = "queries"
    """Which side a block holds while the other streams past: `queries` or `keys`."""
    on_chip: tuple[tuple[str, int], ...] = ()
    """Bytes of each buffer of a block: in shared memory, or in the frame of a CPU's thread."""
    registers: int = 0
    """Registers of a thread; on a CPU vector registers of the inner loop. 0: not known."""
    resident: int = 0
    """Blocks that a unit holds at once. 0: not known."""
    persistent: bool = False
    """Do programs stay on their units, one each, and take work tiles in an order that keeps the tiles of a head together?"""
    order: OrderOf | None = field(default=None, compare=False, repr=False)
    """That order, of a problem on a device of so many units; None where the device decides it in the call."""
    reasons: tuple[str, ...] = ()
    fault: str = ""
    """Why it is taken only where nothing better fits: what the model does not describe, such as a compiler that would spill."""

    def __post_init__(self) -> None:
        if self.pass_ not in PASSES:
            raise PlanError(f"pass: got {self.pass_!r}, need one of {', '.join(PASSES)}")
        for name in ("block_q", "block_k", "stages", "warps", "splits", "heads", "groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise PlanError(f"{name}: got {value!r}, need an integer of at least 1")

    @property
    def sizes(self) -> tuple[int, int]:
        return self.block_q, self.block_k

    @property
    def holds_keys(self) -> bool:
        """Does a block hold keys, past which queries stream?"""
        return self.outer == "keys" or self.pass_ == "backward_dkdv"

    @property
    def sharing(self) -> int:
        """Query heads that share a task's K and V without sharing its rows."""
        return 1 if self.pack_gqa else self.heads

    @property
    def on_chip_bytes(self) -> int:
        return sum(size for _, size in self.on_chip)

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(replace(self, order=None))
        del fields["order"]
        return {**fields, "on_chip": dict(self.on_chip), "reasons": list(self.reasons)}

    def __str__(self) -> str:
        return f"{self.block_q}×{self.block_k}"


def refusal(backend: str, pass_: str, asked: tuple[int, int], has: Iterable[TilePlan], why: str = "") -> str:
    """The sentence with which a backend refuses a tile: what it has, and why not this one."""
    tiles = list(dict.fromkeys(f"{tile}" for tile in has))
    listed = ", ".join(tiles[:SHOWN]) + (f" and {len(tiles) - SHOWN} more" if len(tiles) > SHOWN else "")
    has_not = f"tile: {backend} has no {asked[0]}×{asked[1]} for {pass_}{f', {why}' if why else ''}"
    return f"{has_not}; it has {listed}" if tiles else f"{has_not}: it has no such kernel for this call"
