"""A call needs a mebibyte for each thread and four for all, whatever the problem and whichever processor it is planned for."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("llvmlite")

import tilewise as tw
from tests.conformance.cases import CASES, Case, build, inside
from tests.conformance.harness import excesses
from tests.numerics import checks
from tilewise.backends.cpu import backend, blocks, frames, plan, prepare
from tilewise.backends.cpu.frames import Tiles
from tilewise.backends.cpu.spec import Kernel
from tilewise.hardware import lookup
from tilewise.hardware.cpuid import core_figures
from tilewise.hardware.spec import MATRIX_UNITS, DeviceSpec, KiB
from tilewise.lab.bench.cases import Case as BenchCase
from tilewise.lab.bench.worker import Worker
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

MIB = 1 << 20
THP_DISABLE = 41  # of prctl; children inherit it
PROCESSORS = {
    "neon": ("neon", "aarch64", 64, 1024),
    "avx2": ("avx2", "x86_64", 32, 256),
    "avx512": ("avx512", "x86_64", 48, 2048),
    "amx": ("avx512", "x86_64", 48, 2048),
}
"""Instruction set, architecture, KiB of L1 and of L2; the last multiplies bf16 on matrix tiles."""


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is remembered from before, and none of what follows after the test: plans are remembered with calls."""
    monkeypatch.setattr("tilewise.api.call_cache._calls", {})
    monkeypatch.setattr("tilewise.backends.cpu.prepare._launches", {})


def pretend(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    """Plan for another processor."""
    forget(monkeypatch)
    isa, arch, l1, l2 = PROCESSORS[processor]
    pipe, _ = core_figures(isa, "")
    spec = DeviceSpec(
        key="test", name="test", kind="cpu", vendor="", arch=arch, units=2, isa=isa,
        sram_bytes=l1 * KiB, l2_bytes=l2 * KiB, isa_flags=MATRIX_UNITS.get(processor, ()), **pipe,
    )  # fmt: skip
    for module in (backend, prepare):
        monkeypatch.setattr(module, "probe_cpu", lambda threads=0: replace(spec, threads=threads))


def arranged(problem: Problem, kind: str, threads: int) -> tuple[Kernel, Tiles]:
    """The kernel and the blocks of a pass on the processor that is pretended."""
    spec = backend.probe_cpu(threads)
    tile = plan.planned(problem, spec, kind, problem.seqlen_q)
    return plan.kernel_for(problem, tile, spec), plan.grid_for(problem, tile, spec, problem.seqlen_q)


def problem_of(
    heads: tuple[int, int], lengths: tuple[int, int], dims: tuple[int, int], dtype: str, batch: int = 1
) -> Problem:
    return Problem.of(
        batch=batch, heads=heads[0], kv_heads=heads[1], seqlen=lengths[0], kv_seqlen=lengths[1],
        head_dim=dims[0], head_dim_v=dims[1], dtype=dtype,
    )  # fmt: skip


DIMS = ((1, 1), (64, 64), (65, 65), (128, 128), (129, 127), (192, 128), (256, 256), (300, 40), (511, 511), (512, 512), (64, 512))
LENGTHS = ((1, 32768), (8, 32768), (300, 300), (32768, 32768))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, processor: str, dtype: str) -> None:
    """Head dims up to 512, groups up to 128, splits of the keys for up to 64 threads."""
    pretend(monkeypatch, processor)
    for dims, group, lengths, kind in product(DIMS, (1, 4, 7, 32, 64, 128), LENGTHS, ("forward", "backward", "decode")):
        problem = problem_of((group, 1), lengths, dims, dtype)
        if kind == "decode" and (lengths[0] > 1 or plan.decode_obstacle(problem, backend.probe_cpu(), 1)):
            continue
        for threads in (1, 2, 16, 64):
            kernel, tiles = arranged(problem, kind, threads)
            case = f"{dims} group {group} {lengths} {kind} {threads} threads: {tiles}"
            size = frames.frame(problem, kernel, tiles)
            shared = frames.workspace(problem, kernel, tiles) * (8 if dtype == "float64" else 4)
            assert size <= MIB, case
            assert tiles.threads * size + shared <= (4 + tiles.threads) * MIB, case
            assert tiles.heads == 1 or problem.group % tiles.heads == 0, case
            if kind == "decode":  # scores of sixteen rows and keys are written at once, and read by vectors
                at_once = 16 // kernel.tile.keys, kernel.tile.lanes
                assert tiles.rows == 1 and [tiles.keys % keys for keys in at_once] == [0, 0], case
            else:
                assert tiles.rows % kernel.tile.rows == tiles.keys % kernel.tile.keys == 0, case


@pytest.mark.parametrize("processor", PROCESSORS)
def test_blocks_of_the_backward_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    """They fix the order of sums."""
    pretend(monkeypatch, processor)
    for dims, group, dtype in product(DIMS, (1, 32), ("float32", "bfloat16", "float64")):
        problem = problem_of((group, 1), (4096, 4096), dims, dtype)
        blocks = {arranged(problem, "backward", threads)[1]._replace(threads=0) for threads in (1, 2, 16, 64)}
        assert len(blocks) == 1


KNOWN = {
    ("neon", "float32", (8, 8), (4096, 4096), 64): ((512, 128, 8, 1, 64), (256, 64, 16, 1, 128)),
    ("neon", "float32", (8, 8), (4096, 4096), 128): ((512, 128, 8, 1, 64), (256, 64, 16, 1, 128)),
    ("neon", "float32", (32, 8), (1024, 1024), 128): ((128, 128, 8, 1, 64), (256, 64, 4, 1, 128)),
    ("neon", "bfloat16", (8, 8), (4096, 4096), 128): ((512, 128, 8, 1, 64), (256, 64, 16, 1, 128)),
    ("neon", "float32", (1, 1), (16, 16), 64): ((16, 16, 1, 1, 1), (16, 16, 1, 1, 1)),
    ("neon", "float32", (8, 8), (256, 4096), 64): ((256, 128, 1, 1, 8), (128, 64, 2, 1, 16)),
    ("neon", "float32", (32, 8), (1, 4096), 128): ((1, 24, 1, 1, 8),),
    ("neon", "float32", (32, 8), (1, 4096), 256): ((1, 8, 1, 1, 8),),
    ("neon", "bfloat16", (32, 8), (1, 4096), 128): ((1, 64, 1, 1, 8),),
    ("neon", "float32", (1, 1), (1, 65536), 64): ((1, 256, 1, 8, 8),),
    ("avx2", "float32", (8, 8), (4096, 4096), 64): ((264, 128, 16, 1, 128), (264, 64, 16, 1, 128)),
    ("avx2", "float32", (32, 8), (1024, 1024), 128): ((48, 64, 22, 1, 176), (264, 64, 4, 1, 128)),
    ("avx512", "float32", (8, 8), (4096, 4096), 64): ((704, 128, 6, 1, 48), (256, 64, 16, 1, 128)),
    ("avx512", "float32", (8, 8), (4096, 4096), 128): ((720, 128, 6, 1, 48), (256, 64, 16, 1, 128)),
    ("avx512", "float32", (32, 8), (1024, 1024), 128): ((192, 128, 6, 1, 48), (256, 64, 4, 1, 128)),
    ("avx512", "float32", (1, 1), (1, 65536), 64): ((1, 256, 1, 8, 8),),
    ("avx512", "float32", (32, 8), (1, 4096), 128): ((1, 16, 1, 1, 8),),
    ("avx512", "float32", (32, 8), (1, 4096), 256): ((1, 16, 1, 1, 8),),
    ("avx512", "bfloat16", (32, 8), (1, 4096), 128): ((1, 48, 1, 1, 8),),
    ("amx", "bfloat16", (8, 8), (4096, 4096), 128): ((704, 256, 6, 1, 48), (384, 128, 11, 1, 88)),
}
"""Blocks that were chosen by measurement, for two threads: rows, keys, blocks, splits, tasks; of the forward (or of decoding) and
of the backward. Those of AVX2 were not measured: they follow from the same rules."""


@pytest.mark.parametrize("processor", PROCESSORS)
def test_blocks_for_which_there_is_room_are_left_alone(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    pretend(monkeypatch, processor)
    for (name, dtype, heads, lengths, dim), wanted in KNOWN.items():
        if name != processor:
            continue
        problem = problem_of(heads, lengths, (dim, dim), dtype)
        kinds = ("decode",) if lengths[0] == 1 else ("forward", "backward")
        for kind, sizes in zip(kinds, wanted, strict=True):
            _, tiles = arranged(problem, kind, 2)
            assert tiles[:5] == sizes, (heads, lengths, dim, kind)
            assert tiles.heads == (1 if kind == "backward" else problem.group)


def test_backward_blocks_do_not_depend_on_the_threads() -> None:
    """The order of sums is that of the blocks: the same for any number of threads. Rows of the forward are shared out."""
    xeon = replace(lookup("xeon-8480"), units=16)
    few, many = replace(xeon, threads=2), replace(xeon, threads=16)
    problem = problem_of((4, 4), (1024, 1024), (64, 64), "float32")
    assert [str(plan.tiles(problem, spec)["forward"]) for spec in (few, many)] == ["512×128", "64×128"]
    for heads, length, dim, rows in ((4, 1024, 128, 128), (8, 1024, 64, 256), (1, 2048, 128, 128), (8, 4096, 64, 256)):
        problem = problem_of((heads, heads), (length, length), (dim, dim), "float32")
        assert {plan.tiles(problem, spec)["backward"].block_q for spec in (few, many)} == {rows}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_blocks_at_wide_head_dims_still_pay_for_the_keys_they_pack(
    monkeypatch: pytest.MonkeyPatch, processor: str
) -> None:
    pretend(monkeypatch, processor)
    for dtype, dim, kind in product(("float32", "bfloat16"), (256, 512), ("forward", "backward")):
        for group in (1, 32):
            problem = problem_of((group, 1), (4096, 4096), (dim, dim), dtype, batch=8)
            _, tiles = arranged(problem, kind, 2)
            least = {256: 128, 512: 64}[dim] if kind == "backward" else {256: 256, 512: 96}[dim]
            assert tiles.rows * tiles.heads >= least, (tiles, dtype, dim, kind)
            assert tiles.keys >= 32


# -- parts of a group

PARTED = re.compile(
    r"gqa|mqa|decode|bshd|mask-(causal|window|documents|blocks-heads|dense)$|bias-gqa|alibi|sinks|dropout-gqa|varlen|everything"
)
SOME = [case for case in CASES if PARTED.match(case.name) and case.precision == "default"]


@pytest.fixture
def cramped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tiles]]:
    """Room for the smallest blocks only: one strip of one head and 16 keys, or the fewest. Gives the blocks that were chosen."""
    chosen: list[Tiles] = []

    def least(problem: Problem, kernel: Kernel, tiles: Tiles) -> bool:
        rows, keys = frames.grain(kernel)
        smallest = Tiles(rows, max(16, keys), 1, 1, 1, 1)
        return frames.frame(problem, kernel, tiles) <= frames.frame(problem, kernel, smallest)

    def grid_for(problem: Problem, tile: TilePlan, spec: DeviceSpec, longest: int) -> Tiles:
        chosen.append(original(problem, tile, spec, longest))
        return chosen[-1]

    original = plan.grid_for
    forget(monkeypatch)
    for module in (frames, blocks):
        monkeypatch.setattr(module, "fits", least)
    monkeypatch.setattr(plan, "grid_for", grid_for)
    monkeypatch.setattr("tilewise.model.cpu.SMALL_WORK", 0)
    return chosen


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_conformance_in_little_memory(cramped: list[Tiles], case: Case) -> None:
    built = build(case, "cpu")
    assert excesses(built, "cpu", lse_gradient=case.lse_gradient) == []
    assert cramped and all(tiles.keys <= 32 and tiles.heads <= 2 for tiles in cramped)


@pytest.mark.parametrize("case", [case for case in SOME if re.match("decode|mqa|varlen$", case.name)], ids=lambda case: case.name)
def test_conformance_in_little_memory_with_wide_vectors(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, case: Case
) -> None:
    pretend(monkeypatch, "avx512")
    test_conformance_in_little_memory(request.getfixturevalue("cramped"), case)


@pytest.mark.parametrize("rows", [1, 9], ids=["decode", "few"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", ["a mebibyte", "little"])
def test_groups_that_do_not_fit_come_in_parts(
    room: str, dtype: torch.dtype, rows: int, request: pytest.FixtureRequest
) -> None:
    if room == "little":
        request.getfixturevalue("cramped")
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 128, rows, 512, generator=g).to(dtype)
    k, v = (torch.randn(2, 2, 70, 512, generator=g).to(dtype) for _ in range(2))
    problem = problem_of((128, 2), (rows, 70), (512, 512), str(dtype)[6:], batch=2)
    if rows > 1 or room == "little":  # a mebibyte holds one row of every head
        assert arranged(problem, "decode" if rows == 1 else "forward", 2)[1].heads < 64
    out, lse = tw.attention(q, k, v, mask=tw.causal(), backend="cpu", return_lse=True)
    assert checks.check_forward(*inside(q, k, v, None, {"mask": tw.causal()}), out, lse) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("processor", ["neon", "avx2", "avx512"])
def test_wide_rows_are_decoded_by_few_keys(monkeypatch: pytest.MonkeyPatch, processor: str, dtype: torch.dtype) -> None:
    pretend(monkeypatch, processor)
    for group in (1, 2, 3, 4, 9):
        decode_wide_rows(group, dtype)


def decode_wide_rows(group: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2 * group, 1, 512, generator=g).to(dtype)
    for length in (1, 7, 70):
        k, v = (torch.randn(2, 2, length, 512, generator=g).to(dtype) for _ in range(2))
        out, lse = tw.attention(q, k, v, backend="cpu", return_lse=True)
        assert checks.check_forward(*inside(q, k, v, None, {}), out, lse) == []


@pytest.fixture
def small_pages() -> Iterator[None]:
    """Processes started meanwhile get memory in pages of the usual size: with huge ones each tensor counts up to 2 MiB more."""
    control = getattr(ctypes.CDLL(None), "prctl", None)
    if control is None or control(THP_DISABLE, 1, 0, 0, 0):
        pytest.skip("the system does not let a process do without huge pages")
    yield
    control(THP_DISABLE, 0, 0, 0, 0)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell peaks")
@pytest.mark.parametrize(("dim", "passes"), [(64, "forward"), (128, "forward"), (256, "forward"), (256, "training")])
def test_little_memory_is_needed_beyond_the_results(small_pages: None, dim: int, passes: str) -> None:
    """As the operating system counts it, in a process of its own, over 32k tokens: 4 MiB and one for each thread."""
    case = BenchCase("memory", heads=1, seqlen=32768, head_dim=dim, mask="window(256)", threads=2, passes=passes)
    for _ in range(2):  # the first leaves its kernels on disk: what a compiler takes is not a call's memory
        with Worker(case, "tilewise:cpu") as worker:
            peak = worker.ask("memory", seqlen=case.seqlen)["peak_bytes"]
    results = 4 * case.seqlen * ((dim if passes == "forward" else 4 * dim) + 1)  # out and gradients, lse
    uncounted = 32 * mmap.PAGESIZE * (os.cpu_count() or 1)  # Linux adds a core's pages to the sum 32 at a time
    assert results - uncounted <= peak <= results + (4 + 2) * MIB
    assert peak <= results + 3 * MIB, "two buffers take no more than two of them"
