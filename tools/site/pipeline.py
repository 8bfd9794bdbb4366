"""When the roles of a Hopper forward program wait for one another: a small simulation of its barriers.

The order of waits is that of `backends/hopper`: `producer.produce`, `ring.fill`, `mainloop.step` and `mainloop.issue`. Durations
are the model's clocks of each pipe, so the picture is a prediction and no measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewise.backends.hopper.config import TABLE, Config
from tilewise.backends.plans import tiles
from tilewise.hardware import lookup
from tilewise.model import evaluate
from tilewise.problem import Problem

CONFIG: Config = TABLE[128, 128]
"""Two warpgroups that take turns, as at head dim 128."""


@dataclass(frozen=True)
class Event:
    """Something that takes time: a load into a stage, a product, or a softmax."""

    role: str  # "load", "product", "softmax"
    name: str  # "K", "V", "S", "O" or "P"
    tile: int
    group: int  # warpgroup; -1 for loads
    start: float
    end: float


@dataclass
class Pipeline:
    """The events of a work tile's first key tiles."""

    stages: int
    events: list[Event] = field(default_factory=list)

    def of(self, name: str, tile: int, group: int = -1) -> Event:
        return next(e for e in self.events if (e.name, e.tile, e.group) == (name, tile, group))

    def end(self) -> float:
        return max(event.end for event in self.events)


def clocks() -> tuple[float, float, float]:
    """Of a load of one tile of K or V, of one product of one warpgroup, and of its softmax: those of the planned tile."""
    spec, problem = lookup("h200"), Problem.of(heads=16, seqlen=8192, head_dim=128, device="cuda")
    step = evaluate(problem, spec, tiles("hopper", problem, spec)["forward"]).step
    assert step is not None
    return step.load / 2, step.tensor / 2 / CONFIG.WARPGROUPS, (step.exp + step.fp32) / CONFIG.WARPGROUPS


def simulate(count: int) -> Pipeline:
    """`count` key tiles. Loads follow each other, products too: there is one memory and one set of tensor cores."""
    load, product, softmax = clocks()
    groups, stages = range(CONFIG.WARPGROUPS), CONFIG.KV_STAGES
    run = Pipeline(stages)
    full: dict[tuple[str, int], float] = {}
    released: dict[tuple[str, int], list[float]] = {}
    memory = tensor = 0.0
    loads = [(name, n) for n in range(count) for name in ("K", "V")]

    def fill_until(wanted: tuple[str, int]) -> float:
        """The producer: loads in order, each once all warpgroups have released the tile that was in its stage."""
        nonlocal memory
        while wanted not in full:
            name, n = loads[len(full)]
            before = released.get((name, n - stages), [])
            assert n < stages or len(before) == len(groups), "a load waits for a release that never comes"
            start = max([memory, *before])
            memory = full[name, n] = start + load
            run.events.append(Event("load", name, n, -1, start, memory))
        return full[wanted]

    def multiply(name: str, n: int, group: int, ready: float) -> float:
        nonlocal tensor
        start = max(tensor, ready)
        tensor = start + product
        run.events.append(Event("product", name, n, group, start, tensor))
        return tensor

    def weigh(n: int, group: int, start: float) -> float:
        run.events.append(Event("softmax", "P", n, group, start, start + softmax))
        return start + softmax

    ready, turn = dict.fromkeys(groups, 0.0), 0.0
    for group in groups:  # first_step: no product with values yet
        scores = multiply("S", 0, group, fill_until(("K", 0)))
        released.setdefault(("K", 0), []).append(scores)
        ready[group] = weigh(0, group, scores)
    for n in range(1, count):
        for group in groups:  # in ping-pong: warpgroup 0, warpgroup 1, warpgroup 0, …
            issued = max(ready[group], turn, fill_until(("K", n)))
            scores = multiply("S", n, group, issued)
            issued = max(issued, fill_until(("V", n - 1)))
            output = multiply("O", n - 1, group, issued)
            turn = issued
            released.setdefault(("K", n), []).append(scores)
            released.setdefault(("V", n - 1), []).append(output)
            ready[group] = max(weigh(n, group, scores), output)
    return run
