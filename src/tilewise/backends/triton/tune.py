"""On-line tuning, off unless TILEWISE_AUTOTUNE=1: a call of a new kind tries the best tiles and keeps the fastest.

Winners lie on disk, one file for each kind of call, and are believed only for the same device and the same triton. The plan asks
for them, so that what is explained is what runs. Free of torch and triton; whoever measures brings the timer.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.errors import KernelError, PlanError
from tilewise.hardware.cache import cache_root, load_json, store_json
from tilewise.hardware.spec import DeviceSpec
from tilewise.hardware.timers import median_seconds
from tilewise.model.grid import bucket
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.backends.gpu.record import Launch

VARIABLE = "TILEWISE_AUTOTUNE"
CANDIDATES = 8
SAMPLES = 5
SIZES = ("block_q", "block_k", "stages", "warps")


class Winner(NamedTuple):
    """The fastest of the tiles that were tried."""

    tile: TilePlan
    seconds: float
    tried: int
    date: str

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:.3g} ms, the fastest of {self.tried} tiles, {self.date} ({VARIABLE}=1)"


_winners: dict[str, Winner] = {}


def tuning() -> bool:
    """Was it asked for?"""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def kind_of(problem: Problem, pass_: str, spec: DeviceSpec) -> dict[str, Any]:
    """What a winner holds for. Lengths are rounded, so that a growing sequence is not tuned at every step."""
    return {
        "device": spec.name,
        "arch": spec.arch,
        "triton": _triton(),
        "pass": pass_,
        "dtype": problem.dtype,
        "precision": problem.precision,
        "dims": [problem.head_dim, problem.head_dim_v],
        "heads": [problem.batch * problem.heads, problem.group],
        "lengths": [bucket(problem.seqlen_q), bucket(problem.seqlen_k)],
        "mask": [problem.program.structure, *problem.program.ints],
        "features": [
            problem.bias is not None,
            problem.alibi,
            problem.softcap > 0,
            problem.dropout_p > 0,
            problem.varlen,
        ],
    }


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def place_of(kind: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:24]
    return cache_root() / "tiles" / f"{name}.json"


def winner(problem: Problem, pass_: str, spec: DeviceSpec) -> Winner | None:
    """What was measured for such a call on that device; None if nothing was."""
    kind = kind_of(problem, pass_, spec)
    path = place_of(kind)
    known = _winners.get(str(path)) or _stored(path, kind)
    if known is not None:
        _winners[str(path)] = known
    return known


def measure(
    problem: Problem,
    pass_: str,
    spec: DeviceSpec,
    candidates: Iterable[TilePlan],
    seconds: Callable[[TilePlan], float],
) -> Winner:
    """The fastest candidate by `seconds`, which is infinite for one that cannot run; kept from now on."""
    times = {tile: seconds(tile) for tile in candidates}
    best = min(times, key=times.__getitem__)
    kind = kind_of(problem, pass_, spec)
    path = place_of(kind)
    found = Winner(best, times[best], len(times), date.today().isoformat())
    sizes = {name: getattr(best, name) for name in SIZES}
    store_json(path, kind, {"tile": sizes, "seconds": found.seconds, "tried": found.tried, "date": found.date})
    _winners[str(path)] = found
    return found


def _stored(path: Path, kind: dict[str, Any]) -> Winner | None:
    payload = load_json(path, kind)
    try:
        if payload is None:
            return None
        tile = TilePlan(**payload["tile"], pass_=kind["pass"])
        return Winner(tile, float(payload["seconds"]), int(payload["tried"]), str(payload["date"]))
    except (KeyError, TypeError, ValueError, PlanError):
        return None


def seconds_of(launch: Launch) -> float:
    """Median time of a launch on the device, whose results are the same each time; infinite if it does not run there."""
    try:
        return median_seconds(launch.run, "cuda", SAMPLES)[0]
    except KernelError:
        return float("inf")
