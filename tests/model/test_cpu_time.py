"""Predicted times of the CPU kernels, held to records."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.backends.cpu import frames, plan
from tilewise.hardware import lookup
from tilewise.hardware.host import Host, cpu_spec
from tilewise.hardware.spec import DeviceSpec, KiB
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.suites import CPU as SUITE
from tilewise.model.cpu_time import _makespan, cpu_time
from tilewise.model.cpu_visits import CLASS_ROWS, visits_of
from tilewise.model.fitted import CPU, CpuFit
from tilewise.model.flops import work
from tilewise.problem import Problem

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def spec_of(record: dict[str, Any]) -> DeviceSpec:
    """The machine of a record."""
    machine = record["machine"]
    arm = machine["architecture"] == "aarch64"
    return cpu_spec(
        Host(
            machine=machine["architecture"],
            name=machine["cpu"],
            core="neoverse-n1" if arm else "",
            cores=machine["cores"],
            clock_hz=2.5e9 if arm else 2.1e9,
            l1d=machine["l1_bytes"],
            l2=machine["l2_bytes"],
            l3=machine["l3_bytes"],
            flags=frozenset(machine["isa"].replace("avx512 ", "avx512f ").split()),
        )
    )


def recorded(name: str) -> list[tuple[DeviceSpec, Case, float]]:
    """The rows of a record: the machine with a row's threads, its case, and the seconds it took."""
    record = json.loads((RESULTS / name).read_text())
    machine, spec, rows = record["machine"], spec_of(record), []
    for row in record["records"]:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in row["case"].items()}
        case = Case(**values)
        rows.append((replace(spec, threads=case.threads or machine["threads"]), case, row["results"][0]["seconds"]["p50"]))
    return rows


def predicted(spec: DeviceSpec, case: Case) -> float:
    """Seconds of a case: the forward, and in training the backward too. When the records were made strips were whole."""
    problem = case.problem()
    tiles = [replace(tile, half_rows=0) for tile in plan.tiles(problem, spec).values()]
    return sum(cpu_time(problem, spec, tile).seconds for tile in tiles if case.trains or tile.pass_ != "backward")


@pytest.mark.parametrize(("name", "least"), [("cpu-2026-11-15.json", 0.95), ("cpu-avx512-2026-11-15.json", 0.9)])
def test_predictions_are_within_15_percent(name: str, least: float) -> None:
    """Of the suite's rows 95 % at least; none of them is what the constants were fitted to.

    The Xeon is a virtual machine with neighbours: two records a day apart differ by more than 15 % in 19 rows of 39, in one by a
    factor of two. Of one record nine rows of ten must be within; what two days have in common is judged below.
    """
    rows = recorded(name)
    off = {case.name: round(predicted(spec, case) / seconds, 2) for spec, case, seconds in rows}
    wrong = {name: ratio for name, ratio in off.items() if abs(ratio - 1) > 0.15}
    assert len(wrong) <= (1 - least) * len(rows), wrong


def test_predictions_for_a_xeon_are_within_15_percent_of_two_days() -> None:
    """Of 95 % of the suite's rows. The mean is that of two medians, a day apart, which differ by more than 15 % in six rows."""
    again = json.loads((RESULTS / "cpu-avx512-again-2026-11-16.json").read_text())
    second = {row["name"]: row["p50"] for row in again["rows"]}
    rows = recorded("cpu-avx512-2026-11-15.json")
    assert {case.name for _, case, _ in rows} == set(second) and again["machine"]["threads"] == 2
    off = {case.name: predicted(spec, case) / (first * second[case.name]) ** 0.5 for spec, case, first in rows}
    wrong = {name: round(ratio, 2) for name, ratio in off.items() if abs(ratio - 1) > 0.15}
    assert len(wrong) <= 0.05 * len(rows), wrong
    assert sum(abs(second[case.name] / first - 1) > 0.15 for _, case, first in rows) == 6
    far = 1.15 / 0.85  # no prediction is within 15 % of both
    assert [case.name for _, case, first in rows if not 1 / far < second[case.name] / first < far] == [
        "gqa causal bfloat16", "tiny bfloat16", "training full bfloat16",
    ]  # fmt: skip


def test_few_constants_are_fitted() -> None:
    constants = [field for field in fields(CpuFit) if field.name != "origin"]
    assert len(constants) <= 6
    assert all(fit.origin for fit in CPU.values()), "each tells how it was fitted"


N1 = recorded("cpu-2026-11-15.json")[0][0]


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_no_rival_is_predicted_to_be_faster_than_the_chosen_tile(case: Case) -> None:
    problem = case.problem()
    for pass_, chosen in plan.tiles(problem, N1).items():
        if pass_ == "backward" and not case.trains:
            continue
        mine = cpu_time(problem, N1, chosen).seconds
        times = {str(tile): cpu_time(problem, N1, tile).seconds for tile in plan.choices(problem, N1, pass_)}
        fastest = min(times, key=lambda name: times[name])
        assert mine <= times[fastest] * (1 + 1e-9), (pass_, str(chosen), fastest)


def _with_tensors() -> dict[str, tw.Mask]:
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(500, 1300, (20,), generator=draw)
    ids = torch.repeat_interleave(torch.arange(20), lengths)[:8192]
    return {
        "documents": tw.causal() & tw.documents(ids),
        "full documents": tw.documents(ids),
        "padding": tw.causal() & tw.key_padding(torch.tensor([5000])),
        "blocks": tw.blocks(torch.rand(64, 64, generator=draw) < 0.25, 128),
        "selected": tw.selected(torch.randint(64, (64, 16), generator=draw, dtype=torch.int32)),
    }


@pytest.mark.parametrize("name", _with_tensors())
@pytest.mark.parametrize("spec", [N1, recorded("cpu-avx512-2026-11-15.json")[0][0]], ids=["n1", "xeon"])
def test_no_rival_is_predicted_to_be_faster_under_masks_with_tensors(name: str, spec: DeviceSpec) -> None:
    """What is hidden is skipped by strips or rows of 128, not by blocks: a tall block computes no more than a low one. What one
    block more packs, or the last of two threads waits for, may make a hundredth."""
    problem = Problem.of(heads=8, seqlen=8192, head_dim=64, dtype="float32", mask=_with_tensors()[name])
    chosen = cpu_time(problem, spec, plan.tiles(problem, spec)["forward"]).seconds
    assert chosen <= 1.01 * min(cpu_time(problem, spec, tile).seconds for tile in plan.choices(problem, spec, "forward"))


def test_work_under_documents_is_that_of_their_strips() -> None:
    """Four documents of 1,024 take a quarter of one of 4,096's work, and the corners of their strips."""
    def pairs(mask: tw.Mask) -> float:
        problem = Problem.of(heads=1, seqlen=4096, head_dim=64, dtype="float32", mask=mask)
        visits = visits_of(problem, plan.tiles(problem, N1)["forward"])
        return float(visits.pairs.sum())

    ids = torch.repeat_interleave(torch.arange(4), 1024)
    assert pairs(tw.documents(ids)) == pairs(tw.full()) / 4
    assert pairs(tw.causal() & tw.documents(ids)) == pytest.approx(4 * 1024 * (1024 + 16) / 2, rel=0.01)
    assert CLASS_ROWS == frames.LIST_ROWS


BY_HALVES = {
    "documents": lambda: tw.causal() & tw.documents(torch.repeat_interleave(torch.arange(9), 700)[:4096]),
    "full documents": lambda: tw.documents(torch.repeat_interleave(torch.arange(50), 100)[:4096]),
    "causal": lambda: tw.causal(),
    "window": lambda: tw.causal() & tw.window(75),
}


@pytest.mark.parametrize("name", BY_HALVES)
def test_work_is_counted_by_half_strips_where_there_are_some(name: str) -> None:
    """With AVX-512 a strip has 64 rows: 16 keys or more that one half of them sees alone are computed for that half."""
    problem = Problem.of(heads=1, seqlen=4096, head_dim=64, dtype="float32", mask=BY_HALVES[name]())
    tile = plan.tiles(problem, recorded("cpu-avx512-2026-11-15.json")[0][0])["forward"]
    (rows, keys), half = tile.register_tile or (0, 0), tile.half_rows
    assert half == rows // 2 == 32
    visible = np.asarray(BY_HALVES[name]().to_dense(4096, 4096)).reshape(-1, 4096)
    wanted = 0
    for strip in visible.reshape(-1, 2, half, 4096).any(2):  # what each half sees
        seen = strip.reshape(2, -1, keys).any(2).repeat(keys, axis=1)
        low, high = (np.flatnonzero(part) for part in seen)
        before, behind = np.count_nonzero(low < high[0]), np.count_nonzero(high > low[-1])
        spared = sum(part for part in (before, behind) if part >= 16)
        wanted += rows * (max(high[-1], low[-1]) + 1 - low[0]) - half * spared
    assert visits_of(problem, tile).pairs.sum() == wanted
    whole = visits_of(problem, replace(tile, half_rows=0)).pairs.sum()
    assert whole > 1.005 * wanted


def test_what_is_executed_is_counted_by_strips() -> None:
    """Blocks of 512 by 128 would be a third in vain under a causal mask; strips of 16 rows by 4 keys are not."""
    problem = Problem.of(heads=8, seqlen=1024, head_dim=64, dtype="float32", mask=tw.causal())
    tile = plan.tiles(problem, N1)["forward"]
    (rows, keys), made = tile.register_tile or (0, 0), work(problem, tile)
    assert tile.block_q == 512
    strips = np.arange(rows, 1024 + rows, rows)
    assert made.exps == 8 * rows * int((-(-strips // keys) * keys).sum())
    assert made.waste < 0.02


@pytest.mark.parametrize("name", ["sweep-n1-2026-11-16", "sweep-xeon-2026-11-19"])
def test_the_planned_tile_was_within_5_percent_of_the_fastest_in_every_row_of_a_sweep(name: str) -> None:
    """What was timed on a Neoverse N1 and on a Xeon is every tile that the plan has today, and its choice is today's."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    sweeps, spec = {row["name"]: row for row in record["rows"]}, replace(spec_of(record), threads=2)
    assert sweeps.keys() == {case.name for _, case, _ in recorded("cpu-2026-11-15.json")}
    for case in SUITE:
        if (row := sweeps.pop(case.name, None)) is not None:
            problem, pass_ = case.problem(), row["pass"]
            assert row["planned"] == str(plan.tiles(problem, spec)[pass_])
            assert row["tiles"].keys() == {str(tile) for tile in plan.choices(problem, spec, pass_)}
            assert len(row["tiles"]) >= 8 and 1 <= row["ratio"] <= 1.05, row["name"]
    assert not sweeps


def test_small_tiles_are_predicted_to_be_slower() -> None:
    """Seen in a sweep on a Neoverse N1, d 128: 16 rows take 1.35 times the time of 512, 16 keys 1.11 times that of 128."""
    problem = Problem.of(heads=2, seqlen=2048, head_dim=128, dtype="float32")
    times = {tile.sizes: cpu_time(problem, N1, tile).seconds for tile in plan.choices(problem, N1, "forward")}
    base = times[512, 128]
    assert times[16, 128] / base == pytest.approx(1.35, abs=0.07)
    assert times[512, 16] / base == pytest.approx(1.11, abs=0.04)
    assert times[128, 128] / base == pytest.approx(1.04, abs=0.02)


def test_masks_save_time_as_they_save_work() -> None:
    def seconds(**change: Any) -> float:
        problem = Problem.of(**{"heads": 8, "seqlen": 4096, "head_dim": 64, "dtype": "float32", **change})
        return cpu_time(problem, N1, plan.tiles(problem, N1)["forward"]).seconds

    full = seconds()
    assert seconds(mask=tw.causal()) / full == pytest.approx(0.51, abs=0.02)
    assert seconds(mask=tw.window(256)) < 0.1 * full
    ids = np.repeat(np.arange(8), 512)[None]
    assert seconds(mask=tw.documents(ids)) == pytest.approx(full / 8, rel=0.3)


def test_threads_share_tasks() -> None:
    assert _makespan(np.array([1.0, 1.0, 1.0]), 2) == 2.0
    assert _makespan(np.array([2.0, 1.0, 1.0]), 2) == 2.0
    assert _makespan(np.zeros(0), 2) == 0.0
    problem = Problem.of(heads=8, seqlen=2048, head_dim=64, dtype="float32")
    one, two = (replace(N1, threads=n) for n in (1, 2))
    tile = plan.tiles(problem, one)["forward"]
    assert cpu_time(problem, one, tile).seconds == pytest.approx(2 * cpu_time(problem, two, tile).seconds, rel=0.01)


@pytest.mark.parametrize("key", ["altra-q80", "graviton3", "xeon-8480", "epyc-9654"])
def test_every_processor_has_a_time(key: str) -> None:
    spec = lookup(key)
    for change in ({}, {"seqlen": 1, "kv_seqlen": 4096}, {"dtype": "float32"}, {"seqlen": 0}):
        problem = Problem.of(**{"heads": 8, "seqlen": 1024, "head_dim": 64, **change})  # type: ignore[arg-type]
        for tile in plan.tiles(problem, spec).values():
            time = cpu_time(problem, spec, tile)
            assert time.seconds > 0 and all(limit >= 0 for limit in time.limits.values())
            assert spec.l2_bytes >= 512 * KiB
