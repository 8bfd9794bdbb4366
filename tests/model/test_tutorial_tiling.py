"""The tutorial on tiling: its figures to the digit, with its own constants."""

from __future__ import annotations

import numpy as np
import pytest

from tests.model import tutorials
from tilewise.hardware import lookup
from tilewise.lab.simulator import exact, random_inputs, simulate
from tilewise.lab.simulator.timeline import block_timeline, timeline
from tilewise.model import TilePlan, gpu_tile, v2, work
from tilewise.model.gpu import BLOCKS, ranked
from tilewise.problem import Problem

KiB, MiB = 2**10, 2**20


def test_why_tiles_are_needed() -> None:
    """N = 4096 in fp16: S and P are 32 MiB each, 64 together, against about 20 MB of SRAM (192 KB an SM)."""
    assert tutorials.score_bytes(4096) == 32 * MiB
    assert 2 * tutorials.score_bytes(4096) == 64 * MiB
    all_sram = tutorials.all_sram(192 * KiB)
    assert round(all_sram / 1e6) == 21  # the tutorial's "~20 MB"
    assert 2 * tutorials.score_bytes(4096) > 3 * all_sram


def test_erratum_a_kernel_has_164_of_the_192_kilobytes() -> None:
    """192 KB a multiprocessor are L1 and shared memory together. Of them a kernel may have 164 KB as shared memory, a block 163:
    17.3 MiB in all instead of 20.25."""
    a100 = lookup("a100")
    assert (a100.units, a100.sram_bytes, a100.sram_per_block) == (tutorials.A100_SMS, 164 * KiB, 163 * KiB)
    assert tutorials.all_sram(192 * KiB) == 20.25 * MiB
    assert tutorials.all_sram(a100.sram_bytes) / MiB == pytest.approx(17.3, abs=0.01)


@pytest.mark.parametrize(("n", "block", "count"), [(4096, 64, 64), (4096, 128, 32), (1000, 128, 8), (1, 64, 1)])
def test_block_counts(n: int, block: int, count: int) -> None:
    assert tutorials.blocks(n, block) == count


def test_on_chip_forms() -> None:
    """§2.2 and §7.2 at Br = Bc = 64, d = 64, 16 bits."""
    assert tutorials.tiling_sram(64, 64, 64, 2) == (64 * 64 + 2 * 64 * 64 + 64 * 64 + 64 * 64 + 2 * 64) * 2 == 41216
    assert tutorials.tiling_sram_rule(64, 64, 64) == (64 * 64 + 2 * 64 * 64 + 64 * 64) * 2 == 32 * KiB
    # they differ by the accumulator and the statistics alone
    assert tutorials.tiling_sram(128, 64, 128, 2) - tutorials.tiling_sram_rule(128, 64, 128) == (128 * 128 + 2 * 128) * 2


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("block", [64, 128])
def test_usual_tiles_fit_the_usual_sram(block: int, d: int) -> None:
    """A100 ~164 KB/SM: 64–128 × 64–128; H100 ~228 KB/SM: 128–256 × 64–128."""
    assert tutorials.tiling_sram_rule(block, block, d) <= 164 * KiB
    assert tutorials.tiling_sram_rule(2 * block, block, d) <= 228 * KiB


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_planner_lands_in_the_usual_ranges(d: int, dtype: str) -> None:
    problem = Problem.of(batch=2, heads=16, seqlen=4096, head_dim=d, dtype=dtype)
    for device in ("a100-40", "a100-80"):
        tile = gpu_tile(problem, lookup(device))
        assert 64 <= tile.block_q <= 128 and 64 <= tile.block_k <= 128, (device, tile)
    for device in ("h100", "h100-pcie", "h200"):
        tile = gpu_tile(problem, lookup(device))
        assert 128 <= tile.block_q <= 256 and 64 <= tile.block_k <= 128, (device, tile)


def test_candidates_are_the_tutorials_and_double_buffered() -> None:
    assert {32, 64, 128, 256} <= set(BLOCKS)
    problem = Problem.of(heads=16, seqlen=4096, head_dim=128)
    for device in ("a100", "h200"):
        tile = gpu_tile(problem, lookup(device))
        assert tile.block_q % 32 == 0 and tile.block_k % 32 == 0
        assert tile.stages >= 2


def test_tiles_adapt_to_the_length() -> None:
    """A short sequence gets no tile longer than itself."""
    short = gpu_tile(Problem.of(heads=16, seqlen=64, head_dim=64), lookup("h100"))
    assert short.block_q <= 64 and short.block_k <= 64
    assert gpu_tile(Problem.of(heads=16, seqlen=8192, head_dim=64), lookup("h100")).block_q > short.block_q


def test_trade_off_of_the_tile_size() -> None:
    """§7.1: larger tiles mean fewer iterations, more SRAM, fewer blocks to run side by side."""
    problem = Problem.of(heads=1, seqlen=4096, head_dim=64)
    small, large = TilePlan(64, 64), TilePlan(128, 128)
    assert work(problem, small).tiles == 4 * work(problem, large).tiles
    assert tutorials.tiling_sram_rule(64, 64, 64) < tutorials.tiling_sram_rule(128, 128, 64)
    assert tutorials.blocks(4096, 64) > tutorials.blocks(4096, 128)
    by_tile = {(c.tile.block_q, c.tile.block_k): c for c in ranked(problem, lookup("a100")) if c.tile.stages == 2}
    assert by_tile[64, 64].on_chip.blocks >= by_tile[128, 128].on_chip.blocks


@pytest.mark.parametrize(("n", "br", "bc"), [(64, 16, 16), (50, 16, 12), (7, 64, 64), (33, 32, 1)])
def test_forward_is_exact_with_ragged_tiles(n: int, br: int, bc: int) -> None:
    """§8.1: the listing's algorithm, last tiles shorter than the rest; the output is written once."""
    problem = Problem.of(heads=2, seqlen=n, head_dim=8, dtype="float64")
    inputs = random_inputs(problem)
    run = simulate(problem, TilePlan(br, bc), "v2", inputs=inputs)
    out, _ = exact.attention(problem, inputs["Q"], inputs["K"], inputs["V"])
    np.testing.assert_allclose(run.outputs["O"], out, rtol=0, atol=1e-13)
    assert run.traffic.writes["O"] == 2 * n * 8 * 8
    assert run.traffic.reads["Q"] == 2 * n * 8 * 8
    assert run.traffic.reads["K"] == 2 * n * 8 * 8 * tutorials.blocks(n, br)


def test_double_buffering_overlaps() -> None:
    """§6.1: with two buffers the load of tile j + 1 runs while tile j is computed."""
    loads, computes = [1.0] * 6, [1.0] * 6
    single, double = timeline(loads, computes, 1), timeline(loads, computes, 2)
    assert single.total == 12.0 and single.overlap == 0.0
    assert double.total == 7.0 and double.overlap == 5.0
    assert [event.buffer for event in double.events if event.kind == "load"] == [0, 1, 0, 1, 0, 1]
    second_load = next(e for e in double.events if e.kind == "load" and e.step == 1)
    first_compute = next(e for e in double.events if e.kind == "compute" and e.step == 0)
    assert (second_load.start, second_load.end) == (first_compute.start, first_compute.end)


@pytest.mark.parametrize(
    ("load", "compute", "total"), [(2.0, 1.0, 9.0), (1.0, 2.0, 9.0), (1.0, 1.0, 5.0)], ids=["loads", "computes", "even"]
)
def test_two_buffers_take_the_slower_of_the_two_and_one_of_the_faster(load: float, compute: float, total: float) -> None:
    """Four tiles: n × the slower + one of the faster. Without latency and with equal tiles a third buffer gains nothing."""
    for stages in (2, 3, 4):
        assert timeline([load] * 4, [compute] * 4, stages).total == total
    assert total == 4 * max(load, compute) + min(load, compute)
    assert timeline([load] * 4, [compute] * 4, 1).total == 4 * (load + compute)


def test_stages_beyond_two_hide_latency_and_uneven_tiles() -> None:
    """A tile takes max(load, compute, (latency + load + compute) / stages) in the long run."""
    n, load, compute, latency = 200, 1.0, 1.0, 3.0
    for stages in range(1, 8):
        each = max(load, compute, (latency + load + compute) / stages)
        assert timeline([load] * n, [compute] * n, stages, latency).total == pytest.approx(n * each, rel=0.03)
    uneven = [1.0, 1.0, 7.0, 1.0] * 4  # as PARTIAL tiles among FULL ones
    two, three = (timeline([2.0] * 16, uneven, stages).total for stages in (2, 3))
    assert three < two


@pytest.mark.parametrize("device", ["a100", "h200"])
@pytest.mark.parametrize("d", [64, 128])
def test_a_block_s_loads_come_out_of_l2(device: str, d: int) -> None:
    """As in the IO model: memory sends a tile once for all blocks, and each of them draws it from L2."""
    spec, tile = lookup(device), TilePlan(128, 64)
    problem = Problem.of(heads=8, seqlen=1024, head_dim=d, dtype="bfloat16")
    loads = [event for event in block_timeline(problem, tile, [64] * 4, 128, spec).events if event.kind == "load"]
    tile_bytes = (v2(problem, tile).reads["K"] + v2(problem, tile).reads["V"]) / work(problem, tile).tiles
    share_of_l2 = spec.l2_bandwidth / spec.units
    assert [event.end - event.start for event in loads] == pytest.approx([tile_bytes / share_of_l2] * 4)
    assert share_of_l2 > spec.dram_bandwidth / spec.units


def test_a_core_loads_out_of_its_own_l2() -> None:
    spec = lookup("altra")
    problem = Problem.of(heads=8, seqlen=1024, head_dim=64, dtype="float32")
    first = block_timeline(problem, TilePlan(64, 64), [64], 64, spec).events[0]
    assert first.end - first.start == pytest.approx(64 * 128 * 4 / (spec.l2_bytes_per_cycle * spec.clock_hz))
