"""The Hopper backend's plan is what its kernels are launched with, for a device that need not be there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tilewise.backends.hopper import arguments, plan
from tilewise.backends.hopper.backward import arguments as backward
from tilewise.backends.hopper.backward.choose import with_bias_gradient
from tilewise.hardware import lookup
from tilewise.masks import Mask
from tilewise.problem import Problem

H200 = lookup("h200")


def random_problem(seed: int) -> Problem:
    pick = random.Random(seed)
    batch, keys_heads, dim = pick.choice([1, 2, 5]), pick.choice([1, 2, 4]), pick.choice([8, 64, 72, 96, 128, 192, 256])
    queries = pick.choice([17, 64, 192, 500, 1024, 3000, 8192])
    keys = pick.choice([queries, queries, 100, 2048])
    packed = pick.random() < 0.2
    lengths = torch.full((batch,), max(1, keys // 2))
    masks: list[Mask] = [tw.full(), tw.causal(), tw.causal() & tw.window(100), tw.window(300), tw.causal() | tw.prefix(9)]
    if not packed:
        masks += [tw.key_padding(lengths), tw.causal(offset=torch.ones(batch, dtype=torch.int64))]
    features: dict[str, Any] = {"softcap": pick.choice([0.0, 0.0, 20.0]), "deterministic": pick.random() < 0.2}
    return Problem.of(
        batch=batch, heads=keys_heads * pick.choice([1, 1, 4]), kv_heads=keys_heads, seqlen=queries, kv_seqlen=keys,
        head_dim=dim, head_dim_v=pick.choice([dim, dim, 64, 256]), mask=pick.choice(masks), varlen=packed, device="cuda",
        dtype=pick.choice(["float16", "bfloat16"]), **features,
    )  # fmt: skip


def with_tiles(problem: Problem, seed: int) -> Problem:
    """The problem with some tile asked for, of each kernel that runs or could."""
    pick = random.Random(seed)
    passes = ["forward", *pick.choice([("backward",), ("backward_dkdv", "backward_dq")])]
    offers = {pass_: plan.choices(problem, H200, pass_) for pass_ in passes}
    return replace(problem, tile=tuple((pass_, *pick.choice(has).sizes) for pass_, has in offers.items() if has))


def launched(problem: Problem) -> dict[str, Any]:
    """Configs by kernel, as they reach the compiler."""
    seen: dict[str, Any] = {}
    arguments.make_plan(problem, H200, lambda _, __, config: seen.setdefault("forward_kernel", config))
    backward.make_plan(problem, H200, lambda name, _, __, config: seen.setdefault(name, config))
    return seen


@pytest.mark.parametrize("asks", [False, True], ids=["planned", "asked"])
@pytest.mark.parametrize("seed", range(100))
def test_what_is_planned_is_launched(seed: int, asks: bool) -> None:
    problem = random_problem(seed)
    problem = with_tiles(problem, seed) if asks else problem
    tiles, configs = plan.tiles(problem, H200), launched(problem)
    assert [tile.kernel for tile in tiles.values()] == list(configs)
    for pass_, tile in tiles.items():
        config = configs[tile.kernel]
        assert tile.pass_ == pass_ and tile.block_q == config.BLOCK_M and tile.reasons
        asked = problem.asked(pass_)
        assert tile.source == ("table" if asked is None else "user")
        assert asked in (None, tile.sizes)
        assert plan.choices(problem, H200, pass_)[0] == tile
        if pass_ not in ("backward_preprocess", "backward_postprocess"):
            assert tile.block_k == config.BLOCK_N and tile.registers == config.REGISTERS[0]
            assert tile.on_chip_bytes <= H200.sram_per_block
    assert plan.supports(problem, H200).ok and plan.supports(problem, H200, backward=True).ok


@pytest.mark.parametrize(
    ("tile", "fields", "words"),
    [
        ((256, 128), {}, ("no 256×128", "64 queries for each", "it has 128×128, 128×64, 192×64")),
        ((192, 128), {}, ("no 192×128", "of 160 registers", "it has 128×128")),
        ((192, 128), {"head_dim": 64, "mask": tw.window(100)}, ("too few for rows that begin after key 0",)),
        ({"backward": (64, 64)}, {"head_dim": 256}, ("256 columns", "no such kernel")),
        ({"backward": (64, 128)}, {"deterministic": True}, ("deterministic=True",)),
        ({"backward": (128, 128)}, {"head_dim": 64, "dropout_p": 0.1}, ("dropout finds no registers", "it has 64×128")),
        ({"backward": (128, 128)}, {"head_dim": 64, "scale": -1.0}, ("accumulate from -lse", "it has 64×128")),
        ({"backward": (64, 128)}, {"bias": (1, 4, 1024, 1024)}, ("a bias finds no registers",)),
        ({"backward_dkdv": (128, 128)}, {}, ("256 numbers", "240 registers", "it has 64×128, 64×64")),
        ({"backward_dq": (64, 64)}, {}, ("no 64×64 for backward_dq", "it has 128×128, 128×64")),
        ({"backward": (64, 128), "backward_dq": (128, 64)}, {}, ("name either",)),
        ({"decode": (16, 64)}, {}, ("no such kernel",)),
    ],
    ids=str,
)
def test_tiles_that_do_not_exist_are_refused(tile: Any, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    problem = Problem.of(heads=4, seqlen=1024, device="cuda", tile=tile, **{"head_dim": 128, **fields})
    backward_pass = isinstance(tile, dict) and "decode" not in tile
    verdict = plan.supports(problem, H200, backward=backward_pass)
    assert not verdict.ok
    assert all(word in " ".join(verdict.reasons) for word in words), verdict.reasons
    assert plan.supports(problem, H200, backward=not backward_pass).ok


FEATURES: list[dict[str, Any]] = [
    {"dropout_p": 0.1},
    {"softcap": 20.0},
    {"scale": -1.0},
    {"bias": (1, 4, 1024, 1024)},
    {"mask": tw.causal() & tw.documents(torch.zeros(1024, dtype=torch.int32))},
]


@pytest.mark.parametrize("dim", [24, 32, 40, 64])
@pytest.mark.parametrize("fields", FEATURES, ids=lambda fields: next(iter(fields)))
def test_features_take_one_kernel_up_to_64_columns(fields: dict[str, Any], dim: int) -> None:
    problem = Problem.of(heads=4, seqlen=1024, head_dim=dim, device="cuda", **fields)
    tiles = plan.tiles(problem, H200)
    assert list(tiles) == ["forward", "backward_preprocess", "backward", "backward_postprocess"]
    assert tiles["backward"].sizes == (64, 128)
    assert all(word in tiles["backward"].reasons[0] for word in ("five products", "128 queries"))
    config = plan.config_of(problem, tiles["backward"])
    used = {24: 32, 32: 32, 40: 64, 64: 64}[dim]
    assert (used // 2, used // 2) == config.DQ_PARTS and not config.ACC_FROM_STATS
    two = plan.tiles(replace(problem, deterministic=True), H200)
    assert list(two) == ["forward", "backward_preprocess", "backward_dkdv", "backward_dq"]


def test_the_gradient_of_a_bias_takes_two_kernels() -> None:
    problem = Problem.of(heads=4, seqlen=1024, head_dim=64, bias=(1, 4, 1024, 1024), device="cuda")
    assert "where the gradient of the bias is wanted, two" in plan.tiles(problem, H200)["backward"].reasons[0]
    wanting = with_bias_gradient(problem)
    assert list(plan.tiles(wanting, H200))[2:] == ["backward_dkdv", "backward_dq"] and with_bias_gradient(problem) is wanting
    apart = replace(problem, tile=(("backward_dq", 128, 64),))
    assert with_bias_gradient(apart) is apart, "two already"
    with pytest.raises(tw.TilewiseError, match="gradient of the bias"):
        with_bias_gradient(replace(problem, tile=(("backward", 64, 128),)))


def test_other_devices_are_refused_by_name() -> None:
    problem = Problem.of(heads=4, seqlen=1024, head_dim=128, device="cuda")
    (reason,) = plan.supports(problem, lookup("a100-80")).reasons
    assert "9.0" in reason and "A100" in reason and "sm_80" in reason


def test_plans_need_neither_torch_nor_triton() -> None:
    code = """
import sys
for name in ("torch", "triton", "llvmlite"):
    sys.modules[name] = None
from tilewise.backends import plans
from tilewise.hardware import lookup
from tilewise.masks import causal
from tilewise.problem import Problem
problem = Problem.of(heads=16, seqlen=16384, head_dim=64, mask=causal(), device="cuda")
tiles = plans.tiles("hopper", problem, lookup("h200"))
print(tiles["forward"], tiles["forward"].on_chip_bytes, *tiles)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[2:] == ["forward", "backward_preprocess", "backward", "backward_postprocess"]


@pytest.mark.parametrize(
    ("dim", "tokens", "mask", "more", "sizes"),
    [
        (80, 8192, tw.causal(), {}, (192, 64)),
        (96, 8192, None, {}, (192, 64)),
        (72, 2048, None, {}, (192, 64)),
        (96, 1024, tw.causal(), {}, (128, 128)),  # 192 queries go past the edge too often
        (96, 8192, tw.window(1000), {}, (128, 128)),  # rows that begin after key 0 leave too few registers
        (96, 8192, tw.causal(), {"softcap": 30.0}, (128, 128)),
        (104, 8192, tw.causal(), {}, (128, 128)),
        (128, 8192, tw.causal(), {}, (128, 128)),
        (80, 512, tw.causal(), {}, (128, 64)),
    ],
)
def test_three_warpgroups_of_64_keys_have_up_to_96_columns(
    dim: int, tokens: int, mask: Mask | None, more: dict[str, Any], sizes: tuple[int, int]
) -> None:
    problem = Problem.of(heads=2, seqlen=tokens, head_dim=dim, dtype="bfloat16", mask=mask, device="cuda", **more)
    tile = plan.tiles(problem, H200)["forward"]
    assert tile.sizes == sizes
    assert ("softmax of 96 columns" in tile.reasons[0]) == (sizes == (192, 64))
