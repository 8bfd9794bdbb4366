"""What the CPU kernels run with: planned for any processor, read back from launches, chosen by users."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

import tilewise as tw
from tests.conformance.cases import CASES, Case, build
from tests.conformance.harness import excesses
from tilewise.backends.base import Inputs
from tilewise.backends.cpu import backend as cpu
from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu import frames, plan, prepare
from tilewise.backends.cpu.prepare import launch_for
from tilewise.backends.cpu.spec import HOT, argument_names
from tilewise.errors import BackendError
from tilewise.hardware import catalogue, device, lookup
from tilewise.hardware.spec import DeviceSpec
from tilewise.lab.bench.engine import torch_threads
from tilewise.lab.bench.suites import CPU as SUITE
from tilewise.problem import Problem

CPUS = [spec for spec in catalogue().values() if not spec.is_gpu]
N1 = replace(lookup("altra-q80"), units=2)
"""The processor that blocks were measured on, of which two cores."""
WITHOUT = """
import sys
for name in ("torch", "triton", "llvmlite"):
    sys.modules[name] = None  # importing it raises
from tilewise.backends.cpu import plan
from tilewise.hardware import lookup
from tilewise.problem import Problem
for key, dtype in (("altra-q80", "float32"), ("xeon-8480", "bfloat16")):
    problem, spec = Problem.of(heads=8, seqlen=4096, head_dim=128, dtype=dtype), lookup(key)
    assert plan.supports(problem, spec).ok and plan.declines(problem, spec) is None
    tiles = plan.tiles(problem, spec)
    assert len(plan.choices(problem, spec, "forward")) >= 8
    print(*(f"{tile.kernel}:{tile}" for tile in tiles.values()))
"""


def problem_of(**change: Any) -> Problem:
    return Problem.of(**{"heads": 8, "seqlen": 4096, "head_dim": 64, "dtype": "float32", **change})


def test_planning_needs_neither_torch_nor_a_compiler() -> None:
    """And a Xeon is planned for with its matrix tiles wherever this runs."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["forward:64×128 backward:256×64", "forward_amx:128×256 backward_amx:384×128"]


@pytest.mark.parametrize(
    ("change", "pass_", "tile", "register"),
    [
        ({}, "forward", "512×128", (16, 4)),
        ({}, "backward", "256×64", (16, 4)),
        ({"head_dim": 256}, "forward", "368×128", (16, 4)),
        ({"seqlen": 4, "kv_seqlen": 4096}, "forward", "4×128", (4, 8)),
        ({"batch": 8, "heads": 32, "kv_heads": 8, "seqlen": 1, "kv_seqlen": 4096, "head_dim": 128}, "decode", "1×24", (4, 4)),
        ({"heads": 1, "seqlen": 1, "kv_seqlen": 65536}, "decode", "1×256", (1, 16)),
    ],
)
def test_tiles_on_a_neoverse_n1(change: dict[str, Any], pass_: str, tile: str, register: tuple[int, int]) -> None:
    chosen = plan.tiles(problem_of(**change), N1)[pass_]
    assert (str(chosen), chosen.register_tile) == (tile, register)
    assert chosen.source == "model" and len(chosen.reasons) >= 4


def test_reasons_are_of_the_tile_that_runs() -> None:
    forward = plan.tiles(problem_of(), N1)["forward"]
    said = "\n".join(forward.reasons)
    kib = f"{forward.on_chip_bytes / 1024:.0f} of 1024 KiB"
    for figure in ("16 rows × 4 keys", "128 keys", "512 rows", "64 tasks for 2 threads", kib):
        assert figure in said
    split = plan.tiles(problem_of(heads=1, seqlen=1, kv_seqlen=65536), N1)["decode"]
    assert split.splits == 8 and any("merges them in the kernel" in reason for reason in split.reasons)
    assert "merge" not in plan.tiles(problem_of(heads=1, seqlen=1, kv_seqlen=65536), N1), "there is no such kernel"


def test_matrix_tiles_come_from_the_spec() -> None:
    xeon, problem = lookup("xeon-8480"), problem_of(dtype="bfloat16")
    assert {tile.kernel for tile in plan.tiles(problem, xeon).values()} == {"forward_amx", "backward_amx"}
    for other in (replace(problem, dtype="float16"), problem_of()):
        assert {tile.kernel for tile in plan.tiles(other, xeon).values()} == {"forward", "backward"}
    refused = replace(xeon, isa_flags=("avx512_bf16", "avx512f"))
    assert {tile.kernel for tile in plan.tiles(problem, refused).values()} == {"forward", "backward"}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (lookup("h200"), "is a GPU"),
        (replace(lookup("xeon-8480"), isa="sse2"), "needs AVX2 and FMA"),
        (replace(lookup("altra-q80"), arch="riscv64"), "is riscv64"),
    ],
)
def test_processors_without_kernels_are_refused(spec: DeviceSpec, reason: str) -> None:
    verdict = plan.supports(problem_of(), spec)
    assert not verdict.ok and reason in verdict.reasons[0]


@pytest.mark.parametrize("spec", CPUS, ids=lambda spec: spec.key)
def test_frames_fit_and_are_told(spec: DeviceSpec) -> None:
    for dim in (16, 64, 96, 128, 256, 512):
        for dtype in ("float32", "bfloat16", "float64"):
            problem = problem_of(head_dim=dim, dtype=dtype)
            for pass_ in ("forward", "backward"):
                for tile in plan.choices(problem, spec, pass_):
                    grid = plan.grid_for(problem, tile, spec, problem.seqlen_q)
                    kernel = plan.kernel_for(problem, tile, spec)
                    assert tile.on_chip_bytes == frames.frame(problem, kernel, grid) <= frames.ROOM
                    assert tile.registers <= spec.vector_registers


# -- what is launched


def random_problem(rng: random.Random) -> Problem:
    kv, group = rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 4, 7))
    queries = rng.choice((1, 1, 2, 4, 9, 16, 50, 64, 130, 300))
    keys = queries if rng.random() < 0.6 else rng.choice((1, 7, 64, 100, 500, 3000))
    dim = rng.choice((8, 16, 32, 40, 64, 80, 128, 256))
    return Problem.of(
        batch=rng.choice((1, 2, 5)),
        heads=kv * group,
        kv_heads=kv,
        seqlen=queries,
        kv_seqlen=keys,
        head_dim=dim,
        head_dim_v=dim if rng.random() < 0.8 else rng.choice((8, 24, 64)),
        dtype=rng.choice(("float32", "bfloat16", "float16", "float64")),
        mask=rng.choice((tw.full(), tw.causal(), tw.window(33), tw.causal() | tw.prefix(5))),
        dropout_p=rng.choice((0.0, 0.0, 0.0, 0.1)),
        softcap=rng.choice((0.0, 0.0, 0.0, 20.0)),
        interleaved=rng.random() < 0.5,
    )


def tensors(problem: Problem) -> Inputs:
    dtype = getattr(torch, problem.dtype)
    q = torch.empty(problem.batch, problem.heads, problem.seqlen_q, problem.head_dim, dtype=dtype)
    k = torch.empty(problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim, dtype=dtype)
    v = torch.empty(problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim_v, dtype=dtype)
    return Inputs(q, k, v)


def launched(problem: Problem, direction: str) -> tuple[Any, dict[str, int]]:
    """The launch of a call, and the arguments that its kernel is given."""
    launch = launch_for(problem, tensors(problem), direction)
    names = argument_names(launch.kernel)[len(HOT) :]
    return launch, dict(zip(names, memoryview(launch.template).cast("q"), strict=True))


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_kernels_run_the_tiles_that_are_shown(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """200 random problems; some with tiles of their own."""
    monkeypatch.setattr(compiler, "worker", lambda kernel: None)
    monkeypatch.setattr(compiler, "awake", lambda: False)
    monkeypatch.setattr(prepare, "num_threads", lambda: threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rng = random.Random(threads)
    for _ in range(200):
        problem = random_problem(rng)
        spec = device("cpu")
        if rng.random() < 0.3:
            pass_ = next(iter(plan.tiles(problem, spec)))
            asked = rng.choice(plan.choices(problem, spec, pass_))
            problem = replace(problem, tile=((pass_, *asked.sizes),))
        shown = plan.tiles(problem, spec)
        assert len(shown) == 2
        for pass_, tile in shown.items():
            launch, arguments = launched(problem, "backward" if pass_ == "backward" else "forward")
            register = launch.kernel.tile
            assert launch.tile == tile and launch.kernel.kind == pass_
            assert (arguments["BM"], arguments["BN"], arguments["splits"]) == (tile.block_q, tile.block_k, tile.splits)
            rows = (register.keys, 16 // register.keys) if pass_ == "decode" else (register.rows, register.keys)
            assert rows == tile.register_tile
            assert launch.size == tile.on_chip_bytes
            if pass_ != "backward":
                assert arguments["group"] == tile.heads


# -- tiles that users choose

SOME = (
    *("plain", "mask-causal", "mask-window", "gqa", "cross-causal"),
    *("dropout-gqa", "bias-gqa", "varlen", "varlen-cross", "softcap-bias"),
)
TILES: list[dict[str, tuple[int, int]]] = [
    {"forward": (16, 4), "backward": (16, 4)},
    {"forward": (48, 20), "backward": (32, 24)},
    {"forward": (1024, 64), "backward": (256, 8)},
]


def fitting(problem: Problem, pass_: str, sizes: tuple[int, int]) -> tuple[int, int]:
    """The tile, or on machines with larger register tiles the next one that is made of these."""
    register = plan.register_for(problem, pass_, device("cpu"), plan.even(problem).seqlen_q)
    assert register is not None
    return -(-sizes[0] // register.rows) * register.rows, -(-sizes[1] // register.keys) * register.keys


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(f"{m}x{n}" for m, n in tile.values()))
@pytest.mark.parametrize("case", [case for case in CASES if case.name in SOME], ids=lambda case: case.name)
def test_any_tile_is_inside_the_bounds(case: Case, tile: dict[str, tuple[int, int]]) -> None:
    built = build(case, "cpu")
    built.options["tile"] = {pass_: fitting(built.problem, pass_, sizes) for pass_, sizes in tile.items()}
    assert excesses(built, "cpu", lse_gradient=case.lse_gradient) == []


def qkv(*shape: int, count: int = 3) -> list[torch.Tensor]:
    return list(torch.randn(count, *shape, generator=torch.Generator().manual_seed(1)).unbind())


@pytest.mark.parametrize("group", [1, 2, 8])
def test_decoding_takes_any_keys_that_vectors_divide(group: int) -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2 * group, 1, 64, generator=g)
    k, v = (torch.randn(2, 2, 300, 64, generator=g) for _ in range(2))
    want = tw.attention(q, k, v, backend="reference")
    problem = Problem.of(batch=2, heads=2 * group, kv_heads=2, seqlen=1, kv_seqlen=300, head_dim=64, dtype="float32")
    for tile in plan.choices(problem, device("cpu"), "decode"):
        out = tw.attention(q, k, v, tile={"decode": tile.sizes}, backend="cpu")
        torch.testing.assert_close(out, want, rtol=0, atol=2e-6)
    # a tile for the forward chooses the forward's kernel
    asked = replace(problem, tile=(("forward", 16, 32),))
    assert list(plan.tiles(asked, device("cpu"))) == ["forward", "backward"]
    torch.testing.assert_close(tw.attention(q, k, v, tile=(16, 32), backend="cpu"), want, rtol=0, atol=2e-6)


def test_a_tile_never_changes_what_is_dropped() -> None:
    """Weights of a value that is 1 everywhere: what is left of a row's sum tells which of them were dropped."""
    q, k, v = qkv(1, 2, 100, 16)
    v = torch.eye(100)[:, :16].expand(1, 2, 100, 16).contiguous()
    problem = Problem.of(heads=2, seqlen=100, head_dim=16, dtype="float32", dropout_p=0.5)
    tiles = (None, *(fitting(problem, "forward", sizes) for sizes in ((16, 4), (48, 20), (112, 64))))
    outs = [tw.attention(q, k, v, dropout_p=0.5, seed=3, tile=tile, backend="cpu") for tile in tiles]
    for out in outs[1:]:
        assert torch.equal(out == 0, outs[0] == 0)
        torch.testing.assert_close(out, outs[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        ((24, 64), "rows must be a multiple of 16 and keys of 4, the register tile"),
        ((16, 6), "the register tile"),
        ((8192, 128), "a thread's frame would take .* bytes, and has 1,048,576"),
        ({"backward": (1024, 64)}, "a thread's frame would take"),
        ({"decode": (1, 32)}, "the decode kernel takes one query a head, here are 300"),
        ({"merge": (16, 16)}, "splits are merged inside the kernel"),
        ({"backward_dq": (16, 16)}, "one kernel gives dQ, dK and dV: its pass is 'backward'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_there_is_not_is_refused_with_what_there_is(monkeypatch: pytest.MonkeyPatch, tile: Any, reason: str) -> None:
    monkeypatch.setattr(cpu, "probe_cpu", lambda threads=0: N1)
    q, k, v = qkv(1, 2, 300, 64)
    with pytest.raises(BackendError, match=reason) as error:
        tw.attention(q, k, v, tile=tile, backend="cpu")
    if isinstance(tile, tuple):
        assert re.search(r"; it has \d+×128, 16×16, 16×32, .* and \d+ more", str(error.value))


def test_decoding_with_a_tile_asks_for_adjacent_columns() -> None:
    q = torch.randn(1, 2, 1, 16)
    k = torch.randn(1, 2, 16, 100).transpose(2, 3)
    with pytest.raises(BackendError, match="adjacent columns"):
        tw.attention(q, k, k, tile={"decode": (1, 32)}, backend="cpu")
    assert tw.attention(q, k, k, tile=(16, 32), backend="cpu").isfinite().all()


@pytest.mark.parametrize("spec", [N1, lookup("xeon-8480")], ids=lambda spec: spec.key)
def test_every_row_of_the_suite_has_tiles_to_choose_from(spec: DeviceSpec) -> None:
    for case in SUITE:
        problem = case.problem()
        tiles = plan.tiles(problem, spec)
        for pass_, tile in tiles.items():
            options = plan.choices(problem, spec, pass_)
            assert options[0] == tile and len(options) >= 8, case.name
            assert len({option.sizes for option in options}) == len(options)
            for option in options:
                asked = replace(problem, tile=((pass_, *option.sizes),))
                assert plan.supports(asked, spec).ok
                served = plan.tiles(asked, spec)[pass_]
                assert (served.sizes, served.source) == (option.sizes, "user")


@pytest.mark.parametrize("heads", [(8, 8), (16, 8), (12, 3), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_decoding_takes_heads_together_where_they_lie_side_by_side(
    heads: tuple[int, int], dtype: torch.dtype, threads: int
) -> None:
    """The same numbers as head after head, whatever splits there are; the plan says it."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 1, heads[0], 64, generator=g).to(dtype)
    k, v = (torch.randn(2, 700, heads[1], 64, generator=g).to(dtype) for _ in range(2))
    beside, apart = (
        Problem.of(heads=heads[0], kv_heads=heads[1], batch=2, seqlen=1, kv_seqlen=700, head_dim=64, interleaved=one)
        for one in (True, False)
    )
    spec = device("cpu")
    assert plan.tiles(beside, spec)["decode"].groups == heads[1] and plan.tiles(apart, spec)["decode"].groups == 1
    with torch_threads(threads):
        out, lse = tw.attention(q, k, v, mask=tw.causal(), layout="bshd", backend="cpu", return_lse=True)
        rows = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        want, want_lse = tw.attention(*rows, mask=tw.causal(), backend="cpu", return_lse=True)
    assert torch.allclose(lse, want_lse, atol=1e-5)
    assert torch.allclose(out.transpose(1, 2).float(), want.float(), atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_decoding_takes_heads_together_in_small_pages() -> None:
    """Where a head's tokens of a page end soon, whichever way a page lies; of large pages one head is read after the other."""
    for interleaved, page, groups in ((False, 16, 8), (False, 17, 1), (False, 128, 1), (True, 16, 8), (True, 128, 8)):
        sizes = {"heads": 16, "kv_heads": 8, "batch": 2, "seqlen": 1, "kv_seqlen": 4096, "head_dim": 128}
        problem = Problem.of(**sizes, interleaved=interleaved, page=page)
        tile = plan.tiles(problem, N1)["decode"]
        assert tile.groups == groups
        assert any("which share small pages" in why for why in tile.reasons) == (groups > 1 and not interleaved)


def test_double_backward_says_what_it_keeps() -> None:
    """The rows of a block are as many as there is room for; too many keys leave no room."""
    found = {}
    for seqlen in (2048, 8192, 65536):
        problem = Problem.of(heads=8, seqlen=seqlen, head_dim=64, dtype="float32", device="cpu")
        found[seqlen] = plan.derivative_tiles(problem, N1, "double_backward")["double_backward"]
    assert "are kept in" in found[2048].reasons[-1] and "are kept in" in found[8192].reasons[-1]
    assert found[8192].block_q < found[2048].block_q
    assert "computed twice" in found[65536].reasons[-1]
