"""The main kernels compile for every family of GPU without one, and do not spill where that was promised."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
pytest.importorskip("triton")
if importlib.util.find_spec("triton.backends.nvidia") is None:
    pytest.skip("this triton has no NVIDIA backend", allow_module_level=True)

import compile_matrix as matrix
import triton

PINNED = (Path(__file__).resolve().parents[2] / "constraints.txt").read_text(encoding="utf-8")
"""What was promised of spills was measured with this triton."""
BY_NAME = {case.name: case for case in matrix.CASES}
CHOSEN = [
    ("d128", "sm_90", ("forward", "keys", "queries")),
    ("d128 full", "sm_90", ("forward", "keys", "queries")),
    ("d64", "sm_90", ("forward", "keys", "queries")),
    ("everything", "sm_90", ("bias",)),
    ("varlen", "sm_90", ("forward",)),
    ("decode", "sm_90", ("decode", "merge")),
    ("prepare", "sm_90", ("prepare",)),
    ("d128", "sm_80", ("forward", "keys", "queries")),
    ("d128", "sm_100", ("forward", "keys")),
    ("d64", "gfx942", ("forward", "keys")),
    ("fp32 d128", "sm_90", ("forward", "queries", "fp16_split")),
]


@pytest.mark.parametrize(
    ("case", "target", "kernels"), CHOSEN, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_compiles(case: str, target: str, kernels: tuple[str, ...]) -> None:
    for result in matrix.compile_case(BY_NAME[case], target, kernels):
        assert result.fits, result
        if BY_NAME[case].must_not_spill and target == "sm_90" and f"triton=={triton.__version__}" in PINNED:
            assert result.spilled == 0, result
