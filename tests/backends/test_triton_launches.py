"""The launches of the Triton backend: what the plan says, and nothing else."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tools.compile_checks import portable, problem_of
from tools.gpu_launches import launches, pass_of, plan_faults

from tests.backends.test_gpu_record import Collector
from tilewise.backends.base import BackwardInputs, Inputs, Needs
from tilewise.backends.gpu.launch import EARLY_SINCE, LaunchOptions, signature
from tilewise.backends.gpu.record import Launch
from tilewise.backends.gpu.structs import Attention
from tilewise.backends.triton import onchip, plan, run
from tilewise.hardware import lookup
from tilewise.masks import Mask, blocks, causal, documents, window
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem


def tensors(problem: Problem) -> Inputs:
    dtype = getattr(torch, problem.dtype)
    q = torch.empty((problem.batch, problem.heads, problem.seqlen_q, problem.head_dim), dtype=dtype, device="meta")
    k = torch.empty((problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim), dtype=dtype, device="meta")
    bias = None if problem.bias is None else torch.empty(problem.bias, dtype=dtype, device="meta")
    return Inputs(q, k, k, bias)


def drawn(rng: random.Random, device: str) -> Problem:
    """A random problem, perhaps with a tile that the kernels have there."""
    group, kv_heads = rng.choice((1, 2, 4)), rng.choice((1, 2))
    queries = rng.choice((1, 5, 64, 300, 2048))
    problem = Problem.of(
        batch=rng.choice((1, 3)), heads=group * kv_heads, kv_heads=kv_heads, seqlen=queries,
        kv_seqlen=rng.choice((queries, 4096)), head_dim=rng.choice((16, 40, 64, 128, 256)),
        dtype=rng.choice(("float16", "bfloat16", "float32")), mask=rng.choice((None, causal(), window(64))), device="cuda",
    )  # fmt: skip
    if rng.random() < 0.3:
        shape = (1, problem.heads, problem.seqlen_q, problem.seqlen_k)
        problem = Problem.of(**_fields(problem), bias=shape)
    if rng.random() < 0.5:
        spec = lookup(device)
        pass_ = rng.choice([name for name in plan.passes(problem, spec) if name in plan.STREAMING])
        tile = rng.choice(plan.choices(problem, spec, pass_))
        problem = Problem.of(**_fields(problem), bias=problem.bias, tile={pass_: tile.sizes})
    return problem


def _fields(problem: Problem) -> dict[str, object]:
    names = ("batch", "heads", "kv_heads", "head_dim", "dtype", "mask", "device")
    return {name: getattr(problem, name) for name in names} | {
        "seqlen": problem.seqlen_q,
        "kv_seqlen": problem.seqlen_k,
    }


@pytest.mark.parametrize("device", ["a100", "rtx4090", "h200", "b200", "mi300x"])
def test_what_is_launched_is_what_is_planned(device: str) -> None:
    """200 random problems, some with a tile asked for: every launch has its plan's tile, warps and stages."""
    rng, spec = random.Random(device), lookup(device)
    for _ in range(40):
        problem = drawn(rng, device)
        tiles = plan.tiles(problem, spec)
        inputs = tensors(problem)
        found = launches(problem, inputs, spec)
        if plan.supports(problem, spec, backward=True).ok:
            found += launches(problem, inputs, spec, needs=Needs(dbias=problem.bias is not None))
            assert {pass_of(name, tiles) for name, _ in found} == set(tiles)
        for name, launch in found:
            tile = tiles[pass_of(name, tiles)]
            assert tile.sizes == (launch.config.BLOCK_M, launch.config.BLOCK_N), (problem, name)
            early = tile.pass_ == "merge" and (spec.capability or (0, 0)) >= EARLY_SINCE
            assert launch.options == LaunchOptions(tile.warps, onchip.num_stages(tile, spec), early), (problem, name)
            if problem.asked(tile.pass_):
                assert tile.sizes == problem.asked(tile.pass_) and tile.source == "user"


def test_decoding_never_uses_tensor_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the keys are: they measured slower at every shape."""
    asked: list[bool] = []

    def descriptors(x: torch.Tensor, y: torch.Tensor, rows: int, wanted: bool) -> tuple[None, None]:
        asked.append(wanted)
        return None, None

    monkeypatch.setattr(run, "descriptors", descriptors)
    monkeypatch.setattr(run, "spec_of", lambda device: lookup("h200"))
    monkeypatch.setattr(run, "recorder", Collector([]))
    for queries in (1, 2048):
        problem = Problem.of(heads=64, seqlen=queries, kv_seqlen=2**20, head_dim=128, dtype="bfloat16", device="cuda")
        inputs = tensors(problem)
        lse = torch.empty(inputs.q.shape[:3], dtype=torch.float32, device="meta")
        run.run_forward(problem, inputs, torch.empty_like(inputs.q), lse)
    assert asked == [False, True]


def launched(monkeypatch: pytest.MonkeyPatch, dtype: str, dim: int, needs: Needs) -> list[tuple[str, set[str]]]:
    """The kernels of a backward and the gradients each writes."""
    monkeypatch.setattr(run, "spec_of", lambda device: lookup("h200"))
    monkeypatch.setattr(run, "recorder", collector := Collector([]))
    problem = Problem.of(heads=2, seqlen=64, head_dim=dim, dtype=dtype, device="cuda")
    q = tensors(problem).q
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


def listed_launches(device: str, mask: Mask | None, length: int = 256, **more: object) -> dict[str, list[Launch]]:
    """The launches of a backward under a mask, by kernel."""
    problem = Problem.of(heads=2, seqlen=length, head_dim=128, dtype="bfloat16", mask=mask, device="cuda", **more)
    found: dict[str, list[Launch]] = {}
    for _, launch in launches(problem, tensors(problem), lookup(device), needs=Needs()):
        found.setdefault(launch.kernel.__name__, []).append(launch)
    return found


def test_tables_of_whole_tiles_need_no_second_launch() -> None:
    """Nor a loop over PARTIAL tiles. Where a tile may be PARTIAL, results that are not finite are computed once more."""
    table, ids = torch.ones(1, 1, 4, 4, dtype=torch.bool), torch.zeros(256, dtype=torch.int32)
    for name in ("keys_kernel", "queries_kernel"):
        (only,) = listed_launches("h200", blocks(table, 64))[name]
        assert only.config.ALL_FULL
        for mask, length in ((causal() & blocks(table, 64), 256), (blocks(table, 64), 250), (documents(ids), 256)):
            first, careful = listed_launches("h200", mask, length)[name]
            assert not first.config.ALL_FULL and careful.config.CAREFUL


def test_statistics_come_by_tensor_maps_where_lists_are_walked() -> None:
    """And where a warpgroup multiplies: elsewhere kernels are as they were measured."""
    table = torch.ones(1, 1, 4, 4, dtype=torch.bool)

    def maps(device: str, mask: Mask | None, **more: object) -> list[object]:
        launch = listed_launches(device, mask, **more)["keys_kernel"][0]
        return [x if x is None else (x.shape, x.block_shape) for x in launch.args[4:]]

    assert maps("h200", blocks(table, 64)) == [([512], [64])] * 2
    assert maps("h200", causal()) == maps("a100", blocks(table, 64)) == maps("b200", blocks(table, 64)) == [None, None]
    assert maps("h200", blocks(table, 64), softcap=30.0) == maps("h200", blocks(table, 64), dropout_p=0.1) == [None, None]


def test_no_tensor_map_of_statistics_is_read_off_16_bytes() -> None:
    """Such a copy is an illegal instruction. Packed sequences begin anywhere, and heads where the rows of the one before end."""
    spec, ids = lookup("h200"), torch.zeros(2304, dtype=torch.int32)

    def maps(length: int, varlen: bool) -> set[bool]:
        problem = Problem.of(
            batch=3, heads=6, kv_heads=2, seqlen=length, head_dim=64, head_dim_v=256, dtype="bfloat16", device="cuda",
            mask=documents(ids[:length], q_ids=ids[:length]), varlen=varlen,
        )  # fmt: skip
        batch = 1 if varlen else 3
        q, k, v = (torch.empty(batch, h, length, d, dtype=torch.bfloat16, device="meta") for h, d in ((6, 64), (2, 64), (2, 256)))
        cu = torch.empty(4, dtype=torch.int32, device="meta") if varlen else None
        found = launches(problem, Inputs(q, k, v, cu_q=cu, cu_k=cu), spec, needs=Needs())
        return {x is not None for name, launch in found if name == "keys" for x in launch.args[4:]}

    assert maps(2304, varlen=False) == {True}
    assert maps(2304, varlen=True) == maps(2301, varlen=False) == maps(2302, varlen=False) == {False}


def test_tables_have_tiles_of_their_own_where_they_are_made_of_these() -> None:
    spec = lookup("h200")

    def sizes(table: torch.Tensor, size: int | tuple[int, int], **more: object) -> list[tuple[int, int]]:
        problem = Problem.of(heads=2, seqlen=256, head_dim=128, dtype="bfloat16", mask=blocks(table, size), device="cuda", **more)
        tiles = plan.tiles(problem, spec)
        return [tiles[pass_].sizes for pass_ in ("backward_dkdv", "backward_dq")]

    assert sizes(torch.ones(1, 1, 2, 2, dtype=torch.bool), 128) == [(64, 64), (128, 64)]
    assert sizes(torch.ones(1, 1, 4, 4, dtype=torch.bool), 64) == [(64, 64), (64, 32)]
    assert sizes(torch.ones(1, 1, 8, 4, dtype=torch.bool), (32, 64))[0] == (32, 64)
    assert sizes(torch.ones(1, 1, 4, 4, dtype=torch.bool), 64, softcap=30.0)[0] == (32, 64)
    assert sizes(torch.ones(1, 1, 2, 2, dtype=torch.bool), 192)[0] == (32, 64), "the last block is cut"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"shared": 65537}, "65537 B of shared memory, the plan says 65536"),
        ({"shared": 65536 - 8193}, "B of shared memory, the plan says 65536"),
        ({"registers": 208}, "208 registers, the plan says at most 200"),
        ({"ptx": ".target sm_80\ncp.async.wait_group 0;"}, "2 buffers, but copies are waited for at once"),
    ],
)
def test_a_kernel_that_is_not_what_the_plan_says_is_a_fault(change: dict[str, Any], fault: str) -> None:
    compiled = {"shared": 65536, "registers": 200, "ptx": ".target sm_80\ncp.async.wait_group \t2;\ncp.async.wait_group 0;"}
    compiled |= change
    tile = TilePlan(128, 32, 2, 8, on_chip=(("Q", 32768), ("K", 16384), ("V", 16384)), registers=200)
    facts = SimpleNamespace(shared=compiled["shared"], registers=compiled["registers"])
    wrong = plan_faults(facts, compiled["ptx"], tile, pipelined=True)
    assert (len(wrong) == 1 and fault in wrong[0]) if fault else not wrong


OWN_ROWS = {(0, Attention._fields.index(name)) for name in ("bias", "alibi")}


@pytest.mark.parametrize(
    "change", [{"alibi": True}, {"seqlen": 1023, "bias": (1, 8, 1023, 1023)}, {"seqlen": 1023, "bias": (1, 8, 1023, 1)}], ids=str
)
def test_slopes_and_odd_biases_leave_q_k_and_v_aligned(change: dict[str, Any]) -> None:
    """A row of a bias is as long as there are keys, one of slopes is a number: that kept every load from being a wide one."""
    with_it, without = (
        problem_of(portable("", **{name: value for name, value in change.items() if name in names}))
        for names in (("seqlen", "bias", "alibi"), ("seqlen",))
    )
    for needs in (None, Needs()):
        plain, found = (dict(launches(*one, lookup("a100"), needs=needs)) for one in (without, with_it))
        for name, launch in plain.items():
            expected, attributes = (signature(one.args).attributes for one in (launch, found[name]))
            assert {path: what for path, what in attributes.items() if len(path) < 2 or path[:2] not in OWN_ROWS} == expected
            wide = [path for path in attributes if path[:2] in OWN_ROWS and len(path) > 2 and path[2] > 0]
            assert not wide, "strides of 1023 and 1 are no multiples"
