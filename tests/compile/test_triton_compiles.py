"""The main kernels compile for every family of GPU without one, and do not spill where that was promised."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("triton")
if importlib.util.find_spec("triton.backends.nvidia") is None:
    pytest.skip("this triton has no NVIDIA backend", allow_module_level=True)

import triton
from tools.compile_checks import BY_NAME
from tools.compile_kernels import compile_check, faults

PINNED = (Path(__file__).resolve().parents[2] / "constraints.txt").read_text(encoding="utf-8")
"""What was promised of spills was measured with this triton."""
CHOSEN = [
    ("d128", "sm_90", ("forward", "keys", "queries")),
    ("d128 full", "sm_90", ("forward", "keys", "queries")),
    ("d64", "sm_90", ("forward", "keys", "queries")),
    ("everything", "sm_90", ("bias",)),
    ("documents d64", "sm_90", ("classify", "forward")),
    ("varlen", "sm_90", ("forward",)),
    ("decode", "sm_90", ("decode", "merge")),
    ("pages, invariant", "sm_90", ("decode", "merge")),
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
    check, strict = BY_NAME[f"triton {case}"], f"triton=={triton.__version__}" in PINNED
    for compiled in compile_check(check, target, kernels):
        assert faults(check, compiled, target, strict)[1] == [], compiled.name
