"""The report: its texts, its facts, and that the page is one file that needs nothing else."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.lab.conftest import CEILINGS, XEON
from tilewise import hardware, model
from tilewise.backends import plans
from tilewise.cli.app import app
from tilewise.diagnostics.plan import plan
from tilewise.distributed import plan as context_plan
from tilewise.errors import PlanError
from tilewise.hardware.ceilings import Ceilings
from tilewise.lab.report import figures, machine, page, parallel, walk
from tilewise.lab.report.page import LANGUAGES
from tilewise.lab.simulator import simulate
from tilewise.lab.simulator.banks import ACCESSES
from tilewise.lab.simulator.device import random_inputs
from tilewise.lab.simulator.exact import attention
from tilewise.lab.simulator.precision import DATA, PATHS
from tilewise.masks import TileMap
from tilewise.model import TilePlan
from tilewise.problem import Problem

SOURCES = {path.name: path.read_text(encoding="utf-8") for path in (Path(page.__file__).parent / "page").iterdir()}
TEXTS = {
    key: pair
    for name in page.TABLES
    for key, pair in tomllib.loads((Path(page.__file__).parent / name).read_text(encoding="utf-8")).items()
}


# texts


def test_every_text_is_in_every_language_with_the_same_gaps() -> None:
    for key, pair in TEXTS.items():
        assert len(pair) == len(LANGUAGES) and all(pair), key
        gaps = [sorted(re.findall(r"\{(\w+)\}", text)) for text in pair]
        assert gaps[0] == gaps[1], key
        assert not re.search(r"[\u4e00-\u9fff]", pair[0]), f"{key}: Chinese among the English"


def test_the_page_uses_exactly_the_texts_of_the_table() -> None:
    text = "\n".join(SOURCES.values())
    used = set(re.findall(r'\bw\("([^"+]+)"[,)]', text)) | set(re.findall(r'data-[wt]="([\w.]+)"', text))
    used |= set(re.findall(r'texts\["([\w.]+)"\]', text)) | set(re.findall(r'pick\("(\w+)"', text))
    used |= {f"{name}.{part}" for name in re.findall(r'head\("(\w+)"\)', text) for part in "hp"}
    used |= set(re.findall(r'"((?:walk|c|bench|roof|runs|budget)\.[a-z]+)"', text)) | {"partial", "full", "play", "pause", "roof"}
    missing = {key for key in used if key not in TEXTS and not key.endswith(".")}
    assert not missing
    built = ("s.", "f.", "r.", "l.", "p.", "k.", "mask.", "data.", "theme.", "access.", "layout.", "way.", "path.", "load")
    unused = {key for key in TEXTS if key not in used and not key.startswith(built)}
    assert not unused - {"compute"}  # these and the ones above are put together in the script


def test_the_picture_of_ranks_is_that_of_the_plan(data: dict[str, Any]) -> None:
    """Every tile the mask shows is computed, by the rank that holds its queries or its keys; nobody computes the others."""
    shown = data["parallel"]
    assert set(shown["masks"]) == set(data["axes"]["mask"])
    side = parallel.LENGTH // parallel.CELLS
    for mask in ("causal", "window", "documents"):
        found = shown["masks"][mask]
        tiles, seen = np.array(found["tiles"]), np.array(figures.classes(parallel.LENGTH, mask, side, side))
        assert np.array_equal(tiles >= 0, seen > 0)
        problem = Problem.of(
            heads=figures.HEADS, head_dim=parallel.DIM, seqlen=parallel.LENGTH, mask=figures.make_mask(mask, parallel.LENGTH)
        )
        made = context_plan(problem, ranks=parallel.RANKS, device=parallel.DEVICE, heads=1)
        holder = np.zeros(parallel.LENGTH, int)
        for rank in range(parallel.RANKS):
            holder[made.token_numbers(rank)] = rank
        held = [set(part.tolist()) for part in np.split(holder, parallel.CELLS)]
        for i, j in np.argwhere(tiles >= 0):
            assert tiles[i, j] in held[i] | held[j]
        assert max(end for *_, end in found["events"]) == pytest.approx(made.predict().seconds)
        chosen = context_plan(problem, ranks=parallel.RANKS, device=parallel.DEVICE)
        assert found["schedules"][-1]["bytes_forward"] == max(chosen.bytes_sent(rank) for rank in range(parallel.RANKS))


def test_every_name_python_hands_over_has_a_text(data: dict[str, Any]) -> None:
    names = {f"mask.{mask}" for mask in data["axes"]["mask"]} | {f"s.{way}" for way in (*figures.SCHEDULES, "plan")}
    for found in data["results"].values():
        names |= {f"r.{name}" for name in [found["binding"] or "latency", *(found["limits"] or ())]}
    names |= {f"data.{kind}" for kind in DATA}
    names |= {f"f.{figure['name']}" for device in data["devices"].values() for figure in device["figures"]}
    names |= {f"p.{pass_}" for found in data["results"].values() for pass_ in found["passes"]}
    names |= {f"way.{row['name']}" for shown in data["parallel"]["masks"].values() for row in shown["schedules"]}
    names |= {f"path.{path.name}" for path in PATHS} | {f"access.{access}" for access in ACCESSES}
    names |= {f"l.{loss}" for loss in data["run"]["explanation"]["measured"]["losses"]}
    assert names <= set(TEXTS)


# facts


def test_every_position_of_the_controls_has_a_result(data: dict[str, Any]) -> None:
    axes = data["axes"]
    positions = 1
    for values in axes.values():
        positions *= len(values)
    assert len(data["results"]) == positions
    for device in axes["device"]:
        for length in axes["length"]:
            for mask in axes["mask"]:
                for tile in axes["tile"]:
                    found = data["results"][figures.key(device, length, 64, mask, tile)]
                    assert f"{length}|{mask}|{found['tile']}" in data["maps"]
    for mask in axes["mask"]:
        assert {f"{mask}|v1", f"{mask}|v2"} <= set(data["walks"])


@pytest.mark.parametrize("mask", figures.MASKS)
@pytest.mark.parametrize("schedule", figures.SCHEDULES)
def test_traffic_is_the_model_s(data: dict[str, Any], mask: str, schedule: str) -> None:
    spec = hardware.device("h200")
    problem = figures.problem_of(512, 128, mask, figures.dtype_on(spec))
    found = data["results"][figures.key("h200", 512, 128, mask, "64x64")]
    moved = model.traffic(problem, TilePlan(64, 64), schedule)
    told = found["schedules"][schedule]
    assert told["total"] == moved.total
    assert told["bytes"] == {name: [r, w] for name, r, w in moved.tensors()}
    assert found["useful"] == model.work(problem, TilePlan(64, 64)).useful
    assert told["intensity"] == pytest.approx(found["useful"] / moved.total)
    every = 4 * figures.HEADS * 512 * 512 * 128
    assert told["executed"] == (every if schedule == "standard" else model.work(problem, TilePlan(64, 64)).executed)


def test_every_mark_under_the_roof_has_the_same_kind_of_time(data: dict[str, Any]) -> None:
    """The plan runs v2 with its own tile and fewer bytes: it cannot stand below v2. Nothing stands above the roof."""
    for name, found in data["results"].items():
        device, marks = data["devices"][name.split("|")[0]], found["schedules"]
        assert marks["plan"]["total"] <= marks["v2"]["total"], name
        assert marks["plan"]["rate"] >= marks["v2"]["rate"] * (1 - 1e-12), name
        for mark in marks.values():
            longest = max(mark["executed"] / device["flops"], mark["total"] / device["dramBandwidth"])
            assert mark["seconds"] == pytest.approx(longest, rel=1e-12)
            assert mark["rate"] <= min(device["flops"], mark["intensity"] * device["dramBandwidth"]) * (1 + 1e-12)


def test_the_theoretical_roof_is_nowhere_below_the_measured_one() -> None:
    """Where the system tells no clock it is estimated, and this CPU is faster than that; its memory is slower."""
    spec = hardware.device("cpu")
    fast = Ceilings("here", "2026-01-01", "a test", {"float32": 2 * spec.flops("float32")}, copy=1e9, read=1e9)
    found = machine.describe(spec, fast)
    assert found["theory"] == {"flops": found["flops"], "bandwidth": spec.dram_bandwidth}
    assert found["flops"] == 2 * spec.flops("float32") and found["dramBandwidth"] == 1e9
    for key in ("h200", "altra"):
        same = machine.describe(hardware.device(key))
        assert same["theory"] == {"flops": same["flops"], "bandwidth": same["dramBandwidth"]}


@pytest.mark.parametrize("device", ["here", XEON, "h200", "a100-80"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_tile_and_time_are_the_plan_s(data: dict[str, Any], device: str, mask: str) -> None:
    """What `tilewise.plan` says of the problem there; beside it the reader's own tile, evaluated or refused."""
    spec = None if device == "here" else hardware.device(device)
    spec = CEILINGS.apply(spec) if spec and device == XEON else spec
    for dim in figures.HEAD_DIMS:
        problem = figures.problem_of(512, dim, mask, figures.dtype_on(hardware.device(spec)))
        expected = plan(problem, spec)
        found = data["results"][figures.key(device, 512, dim, mask, "plan")]
        assert (found["tile"], found["predicted"]) == (str(expected.tile), expected.seconds)
        assert found["onChip"] == dict(expected.on_chip)
        there = replace(problem, device="cuda" if expected.spec.is_gpu else "cpu")
        server = next(choice.name for choice in plans.serving(there, expected.spec) if choice.chosen)
        tiles = plans.tiles(server, there, expected.spec)
        assert found["by"] == (server if tiles else "model")
        assert not tiles or found["tile"] == str(tiles["forward"]) == found["passes"]["forward"]
        for tile in figures.TILES[1:]:
            own = data["results"][figures.key(device, 512, dim, mask, figures.tile_name(tile))]
            assert own["runs"] == str(expected.tile)
            assert own["tile"] == "×".join(map(str, tile or ()))
            try:
                given = plan(problem, spec, tile=tile)
            except PlanError as error:
                assert (own["refused"], own["predicted"]) == (str(error), None)
                continue
            assert (own["refused"], own["own"]) == ("", given.figures_of)
            assert own["predicted"] == (given.seconds if given.timed else None)


def test_a_tile_that_torch_alone_has_is_run_without_a_predicted_time(data: dict[str, Any]) -> None:
    """64 rows are no multiple of a Xeon's 48 at head dim 128; at 64, where its strips are 64 rows high, they are one."""
    narrow, wide = (data["results"][figures.key(XEON, 512, dim, "causal", "64x64")] for dim in (64, 128))
    assert (narrow["own"], narrow["refused"]) == ("cpu", "") and narrow["predicted"] > 0
    assert (wide["own"], wide["by"], wide["refused"], wide["predicted"]) == ("tiled", "cpu", "", None)


def test_less_traffic_compares_like_with_like() -> None:
    """An H200, 4,096 tokens, d 64, causal: both ways without a cache. 128 would be without against with."""
    spec = hardware.device("h200")
    problem = figures.problem_of(4096, 64, "causal", "bfloat16")
    found = figures.position(problem, "causal", "h200", spec, (128, 128))
    standard, v2 = (model.traffic(problem, TilePlan(128, 128), way).total for way in ("standard", "v2"))
    assert found["less"] == standard / v2 == pytest.approx(14.7, abs=0.05)
    assert found["schedules"]["standard"]["total"] / found["schedules"]["plan"]["total"] == pytest.approx(128, abs=0.1)


def test_maps_unroll_to_the_tiles(data: dict[str, Any]) -> None:
    for mask in figures.MASKS:
        problem = figures.problem_of(512, 64, mask, "bfloat16")
        tiles = TileMap(problem.program, problem.shape, 64, 64)
        for i, runs in enumerate(data["maps"][f"512|{mask}|64×64"]):
            row = [kind for kind, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]
            assert row == tiles.row(i).tolist()


@pytest.mark.parametrize("mask", figures.MASKS)
def test_the_walk_ends_at_the_exact_output_and_bytes(data: dict[str, Any], mask: str) -> None:
    problem = walk.Problem.of(
        heads=1, head_dim=walk.DIM, seqlen=walk.LENGTH, dtype="float32", mask=figures.make_mask(mask, walk.LENGTH)
    )
    inputs = random_inputs(problem, walk.SEED)
    inputs["Q"] = inputs["Q"] * walk.SHARP
    out, lse = attention(problem, inputs["Q"], inputs["K"], inputs["V"])
    for schedule in ("v1", "v2"):
        found = data["walks"][f"{mask}|{schedule}"]
        run = simulate(problem, TilePlan(walk.TILE, walk.TILE), schedule, inputs=inputs)
        assert found["bytes"][-1] == run.traffic.total
        assert all(a < b for a, b in zip(found["bytes"], found["bytes"][1:], strict=False))
        assert [step[:2] for step in found["steps"]] == [[visit.i, visit.j] for visit in run.walk]
        for row, states in found["rows"].items():
            last = states[-1]
            assert last["out"] == pytest.approx(out[0, 0, int(row), 0])
            assert last["m"] + np.log(last["l"]) == pytest.approx(lse[0, 0, int(row)])
            met = [state["j"] for state in states]
            assert met == sorted(met)
            assert set(met) <= {j for i, j, _ in found["steps"] if i == int(row) // walk.TILE}


def test_some_row_of_the_walk_is_rescaled(data: dict[str, Any]) -> None:
    rows = data["walks"]["full|v2"]["rows"].values()
    assert any(0 < state["alpha"] < 1 for states in rows for state in states)


def test_memory_grows_as_it_must() -> None:
    m = figures.memory(64)
    assert m["length"][:5] == [512, 1024, 2048, 4096, 8192]
    # the tutorials' table counts one matrix: 0.5 MiB at 512 tokens; here S and P are two
    assert [size // 2**19 for size in m["standard"][:5]] == [2, 8, 32, 128, 512]
    assert [b / a for a, b in zip(m["v2"], m["v2"][1:], strict=False)] == [2.0] * (len(m["v2"]) - 1)


def test_two_buffers_are_never_slower(data: dict[str, Any]) -> None:
    tiles = {(*name.split("|")[0:3:2], found["tile"]) for name, found in data["results"].items()}
    assert {"|".join(at) for at in tiles} == set(data["timelines"])
    for runs in data["timelines"].values():
        assert [run["stages"] for run in runs] == [1, 2, 3]
        assert runs[0]["total"] >= runs[1]["total"] >= runs[2]["total"]


# the page


class Parts(HTMLParser):
    """Tags with what they refer to, and the texts of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.refers: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.scripts: list[str] = []
        self.script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.script = tag == "script"
        if self.script:
            self.scripts.append("")
        for name, value in attrs:
            if name in ("src", "href", "action", "srcset") and value:
                self.refers.append((tag, value))
            if name == "id" and value:
                self.ids.append(value)

    def handle_endtag(self, tag: str) -> None:
        self.script = False

    def handle_data(self, data: str) -> None:
        if self.script:
            self.scripts[-1] += data


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_is_one_file(data: dict[str, Any], language: str) -> None:
    text = page.render(data, language)
    assert 4_000_000 < len(text.encode()) < 7_000_000
    parts = Parts(text)
    assert all(value.startswith(("#", "data:")) for _, value in parts.refers), parts.refers
    assert len(parts.ids) == len(set(parts.ids))
    tables, results = (json.loads(script) for script in parts.scripts[1:3])
    assert set(tables) == set(LANGUAGES) and set(tables["zh"]) == set(TEXTS)
    assert set(results["results"]) == set(data["results"])
    own = "".join(parts.scripts[3:])
    assert "fetch(" not in own and "XMLHttpRequest" not in own and "http" not in own
    assert TEXTS["title"][LANGUAGES.index(language)] in text
    for wanted in re.findall(r'\$\("(\w+)"\)', own):
        assert wanted in parts.ids, f"the script looks for #{wanted}"


def test_what_stands_in_a_script_cannot_end_it() -> None:
    text = page.embed({"a": "</script><!--", "b": float("inf"), "c": 1 / 3, "d": ("é",)})
    assert "</script" not in text and "<!--" not in text
    assert json.loads(text) == {"a": "</script><!--", "b": None, "c": 0.333333, "d": ["é"]}


def test_an_unknown_language_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="language"):
        page.render(data, "xx")


def test_records_are_found_and_cut_down(tmp_path: Path) -> None:
    spread = {"p20": 1.0, "p50": 2.0, "p80": 3.0, "samples": 5}
    results = [{"contender": "tilewise", "seconds": spread}, {"contender": "wrong", "seconds": None}]
    where = {"cpu": "N1", "gpus": []}
    record = {"suite": "core", "date": "2026-01-02", "machine": where, "records": [{"words": "x", "results": results}]}
    (tmp_path / "a.json").write_text(json.dumps(record))
    (tmp_path / "b.json").write_text("not json")
    (tmp_path / "c.json").write_text("[1]")
    (tmp_path / "d.json").write_text(json.dumps({"suite": "traffic", "date": "2026-01-01", "kernels": []}))
    found = machine.records([tmp_path, tmp_path / "absent"])
    assert found["bench"][0]["cases"] == [{"words": "x", "times": {"tilewise": spread}, "ratio": None}]
    assert found["bench"][0]["where"] == "N1" and len(found["traffic"]) == 1


@pytest.mark.parametrize(
    ("devices", "where"),
    [(["cpu", "cpu"], "Xeon"), (["cuda"], "NVIDIA H200"), (["cpu", "cuda:0"], "Xeon, NVIDIA H200"), ([None], "NVIDIA H200")],
)
def test_a_record_names_what_its_cases_ran_on(devices: list[str | None], where: str, tmp_path: Path) -> None:
    cases = [{"case": "a name" if device is None else {"device": device}, "results": []} for device in devices]
    place = {"cpu": "Xeon", "gpus": [{"name": "NVIDIA H200"}]}
    (tmp_path / "a.json").write_text(json.dumps({"suite": "cpu", "date": "2026", "machine": place, "records": cases}))
    assert machine.records([tmp_path])["bench"][0]["where"] == where


def test_records_asked_for_must_be_there(tmp_path: Path) -> None:
    for path, word in ((tmp_path / "absent", "no directory"), (tmp_path, "holds no record")):
        result = CliRunner().invoke(app, ["report", "--records", str(path), "-o", str(tmp_path / "page.html")])
        assert result.exit_code == 2 and word in " ".join(result.output.split())
        assert not (tmp_path / "page.html").exists()


def test_the_demo_ends_with_the_report_and_ci_opens_it() -> None:
    root = Path(__file__).resolve().parents[2]
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe and "tilewise report" in recipe[1].splitlines()[-1]
    steps = [
        line for line in (root / ".ci" / "run").read_text(encoding="utf-8").splitlines() if line.startswith("make")
    ]
    assert steps.index("make test") < steps.index("make test-browser")


def test_the_command_writes_the_page_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        page,
        "gather",
        lambda *_: {
            "devices": {"here": {"name": "N"}, "h200": {"name": "G"}},
            "axes": dict.fromkeys(("device", "length", "dim", "mask", "tile"), ()),
        },
    )
    done = CliRunner().invoke(app, ["report", "--output", str(tmp_path / "deep" / "page.html"), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert Path(told["path"]).stat().st_size == told["bytes"] > 4_000_000
