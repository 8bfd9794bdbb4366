"""Every backend against the fp64 oracle, forward and all gradients, within derived bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.conformance.cases import CASES, Case, build
from tests.conformance.harness import BACKENDS, excesses, serves, skip_unless_served
from tilewise import dispatch
from tilewise.backends.tiled import plan as tiled


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32, so that short sequences have many."""
    monkeypatch.setattr(tiled, "TILE_BYTES", 1)


def conform(case: Case, backend: str, device: str) -> None:
    built = build(case, device)
    skip_unless_served(built, backend)
    assert excesses(built, backend, lse_gradient=case.lse_gradient) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_conformance(backend: str, case: Case) -> None:
    conform(case, backend, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", [name for name, entry in dispatch.REGISTRY.items() if "cuda" in entry.devices])
def test_conformance_on_gpu(backend: str, case: Case) -> None:
    """A backend that knows no fp32 gets those cases in bf16."""
    narrow = replace(case, dtype=torch.bfloat16)
    if case.dtype == torch.float32 and serves(build(case, "cuda"), backend) and not serves(build(narrow, "cuda"), backend):
        case = narrow
    conform(case, backend, "cuda")
