"""On-line tuning, off unless TILEWISE_AUTOTUNE=1: a call of a new kind tries the planner's best tiles and keeps the fastest.

Winners lie on disk, one file for each kind of call, and are believed only for the same device and the same triton.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewise.backends.gpu.record import Launch
from tilewise.errors import PlanError
from tilewise.hardware import DeviceSpec
from tilewise.hardware.cache import cache_root, load_json, store_json
from tilewise.hardware.timers import median_seconds
from tilewise.model import TilePlan
from tilewise.model.gpu import ranked
from tilewise.model.grid import bucket
from tilewise.problem import Problem

VARIABLE = "TILEWISE_AUTOTUNE"
CANDIDATES = 8
SAMPLES = 5

_winners: dict[str, TilePlan] = {}


def tuning() -> bool:
    """Was it asked for?"""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def kind_of(problem: Problem, pass_: str, spec: DeviceSpec) -> dict[str, Any]:
    """What a winner holds for. Lengths are rounded, so that a growing sequence is not tuned at every step."""
    return {
        "device": spec.name,
        "arch": spec.arch,
        "triton": importlib.metadata.version("triton"),
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


def place_of(kind: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:24]
    return cache_root() / "tiles" / f"{name}.json"


def best_tile(
    problem: Problem, pass_: str, spec: DeviceSpec, planned: TilePlan, seconds: Callable[[TilePlan], float]
) -> TilePlan:
    """The fastest of the planned tile and the model's next best by `seconds`, which is infinite for one that cannot run."""
    kind = kind_of(problem, pass_, spec)
    path = place_of(kind)
    known = _winners.get(str(path)) or _stored(path, kind)
    if known is None:
        times = {tile: seconds(tile) for tile in _candidates(problem, pass_, spec, planned)}
        known = min(times, key=times.__getitem__)
        store_json(path, kind, {"tile": known.to_dict(), "seconds": times[known], "tried": len(times)})
    _winners[str(path)] = known
    return known


def _candidates(problem: Problem, pass_: str, spec: DeviceSpec, planned: TilePlan) -> list[TilePlan]:
    try:
        ranking = [ranking.tile for ranking in ranked(problem, spec, pass_, kernels="triton") if not ranking.rejected]
    except PlanError:  # nothing fits by the model's count; the planned tile is the smallest
        ranking = []
    tiles = (replace(tile, source="tuned") for tile in (planned, *ranking[:CANDIDATES]))
    return list(dict.fromkeys(tiles))


def _stored(path: Path, kind: dict[str, Any]) -> TilePlan | None:
    payload = load_json(path, kind)
    try:
        return None if payload is None else TilePlan(**payload["tile"])
    except (KeyError, TypeError, PlanError):
        return None


def seconds_of(launch: Launch) -> float:
    """Median time of a launch on the device, whose results are the same each time; infinite if it does not fit there."""
    from triton.runtime.errors import OutOfResources

    try:
        return median_seconds(launch.run, "cuda", SAMPLES)[0]
    except OutOfResources:
        return float("inf")
