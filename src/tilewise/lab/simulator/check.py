"""Whether a simulation computed the right thing."""

from __future__ import annotations

import numpy as np

from tilewise.lab.simulator import exact
from tilewise.lab.simulator.device import Simulation
from tilewise.lab.simulator.memory import Array


def largest_error(run: Simulation, inputs: dict[str, Array]) -> float:
    """The largest absolute difference of any output from float64 attention on the same inputs."""
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    if run.schedule.startswith("backward"):
        wanted = dict(zip(("dQ", "dK", "dV"), exact.gradients(run.problem, q, k, v, inputs["dO"]), strict=True))
    else:
        out, lse = exact.attention(run.problem, q, k, v, inputs.get("bias"))
        wanted = {"O": out, "LSE": lse}
    worst = 0.0
    for name, value in wanted.items():
        if name in run.outputs:
            both = np.isfinite(value)  # rows without keys have LSE −inf in both
            worst = max(worst, float(np.abs(run.outputs[name][both] - value[both]).max(initial=0.0)))
            if not np.array_equal(np.isfinite(run.outputs[name]), both):
                return float("inf")
    return worst
