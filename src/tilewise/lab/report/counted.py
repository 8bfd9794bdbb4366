"""The program that Nsight Compute watches: one forward and one backward, and a note of the tiles they ran with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tilewise import dispatch
from tilewise.backends.base import BackwardInputs
from tilewise.diagnostics.measured import random_inputs
from tilewise.lab.report.counters import TrafficCase
from tilewise.model import TilePlan
from tilewise.problem import Problem


def tiles_of(problem: Problem, forward: str, backward: str, device: torch.device) -> dict[str, TilePlan]:
    """The tile of each pass, as the backends choose it."""
    from tilewise.backends import plans
    from tilewise.backends.triton.run import spec_of

    served = plans.tiles("triton", problem, spec_of(device))
    tiles = {pass_: served[pass_] for pass_ in ("forward", "backward_dkdv", "backward_dq")}
    if forward == "hopper":
        from tilewise.backends.hopper.plan import make_plan

        config = make_plan(problem, 1, lambda *_: None).config
        tiles["forward"] = TilePlan(config.BLOCK_M, config.BLOCK_N, config.KV_STAGES, 4 * (config.WARPGROUPS + 1))
    if backward == "hopper":
        from tilewise.backends.hopper.backward.config import KEYS, widths

        keys = KEYS[widths(problem.head_dim, problem.head_dim_v)]
        tiles["backward_fused"] = TilePlan(keys.BLOCK_M, keys.BLOCK_N, pass_="backward_dkdv")
    if backward != "triton":
        del tiles["backward_dkdv"], tiles["backward_dq"]
    return tiles


def main(case: TrafficCase, note: Path) -> None:
    problem = case.problem()
    inputs = random_inputs(problem)
    forward = dispatch.select(problem, inputs, case.backend).backend
    serves = case.backend != "auto" and dispatch.judge(case.backend, problem, inputs, backward=True).ok
    backward = dispatch.select(problem, inputs, case.backend if serves else "auto", backward=True).backend
    out, lse = forward.forward(problem, inputs)
    backward.backward(problem, inputs, BackwardInputs(out, lse, torch.ones_like(out)))
    torch.cuda.synchronize()
    tiles = tiles_of(problem, forward.name, backward.name, inputs.q.device)
    chosen = {"forward": forward.name, "backward": backward.name}
    note.write_text(json.dumps({"backends": chosen, "tiles": {name: tile.to_dict() for name, tile in tiles.items()}}))


if __name__ == "__main__":
    main(TrafficCase(**json.loads(sys.argv[1])), Path(sys.argv[2]))
