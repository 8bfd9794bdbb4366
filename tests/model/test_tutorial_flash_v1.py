"""The tutorial on FlashAttention v1: its figures to the digit, erratum included."""

from __future__ import annotations

import numpy as np
import pytest

from tests.model import tutorials
from tilewise.hardware import lookup
from tilewise.lab.simulator import exact, random_inputs, simulate
from tilewise.model import TilePlan, kernel, v1, v2, work
from tilewise.problem import Problem

MiB = 2**20


def test_row_blocks() -> None:
    """N = 1024: Br = 256 → 4 Q blocks, Bc = 128 → 8 K/V blocks, S_ij is 256 × 128."""
    assert tutorials.blocks(1024, 256) == 4
    assert tutorials.blocks(1024, 128) == 8
    assert work(Problem.of(heads=1, seqlen=1024, head_dim=64), TilePlan(256, 128)).tiles == 32


def test_sram_rule() -> None:
    """4·Br·d + 8·Bc·d ≤ M, fp32 bytes of Q and of K and V."""
    assert tutorials.flash_v1_sram(256, 128, 64) == 4 * 256 * 64 + 8 * 128 * 64 == 128 * 1024
    assert tutorials.fits_flash_v1(256, 128, 64, 128 * 1024)
    assert not tutorials.fits_flash_v1(256, 128, 64, 128 * 1024 - 1)
    # S and O, left out, are as large again
    assert tutorials.tiling_sram(256, 128, 64, 4) - tutorials.flash_v1_sram(256, 128, 64) == (256 * 128 + 256 * 64 + 2 * 256) * 4


def test_the_rule_in_its_general_form() -> None:
    """x·Br·d + y·Bc·d ≤ M: 4 and 8 are fp32 Q and fp32 K, V. Our kernels' shared memory is the same form with other factors."""
    assert tutorials.sram_rule(4, 8, 256, 128, 64) == tutorials.flash_v1_sram(256, 128, 64)
    for size, stages in ((2, 1), (2, 2), (2, 3), (4, 2)):
        held = kernel(TilePlan(128, 64, stages), 128, 128, size, lookup("h200")).sram_bytes
        assert held == tutorials.sram_rule(size, 2 * stages * size, 128, 64, 128)


def test_erratum_pv_is_no_cheaper_than_the_scores() -> None:
    """"Softmax and SV also take O(N²)": P·V takes 2N²d, as much as QKᵀ; d = 64 makes it 25 times the softmax."""
    softmax, pv = tutorials.softmax_and_pv_flops(1024, 64)
    assert pv / softmax == pytest.approx(25.6)
    scores_and_pv = work(Problem.of(heads=1, seqlen=1024, head_dim=64), TilePlan(64, 64)).useful
    assert scores_and_pv == 2 * pv
    narrow = work(Problem.of(heads=1, seqlen=1024, head_dim=64, head_dim_v=32), TilePlan(64, 64)).useful
    assert narrow == scores_and_pv - pv // 2


def test_erratum_sram_is_no_few_megabytes() -> None:
    """"A few MB" is neither what a block has (163 KiB on an A100) nor what the GPU has: 17 MiB, or 20 with L1."""
    a100 = lookup("a100")
    assert a100.sram_per_block / MiB < 0.2
    assert tutorials.all_sram(a100.sram_bytes, a100.units) / MiB > 17
    # its own example, 256 × 128 at d = 64 in fp32, does not fit a block once S and O are counted
    assert tutorials.flash_v1_sram(256, 128, 64) < a100.sram_per_block < tutorials.tiling_sram(256, 128, 64, 4)


def test_walk_and_result() -> None:
    """K/V outside, Q inside; same result as Q outside."""
    problem = Problem.of(heads=1, seqlen=12, head_dim=4, dtype="float64")
    inputs = random_inputs(problem)
    run = simulate(problem, TilePlan(4, 6), "v1", inputs=inputs)
    assert [(visit.j, visit.i) for visit in run.walk] == [(j, i) for j in range(2) for i in range(3)]
    other = simulate(problem, TilePlan(4, 6), "v2", inputs=inputs)
    assert [(visit.i, visit.j) for visit in other.walk] == [(i, j) for i in range(3) for j in range(2)]
    out, _ = exact.attention(problem, inputs["Q"], inputs["K"], inputs["V"])
    for done in (run, other):
        np.testing.assert_allclose(done.outputs["O"], out, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("br", "bc"), [(256, 128), (128, 128), (64, 64)])
def test_the_two_loop_orders_side_by_side(br: int, bc: int) -> None:
    """v1 reads K and V once but O, m and l (and Q) once per K/V block; v2 the other way round."""
    n, d = 1024, 64
    problem = Problem.of(heads=1, seqlen=n, head_dim=d, dtype="float32")
    first, second = v1(problem, TilePlan(br, bc)), v2(problem, TilePlan(br, bc))
    rows, cols = tutorials.blocks(n, br), tutorials.blocks(n, bc)
    whole = n * d * 4
    assert first.reads["K"] == first.reads["V"] == whole
    assert first.reads["Q"] == cols * whole
    assert first.reads["acc"] == first.writes["acc"] == (cols + 1) * whole
    assert first.writes["m"] == first.writes["l"] == (cols + 1) * n * 4
    assert (first.reads["m"], first.reads["l"]) == (cols * n * 4, (cols + 1) * n * 4)
    assert second.reads["K"] == second.reads["V"] == rows * whole
    assert second.reads["Q"] == second.writes["O"] == whole
    assert first.total > second.total or rows > 3 * cols


def test_complexity() -> None:
    """Time O(N²d): doubling N quadruples the FLOPs. On chip it does not grow. HBM extra: m and l."""
    small, large = (Problem.of(heads=1, seqlen=n, head_dim=64, dtype="float32") for n in (512, 1024))
    tile = TilePlan(64, 64)
    assert work(large, tile).useful == 4 * work(small, tile).useful
    assert tutorials.extra_memory(1024) == 2 * 1024
    runs = [
        simulate(Problem.of(heads=1, seqlen=n, head_dim=4, dtype="float32"), TilePlan(8, 8), "v1") for n in (16, 64)
    ]
    assert runs[0].sram_peak == runs[1].sram_peak == tutorials.tiling_sram(8, 8, 4, 4)


def test_erratum_the_listing_needs_its_scale() -> None:
    """The listing computes softmax(QKᵀ)V: that is attention with scale 1, not 1/√d."""
    problem = Problem.of(heads=1, seqlen=8, head_dim=16, dtype="float64", scale=1.0)
    inputs = random_inputs(problem)
    q, k, v = (inputs[name][0, 0] for name in "QKV")
    p = np.exp(q @ k.T - (q @ k.T).max(axis=1, keepdims=True))
    bare = p @ v / p.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(
        simulate(problem, TilePlan(4, 4), "v1", inputs=inputs).outputs["O"][0, 0], bare, atol=1e-13
    )
    proper = Problem.of(heads=1, seqlen=8, head_dim=16, dtype="float64")
    assert np.abs(simulate(proper, TilePlan(4, 4), "v1", inputs=inputs).outputs["O"][0, 0] - bare).max() > 0.1
