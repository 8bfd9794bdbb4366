"""The examples of the two pages run and print what they say."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.tutorials import step_intensities
from tilewise.backends import plans
from tilewise.hardware import lookup
from tilewise.hardware.spec import KiB, MiB
from tilewise.lab.simulator.precision import make_data
from tilewise.lab.simulator.timeline import block_timeline
from tilewise.masks import causal, full
from tilewise.model import TilePlan, compulsory, standard, v2, work
from tilewise.model.evaluation import call_seconds
from tilewise.model.fitted import gpu_fit
from tilewise.model.onchip import occupancy
from tilewise.problem import Problem

DOCS = Path(__file__).parents[2] / "docs"


PRINTED = {
    "io-model.md": ("258.1", "85.5", "33.0", "2.02", "206", "128×128 tensor cores"),
    "io-model.zh.md": ("258.1", "85.5", "33.0", "2.02", "206", "128×128 tensor cores"),
    "tiling.md": ("1.538 2.538",),
    "tiling.zh.md": ("1.538 2.538",),
    "primer.md": ("1 524288", "8 65536", "64 8192"),
    "primer.zh.md": ("1 524288", "8 65536", "64 8192"),
}


@pytest.mark.parametrize("page", PRINTED)
def test_examples(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    text = (DOCS / page).read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert examples
    for example in examples:
        exec(compile(example, page, "exec"), names)
    printed = capsys.readouterr().out
    for said in PRINTED[page]:
        assert said in printed, said


@pytest.mark.parametrize("chinese", sorted(DOCS.glob("*.zh.md")), ids=lambda path: path.name)
def test_notes_say_the_same_in_both_languages(chinese: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (chinese.with_name(chinese.name.replace(".zh", "")), chinese)]

    def figures(text: str) -> list[str]:
        prose = re.sub(r"```.*?```|`[^`]*`|<!--.*?-->|\]\([^)]*\)|\{#.*?\}", "", text, flags=re.S)
        return sorted(re.findall(r"\d[\d.,]*\d|\d", prose))

    def code(text: str) -> list[str]:
        return [re.sub(r" *#.*", "", block) for block in re.findall(r"```(?:python|bash).*?```", text, re.S)]

    def links(text: str) -> list[str]:
        return [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("primer")]

    for told in (figures, code, links, lambda text: re.findall(r"^#+ |^\|", text, re.M)):
        english, other = map(told, texts)
        assert english == other


def test_the_primer_s_figures() -> None:
    text = (DOCS / "primer.md").read_text(encoding="utf-8")
    a100, clock = lookup("a100"), lookup("a100").clock_hz / 1e9
    shared_bandwidth = 128 * a100.units * a100.clock_hz
    said = [
        f"{a100.register_bytes * a100.units / MiB:.0f} MiB in all, {a100.register_bytes // KiB} KiB a multiprocessor",
        f"{a100.sram_bytes * a100.units / MiB:.1f} MiB in all, {a100.sram_bytes // KiB} KiB a multiprocessor",
        f"{shared_bandwidth / 1e12:.1f} TB/s | 23 clocks, {23 / clock:.0f} ns",
        f"{a100.l2_bytes // MiB} MiB | {a100.l2_bandwidth / 1e12:.1f} TB/s | 200 clocks, {200 / clock:.0f} ns",
        f"{a100.dram_bytes >> 30} GiB | {a100.dram_bandwidth / 1e12:.2f} TB/s | 290 clocks, {290 / clock:.0f} ns",
        f"{a100.ridge('float16'):.0f} multiplications or additions",
    ]
    problem, tile = Problem.of(heads=1, seqlen=4096, head_dim=64, dtype="float16"), TilePlan(128, 128)
    said += [
        f"exp S and P: {standard(problem).total / MiB:.1f} MiB. Three kernels: {standard(problem, kernels=3).total / MiB:.1f}.",
        f"{v2(problem, tile).total / MiB:.1f} MiB with 128 rows, {v2(problem, TilePlan(256, 128)).total / MiB:.1f} with 256",
        f"where {compulsory(problem, tile).total / MiB:.1f} are the least possible",
        f"a block has {a100.sram_per_block // KiB} KiB",
        f"({v2(problem, tile).writes['O'] / MiB:.1f} MiB and {v2(problem, tile).writes['LSE'] // KiB} KiB)",
    ]
    steps = step_intensities(64)
    said.append(f"`QKᵀ` {steps['QKᵀ']:.0f}, softmax {steps['softmax']}, `PV` {steps['PV']:.0f}")
    for words in said:
        assert words in text, words


def test_the_documented_precision_is_what_the_experiment_finds() -> None:
    """Figures of docs/experiments/precision.md's tables, to the printed digits' order: the findings are about these numbers.

    They were found on an Arm. Other processors add up matrix products in fp32 otherwise, most of them more exactly.
    """
    from tilewise.lab.simulator.precision import experiment

    arm = platform.machine() in ("aarch64", "arm64")
    found = {(r.path, r.data, r.width): r for r in experiment(widths=(8, 32, 64, 1024))}
    assert round(found["fp32", "rising", 8].rescalings) == 112
    for path, data, width, figure in (
        ("fp32", "slow", 8, 1.8e-6),
        ("fp32", "slow", 64, 2.3e-7),
        ("fp32", "slow", 1024, 3.8e-7),
        ("fp32 compensated", "slow", 8, 6.3e-7),
        ("fp16", "slow", 8, 1.5e-4),
        ("fp32", "rising", 8, 9.0e-7),
        ("fp32", "rising", 1024, 9.1e-7),
        ("bf16", "rising", 8, 1.2e-3),
        ("fp16 throughout", "random", 8, 2.4e-3),
        ("fp16 throughout", "random", 1024, 6.3e-4),
    ):
        error = found[path, data, width].relative
        least = 2.0**-24 if path.startswith("fp32") and not arm else 0.85 * figure
        most = 6.0 * figure if path.startswith("fp32") and not arm else 1.15 * figure
        assert least < error < most, (path, data, width, error)
    cost = found["fp32", "slow", 32].relative - found["fp32", "slow", 32].relative_without
    assert cost < (2.5 if arm else 20.0) * 2.0**-24  # "about 1e-7"


@pytest.mark.parametrize(
    ("sides", "totals"), [((64, 64), (2.87, 2.61, 2.61)), ((128, 64), (4.84, 4.84, 4.84))], ids=["64x64", "128x64"]
)
def test_the_documented_timelines_of_an_h200(sides: tuple[int, int], totals: tuple[float, ...]) -> None:
    """Eight tiles at d = 64 with two, three and four buffers, in microseconds."""
    problem, spec = Problem.of(heads=8, head_dim=64, seqlen=1024), lookup("h200")
    for stages, total in zip((2, 3, 4), totals, strict=True):
        run = block_timeline(problem, TilePlan(*sides, stages=stages), [sides[1]] * 8, sides[0], spec)
        assert run.total * 1e6 == pytest.approx(total, abs=0.01)
        if sides == (64, 64):
            assert run.busy("load") / 8 * 1e6 == pytest.approx(0.23, abs=0.005)
            assert run.busy("compute") / 8 * 1e6 == pytest.approx(0.28, abs=0.005)


@pytest.mark.parametrize(
    ("options", "figure"),
    [
        ({"backend": "tiled", "tile": (64, 8)}, 1.8e-6),
        ({"backend": "tiled", "tile": (64, 64)}, 2.3e-7),
        ({"backend": "tiled", "tile": (64, 1024)}, 3.7e-7),
        ({"backend": "tiled", "tile": (64, 8), "precision": "double"}, 2.9e-8),
        ({"backend": "tiled", "tile": (64, 8), "precision": "compensated"}, 2.9e-8),
        ({"backend": "cpu"}, 1.9e-7),
        ({"backend": "cpu", "precision": "double"}, 2.9e-8),
    ],
    ids=str,
)
def test_documented_precision_of_the_library(options: dict[str, Any], figure: float) -> None:
    """docs/experiments/precision.md: what rescaling costs the backends on slowly rising scores."""
    import torch

    import tilewise as tw

    if options["backend"] == "cpu":
        pytest.importorskip("llvmlite")
    q, k, v = (torch.from_numpy(np.array(x))[None, None].float() for x in make_data("slow", 64, 1024, 64, 0))
    truth = tw.attention(q.double(), k.double(), v.double(), backend="reference")
    error = float((tw.attention(q, k, v, **options).double() - truth).norm() / truth.norm())
    arm = platform.machine() in ("aarch64", "arm64")
    least, most = (0.7, 1.4) if arm or figure < 1e-7 else (0.05, 6.0)
    assert least * figure < error < most * figure


@pytest.mark.parametrize(
    ("cores", "d", "tile", "kib"),
    [(2, 64, "512×128", 345), (2, 128, "512×128", 665), (2, 256, "368×128", 1014)],
)
def test_documented_tiles_of_a_neoverse_n1(cores: int, d: int, tile: str, kib: int) -> None:
    """docs/tiling.md: what the cpu backend runs, by its own account."""
    problem = Problem.of(heads=8, head_dim=d, seqlen=4096, dtype="float32", device="cpu")
    planned = plans.tiles("cpu", problem, replace(lookup("altra"), units=cores))["forward"]
    assert (str(planned), planned.register_tile) == (tile, (16, 4))
    assert planned.on_chip_bytes / KiB == pytest.approx(kib, abs=1)


@pytest.mark.parametrize(
    ("device", "d", "register_tile"), [("altra", 64, (16, 4)), ("xeon", 64, (64, 4)), ("xeon", 128, (48, 8))]
)
def test_documented_register_tiles(device: str, d: int, register_tile: tuple[int, int]) -> None:
    problem = Problem.of(heads=8, head_dim=d, seqlen=4096, dtype="float32", device="cpu")
    assert plans.tiles("cpu", problem, lookup(device))["forward"].register_tile == register_tile


def test_documented_predictions_of_an_h200() -> None:
    """docs/time-model.md: what is predicted for the Hopper kernels' own tiles, beside the records of the plain grid."""
    text = (DOCS / "time-model.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| (\d+) (full|causal) (\d+)k \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.M)
    rows = {(int(d), mask, int(k) * 1024): [int(x) for x in figures] for d, mask, k, *figures in documented}
    assert len(rows) == 6
    spec, fit = lookup("h200"), gpu_fit(lookup("h200"))
    for constant in (fit.softmax, round(fit.step), fit.tile, spec.launch_s * 1e6):
        assert f"{constant:g}" in text, constant
    off = []
    for side, pass_ in enumerate(("forward", "backward")):
        record = json.loads((DOCS.parent / f"benchmarks/results/hopper-{pass_}-h200.json").read_text(encoding="utf-8"))
        for name, cell in ((name, cell) for cells in record["time"].values() for name, cell in cells.items()):
            found = re.fullmatch(r"d(\d+) (full|causal) (\d+)", name)
            if found is None:
                continue
            d, mask, s = int(found[1]), found[2], int(found[3])
            sizes = {"batch": 16384 // s, "heads": 2048 // d, "seqlen": s, "head_dim": d}
            problem = Problem.of(**sizes, device="cuda", mask=causal() if mask == "causal" else full())
            tiles = plans.tiles("hopper", problem, spec)
            mine = [tile for name, tile in tiles.items() if name.startswith("backward") == (pass_ == "backward")]
            flops = work(problem, tiles["forward"]).useful * (2.5 if pass_ == "backward" else 1)
            predicted = flops / call_seconds(problem, spec, mine) / 1e12
            measured = cell["tflops"]["tilewise"]
            off.append(predicted / measured - 1)
            if (d, mask, s) in rows:
                assert [round(predicted), round(measured)] == rows[d, mask, s][2 * side : 2 * side + 2], (name, pass_)
    assert len(off) == 48 and all(abs(ratio) <= 0.15 for ratio in off)


def test_documented_blocks_a_multiprocessor() -> None:
    """docs/triton-notes.md: 64×64, three stages, four warps, as compiled: an H200's multiprocessor holds three at d 64, two at
    d 128. The plan counts no fewer bytes than the compiler."""
    text, spec = (DOCS / "triton-notes.md").read_text(encoding="utf-8"), lookup("h200")
    for d, blocks, shared, registers in ((64, 3, 58_368, 127), (128, 2, 115_712, 213)):
        assert f"{shared:,} B" in text and f"{registers}" in text
        assert occupancy(shared, registers, 4 * 32, spec) == blocks
        problem = Problem.of(heads=16, seqlen=4096, head_dim=d, device="cuda")
        tile = plans.tiles("triton", problem, spec)["forward"]
        assert (tile.sizes, tile.stages, tile.warps) == ((64, 64), 3, 4)
        assert shared <= tile.on_chip_bytes <= shared + 8 * KiB and registers <= tile.registers


@pytest.mark.parametrize(
    ("device", "backend", "tiles"),
    [
        ("a100", "triton", {64: "128×64", 128: "128×32", 256: "64×32"}),
        ("h200", "hopper", {64: "192×128", 128: "128×128", 256: "128×64"}),
        ("h200", "triton", {64: "64×64", 128: "64×64", 256: "128×64"}),
    ],
)
def test_documented_tiles_of_gpus(device: str, backend: str, tiles: dict[int, str]) -> None:
    """docs/tiling.md: 16 heads of 4,096 tokens in bf16."""
    text = (DOCS / "tiling.md").read_text(encoding="utf-8").replace(" × ", "×")
    for d, tile in tiles.items():
        problem = Problem.of(heads=16, head_dim=d, seqlen=4096, device="cuda")
        assert str(plans.tiles(backend, problem, lookup(device))["forward"]) == tile
    assert ", ".join(tiles.values()) in text
