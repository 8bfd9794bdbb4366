"""The tutorial on IO-aware design: its figures to the digit, errata included."""

from __future__ import annotations

import numpy as np
import pytest

from tests.model import tutorials
from tilewise.hardware import DeviceSpec, lookup
from tilewise.lab.simulator import exact, random_inputs, simulate
from tilewise.model import Roofline, TilePlan, compulsory, roofline, standard, traffic, v2, work
from tilewise.problem import Problem

MiB = 2**20
N, D = 4096, 64
SRAM_ELEMENTS = 100 * 1024 // 4


def under_roof(tflops: float, tbps: float, intensity: float) -> Roofline:
    """A problem of that intensity on a machine of those rates."""
    rates = {"peak": {"float16": tflops * 1e12}, "dram_bandwidth": tbps * 1e12}
    return roofline(intensity, 1, "float16", DeviceSpec("", "", "gpu", "", "", 1, **rates))


def test_ridge_points() -> None:
    """A100 312/2 = 156 FLOP/B; H100 989.4/3.35 = 295.3, which the tutorial prints as 296."""
    assert under_roof(tutorials.A100_TFLOPS, tutorials.A100_TBPS, 1).ridge == 156.0
    assert round(under_roof(tutorials.H100_TFLOPS, tutorials.H100_TBPS, 1).ridge, 1) == 295.3


def test_roofline() -> None:
    """min(peak, AI × bandwidth)."""
    assert under_roof(312, 2, 78).attainable == 156e12
    assert under_roof(312, 2, 156).attainable == 312e12 == under_roof(312, 2, 1000).attainable
    assert roofline(100, 0, "float16", lookup("a100")).intensity == float("inf")


def test_erratum_compute_has_not_outgrown_bandwidth_a_hundredfold() -> None:
    """Printed: compute ×1000, bandwidth ×10 in ten years. V100 (2017) to B200 (2024): ×18 and ×8.9, so the ridge doubled."""
    old, new = lookup("v100"), lookup("b200")
    compute, bandwidth = new.flops("float16") / old.flops("float16"), new.dram_bandwidth / old.dram_bandwidth
    assert tutorials.PRINTED_TREND == (1000, 10)
    assert compute == 18.0
    assert bandwidth == pytest.approx(8.9, abs=0.02)
    assert new.ridge("float16") / old.ridge("float16") == pytest.approx(2.0, abs=0.05)


RIDGES = [  # device, dtype, ridge; standard attention (three kernels) lies left of it at d = 64, at d = 128
    ("v100", "float16", 139, True, True),
    ("a100", "bfloat16", 153, True, True),
    ("h200", "bfloat16", 206, True, True),
    ("b200", "bfloat16", 281, True, True),
    ("mi300x", "bfloat16", 247, True, True),
    ("altra", "float32", 18.75, True, False),
    ("graviton3", "float32", 17.3, True, False),
    ("xeon", "float32", 23.3, True, False),
    ("epyc", "float32", 16, True, False),
]


@pytest.mark.parametrize(("device", "dtype", "ridge", "left64", "left128"), RIDGES)
def test_standard_attention_is_not_left_of_every_ridge(
    device: str, dtype: str, ridge: float, left64: bool, left128: bool
) -> None:
    spec = lookup(device)
    assert spec.ridge(dtype) == pytest.approx(ridge, rel=0.01)
    for d, left in ((64, left64), (128, left128)):
        problem = Problem.of(heads=1, seqlen=4096, head_dim=d, dtype=dtype)
        useful = work(problem, TilePlan(128, 128)).useful
        place = roofline(useful, standard(problem, kernels=3).total, dtype, spec)
        assert place.intensity == pytest.approx(d / problem.itemsize, rel=0.04)
        assert (place.bound == "memory") is left, place
        flash = roofline(useful, compulsory(problem, TilePlan(128, 128)).total, dtype, spec)
        assert flash.bound == "compute" and flash.intensity > 4 * flash.ridge


def test_intensity_by_step() -> None:
    """QKᵀ ≈ 2d = 128, softmax 2.5, PV ≈ 2d."""
    assert tutorials.step_intensities(64) == {"QKᵀ": 128.0, "softmax": 2.5, "PV": 128.0}


def test_intensity_overall() -> None:
    """60–80 per element; in bytes (fp16) about 33, some 21 % of A100's peak."""
    assert 60 <= tutorials.standard_intensity_overall(64) <= 80
    in_bytes = tutorials.standard_intensity_overall(64, itemsize=2)
    assert round(in_bytes) == 33
    share = under_roof(312, 2, in_bytes).attainable / 312e12
    assert round(100 * share) == 21  # the tutorial's "~50 %" reads the per-element figure against the ridge in bytes
    assert tutorials.standard_intensity_overall(64) / 156 == pytest.approx(0.42, abs=0.01)


def test_accesses_of_the_standard_way() -> None:
    """~4N² + 6Nd as printed; the list sums to 5Nd."""
    assert tutorials.standard_accesses(N, D) == 4 * N * N + 6 * N * D
    listed = {"Q": 1, "K": 1, "K again": 1, "V": 1, "O": 1}
    assert tutorials.standard_accesses_listed(N, D) == 4 * N * N + sum(listed.values()) * N * D
    # without reading K a second time: what three kernels really move
    problem = Problem.of(heads=1, seqlen=N, head_dim=D, dtype="float32")
    assert standard(problem, kernels=3).total == 4 * (4 * N * N + 4 * N * D)


def test_the_headline_figure() -> None:
    """N = 4096, d = 64, M = 100 KiB = 25,600 fp32 elements: 256 MiB against 10.24 MiB, exactly 4M/d² = 25×."""
    assert SRAM_ELEMENTS == 25_600
    assert 256 * MiB == 4 * N * N * 4
    flash = tutorials.flash_accesses(N, D, SRAM_ELEMENTS) * 4
    assert flash == pytest.approx(10.24 * MiB, rel=1e-12)
    assert 4 * N * N * 4 / flash == pytest.approx(25.0, rel=1e-12)
    assert tutorials.traffic_ratio(SRAM_ELEMENTS, D) == 25.0


def test_erratum_the_formula_lost_a_square() -> None:
    """N²d/M would be 0.16 MiB, not the 10 MB the tutorial prints."""
    printed = N * N * D / SRAM_ELEMENTS * 4
    assert printed < 0.2 * MiB


@pytest.mark.parametrize(("br", "ratio"), [(128, 3.95), (256, 7.68)])
def test_exact_count_of_the_q_outer_schedule(br: int, ratio: float) -> None:
    """What a stated tile really moves: about 3.9× less at Br = 128, 7.7× at 256."""
    assert tutorials.standard_accesses_listed(N, D) / tutorials.q_outer_accesses(N, D, br) == pytest.approx(ratio, abs=0.005)
    problem = Problem.of(heads=1, seqlen=N, head_dim=D, dtype="float32")
    lse = N * 4
    assert v2(problem, TilePlan(br, 64)).total == tutorials.q_outer_accesses(N, D, br) * 4 + lse


def test_recomputation_keeps_only_statistics() -> None:
    """The forward writes O and one statistic a row; the backward reads no N × N matrix."""
    problem = Problem.of(heads=1, seqlen=1024, head_dim=64, dtype="float16")
    forward = v2(problem, TilePlan(128, 128))
    assert dict(forward.writes) == {"O": 1024 * 64 * 2, "LSE": 1024 * 4}
    again = traffic(problem, TilePlan(128, 128), "backward")
    assert set(again.reads) == {"O", "dO", "Q", "K", "V", "LSE", "delta"}
    assert max(again.writes.values()) == 1024 * 64 * 2


def test_erratum_the_loop_needs_its_scale() -> None:
    """The tutorial leaves out 1/√d: without it the result is another one."""
    scaled = Problem.of(heads=1, seqlen=16, head_dim=16, dtype="float64")
    bare = Problem.of(heads=1, seqlen=16, head_dim=16, dtype="float64", scale=1.0)
    assert scaled.scale == 0.25
    inputs = random_inputs(scaled)
    right, _ = exact.attention(scaled, inputs["Q"], inputs["K"], inputs["V"])
    np.testing.assert_allclose(simulate(scaled, TilePlan(4, 4), inputs=inputs).outputs["O"], right, atol=1e-14)
    assert np.abs(simulate(bare, TilePlan(4, 4), inputs=inputs).outputs["O"] - right).max() > 0.1
