"""`python -m tilewise` from a checkout, without installation and without what only the report needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

HIDE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"plotly", "jinja2", "platformdirs"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    command = [sys.executable, "-m", "tilewise", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)


def test_commands_work_without_plotting_templating_and_directories(tmp_path: Path) -> None:
    done = run(tmp_path, "bench", "--suite", "smoke", "--case", "causal", "--seconds", "0.01", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
    hidden = subprocess.run(
        [sys.executable, "-c", "import plotly"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert "No module named 'plotly'" in hidden.stderr, "the test hides what it says it hides"
    assert run(tmp_path, "env").returncode == 0
