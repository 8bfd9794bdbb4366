"""Contenders in processes of their own: memory as the system counts it, and failures that say what happened."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilewise.errors import ArgumentError
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.engine import measure
from tilewise.lab.bench.memory import forget_peak, resident
from tilewise.lab.bench.peers import PEERS
from tilewise.lab.bench.timing import Effort
from tilewise.lab.bench.worker import OWN_SOURCE, Checkout, Worker, WorkerError, compile_ahead, source_folder

CASE = Case("case", heads=1, seqlen=64, head_dim=16, mask="causal")


CORES = os.cpu_count() or 1
SLACK = max(2**20, max(32, 2 * CORES) * CORES * mmap.PAGESIZE)  # Linux counts pages for each core and adds them up in batches


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


FEATURES = replace(CASE, passes="training", mask="full", data="padding", batch=2, bias=(1, 1, 64, 64), softcap=3.0)


def test_a_checkout_takes_part_with_the_same_tensors() -> None:
    """Another checkout is this one again: judged by the oracle, timed in turns, its ratio told."""
    quick = Effort(seconds=0.0, least=2, most=2, sample=0.0)
    with Checkout("tilewise", OWN_SOURCE) as ours, Checkout("checkout:before", OWN_SOURCE) as before:
        for case in (CASE, FEATURES, replace(CASE, lengths=(10, 0, 30), passes="backward")):
            record = measure(case, [ours, before, PEERS["sdpa"]], quick)
            assert [result.status for result in record.results[:2]] == ["ok", "ok"], record.results
            assert record.checkouts["checkout:before"].p50 > 0
        assert record.to_dict()["checkouts"]["checkout:before"]["samples"] == 2


def test_a_checkout_is_named_by_its_folder(tmp_path: Path) -> None:
    assert source_folder(OWN_SOURCE.parent) == source_folder(OWN_SOURCE) == OWN_SOURCE
    with pytest.raises(ArgumentError, match="holds no tilewise"):
        source_folder(tmp_path)


def test_kernels_are_compiled_by_several_processes() -> None:
    """A contender that fails stops nobody."""
    said: list[str] = []
    jobs = [(CASE, name, source) for name, source in (("sdpa", None), ("tilewise:nope", None), ("tilewise", OWN_SOURCE))]
    compile_ahead(jobs, 2, said.append)
    assert sorted(said) == [f"case: compiling {name}" for name in ("sdpa", "tilewise", "tilewise:nope")]
