"""Which tiles the Triton kernels get on which device: what was measured, what fits, what the user asks for; and why."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.backends.gpu.operands import splits_fp32
from tilewise.backends.triton import onchip, plan, tuned
from tilewise.errors import PlanError
from tilewise.hardware import catalogue, lookup
from tilewise.masks import causal, window
from tilewise.model.gpu import evaluate
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
GPUS = [spec for spec in catalogue().values() if spec.is_gpu and (spec.capability is None or spec.capability >= (8, 0))]


def problem_of(**change: object) -> Problem:
    sizes = {"batch": 4, "heads": 16, "seqlen": 2048, "head_dim": 128, "mask": causal(), "device": "cuda"}
    return Problem.of(**{**sizes, **change})  # type: ignore[arg-type]


def test_plans_need_neither_torch_nor_triton() -> None:
    program = """
import builtins
real = builtins.__import__
def guarded(name, *rest, **more):
    assert name.split(".")[0] not in ("torch", "triton", "llvmlite"), name
    return real(name, *rest, **more)
builtins.__import__ = guarded
from tilewise.backends.triton import plan
from tilewise.hardware.catalogue import lookup
from tilewise.problem import Problem
problem = Problem.of(heads=8, seqlen=512, head_dim=64, device="cuda")
assert plan.supports(problem, lookup("h200")).ok and plan.declines(problem, lookup("h200")) is None
assert plan.tiles(problem, lookup("a100"))["forward"].on_chip and plan.choices(problem, lookup("a100"), "backward_dq")
"""
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=ROOT)


@pytest.mark.parametrize(
    ("features", "dkdv", "dq"),
    [
        ({}, (64, 64, 4), (64, 64, 4)),
        ({"alibi": True}, (64, 64, 4), (64, 64, 4)),
        ({"dropout_p": 0.1}, (32, 64, 4), (64, 64, 4)),
        ({"dropout_p": 0.1, "alibi": True}, (32, 64, 8), (64, 32, 4)),
        ({"softcap": 30.0, "alibi": True}, (32, 64, 8), (64, 32, 4)),
    ],
    ids=str,
)
def test_features_take_tiles_that_leave_them_registers(
    features: dict[str, object], dkdv: tuple[int, int, int], dq: tuple[int, int, int]
) -> None:
    tiles = plan.tiles(problem_of(head_dim=64, **features), lookup("h200"))
    assert [(*tiles[f"backward_{name}"].sizes, tiles[f"backward_{name}"].warps) for name in ("dkdv", "dq")] == [dkdv, dq]


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "keys", "splits"),
    [(8, 32, 8, 16384, 2), (1, 32, 8, 131072, 16), (64, 32, 8, 4096, 1), (1, 64, 8, 8192, 16), (8, 16, 1, 16384, 16)],
)
def test_decoding_takes_the_tile_and_the_splits_that_were_measured(
    batch: int, heads: int, kv_heads: int, keys: int, splits: int
) -> None:
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seqlen": 1, "kv_seqlen": keys}
    problem = Problem.of(**sizes, head_dim=128, dtype="bfloat16")
    tiles = plan.tiles(problem, lookup("h200"))
    tile = tiles["decode"]
    assert problem.decodes and tile.pack_gqa and tile.source == "tuned" and "forward" not in tiles
    assert ("merge" in tiles) == (splits > 1)
    assert (*tile.sizes, onchip.num_stages(tile, lookup("h200")), tile.warps, tile.splits) == (16, 128, 3, 4, splits)
    assert dict(tile.on_chip)["K"] == 2 * 128 * 128 * 2, "two buffers: Triton counts the one in registers, too"


@pytest.mark.parametrize("spec", GPUS, ids=lambda spec: spec.key)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_planned_tiles_fit_and_say_so(spec: object, dtype: str, dim: int) -> None:
    assert isinstance(spec, type(lookup("h200")))
    problem = problem_of(head_dim=dim, dtype=dtype)
    for pass_, tile in plan.tiles(problem, spec).items():
        assert tile.pass_ == pass_ and tile.kernel == plan.KERNELS[pass_] and tile.reasons
        assert 0 < tile.on_chip_bytes <= spec.sram_per_block and 0 < tile.registers <= spec.max_registers
        assert tile.resident >= 1
        if pass_ in plan.STREAMING:
            assert all(side in plan.BLOCKS for side in tile.sizes)
            assert tile.outer == ("keys" if pass_ == "backward_dkdv" else "queries")
        if spec.key == "b200" and dtype == "float32" and pass_ in plan.STREAMING:
            assert max(tile.sizes) <= 32, "more goes through tensor memory, which is too small"


@pytest.mark.parametrize("device", ["a100", "rtx3090", "rtx4090", "rtx5090"])
@pytest.mark.parametrize("dim", [64, 128])
def test_ampere_has_two_buffers(device: str, dim: int) -> None:
    spec = lookup(device)
    for pass_, tile in plan.tiles(problem_of(head_dim=dim), spec).items():
        if pass_ in plan.STREAMING:
            assert tile.stages >= 2 and onchip.num_stages(tile, spec) >= 3, (pass_, tile)


@pytest.mark.parametrize("device", ["a100", "h200", "b200", "mi300x"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("pass_", ["forward", "backward_dkdv", "backward_dq"])
def test_there_are_tiles_to_choose_from(device: str, dim: int, pass_: str) -> None:
    spec, problem = lookup(device), problem_of(head_dim=dim)
    has = plan.choices(problem, spec, pass_)
    assert len(has) >= 8 and len({tile.sizes for tile in has}) == len(has)
    assert has[0] == plan.tiles(problem, spec)[pass_]
    for tile in has[:: max(1, len(has) // 6)]:
        asked = dataclasses.replace(problem, tile=((pass_, *tile.sizes),))
        got = plan.tiles(asked, spec)[pass_]
        assert plan.supports(asked, spec).ok and got.source == "user"
        assert got.sizes == tile.sizes and got.on_chip == tile.on_chip and got.warps == tile.warps
        assert plan.choices(asked, spec, pass_)[0] == got


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (("forward", 48, 64), "whose sides are powers of two from 16 to 256; it has 64×64"),
        (("forward", 512, 64), "whose sides are powers of two"),
        (("forward", 256, 256), "has no 256×256 for forward, which needs [0-9]+ (KiB of shared memory|registers)"),
        (("backward", 64, 64), "has no 64×64 for backward: it has no such kernel"),
        (("decode", 16, 64), "has no 16×64 for decode: it has no such kernel for this call"),
        (("backward_preprocess", 128, 1), "has no 128×1 for backward_preprocess.*it has 64×1"),
    ],
)
def test_a_tile_it_has_not_is_refused_with_those_it_has(tile: tuple[str, int, int], message: str) -> None:
    verdict = plan.supports(dataclasses.replace(problem_of(), tile=(tile,)), lookup("h200"))
    assert not verdict.ok
    with pytest.raises(PlanError, match=message):
        raise PlanError(verdict.reasons[0])


def test_a_tile_of_the_forward_keeps_a_call_from_decoding() -> None:
    few = Problem.of(heads=8, seqlen=1, kv_seqlen=4096, head_dim=64, device="cuda", tile=(16, 64))
    tiles = plan.tiles(few, lookup("a100"))
    assert "decode" not in tiles and tiles["forward"].sizes == (16, 64)
    decoding = Problem.of(heads=8, seqlen=1, kv_seqlen=4096, head_dim=64, device="cuda", tile={"decode": (16, 32)})
    assert plan.tiles(decoding, lookup("a100"))["decode"].sizes == (16, 32)


@pytest.mark.parametrize("device", ["a100", "rtx4090", "h200", "b200", "mi300x"])
def test_a_chosen_tile_is_the_fastest_or_says_why_not(device: str) -> None:
    spec = lookup(device)
    for dim in (64, 96, 128, 256):
        for mask in (None, causal(), window(512)):
            problem = problem_of(head_dim=dim, mask=mask)
            for pass_, tile in plan.tiles(problem, spec).items():
                if pass_ not in plan.STREAMING:
                    continue
                rivals = [evaluate(problem, spec, rival) for rival in plan.choices(problem, spec, pass_)]
                fastest = min(rivals, key=lambda rival: rival.seconds)
                if fastest.seconds < evaluate(problem, spec, tile).seconds:
                    assert any("faster" in reason for reason in tile.reasons), (tile, fastest.tile)


def test_the_table_wins_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tuned.Tuned(
        arch="sm_90", pass_="forward", head_dim=128, itemsize=2, block_q=128, block_k=64, num_stages=3, warps=8,
        device="NVIDIA H200", date="2026-01-01", figure="600 TFLOP/s against 580", evidence="a test",
    )  # fmt: skip
    monkeypatch.setattr(tuned, "TUNED", (entry,))
    tile = plan.tiles(problem_of(), lookup("h200"))["forward"]
    assert (*tile.sizes, tile.stages, tile.warps, tile.source) == (128, 64, 3, 8, "tuned")
    assert "600 TFLOP/s against 580; NVIDIA H200, 2026-01-01 (a test)" in tile.reasons[0]
    assert plan.tiles(problem_of(), lookup("a100"))["forward"].source == "model"
    assert plan.tiles(problem_of(head_dim=64), lookup("h200"))["forward"].source == "model"


def test_packed_sequences_may_have_a_tile_of_their_own() -> None:
    def stages(**change: object) -> int:
        return plan.tiles(problem_of(head_dim=64, **change), lookup("h200"))["backward_dkdv"].stages

    assert stages(varlen=True) == 2
    assert stages() == stages(varlen=True, mask=None) == 3


def test_a_large_tile_waits_for_a_grid_that_fills_the_device() -> None:
    def sizes(**change: object) -> tuple[int, int]:
        fields: dict[str, object] = {"dtype": "float32", "head_dim": 128, "batch": 1, "heads": 11}
        return plan.tiles(problem_of(**fields | change), lookup("h200"))["forward"].sizes

    assert sizes(seqlen=12 * 128) == sizes(seqlen=11 * 128 + 1) == (128, 64)  # 132 tiles
    assert sizes(seqlen=11 * 128) == sizes(seqlen=12 * 128, varlen=True, batch=3, heads=10) == (64, 32)
    assert sizes(seqlen=128, batch=12) == sizes(seqlen=12 * 128, varlen=True, batch=3) == (128, 64)
    assert sizes(seqlen=4096, softcap=20.0) == sizes(seqlen=4096, dropout_p=0.1) == (64, 32)


def test_every_exception_has_a_device_a_date_and_a_figure() -> None:
    for entry in tuned.TUNED:
        assert entry.device and any(c.isdigit() for c in entry.figure) and entry.evidence and len(entry.date) == 10
        sizes = TilePlan(entry.block_q, entry.block_k, 1, entry.warps, pass_=entry.pass_)
        assert onchip.stages_of(entry.num_stages, sizes, lookup("h200")) >= 2, entry


def test_what_does_not_fit_is_refused_for_the_gradients_only() -> None:
    wide = Problem.of(heads=1, seqlen=1024, head_dim=512, dtype="float32", device="cuda")
    spec = lookup("rtx4090")
    assert plan.supports(wide, spec).ok and "backward_dkdv" not in plan.tiles(wide, spec)
    refused = plan.supports(wide, spec, backward=True)
    assert not refused.ok and "no tile of backward_dkdv fits NVIDIA GeForce RTX 4090" in refused.reasons[0]


def test_what_no_device_serves_is_refused() -> None:
    assert "float64" in plan.supports(problem_of(dtype="float64"), lookup("h200")).reasons[0]
    assert (
        "compensated" in plan.supports(problem_of(dtype="float32", precision="compensated"), lookup("h200")).reasons[0]
    )
    assert "8.0 or newer" in plan.supports(problem_of(dtype="float16"), lookup("v100")).reasons[0]
    assert "interpreter" in (plan.declines(problem_of(device="cpu"), lookup("xeon")) or "")


def test_who_splits_fp32() -> None:
    def problem(dtype: str, precision: str = "default") -> Problem:
        return Problem.of(heads=1, seqlen=8, head_dim=8, dtype=dtype, precision=precision)

    assert splits_fp32(problem("float32"), hip=False)
    assert not splits_fp32(problem("float32"), hip=True) and not splits_fp32(problem("float32", "tf32"), hip=False)
    assert not splits_fp32(problem("bfloat16"), hip=False)
    assert "fp16_split" in plan.tiles(problem("float32"), lookup("h200"))
    assert "fp16_split" not in plan.tiles(problem("float32"), lookup("mi300x"))


def test_keys_are_not_split_under_a_bias() -> None:
    """A bias of -1e9 over a row leaves its log-sum-exp no digits for the number of keys, and parts of it are merged by that."""
    plain = Problem.of(heads=8, seqlen=1, kv_seqlen=2**16, head_dim=128, dtype="bfloat16", device="cuda")
    biased = dataclasses.replace(plain, bias=(1, 8, 1, 2**16))
    assert plan.tiles(plain, lookup("h200"))["decode"].splits > 1
    tiles = plan.tiles(biased, lookup("h200"))
    assert tiles["decode"].splits == 1 and "merge" not in tiles and "backward_dbias" in tiles
