"""`tilewise.plan`: the planner, by its public name."""

from __future__ import annotations

from tilewise.hardware import DeviceSpec
from tilewise.model import Plan, TilePlan
from tilewise.model import plan as _plan
from tilewise.problem import Problem


def plan(
    problem: Problem, device: str | DeviceSpec | None = None, *, tile: TilePlan | tuple[int, int] | None = None
) -> Plan:
    """Tile, splits, on-chip bytes, predicted traffic and time of a problem on a device, with reasons.

    problem: what is to be computed, made by `Problem.of`.
    device: a name such as "h200" or "a100", a DeviceSpec, or None for this machine.
    tile: your own tile, (queries, keys), which is kept and its cost shown.

    >>> problem = tw.Problem.of(heads=32, kv_heads=8, seqlen=8192, head_dim=128, mask=tw.causal())
    >>> print(tw.plan(problem, "h200"))
    """
    return _plan(problem, device, tile=tile)
