"""The tutorial on tile sizes and rescaling: its figures to the digit, errata included."""

from __future__ import annotations

import math
import platform

import numpy as np
import pytest

import tilewise.masks as masks
from tests.model import tutorials
from tilewise.lab.simulator import random_inputs, simulate
from tilewise.lab.simulator.precision import PATHS, exact, experiment, make_data, run, to_bfloat16
from tilewise.model import TilePlan, work
from tilewise.problem import Problem

KiB = 2**10

TABLE = [  # d, tile, KiB, under 48
    (64, (32, 64), 72.5, False),
    (64, (16, 32), 32.25, True),
    (128, (32, 64), 128.5, False),
    (128, (16, 32), 60.25, False),
    (256, (32, 64), 240.5, False),
    (256, (16, 32), 116.25, False),
]


@pytest.mark.parametrize(("d", "tile", "kib", "fits"), TABLE)
def test_shared_memory_table(d: int, tile: tuple[int, int], kib: float, fits: bool) -> None:
    assert tutorials.rescaling_sram(*tile, d, 4) == kib * KiB
    assert (tutorials.rescaling_sram(*tile, d, 4) <= 48 * KiB) is fits


def test_worked_rescaling() -> None:
    """m 5 → 7: alpha = exp(−2) ≈ 0.135, o 10 → 1.35, l 2 → 0.27."""
    step = tutorials.rescale(5.0, 7.0, 10.0, 2.0)
    assert step.alpha == math.exp(-2.0)
    assert round(step.alpha, 3) == 0.135
    assert round(step.o, 2) == 1.35
    assert round(step.l, 2) == 0.27
    assert tutorials.rescale(7.0, 5.0, 10.0, 2.0) == tutorials.Rescaling(1.0, 10.0, 2.0)


@pytest.mark.parametrize(("width", "count"), [(32, 32), (64, 16), (8, 128)])
def test_updates(width: int, count: int) -> None:
    """1024 keys: 32 updates with 32-wide tiles, 16 with 64-wide ones; the simulator does as many."""
    assert tutorials.updates(1024, width) == count
    problem = Problem.of(heads=1, seqlen=4, kv_seqlen=1024, head_dim=2, dtype="float32")
    assert simulate(problem, TilePlan(4, width), "v2").counts.updates == count
    assert work(problem, TilePlan(4, width)).tiles == count


def test_updates_with_a_mask_are_the_visited_tiles() -> None:
    problem = Problem.of(heads=1, seqlen=64, head_dim=2, dtype="float32", mask=masks.causal())
    done = simulate(problem, TilePlan(16, 16), "v2")
    assert done.counts.updates == 4 + 3 + 2 + 1
    assert 0 < done.counts.rescales <= done.counts.updates


def test_only_growing_maxima_rescale() -> None:
    """Falling scores: the first tile holds every maximum, no update has alpha < 1."""
    problem = Problem.of(heads=1, seqlen=1, kv_seqlen=32, head_dim=1, dtype="float64", scale=1.0)
    inputs = random_inputs(problem)
    inputs["Q"][:] = 1.0
    for order, expected in ((-1.0, 0), (1.0, 7)):
        inputs["K"][0, 0, :, 0] = order * np.arange(32)
        done = simulate(problem, TilePlan(1, 4), "v2", inputs=inputs)
        assert (done.counts.updates, done.counts.rescales) == (8, expected)


@pytest.mark.parametrize(
    ("itemsize", "d", "tile"),
    [
        (4, 128, (16, 32)),
        (4, 256, (16, 32)),
        (4, 96, (32, 64)),
        (4, 64, (32, 64)),
        (2, 128, (8, 16)),
        (2, 96, (8, 32)),
        (2, 64, (16, 32)),
        (2, 32, (16, 32)),
    ],
)
def test_starting_tiles(itemsize: int, d: int, tile: tuple[int, int]) -> None:
    assert tutorials.starting_tile(itemsize, d) == tile


def test_erratum_the_fp32_rule_falls_to_the_smallest_tile() -> None:
    """fp32 at d = 64 starts at 72.5 KiB and falls straight to 4×8: 128 updates where half precision does 32."""
    assert tutorials.adapted_tile(4, 64) == (4, 8)
    assert tutorials.updates(1024, tutorials.adapted_tile(4, 64)[1]) == 128
    assert tutorials.adapted_tile(2, 64) == (16, 32)
    assert tutorials.updates(1024, tutorials.adapted_tile(2, 64)[1]) == 32


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_best_tile_that_fits_is_better(itemsize: int, d: int) -> None:
    """What a planner should do instead: the largest tile within 48 KiB."""
    tile = tutorials.best_fitting_tile(itemsize, d)
    assert tutorials.rescaling_sram(*tile, d, itemsize) <= 48 * KiB
    assert tutorials.updates(1024, tile[1]) <= tutorials.updates(1024, tutorials.adapted_tile(itemsize, d)[1])
    if itemsize == 4 and d == 64:
        assert tile == (8, 64)  # 42.125 KiB: 16 updates where the tutorial's 4×8 does 128
        assert tutorials.rescaling_sram(*tile, d, itemsize) == 42.125 * KiB


def test_erratum_floats_do_not_use_less_memory() -> None:
    assert all(tutorials.rescaling_sram(16, 32, d, 4) > tutorials.rescaling_sram(16, 32, d, 2) for d in (64, 128, 256))


def test_error_budget() -> None:
    """10 rescalings of 1e-6 each ≈ 1e-5."""
    assert tutorials.error_budget(10, 1e-6) == pytest.approx(1e-5, rel=1e-12)


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str, int], object]:
    return {(r.path, r.data, r.width): r for r in experiment(n=512, rows=32, widths=(8, 64, 512))}


def test_precision_within_the_tutorials_tolerances(results) -> None:  # type: ignore[no-untyped-def]
    """fp32 within 1e-5 of exact, half within 0.02: both far tighter here."""
    for (path, _, _), result in results.items():
        limit = {"fp32": 1e-6, "fp32 compensated": 1e-6, "double accumulators": 1e-14}.get(path, 0.02)
        assert result.error < limit, result


@pytest.mark.parametrize("path", ["fp16", "bf16", "fp32", "fp32 compensated"])
def test_finding_steeply_rising_scores_hide_rescalings(results, path: str) -> None:  # type: ignore[no-untyped-def]
    """Scores that climb by 8: rounding the scores decides, and rescaling on nearly every tile is no worse than never."""
    often, never = results[path, "rising", 8], results[path, "rising", 512]
    assert often.rescalings > 40 and never.rescalings == 0
    assert often.relative < 1.5 * never.relative
    assert often.relative < 1.5 * often.relative_without


def test_finding_rescalings_cost_precision_where_scores_rise_slowly() -> None:
    """The tutorial's direction: 1,024 keys whose scores rise from 0 to 0.05. Nothing fades, so 127 roundings by alpha add up.

    fp32 in 8-wide tiles loses several times what it loses without rescaling, and what 64-wide tiles lose; far from its budget
    of n × 1e-6 all the same.
    """
    data = make_data("slow", 16, 1024, 64, 0)
    scores = data[0] @ data[1].T / np.sqrt(64)
    assert scores.min() == 0.0 and scores.max() == pytest.approx(0.05)
    path = next(path for path in PATHS if path.name == "fp32")
    inputs = [path.inputs(x) for x in data]
    truth = exact(*inputs)

    def error(width: int, known: bool = False) -> float:
        out, rescalings = run(path, *inputs, width, known)
        assert known or (rescalings == 1024 // width - 1).all()
        return float(np.linalg.norm(out - truth) / np.linalg.norm(truth))

    # numpy's fp32 exp is off by up to two units elsewhere than on an Arm; one alpha decides, so that shows
    clear = 2.5 if platform.machine() in ("aarch64", "arm64") else 1.2
    assert error(8) > clear * error(8, known=True)
    assert error(8) > clear * error(64)
    assert error(8) < tutorials.error_budget(127, 1e-6) / 10


def test_finding_half_accumulators_do_lose(results) -> None:  # type: ignore[no-untyped-def]
    """Where the accumulators themselves are 16 bits wide, many tiles do hurt, and it is the additions that hurt:
    without any rescaling the error is as large."""
    for path in ("fp16 throughout", "bf16 throughout"):
        many, few = results[path, "random", 8], results[path, "random", 512]
        assert many.relative > 2 * few.relative
        assert many.relative < 1.5 * many.relative_without


def test_bfloat16_rounding() -> None:
    import torch

    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 10.0 ** np.arange(-20, 20).repeat(25)
    values = values.astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(to_bfloat16(values), expected)


def test_the_experiment_can_fail() -> None:
    """A path without its rescaling is far off: the errors above are not zero by construction."""
    q, k, v = make_data("rising", 8, 64, 16, 0)
    path = next(path for path in PATHS if path.name == "fp32")
    out, count = run(path, *(path.inputs(x) for x in (q, k, v)), 8)
    assert np.abs(out - exact(q, k, v)).max() < 1e-5
    assert (count > 0).all()
    half, _ = run(path, path.inputs(q), path.inputs(k)[:32], path.inputs(v)[:32], 8)
    assert np.abs(half - exact(q, k, v)).max() > 1e-3
