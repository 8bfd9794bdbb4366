"""Where there is a GPU, `pytest -m gpu` runs its tests, and a run of others leaves them out."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import spread

ROOT = Path(__file__).parents[1]
COLLECT = """
import sys
import pytest, torch
torch.cuda.is_available = lambda: True
class Counted:
    def pytest_collection_finish(self, session):
        marked = [item for item in session.items if "gpu" in item.keywords]
        skipped = [item for item in marked if any(item.iter_markers("skip"))]
        print("counted", len(session.items), len(marked), len(skipped))
pytest.main([*sys.argv[1:], "--collect-only", "-qq", "-p", "no:cacheprovider", "tests/cache/test_cached_gpu.py",
             "tests/cache/test_merge.py"], plugins=[Counted()])
"""


def counted(*options: str) -> list[int]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-c", COLLECT, *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    line = next((line for line in done.stdout.splitlines() if line.startswith("counted")), None)
    if line is None:
        pytest.fail(done.stdout[-800:] + done.stderr[-800:])
    return [int(word) for word in line.split()[1:]]


def test_gpu_tests_run_alone_or_not_at_all() -> None:
    items, marked, skipped = counted("-m", "gpu")
    assert items == marked > 0 and skipped == 0
    items, marked, skipped = counted()
    assert items > marked == skipped > 0


def test_long_tests_are_spread_over_a_run() -> None:
    names = [*(f"tests/backends/test_a.py::{n}" for n in range(100)), *(f"tests/integrations/test_b.py::{n}" for n in range(5))]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    found = [item.nodeid for item in spread(items)]
    at = [n for n, name in enumerate(found) if "test_b" in name]
    assert sorted(found) == sorted(names) and [name for name in found if "test_a" in name] == names[:100]
    assert len(at) == 5 and all(20 <= b - a <= 22 for a, b in pairwise(at))
    assert spread(items[:3]) == items[:3] and spread(items[-2:]) == items[-2:] and spread([]) == []
