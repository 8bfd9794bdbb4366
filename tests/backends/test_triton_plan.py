"""Which tiles the Triton kernels get: what was measured, and for fp32 only what fits with two fp16 parts in place of a number."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from tests.backends.test_gpu_record import Collector
from tilewise.backends.base import BackwardInputs, Inputs, Needs
from tilewise.backends.gpu.arguments import splits_fp32
from tilewise.backends.triton import run
from tilewise.hardware import lookup
from tilewise.masks import causal
from tilewise.model import TilePlan, gpu_tile, onchip
from tilewise.problem import Problem

PASSES = ("forward", "backward_dkdv", "backward_dq")


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "keys", "splits"),
    [(8, 32, 8, 16384, 2), (1, 32, 8, 131072, 16), (64, 32, 8, 4096, 1), (1, 64, 8, 8192, 16), (8, 16, 1, 16384, 16)],
)
def test_decoding_takes_the_tile_and_the_splits_that_were_measured(
    batch: int, heads: int, kv_heads: int, keys: int, splits: int
) -> None:
    problem = Problem.of(
        batch=batch, heads=heads, kv_heads=kv_heads, seqlen=1, kv_seqlen=keys, head_dim=128, dtype="bfloat16"
    )
    tile = gpu_tile(problem, lookup("h200"), "decode", "triton")
    assert problem.decodes and tile.pack_gqa and tile.source == "tuned"
    assert (tile.block_q, tile.block_k, tile.stages, tile.warps, tile.splits) == (16, 128, 3, 4, splits)


@pytest.mark.parametrize("device", ["h200", "h100", "a100-80", "rtx4090", "b200"])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("pass_", PASSES)
def test_fp32_tiles_fit_in_two_parts(device: str, dim: int, pass_: str) -> None:
    spec = lookup(device)
    problem = Problem.of(batch=8, heads=8, seqlen=2048, head_dim=dim, dtype="float32", mask=causal(), device="cuda")
    tile = gpu_tile(problem, spec, pass_, "triton")
    assert sum(onchip.buffers(tile, dim, dim, itemsize=4).values()) <= spec.sram_per_block, tile
    if device == "b200":
        assert max(tile.block_q, tile.block_k) <= 32, "more goes through tensor memory, which is too small"


def test_who_splits_fp32() -> None:
    def problem(dtype: str, precision: str = "default") -> Problem:
        return Problem.of(heads=1, seqlen=8, head_dim=8, dtype=dtype, precision=precision)

    assert splits_fp32(problem("float32"), hip=False)
    assert not splits_fp32(problem("float32"), hip=True) and not splits_fp32(problem("float32", "tf32"), hip=False)
    assert not splits_fp32(problem("bfloat16"), hip=False)


def test_decoding_never_uses_tensor_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the keys are: they measured slower at every shape."""
    asked: list[bool] = []

    def descriptors(x: torch.Tensor, y: torch.Tensor, rows: int, wanted: bool) -> tuple[None, None]:
        asked.append(wanted)
        return None, None

    tile = TilePlan(16, 32, pack_gqa=True, splits=2, pass_="decode")
    monkeypatch.setattr(run, "descriptors", descriptors)
    monkeypatch.setattr(run, "tile_for", lambda problem, pass_, device: tile)
    monkeypatch.setattr(run, "fitting", lambda problem, pass_, build, tile, device: build(tile))
    monkeypatch.setattr(run, "recorder", Collector([]))
    for queries in (1, 2048):
        problem = Problem.of(heads=64, seqlen=queries, kv_seqlen=2**20, head_dim=128, dtype="bfloat16", device="cuda")
        q = torch.empty((1, 64, queries, 128), dtype=torch.bfloat16, device="meta")
        k = torch.empty((1, 64, 2**20, 128), dtype=torch.bfloat16, device="meta")
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
        trial = run.PLANNED if queries == 1 else run.Trial((TilePlan(64, 64),))
        run.run_forward(problem, Inputs(q, k, k), torch.empty_like(q), lse, trial)
    assert asked == [False, True]


def test_keys_are_not_split_under_a_bias() -> None:
    """A bias of -1e9 over a row leaves its log-sum-exp no digits for the number of keys, and parts of it are merged by that."""
    plain = Problem.of(heads=8, seqlen=1, kv_seqlen=2**16, head_dim=128, dtype="bfloat16", device="cuda")
    biased = dataclasses.replace(plain, bias=(1, 8, 1, 2**16))
    assert gpu_tile(plain, lookup("h200"), "decode", "triton").splits > 1
    assert gpu_tile(biased, lookup("h200"), "decode", "triton").splits == 1


def launched(monkeypatch: pytest.MonkeyPatch, dtype: str, dim: int, needs: Needs) -> list[tuple[str, set[str]]]:
    """The kernels of a backward and the gradients each writes."""
    tile = TilePlan(32, 32)
    monkeypatch.setattr(run, "fitting", lambda problem, pass_, build, given, device: build(tile))
    monkeypatch.setattr(run, "recorder", collector := Collector([]))
    problem = Problem.of(heads=2, seqlen=64, head_dim=dim, dtype=dtype, device="cuda")
    q = torch.empty((1, 2, 64, dim), dtype=getattr(torch, dtype), device="meta")
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
    run.run_backward(problem, Inputs(q, q, q), BackwardInputs(q, lse, q, needs=needs))
    found = [
        (launch.kernel.__name__, launch.args[1])
        for launch in collector.found[0][2]
        if launch.kernel.__name__ != "fp16_split_kernel"
    ]
    return [(name, {x for x in ("dq", "dk", "dv") if getattr(g, x) is not None}) for name, g in found]


@pytest.mark.parametrize(
    ("dtype", "dim", "apart"), [("float32", 128, True), ("float32", 64, False), ("bfloat16", 128, False)]
)
def test_dk_and_dv_are_computed_apart_where_registers_lack(
    monkeypatch: pytest.MonkeyPatch, dtype: str, dim: int, apart: bool
) -> None:
    keys = [("keys_kernel", {"dk"}), ("keys_kernel", {"dv"})] if apart else [("keys_kernel", {"dk", "dv"})]
    assert launched(monkeypatch, dtype, dim, Needs())[1:] == [*keys, ("queries_kernel", {"dq"})]
    assert launched(monkeypatch, dtype, dim, Needs(False, False, True))[1:] == [("keys_kernel", {"dv"})]
    assert launched(monkeypatch, dtype, dim, Needs(True, False, False))[1:] == [("queries_kernel", {"dq"})]
