"""The short examples run as a user runs them; the longer ones are tested piece by piece in tests/integrations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHORT = ("masks", "mean_flow", "gradient_penalty", "per_sample_gradients", "qk_clip")


@pytest.mark.parametrize("name", SHORT)
def test_example_runs(name: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_no_example_is_forgotten() -> None:
    tested = (ROOT / "tests" / "integrations" / "test_examples.py").read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        assert path.stem in SHORT or f'example("{path.stem}")' in tested, f"{path.name} has no test"
