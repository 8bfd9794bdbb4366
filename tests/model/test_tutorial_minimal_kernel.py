"""The tutorial on the minimal kernel: its figures to the digit, errata included."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.model import tutorials
from tilewise.lab.simulator import exact, random_inputs, simulate
from tilewise.lab.simulator.banks import BANKS, Layout, layouts, tile_conflicts, transactions
from tilewise.model import TilePlan, compulsory, standard, v2, work
from tilewise.problem import Problem

KiB, MiB = 2**10, 2**20


def test_shared_memory() -> None:
    """64×64×64 fp16: Q, K, V 8 KiB each, S and P 16 KiB each → 56 KiB."""
    buffers = tutorials.minimal_kernel_sram(64, 64, 64)
    assert [buffers[name] for name in "QKVSP"] == [8 * KiB] * 3 + [16 * KiB] * 2
    assert sum(buffers.values()) == 56 * KiB


def test_flops() -> None:
    """4·S²·D·B·H."""
    problem = Problem.of(batch=2, heads=3, seqlen=1024, head_dim=64)
    done = work(problem, TilePlan(128, 128))
    assert done.useful == done.executed == 4 * 1024**2 * 64 * 2 * 3
    assert done.exps == 2 * 3 * 1024**2


def test_hbm_elements() -> None:
    """Standard S(3D + 2S), flash 4SD."""
    assert tutorials.standard_elements(1024, 64) == 1024 * (3 * 64 + 2 * 1024)
    assert tutorials.flash_elements(1024, 64) == 4 * 1024 * 64


def test_erratum_the_list_sums_to_something_else() -> None:
    """Q, K, V, O once and S written and read are S(4D + 2S); with P written and read too, S(4D + 4S)."""
    s, d = 1024, 64
    assert tutorials.standard_elements_listed(s, d) == s * (4 * d + 2 * s)
    problem = Problem.of(heads=1, seqlen=s, head_dim=d, dtype="float16")
    assert standard(problem, kernels=3).total == 2 * s * (4 * d + 4 * s)


def test_flash_elements_are_a_lower_bound() -> None:
    """With one Q block it is reached (beside LSE); with more, K and V are read again for each."""
    problem = Problem.of(heads=1, seqlen=256, head_dim=64, dtype="float16")
    lse = 256 * 4
    assert v2(problem, TilePlan(256, 64)).total == 2 * tutorials.flash_elements(256, 64) + lse
    assert v2(problem, TilePlan(64, 64)).total == 2 * 256 * 64 * (2 + 2 * 4) + lse


def test_one_kernel_against_six() -> None:
    """Six kernels move S three times and E, P as often; the count of the fused kernel is a small part of it."""
    s, d = 1024, 64
    problem = Problem.of(heads=1, seqlen=s, head_dim=d, dtype="float16")
    six = standard(problem)
    scores, rows = 2 * s * s, 4 * s
    assert dict(six.reads) == {"Q": 2 * s * d, "K": 2 * s * d, "S": 2 * scores, "rowmax": rows, "E": 2 * scores,
                               "rowsum": rows, "P": scores, "V": 2 * s * d}  # fmt: skip
    assert dict(six.writes) == {"S": scores, "rowmax": rows, "E": scores, "rowsum": rows, "P": scores, "O": 2 * s * d}
    assert six.total / v2(problem, TilePlan(128, 128)).total == pytest.approx(7.33, abs=0.01)


def test_intensities() -> None:
    """2D standard and S flash, per element, for S ≫ D."""
    assert tutorials.standard_intensity(64) == 128
    assert tutorials.flash_intensity(1024) == 1024
    s, d = 1 << 20, 64
    assert 4 * s * s * d / tutorials.standard_elements(s, d) == pytest.approx(2 * d, rel=1e-3)
    assert 4 * s * s * d / tutorials.flash_elements(s, d) == s


def test_ideal_speedup() -> None:
    """4.75·S/D with 19 and 2 TB/s: 76 at S = 1024, D = 64."""
    assert tutorials.ideal_speedup(1024, 64) == pytest.approx(76.0, rel=1e-12)
    assert tutorials.ideal_speedup(2048, 128) == pytest.approx(4.75 * 2048 / 128, rel=1e-12)


def test_erratum_at_equal_bandwidth_it_is_nine() -> None:
    """The 76 divides HBM bytes by SRAM bandwidth; the bytes alone are 9 to 1."""
    assert tutorials.equal_bandwidth_speedup(1024, 64) == 9.0
    assert tutorials.equal_bandwidth_speedup(1024, 64) >= 3  # "3–8× in practice" is no more than the bytes allow


def test_memory_table() -> None:
    """S = 512 … 8192: 0.5, 2, 8, 32, 128 MiB against 128 KiB … 2 MiB; savings 4, 8, 16, 32, 64."""
    assert tutorials.memory_table(64) == [
        (512, MiB // 2, 128 * KiB, 4),
        (1024, 2 * MiB, 256 * KiB, 8),
        (2048, 8 * MiB, 512 * KiB, 16),
        (4096, 32 * MiB, MiB, 32),
        (8192, 128 * MiB, 2 * MiB, 64),
    ]


def test_erratum_the_table_mixes_two_element_sizes() -> None:
    """2S² are 2 bytes an element, 4SD is 1. In fp16 flash at S = 1024 has 512 KiB, not 256, and every saving is half."""
    assert [row[2:] for row in tutorials.memory_table(64, flash_bytes=2)] == [
        (256 * KiB, 2),
        (512 * KiB, 4),
        (MiB, 8),
        (2 * MiB, 16),
        (4 * MiB, 32),
    ]
    problem = Problem.of(heads=1, seqlen=1024, head_dim=64, dtype="float16")
    assert compulsory(problem, TilePlan(64, 64)).total == 512 * KiB + 1024 * 4  # and LSE


def test_both_online_forms_and_the_erratum() -> None:
    """Unnormalised and running-normalised agree; dividing by the running l without l_old / l_new does not."""
    problem = Problem.of(heads=1, seqlen=8, head_dim=4, dtype="float64")
    inputs = random_inputs(problem)
    out, _ = exact.attention(problem, inputs["Q"], inputs["K"], inputs["V"])
    for form in ("unnormalised", "normalised"):
        got = simulate(problem, TilePlan(8, 2), "v2", form=form, inputs=inputs).outputs["O"]
        np.testing.assert_allclose(got, out, rtol=0, atol=1e-14)
    q, k, v = (inputs[name][0, 0] for name in "QKV")
    m, l, o = np.full(8, -np.inf), np.zeros(8), np.zeros((8, 4))
    for start in range(0, 8, 2):
        s = problem.scale * q @ k[start : start + 2].T
        m_new = np.maximum(m, s.max(axis=1))
        p, correction = np.exp(s - m_new[:, None]), np.exp(m - m_new)
        l = correction * l + p.sum(axis=1)
        o = correction[:, None] * o + p @ v[start : start + 2] / l[:, None]  # the tutorial's high-level loop
        m = m_new
    assert np.abs(o - out[0, 0]).max() > 0.1


def test_two_by_two_by_hand() -> None:
    """Q = K = I, V = [[1, 2], [3, 4]], scale 1: each row weighs its own key e / (1 + e)."""
    problem = Problem.of(heads=1, seqlen=2, head_dim=2, dtype="float64", scale=1.0)
    eye, values = np.eye(2)[None, None], np.array([[1.0, 2.0], [3.0, 4.0]])[None, None]
    run = simulate(problem, TilePlan(1, 1), "v2", inputs={"Q": eye, "K": eye, "V": values})
    own, other = np.e / (1 + np.e), 1 / (1 + np.e)
    expected = [[own * 1 + other * 3, own * 2 + other * 4], [other * 1 + own * 3, other * 2 + own * 4]]
    np.testing.assert_allclose(run.outputs["O"][0, 0], expected, rtol=0, atol=1e-15)
    np.testing.assert_allclose(np.round(expected, 3), [[1.538, 2.538], [2.462, 3.462]], atol=1e-12)
    # row 0 meets its own key first (no rescaling), row 1 second: m goes 0 → 1 and alpha is 1/e
    assert (run.counts.updates, run.counts.rescales) == (4, 1)


# bank conflicts


def test_bad_and_good_access() -> None:
    """shared[thread · N] puts 32 threads on one bank, shared[thread · (N + 1)] on 32."""
    assert transactions([thread * 32 * 4 for thread in range(32)]) == 32
    assert transactions([thread * 33 * 4 for thread in range(32)]) == 1
    assert transactions([0] * 32) == 1  # the same word is given to all at once


def test_erratum_the_printed_swizzle_removes_nothing() -> None:
    """The same swap in every row keeps a column in one bank: 32 goes, as without. XOR with the row takes one."""

    def goes(place: Callable[[int, int], int], column: int) -> int:
        return transactions([(row * 32 + place(row, column)) * 4 for row in range(32)])

    for column in range(32):
        assert goes(lambda _, c: c, column) == goes(tutorials.printed_swizzle, column) == 32
        assert goes(tutorials.xor_swizzle, column) == 1
    assert [tutorials.printed_swizzle(0, c) for c in range(4)] == [0, 2, 1, 3]  # as printed: [0][2][1][3]
    layout = layouts("column", 128)["swizzled"]
    assert all(layout.address(r, 4 * c, 128) == (r * 32 + tutorials.xor_swizzle(r, c)) * 4 for r in range(64) for c in range(32))


@pytest.mark.parametrize("access", ["column", "matrix"])
@pytest.mark.parametrize(("cols", "itemsize"), [(64, 2), (128, 2), (64, 4), (256, 2)])
def test_padding_and_swizzling_remove_conflicts(access: str, cols: int, itemsize: int) -> None:
    found = {
        name: tile_conflicts(64, cols, itemsize, access, layout)
        for name, layout in layouts(access, cols * itemsize).items()
    }
    assert found["plain"].degree == (32 if access == "column" and cols * itemsize >= 128 else 8)
    assert found["plain"].conflicts > 0
    assert found["padded"].conflicts == found["swizzled"].conflicts == 0
    assert found["padded"].transactions == found["swizzled"].transactions == found["plain"].ideal


def test_rows_never_conflict() -> None:
    for layout in layouts("row", 128).values():
        assert tile_conflicts(16, 32, 4, "row", layout).conflicts == 0


def test_swizzling_loses_no_element() -> None:
    """A swizzle is a permutation of each row: as many addresses as elements, and no more bytes than the plain layout."""
    layout = layouts("matrix", 128)["swizzled"]
    plain = Layout("plain")
    addresses = {layout.address(row, byte, 128) for row in range(64) for byte in range(0, 128, 4)}
    assert addresses == {plain.address(row, byte, 128) for row in range(64) for byte in range(0, 128, 4)}
    assert BANKS == 32
