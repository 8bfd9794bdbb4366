"""tilewise without its extras: all of Python works, the command line and the report say what to install."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

HIDE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""

SHOW = """
import torch
import tilewise as tw

q, k, v = torch.randn(3, 1, 2, 64, 16)
problem = tw.Problem.of(heads=2, head_dim=64, seqlen=512, mask=tw.causal())
shown = [
    tw.plan(problem, "h200"),
    tw.explain(q, k, v, mask=tw.causal()),
    tw.certify(q, k, v, tw.attention(q, k, v)),
    tw.trace_nonfinite(q, k, v),
]
for one in shown:
    assert "<div" in one._repr_html_()
    print(one)
"""


def run(tmp_path: Path, hidden: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)


def test_python_needs_no_extra(tmp_path: Path) -> None:
    done = run(tmp_path, {"typer", "rich", "plotly", "jinja2"}, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    for text in ("bytes by tensor", "tiles considered", "backends", "Certified", "Finite"):
        assert text in done.stdout


@pytest.mark.parametrize("hidden", [{"typer"}, {"rich"}, {"typer", "rich"}], ids=sorted)
def test_the_command_line_names_its_extra(tmp_path: Path, hidden: set[str]) -> None:
    done = run(tmp_path, hidden, "-m", "tilewise", "plan", "--device", "h200")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "pip install 'tilewise[cli]'" in done.stderr and any(name in done.stderr for name in hidden)


@pytest.mark.parametrize("hidden", ["plotly", "jinja2"])
def test_the_report_names_its_extra(tmp_path: Path, hidden: str) -> None:
    done = run(tmp_path, {hidden}, "-m", "tilewise", "report")
    text = " ".join(done.stderr.split())
    assert done.returncode == 2 and "Traceback" not in text
    assert "pip install 'tilewise[report]'" in text and hidden in text
    assert not (tmp_path / "tilewise-report.html").exists()


def test_commands_need_no_report_extra(tmp_path: Path) -> None:
    hidden = {"plotly", "jinja2", "platformdirs"}
    for command in (["env"], ["bench", "--suite", "smoke", "--case", "causal", "--seconds", "0.01", "--json"]):
        done = run(tmp_path, hidden, "-m", "tilewise", *command)
        assert done.returncode == 0, done.stderr


def test_the_tests_hide_what_they_say(tmp_path: Path) -> None:
    done = run(tmp_path, {"plotly"}, "-c", "import plotly")
    assert "No module named 'plotly'" in done.stderr


def test_all_has_every_extra() -> None:
    (everything,) = EXTRAS["all"]
    assert all(name in everything for name in EXTRAS if name not in ("all", "dev", "docs"))
    assert "tilewise[all]" in EXTRAS["dev"]
