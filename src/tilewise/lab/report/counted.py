"""The program that Nsight Compute watches: one forward and one backward, and a note of the tiles they ran with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tilewise import dispatch
from tilewise.backends import plans
from tilewise.backends.base import BackwardInputs
from tilewise.diagnostics.measured import random_inputs
from tilewise.hardware import DeviceSpec, probe_gpu
from tilewise.lab.report.counters import TrafficCase
from tilewise.model import TilePlan
from tilewise.problem import Problem


def tiles_of(problem: Problem, forward: str, backward: str, spec: DeviceSpec) -> dict[str, TilePlan]:
    """The tile of each pass, as the plans of the backends that ran have it."""
    ahead = {pass_: tile for pass_, tile in plans.tiles(forward, problem, spec).items() if not pass_.startswith("backward")}
    back = {pass_: tile for pass_, tile in plans.tiles(backward, problem, spec).items() if pass_.startswith("backward")}
    return ahead | back


def main(case: TrafficCase, note: Path) -> None:
    problem = case.problem()
    inputs = random_inputs(problem)
    forward = dispatch.select(problem, inputs, case.backend).backend
    serves = case.backend != "auto" and dispatch.judge(case.backend, problem, inputs, backward=True).ok
    backward = dispatch.select(problem, inputs, case.backend if serves else "auto", backward=True).backend
    out, lse = forward.forward(problem, inputs)
    backward.backward(problem, inputs, BackwardInputs(out, lse, torch.ones_like(out)))
    torch.cuda.synchronize()
    spec = probe_gpu(inputs.q.device.index or 0)
    assert spec is not None
    tiles = tiles_of(problem, forward.name, backward.name, spec)
    chosen = {"forward": forward.name, "backward": backward.name}
    note.write_text(json.dumps({"backends": chosen, "tiles": {name: tile.to_dict() for name, tile in tiles.items()}}))


if __name__ == "__main__":
    main(TrafficCase(**json.loads(sys.argv[1])), Path(sys.argv[2]))
