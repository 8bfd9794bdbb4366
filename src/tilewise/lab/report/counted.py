"""The program that Nsight Compute watches: forwards and backwards, and a note of the tiles they ran with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tilewise import dispatch
from tilewise.backends import plans
from tilewise.backends.base import BackwardInputs
from tilewise.diagnostics.measured import random_inputs
from tilewise.hardware import DeviceSpec, probe_gpu
from tilewise.lab.report.counters import RUNS, TrafficCase
from tilewise.model import TilePlan
from tilewise.problem import Problem


def tiles_of(problem: Problem, forward: str, backward: str, spec: DeviceSpec) -> dict[str, TilePlan]:
    """The tile of each pass, as the plans of the backends that ran have it."""
    ahead = {pass_: tile for pass_, tile in plans.tiles(forward, problem, spec).items() if not pass_.startswith("backward")}
    back = {pass_: tile for pass_, tile in plans.tiles(backward, problem, spec).items() if pass_.startswith("backward")}
    return ahead | back


def run(case: TrafficCase) -> dict[str, Any]:
    """A case, run several times: who served it, with which tiles."""
    problem = case.problem()
    inputs = random_inputs(problem)
    spec = probe_gpu(inputs.q.device.index or 0)
    assert spec is not None
    forward = dispatch.select(problem, inputs, case.backend).backend
    serves = case.backend != "auto" and dispatch.judge(case.backend, problem, inputs, backward=True).ok
    backward = dispatch.select(problem, inputs, case.backend if serves else "auto", backward=True).backend
    for _ in range(RUNS):
        out, lse = forward.forward(problem, inputs)
        backward.backward(problem, inputs, BackwardInputs(out, lse, torch.ones_like(out)))
        torch.cuda.synchronize()
    tiles = tiles_of(problem, forward.name, backward.name, spec)
    served = {"forward": forward.name, "backward": backward.name}
    return {"backends": served, "tiles": {name: tile.to_dict() for name, tile in tiles.items()}}


def main(cases: list[TrafficCase], note: Path) -> None:
    note.write_text(json.dumps([run(case) for case in cases]))


if __name__ == "__main__":
    main([TrafficCase(**case) for case in json.loads(sys.argv[1])], Path(sys.argv[2]))
