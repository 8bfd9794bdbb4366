"""What docs/explain.md shows runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "explain.md").read_text(encoding="utf-8")


def test_the_examples_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "explain.md", "exec"), scope)
    (told,) = re.findall(r"^# (First at .*)$", TEXT, re.MULTILINE)
    assert told in capsys.readouterr().out
