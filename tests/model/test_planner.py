"""Tiles: derived from bytes and registers, ranked by predicted time, overridable, explained."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import tilewise as tw
import tilewise.masks as masks
from tilewise.errors import ArgumentError, DeviceError, PlanError
from tilewise.hardware import DeviceSpec, catalogue, lookup
from tilewise.hardware.cpuid import core_figures
from tilewise.model import TilePlan, cpu_tile, evaluate, gpu_tile, onchip, plan
from tilewise.model.cpu import register_tile
from tilewise.model.evaluation import EVALUATED
from tilewise.model.gpu import ranked
from tilewise.model.grid import band_of, bucket, grid_fraction, visited_fraction
from tilewise.model.tile import RESOLUTION
from tilewise.problem import Problem

GPUS = [spec for spec in catalogue().values() if spec.is_gpu]
CPUS = [spec for spec in catalogue().values() if not spec.is_gpu]


def problem_of(**change: object) -> Problem:
    values: dict[str, object] = {"batch": 2, "heads": 16, "seqlen": 4096, "head_dim": 128, "dtype": "float16"}
    return Problem.of(**{**values, **change})  # type: ignore[arg-type]


# CPUs


@pytest.mark.parametrize(
    ("isa", "rows", "keys"), [("neon", 16, 4), ("avx512", 64, 4), ("avx2", 24, 4), ("sse2", 12, 4)]
)
def test_register_tiles_by_instruction_set(isa: str, rows: int, keys: int) -> None:
    pipe, _ = core_figures(isa)
    spec = DeviceSpec("t", "Test", "cpu", "", "x", units=1, isa=isa, **pipe)
    tile, _ = register_tile(spec)
    assert (tile.row_vectors * spec.lanes(), tile.keys) == (rows, keys)


@pytest.mark.parametrize("spec", CPUS, ids=lambda spec: spec.key)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("d", [16, 64, 96, 128, 256, 512])
def test_cpu_tiles_fit(spec: DeviceSpec, dtype: str, d: int) -> None:
    tile = cpu_tile(spec, problem_of(head_dim=d, dtype=dtype))
    assert tile.register_tile is not None and tile.reasons
    rows, keys = tile.register_tile
    assert rows * keys // spec.lanes(8 if dtype == "float64" else 4) < tile.registers <= spec.vector_registers
    assert tile.block_q % rows == 0 and tile.block_k % keys == 0
    assert 2 * tile.block_k * d * (8 if dtype == "float64" else 4) <= spec.l2_bytes // 2


# GPUs


@pytest.mark.parametrize(
    ("tile", "d", "registers"),
    [
        (TilePlan(128, 128, warps=8), 128, 184),
        (TilePlan(192, 128, warps=12), 64, 152),
        (TilePlan(128, 64, warps=8), 256, 204),
        (TilePlan(64, 128, warps=8, pass_="backward_dkdv"), 128, 235),
    ],
)
def test_register_model_against_the_assembler(tile: TilePlan, d: int, registers: int) -> None:
    """What ptxas reported for Hopper kernels with these tiles, two or three groups of four warps; none spilled."""
    found = onchip.kernel(tile, d, d, 2, lookup("h200")).registers
    assert abs(found - registers) <= 13
    assert found <= 65536 // (tile.warps * 32)


@pytest.mark.parametrize(
    ("tile", "d"),
    [
        (TilePlan(192, 128, warps=12), 128),
        (TilePlan(128, 256, warps=8), 128),
        (TilePlan(128, 128, warps=8, pass_="backward_dkdv"), 64),
    ],
)
def test_register_model_sees_spills(tile: TilePlan, d: int) -> None:
    """These did spill."""
    assert onchip.kernel(tile, d, d, 2, lookup("h200")).registers > 65536 // (tile.warps * 32) - 16


@pytest.mark.parametrize("spec", GPUS, ids=lambda spec: spec.key)
@pytest.mark.parametrize("pass_", ["forward", "backward_dkdv", "backward_dq", "decode"])
def test_chosen_tiles_run(spec: DeviceSpec, pass_: str) -> None:
    for d in (32, 64, 80, 128, 192, 256):
        for dtype in ("float16", "float32"):
            problem = problem_of(head_dim=d, dtype=dtype, seqlen=4 if pass_ == "decode" else 1024, kv_seqlen=4096)
            best = ranked(problem, spec, pass_)[0]
            assert not best.rejected and 0 < best.seconds < 1
            assert best.on_chip.sram_bytes <= spec.sram_per_block
            assert best.on_chip.registers <= spec.max_registers
            assert best.on_chip.blocks >= 1
            for side in (best.tile.block_q, best.tile.block_k):
                assert side & (side - 1) == 0, "Triton's tiles are powers of two"
            chosen = gpu_tile(problem, spec, pass_)
            assert chosen == best.tile


def test_predictions_are_near_what_kernels_reach() -> None:
    """H200, bf16, 16k tokens, hidden 2048: the best kernels known lie between cuDNN and FA4; the model within 25 %."""
    measured = {  # d, mask, S: useful TFLOP/s of cuDNN and FA4
        (64, False, 8192): (459, 531),
        (128, False, 2048): (601, 631),
        (128, False, 8192): (606, 653),
        (128, True, 8192): (551, 614),
        (256, False, 8192): (680, 716),
        (256, True, 8192): (601, 667),
    }
    for (d, causal, s), (low, high) in measured.items():
        mask = masks.causal() if causal else None
        problem = Problem.of(batch=16384 // s, heads=2048 // d, seqlen=s, head_dim=d, mask=mask)
        predicted = plan(problem, "h200").flops_per_second / 1e12
        assert 0.75 * low < predicted < 1.25 * high, (d, causal, s, predicted)


def test_tiles_of_192_rows_are_considered_but_never_chosen() -> None:
    """No power of two: only kernels that join two accumulators can have them."""
    problem = problem_of(head_dim=64)
    found = plan(problem, "h200")
    joined = [a for a in found.alternatives if 192 in (a.tile.block_q, a.tile.block_k)]
    assert joined and all(a.verdict != "chosen" for a in joined)
    assert all(192 not in (c.tile.block_q, c.tile.block_k) for c in ranked(problem, lookup("h200")))
    assert tw.plan(problem, "h200", tile=(192, 128)).tile.block_q == 192


def test_short_and_narrow_problems_get_small_tiles() -> None:
    tile = gpu_tile(problem_of(seqlen=20, head_dim=16), lookup("a100"))
    assert tile.block_q <= 32 and tile.block_k <= 32


def test_decode_splits_fill_the_device() -> None:
    spec = lookup("h200")
    lone = gpu_tile(Problem.of(heads=32, kv_heads=8, seqlen=1, kv_seqlen=131072, head_dim=128), spec, "decode")
    assert lone.pack_gqa and lone.block_q == 16
    assert 0.9 * spec.units <= 8 * lone.splits <= 3 * spec.units
    crowd = gpu_tile(Problem.of(batch=64, heads=32, kv_heads=8, seqlen=1, kv_seqlen=4096, head_dim=128), spec, "decode")
    assert crowd.splits < lone.splits
    short = gpu_tile(Problem.of(heads=32, kv_heads=8, seqlen=1, kv_seqlen=64, head_dim=128), spec, "decode")
    assert short.splits == 1


def test_plan_takes_decode_for_few_queries() -> None:
    few = Problem.of(heads=32, kv_heads=8, seqlen=1, kv_seqlen=8192, head_dim=128)
    assert plan(few, "h200").tile.pass_ == "decode"
    assert plan(few, "h200", pass_="forward").tile.pass_ == "forward"
    assert plan(few, "h200").binding in ("DRAM bandwidth", "latency")


@pytest.mark.parametrize("device", ["a100", "h200", "xeon-8480"])
def test_a_plan_is_consistent(device: str) -> None:
    found = tw.plan(problem_of(mask=masks.causal()), device)
    assert found.compulsory.total <= found.dram.total <= found.tile_traffic.total
    assert found.seconds >= max(found.limits.values())
    assert found.work.useful <= found.work.visited <= found.work.executed
    assert found.reasons and found.binding
    assert found.counters["l2_read"] == found.tile_traffic.total_read
    data = json.loads(json.dumps(found.to_dict()))
    assert data["traffic"]["tile"]["tensors"]["K"]["read"] == found.tile_traffic.reads["K"]
    text = str(found)
    for word in ("bytes by tensor", "HBM", "predicted", "why", str(found.tile)):
        assert word in text


def test_windows_cost_less_than_causal_and_causal_less_than_full() -> None:
    times = [
        plan(problem_of(seqlen=16384, mask=mask), "h200").seconds for mask in (masks.window(1024), masks.causal(), None)
    ]
    assert times[0] < times[1] < times[2]


def test_the_user_may_override_and_sees_the_cost() -> None:
    own = tw.plan(problem_of(), "h200", tile=(128, 64))
    assert (own.backend, own.tile.sizes, own.tile.source) == ("hopper", (128, 64), "user")
    assert own.reasons[0].startswith("yours: predicted") and "128×128, which would have been taken" in own.reasons[0]
    verdicts = {str(one.tile): one.verdict for one in own.alternatives}
    assert verdicts["128×64"] == "yours" and "128×128" in verdicts
    cpu = tw.plan(problem_of(dtype="float32"), "altra-q80", tile=(64, 64))
    assert cpu.tile.sizes == (64, 64) and cpu.reasons[0].startswith("yours")


@pytest.mark.parametrize(
    ("device", "backend", "tile", "message"),
    [
        ("h200", "hopper", (256, 256), "hopper has no 256×256 for forward, .*; it has 128×128, 128×64"),
        ("h200", "triton", (256, 256), "triton has no 256×256 for forward, .*(KiB|registers).*; it has .*128×64"),
        ("h200", "triton", (64, 100), "triton has no 64×100 for forward, .*powers of two"),
        ("altra-q80", "cpu", (20, 64), "cpu has no 20×64 for forward, rows must be a multiple of 16 and keys of 4"),
        ("altra-q80", "cpu", (65536, 4096), "cpu has no 65536×4096 for forward, .*bytes"),
        ("h200", "reference", (64, 64), "reference has none to choose"),
        ("altra-q80", "aten", (64, 64), "aten has none to choose"),
        ("a100", "hopper", (128, 128), "backend 'hopper' cannot serve .* needs compute capability 9.0"),
    ],
)
def test_impossible_tiles_raise(device: str, backend: str, tile: tuple[int, int], message: str) -> None:
    dtype = "float16" if lookup(device).is_gpu else "float32"
    with pytest.raises(PlanError, match=message):
        tw.plan(problem_of(dtype=dtype), device, backend=backend, tile=tile)


@pytest.mark.parametrize(
    "tile", [(0, 64), (64, -1), (64,), (1.5, 2), "64x64", (True, 64), {"forward": 64}, {"sideways": (1, 1)}]
)
def test_what_is_no_tile_raises(tile: object) -> None:
    with pytest.raises(ArgumentError, match="tile: got"):
        tw.plan(problem_of(), "h200", tile=tile)  # type: ignore[arg-type]


def test_a_tile_goes_to_the_first_backend_that_has_it() -> None:
    problem = problem_of()
    assert [tw.plan(problem, "h200", tile=tile).backend for tile in ((128, 64), (64, 64), (100, 7))] == [
        "hopper", "triton", "tiled",
    ]  # fmt: skip


def test_a_pair_is_for_the_pass_that_is_asked_for() -> None:
    problem = problem_of()
    usual = tw.plan(problem, "a100", pass_="backward_dq")
    own = tw.plan(problem, "a100", pass_="backward_dq", tile=(64, 32))
    assert own.tile.sizes == (64, 32) and own.tile.source == "user" != usual.tile.source
    assert own.passes[0] == usual.passes[0], "the forward keeps its tile"
    few = Problem.of(heads=32, kv_heads=8, seqlen=1, kv_seqlen=8192, head_dim=128)
    assert tw.plan(few, "a100").tile.pass_ == "decode"
    assert tw.plan(few, "a100", tile=(64, 64)).tile.pass_ == "forward", "naming the forward chooses its kernel"


def test_a_device_or_pass_nobody_knows_raises() -> None:
    with pytest.raises(DeviceError, match=r"unknown 'h20'.*did you mean 'h200'.*Known: .*a100-80.*xeon-8480"):
        tw.plan(problem_of(), "h20")
    with pytest.raises(PlanError, match="hopper has no kernel 'backward_dq' for this problem, only forward"):
        tw.plan(problem_of(), "h200", pass_="backward_dq")
    with pytest.raises(PlanError, match="pass_: got 'sideways', need auto, forward"):
        tw.plan(problem_of(), "h200", pass_="sideways")


MACHINES = [
    *(lookup(key) for key in ("h200", "a100", "rtx4090", "mi300x")),
    replace(lookup("altra-q80"), units=2),
    *(replace(lookup("xeon-8480"), threads=threads) for threads in (2, 16)),
]
"""GPUs, and CPUs whose constants were fitted."""


@pytest.mark.parametrize("spec", MACHINES, ids=lambda spec: f"{spec.key}-{spec.workers}")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_chosen_tile_is_not_predicted_slower_than_its_rivals(spec: DeviceSpec, backward: bool) -> None:
    """Beyond what the model can tell apart; what measurement chose is exempt, and says so."""
    dtype = "float16" if spec.is_gpu else "float32"
    for change in ({}, {"mask": masks.causal()}, {"head_dim": 64}, {"seqlen": 1024}, {"heads": 32, "kv_heads": 8}):
        problem = problem_of(dtype=dtype, **change)
        kernels = [tile.pass_ for tile in tw.plan(problem, spec).passes if tile.pass_ in EVALUATED]
        for kernel in kernels:
            if kernel.startswith("backward") != backward:
                continue
            found = tw.plan(problem, spec, pass_=kernel)
            rivals = {one.tile.sizes: one for one in found.alternatives}
            assert rivals[found.tile.sizes].verdict == "chosen" and rivals[found.tile.sizes].seconds == found.seconds
            assert all(one.seconds is not None or one.verdict for one in rivals.values())
            fastest = min(one.seconds for one in rivals.values() if one.seconds is not None)
            if found.tile.source == "model":
                assert found.seconds <= fastest * (1 + RESOLUTION), (spec.key, change, kernel, found.tile.sizes)


def test_impossible_requests_raise() -> None:
    with pytest.raises(PlanError, match="multiplies no bfloat16, only float16"):
        plan(problem_of(dtype="bfloat16"), "v100")
    with pytest.raises(PlanError, match="pass_: got 'sideways'"):
        plan(problem_of(), "h200", pass_="sideways")
    with pytest.raises(PlanError, match="is a CPU"):
        gpu_tile(problem_of(), lookup("xeon"))
    with pytest.raises(PlanError, match="stages: got 0"):
        TilePlan(64, 64, stages=0)


def test_where_nothing_fits_backends_get_the_smallest_and_plans_raise() -> None:
    wide = Problem.of(heads=1, seqlen=1024, head_dim=512, dtype="float32")
    tile = gpu_tile(wide, lookup("rtx4090"), "backward_dkdv")
    assert (tile.block_q, tile.block_k, tile.stages) == (16, 16, 1)
    with pytest.raises(
        PlanError, match=r"tile: none fits NVIDIA GeForce RTX 4090 .* the smallest, 16×16, fails: needs"
    ):
        plan(wide, "rtx4090", pass_="backward_dkdv")


@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.window(300), masks.window(100, 50), masks.causal(align="top_left")]
)
@pytest.mark.parametrize(("m", "n"), [(128, 64), (64, 128)])
def test_the_visited_fraction_is_exact_for_bands(mask: masks.Mask, m: int, n: int) -> None:
    problem = problem_of(seqlen=1000, kv_seqlen=1500, mask=mask)
    visited, _ = visited_fraction(band_of(problem), 1000, 1500, m, n)
    counts = masks.TileMap(problem.program, problem.shape, m, n).counts()
    assert visited == pytest.approx(counts.visited / sum(counts))


def test_growing_caches_are_planned_rarely() -> None:
    """A thousand decoding steps ask for a handful of plans; up to 256 every length counts."""
    assert [bucket(n) for n in (1, 17, 256, 257, 4096, 4097, 8000)] == [1, 17, 256, 288, 4096, 4608, 8192]
    lengths = range(4000, 5000)
    assert len({bucket(n) for n in lengths}) <= 4
    spec = lookup("h200")
    tiles = {gpu_tile(Problem.of(heads=8, seqlen=1, kv_seqlen=n, head_dim=64), spec, "decode") for n in lengths}
    assert len(tiles) <= 4
    causal = problem_of(seqlen=1000, kv_seqlen=3001, mask=masks.causal())
    assert gpu_tile(causal, spec) == plan(causal, spec).tile


def test_packed_batches_are_planned_as_even_ones() -> None:
    packed = Problem.of(batch=4, heads=8, seqlen=4096, head_dim=64, varlen=True, mask=masks.causal())
    even = Problem.of(batch=4, heads=8, seqlen=1024, head_dim=64, mask=masks.causal())
    assert gpu_tile(packed, lookup("h200")) == gpu_tile(even, lookup("h200"))
    assert plan(packed, "h200").tile_traffic == plan(even, "h200").tile_traffic


@pytest.mark.parametrize("mask", [masks.causal(), masks.window(300), masks.causal() & masks.window(100)], ids=repr)
@pytest.mark.parametrize("by_key", [False, True])
def test_both_counts_of_visited_tiles_agree(mask: masks.Mask, by_key: bool) -> None:
    problem = Problem.of(batch=2, heads=4, kv_heads=2, seqlen=1000, head_dim=64, mask=mask)
    average, longest = visited_fraction(band_of(problem), 1000, 1000, 128, 64)
    counted = grid_fraction(problem, 128, 64, by_key)
    assert counted[0] == pytest.approx(average) and (by_key or counted[1] == pytest.approx(longest))


@pytest.mark.parametrize("device", ["a100", "h200"])
@pytest.mark.parametrize("length", [1024, 4096])
def test_a_mask_that_shows_more_is_not_predicted_faster(device: str, length: int) -> None:
    """Of one wave the longest block decides: a prefix beside a causal mask, which is not one band, takes as long at least."""
    spec, tile = lookup(device), TilePlan(64, 64)

    def seconds(mask: masks.Mask | None) -> float:
        return evaluate(Problem.of(heads=8, seqlen=length, head_dim=64, mask=mask), spec, tile).seconds

    causal = seconds(masks.causal())
    assert causal <= seconds(masks.causal() | masks.prefix(length // 4)) <= seconds(None)
    if length == 1024 and device == "h200":
        assert causal == pytest.approx(seconds(None))  # 128 blocks on 132 units
