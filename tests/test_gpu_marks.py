"""Where there is a GPU, `pytest -m gpu` runs its tests, and a run of others leaves them out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
