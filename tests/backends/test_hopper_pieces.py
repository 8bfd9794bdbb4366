"""Tiles of queries in pieces: every key once, even shares, and the kernel that merges them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

from tilewise.backends.hopper import launch
from tilewise.backends.hopper.pieces import EXTRA_STEPS, share_out
from tilewise.problem import Problem

SHAPES = [(1024, 256, 132), (1024, 128, 132), (2048, 64, 132), (136, 64, 132), (180, 128, 132), (330, 64, 132)]
SHAPES += [(10, 16, 7), (6, 32, 4)]


@pytest.mark.parametrize(("tiles", "steps", "programs"), SHAPES, ids=str)
def test_every_tile_of_keys_once(tiles: int, steps: int, programs: int) -> None:
    pieces = share_out(tiles, steps, programs)
    assert pieces is not None
    taken = pieces.order[pieces.order >= 0].tolist()
    assert sorted(taken) == [*range(tiles // programs * programs), *range(tiles, tiles + len(pieces.table))]
    assert (pieces.order[-1] < 0).all()
    visits = Counter((t, k) for t, last, count, _ in pieces.table.tolist() for k in range(last - count, last))
    assert visits == Counter((t, k) for t in range(tiles // programs * programs, tiles) for k in range(steps))
    for t, first, count, _ in pieces.cuts.tolist():
        assert (pieces.table[first : first + count, 0] == t).all()
    assert int(pieces.cuts[:, 2].sum()) == len(pieces.table)


@pytest.mark.parametrize(("tiles", "steps", "programs"), SHAPES, ids=str)
def test_even_shares(tiles: int, steps: int, programs: int) -> None:
    pieces = share_out(tiles, steps, programs)
    assert pieces is not None and pieces.saved > 0
    last = pieces.order[tiles // programs :]
    for program in range(programs):
        mine = [int(pieces.table[n - tiles, 2]) for n in last[:, program] if n >= 0]
        # whoever has several pieces has room for what they cost
        cost = sum(mine) + (EXTRA_STEPS * len(mine) if len(mine) > 1 else 0)
        assert cost <= steps - pieces.saved
    # no program could do with much less
    assert steps - pieces.saved <= tiles % programs * steps / programs + 2 * EXTRA_STEPS + 4


def test_nothing_to_share() -> None:
    assert share_out(264, 64, 132) is None
    assert share_out(100, 64, 132) is None
    assert share_out(1024, 1, 132) is None


def plan_of(length: int, monkeypatch: pytest.MonkeyPatch, keys: int | None, newer: bool = False, **more: object) -> launch.Plan:
    monkeypatch.setattr(launch, "SPLIT_KEYS", keys)
    monkeypatch.setattr(launch, "newer_registers", lambda: newer)
    shape = {"batch": 1, "heads": 8, "seqlen": length, "head_dim": 256, "dtype": "bfloat16", "device": "cuda", **more}
    return launch.make_plan(Problem.of(**shape), 132, lambda *_: None)


def test_where_tiles_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of(16384, monkeypatch, launch.SPLIT_KEYS).config.SPLIT
    assert not plan_of(8192, monkeypatch, launch.SPLIT_KEYS, batch=2).config.SPLIT
    assert not plan_of(16384, monkeypatch, None).config.SPLIT
    assert not plan_of(16384, monkeypatch, 1 << 20).config.SPLIT
    assert not plan_of(16384, monkeypatch, 1500, newer=True).config.SPLIT
    assert not plan_of(16383, monkeypatch, 1500).config.SPLIT
    assert not plan_of(16384, monkeypatch, 1500, head_dim=128).config.SPLIT
    assert not plan_of(2048, monkeypatch, 1500).config.SPLIT
    # whatever tile it is given
    tile = plan_of(16384, monkeypatch, 1500).config
    short = Problem.of(batch=1, heads=8, seqlen=2048, head_dim=256, dtype="bfloat16", device="cuda")
    assert not launch.make_plan(short, 132, lambda *_: None, tile).config.SPLIT


def test_scratch_is_as_large_as_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for heads in range(1, 40):
        plan = plan_of(16384, monkeypatch, 1, heads=heads)
        if plan.cut is not None:
            assert plan.cut.scratch(plan.config).nbytes <= 34 << 20


def test_the_merging_kernel_compiles_for_hopper() -> None:
    from triton.backends.compiler import GPUTarget

    from tilewise.backends.gpu.launch import Options, compile_for, signature, view
    from tilewise.backends.hopper.merge import ROWS, MergeConfig, Pending, merge_kernel

    fp32 = torch.empty(0)
    out, cuts = torch.empty(1, 8, 512, 256, dtype=torch.bfloat16), torch.empty(4, 4, dtype=torch.int32)
    given = (view(out), Pending(cuts, fp32, fp32, fp32, 8, 4, 512))
    config = MergeConfig(ROWS, 128, 256, 256)
    kernel = compile_for(GPUTarget("cuda", 90, 32), merge_kernel, signature(given), config, Options(4, 1))
    # pieces are read 16 bytes at a time, and nothing spills
    assert "ld.global.v4" in kernel.asm["ptx"] and ".local" not in kernel.asm["ptx"]


MERGE = """
import torch
from tilewise.backends.gpu.launch import view
from tilewise.backends.gpu.replay import Launch, Options
from tilewise.backends.hopper.merge import MergeConfig, Pending, merge_kernel
torch.manual_seed(0)
out = torch.full((2, 5, 3, 24), float("nan"), dtype=torch.float16).transpose(1, 2)  # (B, H, M, DV) = (2, 3, 5, 24)
lse = torch.full((2, 3, 5), float("nan"))
part_out, part_lse = torch.randn(5, 4, 32), 3 * torch.randn(5, 4)
part_lse[1] = float("-inf")
part_out[:, :, 24:] = float("nan")
cuts = torch.tensor([[3, 0, 2, 0], [10, 2, 3, 0]], dtype=torch.int32)  # of two tiles of 4 rows a head
a = Pending(cuts, part_out, part_lse, lse, 3, 2, 5)
Launch(merge_kernel, 2 * 2, (view(out), a), MergeConfig(2, 4, 24, 32), Options(4, 1)).run()
for t, first, count, _ in cuts.tolist():
    (b, h), m0 = divmod(t // 2, 3), (1 - t % 2) * 4
    rows = slice(m0, min(m0 + 4, 5))
    n = rows.stop - m0
    want = torch.logsumexp(part_lse[first : first + count, :n], 0)
    mean = (part_out[first : first + count, :n, :24] * torch.exp(part_lse[first : first + count, :n] - want)[..., None]).sum(0)
    torch.testing.assert_close(lse[b, h, rows], want)
    torch.testing.assert_close(out[b, h, rows].float(), mean, rtol=2e-3, atol=2e-3)
    lse[b, h, rows] = out[b, h, rows] = float("nan")
assert lse.isnan().all() and out.isnan().all()
"""


def test_the_merging_kernel() -> None:
    """In Triton's interpreter, which is decided on when triton is imported: in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", MERGE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
