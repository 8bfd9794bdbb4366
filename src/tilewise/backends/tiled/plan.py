"""Which tiles plain torch visits. Any pair of sizes runs: a tile is a slice of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.backends.verdict import Verdict
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.hardware.spec import DeviceSpec

TILE_BYTES = 8 << 20
"""Scores of one tile over the whole batch; a few such tensors are alive at a time."""
LARGEST, SMALLEST = 512, 32
INVARIANT = True
"""Serves `Problem.invariant`."""
INVARIANT_BLOCKS = (64, 128)
"""Tiles whose borders must not move with the batch. Their products are sums in order, a torch operation for each step."""
SERVED = ("forward", "backward", "jvp", "double_backward")


def supports(problem: Problem, spec: DeviceSpec | None = None, *, backward: bool = False) -> Verdict:
    known = problem.device in ("cpu", "cuda")
    return Verdict.of(
        None if known else f"runs on cpu and cuda, not on {problem.device}",
        "float64 with precision='compensated' has no invariant=True" if problem.carries_errors and problem.invariant else None,
        *(
            f"tile: tiled has no kernel {name!r}, only {', '.join(SERVED)}"
            for name, *_ in problem.tile
            if name not in SERVED
        ),
    )


def declines(problem: Problem, spec: DeviceSpec | None = None, *, backward: bool = False) -> str | None:
    return None


def tiles(problem: Problem, spec: DeviceSpec | None = None) -> dict[str, TilePlan]:
    return {pass_: _tile(problem, pass_) for pass_ in ("forward", "backward")}


def derives(problem: Problem, spec: DeviceSpec | None = None, *, derivative: str) -> Verdict:
    return supports(problem, spec)


def derivative_tiles(problem: Problem, spec: DeviceSpec | None, derivative: str) -> dict[str, TilePlan]:
    return {derivative: _tile(problem, derivative)}


def choices(problem: Problem, spec: DeviceSpec | None, pass_: str) -> list[TilePlan]:
    """The planned tile, then the other powers of two; sizes in between run too."""
    planned = tiles(problem, spec).get(pass_)
    if planned is None:
        return []
    sides = [1 << n for n in range(4, LARGEST.bit_length())]
    return [planned, *(_plan(pass_, (m, n)) for m in sides for n in sides if (m, n) != planned.sizes)]


def _tile(problem: Problem, pass_: str) -> TilePlan:
    asked = problem.asked(pass_)
    if asked is not None:
        return _plan(pass_, asked, "user", "yours: any pair of sizes runs")
    if problem.invariant:
        return _plan(pass_, _blocks(problem), "model", "blocks of keys begin at the same positions in every call")
    kept = f"scores of one tile over {_batch(problem)} × {problem.heads} heads stay within {TILE_BYTES >> 20} MiB"
    return _plan(pass_, _blocks(problem), "model", kept)


def _blocks(problem: Problem) -> tuple[int, int]:
    """The largest tile, square or twice as wide as high, whose scores stay within TILE_BYTES."""
    if problem.invariant:
        return INVARIANT_BLOCKS
    block_q = block_k = LARGEST
    each = _batch(problem) * problem.heads * _itemsize(problem)
    while each * block_q * block_k > TILE_BYTES and block_q > SMALLEST:
        if block_q == block_k:
            block_q //= 2
        else:
            block_k //= 2
    return block_q, block_k


def _batch(problem: Problem) -> int:
    """Sequences computed at once: a packed batch, or one whose mask differs by sequence, is taken apart."""
    together = not problem.varlen and all(tensor.shape[0] <= 1 for tensor in problem.program.tensors)
    return problem.batch if together else 1


def _itemsize(problem: Problem) -> int:
    return 8 if problem.arithmetic == "float64" else 4


def _plan(pass_: str, sizes: tuple[int, int], source: str = "model", *reasons: str) -> TilePlan:
    """Tiles are torch tensors: nothing is on chip by our doing."""
    return TilePlan(*sizes, stages=1, warps=1, pass_=pass_, source=source, kernel="torch", reasons=reasons)
