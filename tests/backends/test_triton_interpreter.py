"""The Triton kernels in Triton's interpreter, held to the conformance cases. Each share is a process: see `interpreted.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import needs_interpreter

ROOT = Path(__file__).resolve().parents[2]
SHARES = 4


pytestmark = needs_interpreter


def interpret(*program: str) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.quick_interpreter", *program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.parametrize("share", range(SHARES))
def test_conformance_in_the_interpreter(share: int) -> None:
    interpret("tests.backends.interpreted", str(share), str(SHARES))


def test_fp32_in_two_fp16_parts() -> None:
    interpret("tests.backends.fp16_split")


def test_packed_sequences_find_their_tiles() -> None:
    interpret("tests.backends.packed_tiles")


def test_the_tile_that_is_planned_or_asked_for_runs() -> None:
    interpret("tests.backends.interpreted_tiles")


def test_derivatives_in_the_interpreter() -> None:
    interpret("tests.backends.interpreted_derivatives")


def test_statistics_in_the_interpreter() -> None:
    interpret("tests.backends.interpreted_statistics")


def test_lists_of_tiles() -> None:
    interpret("tests.backends.interpreted_lists")


def test_rows_of_partial_results() -> None:
    interpret("tests.backends.interpreted_partials")
