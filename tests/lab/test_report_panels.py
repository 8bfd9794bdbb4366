"""The report's panels about the chip, its colours, and the order of its sections."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lab.test_report_conclusions import HTML, number, says
from tilewise import hardware
from tilewise.backends import plans
from tilewise.diagnostics.plan import plan
from tilewise.lab.report import figures, page, panels

PAGE = Path(page.__file__).parent / "page"
CSS = (PAGE / "page.css").read_text(encoding="utf-8")
SCRIPTS = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PAGE.glob("*.js")))


# the order of the page


def test_the_lesson_opens_on_a_gpu_and_this_machine_follows(data: dict[str, Any]) -> None:
    assert data["axes"]["device"][:3] == ["h200", "a100-80", "here"]
    assert "device: R.axes.device[0]" in SCRIPTS
    order = ["controls", "roofline", "traffic", "map", "walk-h", "budget", "banks", "timeline", "machine-h", "bench-h"]
    places = [re.search(rf'(?:id|aria-labelledby)="{name}"', HTML).start() for name in order]  # type: ignore[union-attr]
    assert all(a < b for a, b in pairwise(places))
    names = page.names_of(data)
    assert names["gpu"] == data["devices"]["h200"]["name"] in page.render(data, "en")


# banks


@pytest.mark.parametrize("dim", figures.HEAD_DIMS)
def test_banks_are_where_the_addresses_say(data: dict[str, Any], dim: int) -> None:
    """A row of a 16-bit tile of 64 is 128 bytes, all 32 banks: its columns fall on one bank each, unless rows are shifted."""
    column = data["banks"][f"{dim}|column"]["layouts"]
    assert column["plain"]["degree"] == 32 and column["padded"]["degree"] == column["swizzled"]["degree"] == 1
    assert len({bank for _, bank, _ in column["plain"]["cells"]}) == 1
    for layout in ("padded", "swizzled"):
        assert sorted(bank for _, bank, _ in column[layout]["cells"]) == list(range(32))
    steps = {(b - a) % 32 for (_, a, _), (_, b, _) in pairwise(column["padded"]["cells"])}
    assert steps == {1}  # each row begins one word later
    first = column["swizzled"]["cells"][0][1]
    assert [bank for _, bank, _ in column["swizzled"]["cells"]] == [first ^ row for row in range(32)]
    matrix = data["banks"][f"{dim}|matrix"]["layouts"]
    assert (matrix["plain"]["degree"], matrix["padded"]["degree"], matrix["swizzled"]["degree"]) == (8, 1, 1)
    assert data["banks"][f"{dim}|row"]["layouts"]["plain"]["degree"] == 1


def test_banks_count_what_the_picture_shows(data: dict[str, Any]) -> None:
    for name, shown in data["banks"].items():
        words = shown["keys"] * shown["dim"] * panels.ITEMSIZE // 4
        for layout, found in shown["layouts"].items():
            loads: dict[int, int] = {}
            for _, bank, _ in found["cells"]:
                loads[bank] = loads.get(bank, 0) + 1
            assert [goes for *_, goes in found["cells"]] == [loads[bank] for _, bank, _ in found["cells"]], (name, layout)
            assert max(loads.values()) == found["degree"]
            assert found["ideal"] == words // 32 <= found["transactions"]
            assert found["extra"] == (shown["keys"] * (16 if shown["access"] == "matrix" else 4) if layout == "padded" else 0)
        told = data["says"]["banks"][name]
        if shown["layouts"]["plain"]["degree"] == 1:
            assert number(says(told, "banks.free")["plain"]) == shown["layouts"]["plain"]["transactions"]
            continue
        gaps = says(told, "banks.conflict")
        for layout, found in shown["layouts"].items():
            assert number(gaps[layout]) == found["transactions"] and gaps[f"{layout}Degree"] == str(found["degree"])
        ratio = shown["layouts"]["plain"]["transactions"] / shown["layouts"]["swizzled"]["transactions"]
        assert number(gaps["times"]) == pytest.approx(ratio)


# the budget


@pytest.mark.parametrize("device", ["h200", "a100-80", "here"])
def test_the_budget_is_that_of_the_tiles_that_run(data: dict[str, Any], device: str) -> None:
    """Buffer by buffer what the backend's plan says, and all of it with what is left is the room there is."""
    spec = hardware.device(None if device == "here" else device)
    for dim in figures.HEAD_DIMS:
        found = data["results"][figures.key(device, 512, dim, "causal", "plan")]
        problem = figures.problem_of(512, dim, "causal", figures.dtype_on(spec))
        budget, made = found["budget"], plan(problem, spec if device != "here" else None)
        assert budget["room"] == (spec.sram_per_block if spec.is_gpu else 1 << 20)
        tiles = {tile.pass_: tile for tile in made.passes}
        assert {"forward"} <= {row["pass"] for row in budget["passes"]} <= set(tiles)
        for row in budget["passes"]:
            held = dict(tiles[row["pass"]].on_chip)
            assert row["used"] == sum(held.values())
            for name, size in row["buffers"].items():
                copies = ["W", "kept"] if name == "P" else []
                assert size == sum(held.get(one, 0) for one in (name, f"{name}_panels", f"{name}_columns", *copies))
            assert sum(row["buffers"].values()) + row["small"] + row["left"] == budget["room"]
            assert row["left"] >= 0 and (row["tile"], row["stages"]) == (str(tiles[row["pass"]]), tiles[row["pass"]].stages)


def test_the_budget_of_an_h200_by_hand(data: dict[str, Any]) -> None:
    """d 128, 512 tokens: K and V of 128 keys in two stages, 16 bits."""
    found = data["results"][figures.key("h200", 512, 128, "full", "plan")]["budget"]
    (forward,) = [row for row in found["passes"] if row["pass"] == "forward"]
    keys = int(forward["tile"].split("×")[1])
    assert forward["buffers"]["K"] == forward["buffers"]["V"] == forward["stages"] * keys * 128 * 2
    assert found["room"] == 227 * 1024


def test_what_is_said_of_the_budget_is_in_it(data: dict[str, Any]) -> None:
    more = set()
    for name, told in data["says"]["budget"].items():
        shown = data["results"][name]["budget"]
        used = [gaps for key, gaps in told if key == "k.budget.used"]
        assert len(used) == len(shown["passes"]) and bool(used) != (told == [["k.budget.none", {}]])
        for row, gaps in zip(shown["passes"], used, strict=True):
            assert gaps["pass"] == f"@p.{row['pass']}"
            assert number(gaps["left"]) == pytest.approx(shown["room"] - row["used"], rel=0.006)
            assert number(gaps["share"]) == pytest.approx(100 * row["used"] / shown["room"], abs=0.51)
        for key, gaps in told:
            if key in ("k.budget.fits", "k.budget.full"):
                more.add(key)
                forward = next(row for row in shown["passes"] if row["pass"] == "forward")
                stage = (forward["buffers"]["K"] + forward["buffers"]["V"]) / forward["stages"]
                assert number(gaps["stage"]) == pytest.approx(stage, rel=0.006)
                assert (key == "k.budget.fits") == (stage <= forward["left"])
    assert more == {"k.budget.fits", "k.budget.full"}


def test_a_tile_of_torch_has_no_budget() -> None:
    made = plan(figures.problem_of(512, 64, "causal", "float32"), hardware.device("xeon-8480"), backend="tiled")
    assert plans.tiles("tiled", made.problem, made.spec) and panels.budget(made)["passes"] == []


# colours

BLOCKS = zip(("light", "dark"), CSS.split("[data-theme"), strict=False)
THEMES = {name: dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for name, block in BLOCKS}
SEEN_BY = {
    "everybody": np.eye(3),
    "protanopes": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopes": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]),
    "tritanopes": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]),
}
"""Machado, Oliveira and Fernandes 2009, severity 1, on linear light."""
APART = 0.1
"""Least distance of two colours in OKLab, where 0.02 is just noticeable side by side."""
SERIES = ("blue", "teal", "amber", "red", "violet", "green", "pink", "slate")


def linear(colour: str) -> Any:
    part = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def oklab(light: Any) -> Any:
    cones = np.array([[0.4122215, 0.5363325, 0.051446], [0.2119035, 0.6806995, 0.107397], [0.0883025, 0.2817188, 0.6299787]])
    axes = np.array([[0.2104543, 0.7936178, -0.004072], [1.9779985, -2.4285922, 0.4505937], [0.025904, 0.7827718, -0.8086758]])
    return axes @ np.cbrt(cones @ np.clip(light, 0, 1))


def distance(a: str, b: str, seen: Any) -> float:
    return float(np.linalg.norm(oklab(seen @ linear(a)) - oklab(seen @ linear(b))))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("who", SEEN_BY)
def test_colours_differ_for_everybody(theme: str, who: str) -> None:
    for group in (SERIES, ("empty", "partial", "full"), ("empty", "blue", "amber")):
        for a, b in combinations(group, 2):
            apart = distance(THEMES[theme][a], THEMES[theme][b], SEEN_BY[who])
            assert apart >= APART, f"{theme}: {a} and {b} for {who}: {apart:.3f}"


@pytest.mark.parametrize("theme", THEMES)
def test_colours_stand_out_from_the_paper(theme: str) -> None:
    def brightness(name: str) -> float:
        return float(linear(THEMES[theme][name]) @ [0.2126, 0.7152, 0.0722]) + 0.05

    for name in SERIES:
        for paper in ("paper", "card"):
            low, high = sorted((brightness(name), brightness(paper)))
            assert high / low >= 3, (theme, name, paper)


def test_no_chart_uses_a_colour_twice() -> None:
    """Of lists and tables of colours in the scripts; what shares one is not in one chart."""
    lists = re.findall(r"\[((?:\"\w+\"(?:, )?){3,})\]", SCRIPTS)
    coloured = [names for names in (re.findall(r'"(\w+)"', text) for text in lists) if set(names) <= {*SERIES, "line"}]
    assert len(coloured) >= 5
    for names in coloured:
        assert len(names) == len(set(names)), names
    for table in re.findall(r"const (?:COLOURS|TENSORS) = \{([^}]+)\}", SCRIPTS):
        names = re.findall(r': "(\w+)"', table)
        assert len(names) == len(set(names)) and set(names) <= set(SERIES)


def test_every_buffer_of_the_budget_has_a_colour(data: dict[str, Any]) -> None:
    (table,) = re.findall(r"const BUFFERS = \{([^}]+)\}", SCRIPTS)
    colours = dict(re.findall(r'(\w+): "(\w+)"', table))
    for found in data["results"].values():
        names = {name for row in found["budget"]["passes"] for name in row["buffers"]}
        assert names <= set(colours), names - set(colours)
        assert len({colours[name] for name in names}) == len(names), names
