"""The walk over the tiles of a small problem, and what the online softmax does to one row on the way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewise.lab.report.figures import MASKS, make_mask
from tilewise.lab.simulator import simulate
from tilewise.lab.simulator.device import random_inputs
from tilewise.lab.simulator.softmax import Counts, RowState
from tilewise.masks import allowed
from tilewise.model import TilePlan
from tilewise.problem import Problem

LENGTH, DIM, TILE = 96, 16, 16
BANDS = ((32, 48), (64, 80), (80, 96))
"""One row is shown of each: the one whose maximum grows most often."""
SEED = 3
SHARP = 2.0
"""Q is scaled up by this, so that rescaling is seen."""


def walks() -> dict[str, dict[str, Any]]:
    """By mask and schedule: the tiles in order, bytes moved before the next, and each row's statistics at its key tiles."""
    table: dict[str, dict[str, Any]] = {}
    for mask in MASKS:
        problem = Problem.of(heads=1, head_dim=DIM, seqlen=LENGTH, dtype="float32", mask=make_mask(mask, LENGTH))
        inputs = random_inputs(problem, SEED)
        inputs["Q"] = inputs["Q"] * SHARP
        rows = {str(row): row_states(problem, inputs, row) for row in _telling(inputs)}
        for schedule in ("v1", "v2"):
            run = simulate(problem, TilePlan(TILE, TILE), schedule, inputs=inputs)
            steps = [[visit.i, visit.j, int(visit.kind)] for visit in run.walk]
            moved = [*(visit.moved for visit in run.walk[1:]), run.traffic.total]
            table[f"{mask}|{schedule}"] = {"steps": steps, "bytes": moved, "rows": rows}
    return table


def _telling(inputs: dict[str, Any]) -> list[int]:
    """Rows worth watching, one of each band."""
    problem = Problem.of(heads=1, head_dim=DIM, seqlen=LENGTH, dtype="float32")

    def grows(row: int) -> float:
        states = row_states(problem, inputs, row)
        return float(sum(state["alpha"] < 1 for state in states)) - float(states[-1]["alpha"])

    return [max(range(*band), key=grows) for band in BANDS]


def row_states(problem: Problem, inputs: dict[str, Any], row: int) -> list[dict[str, Any]]:
    """m, l, alpha and the first element of the output of one row, after each key tile it visits."""
    q, k, v = (inputs[name][0, 0] for name in "QKV")
    state, counts, states = RowState.empty(1, problem.head_dim_v), Counts(), []
    for start in range(0, problem.seqlen_k, TILE):
        span = (start, min(start + TILE, problem.seqlen_k))
        seen = allowed(problem.program, problem.shape, (row, row + 1), span, np.arange)
        visible = np.broadcast_to(True if seen is None else seen, (1, 1, 1, span[1] - span[0]))[0, 0]
        if not visible.any():
            continue
        s = np.where(visible, problem.scale * (q[row : row + 1] @ k[slice(*span)].T), -np.inf)  # [1, N]
        before = float(state.m[0])
        state.update(s, v[slice(*span)], counts)
        m = float(state.m[0])
        states.append(
            {
                "j": start // TILE,
                "scores": [None if x == -np.inf else round(float(x), 3) for x in s[0]],
                "tileMax": float(s.max()),
                "m": m,
                "alpha": math.exp(before - m) if math.isfinite(before) else 0.0,
                "l": float(state.l[0]),
                "o": float(state.acc[0, 0]),
                "out": float(state.acc[0, 0] / state.l[0]),
            }
        )
    return states
