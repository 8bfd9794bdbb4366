"""The page's picture of context parallelism: which rank computes which tile, when, and what other schedules would send."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.distributed import ContextPlan, compare, plan
from tilewise.distributed.timeline import events
from tilewise.lab.report.figures import HEADS, MASKS, classes, make_mask
from tilewise.problem import Problem

LENGTH, DIM, RANKS, DEVICE = 32768, 128, 8, "h200"
CELLS = 64
"""Tiles of a side of the picture."""
NOBODY = -1


def parallel(masks: tuple[str, ...] = MASKS) -> dict[str, Any]:
    """By mask: the picture of the plan, its forward pass in time, and all schedules; and what they are of."""
    found = {}
    for mask in masks:
        problem = Problem.of(heads=HEADS, head_dim=DIM, seqlen=LENGTH, mask=make_mask(mask, LENGTH))
        # ranks that share heads would all compute every tile: the picture is that of tokens alone
        rows, own = compare(problem, RANKS, DEVICE), plan(problem, ranks=RANKS, device=DEVICE, heads=1)
        found[mask] = {
            "tiles": owners(own, classes(LENGTH, mask, LENGTH // CELLS, LENGTH // CELLS)).tolist(),
            "events": [[e.rank, e.kind, e.stage, e.start, e.end] for e in events(own.predict())],
            "schedules": [row.to_dict() for row in rows],
        }
    return {"ranks": RANKS, "length": LENGTH, "device": DEVICE, "masks": found}


def owners(made: ContextPlan, seen: Any) -> Any:
    """[CELLS, CELLS]: the rank that computes most of each tile, NOBODY where the mask leaves the tile out."""
    edges = np.arange(CELLS + 1) * (LENGTH // CELLS)
    cells, most = np.full((CELLS, CELLS), NOBODY), np.zeros((CELLS, CELLS))
    for stage in made.stages:
        for work in stage.works:
            sides = (np.minimum(c.end, edges[1:]) - np.maximum(c.start, edges[:-1]) for c in (work.q, work.k))
            area = np.outer(*(side.clip(0) for side in sides))
            cells[area > most] = work.rank
            most = np.maximum(area, most)
    return np.where(np.asarray(seen) > 0, cells, NOBODY)
