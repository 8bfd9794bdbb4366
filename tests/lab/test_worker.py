"""Contenders in processes of their own: memory as the system counts it, and failures that say what happened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.memory import forget_peak, resident
from tilewise.lab.bench.worker import Worker, WorkerError

CASE = Case("case", heads=1, seqlen=64, head_dim=16, mask="causal")


SLACK = 2**20  # Linux counts pages for each core and adds them up in batches


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux forgets a peak")
def test_the_peak_is_seen_and_forgotten() -> None:
    """Pages count once they are touched, whoever allocated them; a freed block leaves the peak behind."""
    forget_peak()
    before = resident()
    block = np.ones(2**26, dtype=np.uint8)
    del block
    after = resident()
    assert after.peak - before.now >= 2**26 - SLACK
    assert after.now - before.now < 2**25
    forget_peak()
    assert resident().peak - before.now < 2**25


def test_a_worker_answers_and_ends() -> None:
    with Worker(CASE, "standard") as worker:
        assert worker.ask("memory", seqlen=64)["peak_bytes"] >= 0
        assert worker.ask("judge")["ok"]
        assert worker.ask("time")["seconds"] > 0
    assert worker.process.poll() is not None


def test_failures_name_the_contender_and_the_cause() -> None:
    with Worker(CASE, "tilewise:nope") as worker, pytest.raises(WorkerError, match=r"tilewise:nope: .*got 'nope'"):
        worker.ask("memory", seqlen=64)
    with Worker(CASE, "sdpa") as worker:
        worker.process.kill()
        worker.process.wait()
        with pytest.raises(WorkerError, match="sdpa: its process ended while asked to time"):
            worker.ask("time")
