"""The schedules run literally on small inputs, every byte counted: what the IO model is tested against."""

from __future__ import annotations

from tilewise.lab.simulator.device import Simulation, Visit, random_inputs
from tilewise.lab.simulator.run import SCHEDULES, simulate

__all__ = ["SCHEDULES", "Simulation", "Visit", "random_inputs", "simulate"]
