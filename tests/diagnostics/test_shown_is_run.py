"""What is shown is what runs: the tile of a launch is explain's, and a problem has one predicted time."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise import dispatch, hardware
from tilewise.backends import plans, sequence
from tilewise.diagnostics import measured
from tilewise.diagnostics.explain import explain
from tilewise.errors import PlanError
from tilewise.hardware.ceilings import Ceilings
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.engine import chosen
from tilewise.lab.report import figures
from tilewise.model import evaluate
from tilewise.problem import Problem

PLAN_MODULES = [entry.plan for entry in dispatch.REGISTRY.values() if entry.plan]


def draw(rng: random.Random, dtypes: tuple[str, ...]) -> Problem:
    kv, group, queries = rng.choice((1, 2)), rng.choice((1, 1, 4)), rng.choice((1, 3, 16, 40, 70, 130))
    dim = rng.choice((8, 16, 32, 64))
    return Problem.of(
        batch=rng.choice((1, 2)), heads=kv * group, kv_heads=kv, seqlen=queries, head_dim=dim,
        kv_seqlen=queries if rng.random() < 0.6 else rng.choice((1, 50, 200)), dtype=rng.choice(dtypes),
        mask=rng.choice((tw.full(), tw.causal(), tw.window(20), tw.causal() | tw.prefix(5))),
    )  # fmt: skip


def call(problem: Problem, backend: str, tile: dict[str, tuple[int, int]] | None) -> None:
    dtype = getattr(torch, problem.dtype)
    q = torch.zeros(problem.batch, problem.heads, problem.seqlen_q, problem.head_dim, dtype=dtype, requires_grad=True)
    k = torch.zeros(problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim, dtype=dtype)
    tw.attention(q, k, k, mask=problem.mask, backend=backend, tile=tile).sum().backward()  # type: ignore[call-overload]


def tiles_of_tiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, int]]]:
    """The pass and the tile of each sequence that plain torch walks over, as they come."""
    found: list[tuple[str, tuple[int, int]]] = []
    backend, view = dispatch.get("tiled"), sequence.SequenceView.__init__

    def watch(self: Any, *given: Any, **named: Any) -> None:
        view(self, *given, **named)
        found.append((running[-1], (self.tiles.block_q, self.tiles.block_k)))

    running: list[str] = []

    def telling(pass_: str) -> None:
        run = getattr(backend, pass_)

        def told(*given: Any) -> Any:
            running.append(pass_)
            return run(*given)

        monkeypatch.setattr(backend, pass_, told, raising=False)

    telling("forward"), telling("backward")
    monkeypatch.setattr(sequence.SequenceView, "__init__", watch)
    return found


def tiles_of_cpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, int]]]:
    """The pass and the tile (BM and BN among a kernel's arguments) of each launch, as they come; kernels run."""
    from tilewise.backends.cpu import backend as cpu
    from tilewise.backends.cpu.spec import HOT, argument_names

    found: list[tuple[str, tuple[int, int]]] = []
    run = cpu.CpuLaunch.run

    def watch(self: Any, *given: Any, **named: Any) -> None:
        names = argument_names(self.kernel)[len(HOT) :]
        arguments = dict(zip(names, memoryview(self.template).cast("q"), strict=True))
        found.append((self.kernel.kind, (arguments["BM"], arguments["BN"])))
        run(self, *given, **named)

    monkeypatch.setattr(cpu.CpuLaunch, "run", watch)
    return found


@pytest.mark.parametrize("backend", ["tiled", "cpu"])
def test_the_tile_of_a_launch_is_the_one_explained(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 random problems, forward and backward, half of them with a tile of the user's."""
    found = {"tiled": tiles_of_tiled, "cpu": tiles_of_cpu}[backend](monkeypatch)
    rng = random.Random(18)
    dtypes = ("float32",) if backend == "cpu" else ("float32", "bfloat16", "float64")
    for number in range(200):
        problem, spec = draw(rng, dtypes), hardware.device("cpu")
        tile = None
        if number % 2:
            pass_ = rng.choice([*plans.tiles(backend, problem, spec)])
            tile = {pass_: rng.choice(plans.choices(backend, problem, spec, pass_)).sizes}
        shown = explain(problem, device="cpu", backend=backend, tile=tile)  # type: ignore[arg-type]
        found.clear()
        call(problem, backend, tile)
        assert dict(found) == {one.pass_: one.sizes for one in shown.plan.passes}, (problem, tile)
        if tile is not None:
            assert tile.items() <= dict(found).items()


def test_the_tile_that_is_measured_is_the_one_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Ceilings("here", "2026-01-01", "a test", {"float32": 1e9}, copy=1e9, read=1e9, exp=1e9)
    monkeypatch.setattr(hardware, "measure", lambda device: known, raising=False)
    monkeypatch.setattr(measured, "ROUNDS", 1)
    found = tiles_of_tiled(monkeypatch)
    q, k, v = (torch.randn(1, 1, 128, 16) for _ in range(3))
    for tile, pass_ in (((32, 32), "auto"), ((16, 64), "backward")):
        found.clear()
        shown = explain(q, k, v, mask=tw.causal(), backend="tiled", tile=tile, pass_=pass_, measure=True)
        assert shown.measured is not None and shown.plan.tile.sizes == tile
        assert (shown.plan.tile.pass_, tile) in found
    with pytest.raises(PlanError, match="reference has none to choose"):
        explain(q, k, v, backend="reference", tile=(32, 32), measure=True)


def test_one_time_for_one_problem() -> None:
    """plan, explain, a bench record and the report predict the same, from the same function."""
    for device, spec in (("cpu", hardware.device("cpu")), ("h200", hardware.device("h200"))):
        dtype = figures.dtype_on(spec)
        problem = figures.problem_of(1024, 64, "causal", dtype)
        planned, explained = tw.plan(problem, device), explain(problem, device=device)
        assert planned.seconds == explained.plan.seconds == evaluate(problem, planned.spec, planned.tile).seconds
        assert planned.ceilings == "theoretical ceilings" and "theoretical ceilings" in str(planned)
        ceilings = Ceilings("x", "2026-01-01", "a test", {dtype: 1e10}, copy=1e10, read=1e10, exp=1e9)
        key, roof = (figures.HERE, ceilings.apply(spec)) if device == "cpu" else (device, spec)
        reported = figures.results({key: roof}, (1024,))
        assert reported[figures.key(key, 1024, 64, "causal", "plan")]["predicted"] == planned.seconds
    case = Case("case", heads=figures.HEADS, seqlen=1024, mask="causal")
    recorded = chosen(case)
    here = tw.plan(figures.problem_of(1024, 64, "causal", "float32"), "cpu")
    assert recorded["plan"]["seconds"] == here.seconds
    assert recorded["plan"]["passes"] == {tile.pass_: tile.to_dict() for tile in here.passes}
    slower = Ceilings("x", "2026-01-01", "a test", {"float32": 1e9}).apply(here.spec)
    with_measured = tw.plan(here.problem, slower)
    assert with_measured.ceilings.startswith("measured: 2026-01-01, a test")


def test_plans_need_neither_torch_nor_triton_nor_llvmlite() -> None:
    """In a process where importing them raises: every plan module, and plans of every kind of machine."""
    code = (
        "import sys, importlib\n"
        "for name in ('torch', 'triton', 'llvmlite'): sys.modules[name] = None\n"
        f"for name in {PLAN_MODULES!r}: importlib.import_module(name)\n"
        "import tilewise as tw\n"
        "for device in ('h200', 'a100', 'b200', 'mi300x', 'v100', 'xeon-8480', 'altra-q80'):\n"
        "    for dtype in ('float16', 'float32'):\n"
        "        problem = tw.Problem.of(heads=8, kv_heads=2, seqlen=1024, head_dim=64, dtype=dtype, mask=tw.causal())\n"
        "        found = tw.plan(problem, device)\n"
        "        assert found.backend and found.passes and str(found)\n"
        "        few = tw.Problem.of(heads=8, kv_heads=2, seqlen=1, kv_seqlen=4096, head_dim=64, dtype=dtype)\n"
        "        assert str(tw.plan(few, device)) and tw.plan(few, device).to_dict()\n"
    )
    source = Path(hardware.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(source)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_predicted_time_of_a_users_tile_is_of_that_tile() -> None:
    problem = Problem.of(heads=8, seqlen=2048, head_dim=64, dtype="float32", mask=tw.causal())
    spec = replace(hardware.device("xeon-8480"), threads=2)
    times = {tile: tw.plan(problem, spec, backend="cpu", tile=tile).seconds for tile in ((64, 16), (512, 128))}
    assert times[64, 16] > times[512, 128]
