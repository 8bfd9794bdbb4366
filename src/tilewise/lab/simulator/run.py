"""`simulate`: one schedule on one problem."""

from __future__ import annotations

from tilewise.errors import PlanError
from tilewise.lab.simulator import backward, exact, forward
from tilewise.lab.simulator.device import Run, Simulation, random_inputs, start
from tilewise.lab.simulator.memory import Array
from tilewise.lab.simulator.softmax import FORMS
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

SCHEDULES = ("standard", "standard3", "v1", "v2", "decode", "backward", "backward_fused")
_ONLINE = {"v1": forward.v1, "v2": forward.v2, "decode": forward.decode}
"""Schedules with an online softmax, which has two forms."""
_OUTPUTS = ("O", "LSE", "dQ", "dK", "dV")


def simulate(
    problem: Problem,
    tile: TilePlan,
    schedule: str = "v2",
    *,
    form: str = "unnormalised",
    inputs: dict[str, Array] | None = None,
    seed: int = 0,
    sram: int | None = None,
) -> Simulation:
    """Run a schedule; `sram` bytes of on-chip memory (None: as much as it takes), inputs random unless given.

    `form` is the online softmax's: `unnormalised` divides once at the end, `normalised` keeps the output divided.
    """
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule: got {schedule!r}, need one of {', '.join(SCHEDULES)}")
    if form not in FORMS:
        raise PlanError(f"form: got {form!r}, need one of {', '.join(FORMS)}")
    run = start(problem, tile, inputs if inputs is not None else random_inputs(problem, seed))
    if schedule.startswith("standard"):
        forward.standard(run, 3 if schedule == "standard3" else 6)
    elif schedule.startswith("backward"):
        _backward(run, schedule)
    else:
        _ONLINE[schedule](run, form)
    if sram is not None:
        run.sram.check(sram)
    outputs = {name: run.hbm.arrays[name] for name in _OUTPUTS if run.hbm.traffic.writes[name]}
    return Simulation(
        schedule=schedule,
        form=form if schedule in _ONLINE else FORMS[0],
        problem=problem,
        tile=tile,
        outputs=outputs,
        traffic=run.hbm.traffic,
        counts=run.counts,
        sram_peak=run.sram.peak,
        sram_buffers=run.sram.peak_buffers,
        walk=run.walk,
    )


def _backward(run: Run, schedule: str) -> None:
    arrays = run.hbm.arrays
    out, lse = exact.attention(run.problem, arrays["Q"], arrays["K"], arrays["V"])
    backward.prepare(run, out, lse)
    if schedule == "backward_fused":
        backward.fused(run)
    else:
        backward.dkdv(run)
        backward.dq(run)
