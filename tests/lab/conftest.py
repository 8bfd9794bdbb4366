"""What the tests of the report have in common: everything the page shows, over a small grid of problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilewise import hardware
from tilewise.hardware.ceilings import Ceilings
from tilewise.lab.report import figures, machine, page

LENGTHS = (256, 512)
CEILINGS = Ceilings("here", "2026-01-01", "a test", {"float32": 5e10}, copy=1e10, read=1e10, exp=1e9)
XEON = "xeon-8480"
"""A CPU whose register tile, 48 rows at head dim 128, divides neither the lengths nor the tiles of the page."""


def machines(catalogued: tuple[str, ...], found: Callable[..., Any] = machine.machines) -> tuple[dict[str, Any], ...]:
    """Those of the page, and a Xeon under a measured roof."""
    specs, described = found(catalogued)
    spec = hardware.device(XEON)
    return {**specs, XEON: CEILINGS.apply(spec)}, {**described, XEON: machine.describe(spec, CEILINGS)}


@pytest.fixture(scope="session")
def data() -> dict[str, Any]:
    """Everything the page shows, with ceilings that need no measuring."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "measure", lambda *_: CEILINGS, raising=False)
        patch.setattr(machine, "machines", machines)
        patch.setattr(figures, "LENGTHS", LENGTHS)
        patch.setattr(machine, "RUN", {"heads": 1, "seqlen": 128, "head_dim": 16})
        patch.setattr(figures.results, "__defaults__", (LENGTHS,))
        patch.setattr(page, "experiment", lambda **_: [])
        return page.gather()
