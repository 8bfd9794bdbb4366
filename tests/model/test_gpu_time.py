"""The time of persistent GPU kernels: fitted on some calls, judged on others, on an H200."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tools.site.summary import tile_pairs

import tilewise as tw
from tilewise.backends import plans
from tilewise.errors import PlanError
from tilewise.hardware import lookup
from tilewise.lab.bench.suites import suite
from tilewise.lab.bench.sweep import timed_for
from tilewise.masks import parse
from tilewise.model import evaluate, fitted, l2
from tilewise.model.evaluation import call_seconds
from tilewise.model.gpu_time import longest_program
from tilewise.model.tile import RESOLUTION
from tilewise.problem import Problem

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORDS = ("hopper-times-h200-2026-11-16", "hopper-times-h200-2026-11-19")
"""Constants were fitted to the first; kernels have changed until the second."""
ROWS: list[dict[str, Any]] = json.loads((RESULTS / f"{RECORDS[0]}.json").read_text())["rows"]
H200 = lookup("h200")
PASSES = ("forward", "backward", "backward_dkdv", "backward_dq")


def problem_of(row: dict[str, Any]) -> Problem:
    shape = {name: row[name] for name in ("batch", "heads", "kv_heads", "seqlen", "head_dim")}
    return Problem.of(mask=parse(row["mask"]), device="cuda", **shape)


def predicted(row: dict[str, Any]) -> float:
    problem, backward = problem_of(row), row["passes"] == "backward"
    tiles = plans.tiles("hopper", problem, H200)
    return call_seconds(problem, H200, [tile for name, tile in tiles.items() if name.startswith("backward") == backward])


@pytest.mark.parametrize("record", RECORDS)
def test_the_plain_grid_is_predicted_within_15_percent(record: str) -> None:
    rows = json.loads((RESULTS / f"{record}.json").read_text())["rows"]
    judged = [row for row in rows if row["kind"] == "judged"]
    off = [abs(predicted(row) / row["p50"] - 1) for row in judged]
    assert len(judged) == 52 and sum(one <= 0.15 for one in off) >= 0.95 * len(off)
    assert sum(off) / len(off) < 0.05


def test_no_row_was_both_fitted_and_judged() -> None:
    keys = ("passes", "mask", "batch", "heads", "kv_heads", "seqlen", "head_dim")
    kinds = {kind: {tuple(row[key] for key in keys) for row in ROWS if row["kind"] == kind} for kind in ("fit", "judged")}
    assert not kinds["fit"] & kinds["judged"]
    cases = {case.name for name in ("hopper", "hopper-backward") for case in suite(name).cases}
    assert {row["name"] for row in ROWS if row["kind"] == "judged"} == cases


def test_constants_are_few_and_say_where_they_come_from() -> None:
    constants = [field.name for field in fields(fitted.GpuFit) if field.name != "origin"]
    assert len(constants) + (l2.REREAD > 0) <= 6
    assert all("H200" in fit.origin for fit in fitted.GPU.values())


@pytest.mark.parametrize("row", [row for row in ROWS if row["kind"] == "judged"], ids=lambda row: row["name"])
def test_the_planned_tile_is_not_predicted_slower_than_its_rivals(row: dict[str, Any]) -> None:
    problem = problem_of(row)
    for pass_, tile in plans.tiles("hopper", problem, H200).items():
        if pass_ in PASSES:
            times = [evaluate(problem, H200, rival).seconds for rival in plans.choices("hopper", problem, H200, pass_)]
            assert evaluate(problem, H200, tile).seconds <= (1 + RESOLUTION) * min(times)


def test_tiles_that_took_turns_are_told_apart() -> None:
    """What the record of the Hopper forward has of other tiles. Not foreseen: causal 512, where 64 keys at a time were 9 to 11 %
    faster than 128."""
    pairs = tile_pairs()
    assert len(pairs) == 13
    off = {one: one.predicted / one.measured - 1 for one in pairs}
    known = [one for one in pairs if one.cell.endswith("causal 512") and one.first == (128, 64)]
    assert len(known) == 2 and all(0.1 < off[one] < 0.2 for one in known)
    for one in pairs:
        if one not in known:
            assert abs(off[one]) < 0.1, one
            if abs(one.measured - 1) > 0.05:
                assert (one.predicted > 1) == (one.measured > 1), one


SWEEPS = {"hopper": ("hopper", "hopper-backward"), "triton": ("gpu",)}


@pytest.mark.parametrize("backend", SWEEPS)
def test_a_sweep_on_an_h200_timed_every_tile_and_the_planned_one_is_near_the_fastest(backend: str) -> None:
    record = json.loads((RESULTS / f"sweep-{backend}-h200-2026-11-19.json").read_text())
    cases = {case.name: case for name in SWEEPS[backend] for case in suite(name).cases}
    for row in record["rows"]:
        problem, pass_ = timed_for(cases[row["name"]], row["pass"]).problem(), row["pass"]
        assert row["planned"] == str(plans.tiles(backend, problem, H200)[pass_])
        assert row["tiles"].keys() == {str(tile) for tile in plans.choices(backend, problem, H200, pass_)}
        assert len(row["tiles"]) >= (8 if backend == "triton" else 1)
        assert 1 <= row["ratio"] <= 1.05, row
    assert len(record["rows"]) >= 36


def test_equal_work_tiles_take_whole_rounds_and_unequal_ones_are_even() -> None:
    full = Problem.of(batch=1, heads=33, seqlen=1024, head_dim=128, device="cuda")
    tile = plans.tiles("hopper", full, H200)["forward"]
    assert tile.sizes == (128, 128)
    assert longest_program(full, H200, tile) == (2 * 8, 2)  # 264 tiles on 132 units
    causal = replace(full, mask=tw.causal())
    assert longest_program(causal, H200, replace(tile, block_k=64)) == (33 * 2 * 36 / 132, 2)


def test_what_a_persistent_tile_takes_on_the_chip_is_its_own() -> None:
    problem = Problem.of(heads=16, seqlen=4096, head_dim=64, device="cuda")
    tile = plans.tiles("hopper", problem, H200)["forward"]
    found = evaluate(problem, H200, tile)
    assert (found.on_chip, found.registers, found.resident) == (dict(tile.on_chip), 160, 1)
    assert 136 * 1024 < found.on_chip_bytes < 137 * 1024 and found.step is not None
    with pytest.raises(PlanError, match="KiB of shared memory"):
        evaluate(problem, replace(H200, sram_per_block=100 * 1024), tile)
