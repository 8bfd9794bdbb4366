"""The sentences under the report's charts: every figure in them is found again in the data that the chart draws."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lab.test_report import TEXTS
from tilewise.lab.report import conclusions, figures, page
from tilewise.lab.simulator.precision import DATA, experiment

HTML = (Path(page.__file__).parent / "page" / "page.html").read_text(encoding="utf-8")
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "s": 1.0, "ms": 1e-3, "µs": 1e-6}


def number(text: str) -> float:
    """What a figure in a sentence says, its unit multiplied out."""
    value, _, unit = text.replace(",", "").rstrip("%").partition(" ")
    return float(value) * UNITS.get(unit, 1)


def says(sentences: list[Any], key: str) -> dict[str, str]:
    """The gaps of the one sentence of that key."""
    (gaps,) = [gaps for name, gaps in sentences if name == f"k.{key}"]
    return gaps


def every(data: dict[str, Any]) -> list[tuple[str, str, dict[str, str]]]:
    return [(chart, *one) for chart, table in data["says"].items() for told in table.values() for one in told]


def test_every_chart_has_a_conclusion_below_it(data: dict[str, Any]) -> None:
    charts = set(re.findall(r'class="(?:chart[^"]*|banks)" id="(\w+)"', HTML))
    assert charts == set(re.findall(r'says\("(\w+)"\)', HTML)) - {"tiles"}
    for chart in charts:
        assert HTML.index(f'id="{chart}"') < HTML.index(f'says("{chart}")')
    assert charts - {"precision", "bench"} <= {chart for chart, *_ in every(data)}  # there is nothing to say of no data


def test_sentences_have_the_gaps_of_their_texts(data: dict[str, Any]) -> None:
    for chart, key, gaps in every(data):
        assert set(re.findall(r"\{(\w+)\}", TEXTS[key][0])) <= set(gaps), (chart, key)
        for value in gaps.values():
            assert value and (not value.startswith("@") or value[1:] in TEXTS), (chart, key, value)


def test_every_text_of_a_conclusion_can_be_said() -> None:
    source = Path(conclusions.__file__).read_text(encoding="utf-8")
    said = {re.sub(r"\{[^}]+\}", "*", key) for key in re.findall(r'say\(\s*f?"([^"]+)"', source)}
    for key in (key.removeprefix("k.") for key in TEXTS if key.startswith("k.")):
        assert any(re.fullmatch(re.escape(one).replace(r"\*", r"\w+"), key) for one in said), key


def test_no_figure_is_typed_into_a_conclusion() -> None:
    """A sentence may name v1, fp32, H200 or N × N; every other digit comes from the data."""
    for key, (english, chinese) in TEXTS.items():
        if key.startswith("k."):
            for text in (english, chinese):
                rest = re.sub(r"\{\w+\}|v[12]\b|fp32|H200", "", text)
                assert not re.search(r"\d", rest), key


def test_roofline(data: dict[str, Any]) -> None:
    for name, told in data["says"]["roofline"].items():
        found, device = data["results"][name], data["devices"][name.split("|")[0]]
        for way in ("standard", "plan"):
            mark = found["schedules"][way]
            (key,) = [key for key, _ in told if f".{way}." in key]
            gaps = dict(told)[key]
            assert number(gaps["intensity"]) == pytest.approx(found["useful"] / mark["total"], rel=0.006)
            assert number(gaps["ridge"]) == pytest.approx(device["flops"] / device["dramBandwidth"], rel=0.006)
            assert number(gaps["share"]) == pytest.approx(100 * mark["rate"] / device["flops"], abs=0.51)
            by_memory = mark["seconds"] > mark["executed"] / device["flops"] * (1 + 1e-9)
            assert key.endswith("memory" if by_memory else "arithmetic"), name
        if found["predicted"] is None:
            assert len(told) == 2
        elif found["predicted"] < found["schedules"]["plan"]["seconds"]:
            assert device["measured"], name  # no prediction beats a roof made of published figures
            gaps = says(told, "roof.below")
            assert number(gaps["least"]) == pytest.approx(found["schedules"]["plan"]["seconds"], rel=0.006)
        else:
            gaps = says(told, "roof.predicted")
            assert number(gaps["time"]) == pytest.approx(found["predicted"], rel=0.006)
            assert number(gaps["times"]) == pytest.approx(found["predicted"] / found["schedules"]["plan"]["seconds"], rel=0.006)
            assert gaps["binding"] == f"@r.{found['binding']}"


def test_a_rival_that_is_predicted_faster_is_named(data: dict[str, Any]) -> None:
    """The page does not hide what the model says of tiles that a backend's plan passes over."""
    kinds = set()
    for name, told in data["says"]["tiles"].items():
        runs, at = data["results"][name], name.removesuffix("plan")
        rivals = [data["results"][at + tile] for tile in ("64x64", "128x64", "128x128")]
        times = {rival["tile"]: rival["predicted"] for rival in rivals if rival["predicted"] is not None}
        if runs["predicted"] is None or not times:
            assert told == []
            continue
        ((key, gaps),) = told
        kinds.add(key)
        assert gaps["rivals"] == ", ".join(times) and gaps["runs"] == runs["runs"]
        faster = runs["predicted"] / min(times.values()) - 1
        assert key == ("k.tiles.best" if faster <= 0 else "k.tiles.same" if faster < 0.1 else "k.tiles.rival"), name
        if faster > 0:
            assert times[gaps["tile"]] == min(times.values())
    assert "k.tiles.best" in kinds


def test_traffic_and_shares(data: dict[str, Any]) -> None:
    for name, found in data["results"].items():
        marks, told = found["schedules"], data["says"]["traffic"][name]
        total = {way: sum(sum(pair) for pair in mark["bytes"].values()) for way, mark in marks.items()}
        gaps = says(told, "traffic.less")
        for way in ("v1", "v2"):
            assert number(gaps[way]) == pytest.approx(total["standard"] / total[way], rel=0.006)
        if total["plan"] < total["v2"]:
            kept = number(says(told, "traffic.cache")["kept"])
            assert kept == pytest.approx(100 * (1 - total["plan"] / total["v2"]), abs=0.51)
        key = "traffic.once" if f"{total['plan'] / found['compulsory']:.3g}" == "1" else "traffic.floor"
        assert number(says(told, key)["plan"]) == pytest.approx(total["plan"], rel=0.006)
        shares = says(data["says"]["shares"][name], "shares")
        square = sum(sum(marks["standard"]["bytes"][tensor]) for tensor in "SPE")
        assert number(shares["standard"]) == pytest.approx(100 * square / total["standard"], abs=0.51)
        keys = sum(sum(marks["v2"]["bytes"][tensor]) for tensor in "KV")
        assert number(shares["v2"]) == pytest.approx(100 * keys / total["v2"], abs=0.51)


def test_map(data: dict[str, Any]) -> None:
    for name, rows in data["maps"].items():
        length, mask, tile = name.split("|")
        kinds = np.bincount(np.ravel(figures.classes(int(length), mask, *map(int, tile.split("×")))), minlength=3)
        assert sum(sum(runs[1::2]) for runs in rows) == kinds.sum()
        gaps = says(data["says"]["map"][name], "map")
        assert number(gaps["empty"]) == pytest.approx(100 * kinds[0] / kinds.sum(), abs=0.51)
        assert number(gaps["partial"]) == pytest.approx(100 * kinds[1] / kinds[1:].sum(), abs=0.51)


def test_timeline(data: dict[str, Any]) -> None:
    for name, runs in data["timelines"].items():
        told, ends = data["says"]["timeline"][name], [max(event[4] for event in run["events"]) for run in runs]
        assert number(says(told, "timeline.two")["share"]) == pytest.approx(100 * ends[1] / ends[0], abs=0.51)
        spent = {kind: sum(e[4] - e[3] for e in runs[0]["events"] if e[1] == kind) for kind in ("load", "compute")}
        gaps = says(told, "timeline.load" if spent["load"] > spent["compute"] else "timeline.compute")
        for kind, seconds in spent.items():
            assert number(gaps[kind]) == pytest.approx(seconds, rel=0.006, abs=1e-8)


def test_walk(data: dict[str, Any]) -> None:
    for mask in figures.MASKS:
        for row, states in data["walks"][f"{mask}|v1"]["rows"].items():
            told = data["says"]["rowchart"][f"{mask}|{row}"]
            grew = sum(now["m"] > before["m"] for before, now in pairwise(states))
            assert says(told, "walk.row") == {"row": row, "tiles": str(len(states)), "grew": str(grew)}
            gaps = says(told, "walk.moved")
            moved = [data["walks"][f"{mask}|{way}"]["bytes"][-1] for way in ("v1", "v2")]
            assert [number(gaps["v1"]), number(gaps["v2"])] == pytest.approx(moved, rel=0.006)
            assert number(gaps["times"]) == pytest.approx(moved[0] / moved[1], rel=0.006)


def test_parallel(data: dict[str, Any]) -> None:
    for mask, shown in data["parallel"]["masks"].items():
        tiles = np.array(shown["tiles"])
        counts = np.bincount(tiles[tiles >= 0], minlength=data["parallel"]["ranks"])
        gaps = says(data["says"]["parallelTiles"][mask], "parallel.tiles")
        assert [gaps[name] for name in ("least", "most", "all")] == [str(n) for n in (counts.min(), counts.max(), counts.sum())]
        timed = {row["name"]: row["seconds"] for row in shown["schedules"] if row["seconds"]}
        gaps = says(data["says"]["parallelTime"][mask], "parallel.time")
        assert timed[gaps["best"].removeprefix("@way.")] == min(timed.values())
        assert timed[gaps["worst"].removeprefix("@way.")] == max(timed.values())


@pytest.mark.parametrize("dim", figures.HEAD_DIMS)
def test_memory(data: dict[str, Any], dim: int) -> None:
    told, shown = data["says"]["memory"][str(dim)], data["memory"][str(dim)]
    last = says(told, "memory.last")
    assert number(last["standard"]) == shown["standard"][-1] and number(last["v2"]) == shown["v2"][-1]
    tokens = int(says(told, "memory.passes")["tokens"].replace(",", ""))
    assert 2 * tokens * tokens > 4 * tokens * dim and (tokens == shown["length"][0] or 2 * (tokens // 2) <= 4 * dim)
    full = int(says(told, "memory.full")["tokens"].replace(",", ""))
    assert 4 * full**2 > 141e9 > 4 * (full / 2) ** 2  # S and P of one head, two bytes an element


def test_precision() -> None:
    results = [vars(one) for one in experiment(rows=4)]
    for kind in DATA:
        told = conclusions.precision(results, kind)
        narrow = min((row for row in results if (row["data"], row["path"]) == (kind, "fp32")), key=lambda row: row["width"])
        cost = narrow["relative"] / narrow["relative_without"]
        gaps = says(told, "precision.costs" if cost > 1.25 else "precision.free")
        assert number(gaps["narrow"]) == pytest.approx(narrow["relative"], rel=0.06)
        assert number(gaps["cost"]) == pytest.approx(cost, rel=0.06)
        widest = {row["path"]: row["relative"] for row in results if row["data"] == kind and row["width"] == 1024}
        ends = says(told, "precision.ends")
        assert widest[ends["most"].removeprefix("@path.")] == max(widest.values())
        assert widest[ends["least"].removeprefix("@path.")] == min(widest.values())
    assert any(key == "k.precision.costs" for key, _ in conclusions.precision(results, "slow"))


def test_bench_and_losses() -> None:
    def case(**seconds: float) -> dict[str, Any]:
        return {"times": {name: {"p50": value} for name, value in seconds.items()}}

    record = {"cases": [case(tilewise=1, sdpa=2, other=1.5), case(tilewise=2, sdpa=1), case(tilewise=1, sdpa=4), case(sdpa=1)]}
    gaps = says(conclusions.bench(record), "bench")
    assert gaps == {"first": "2", "cases": "3", "median": "1.5", "least": "0.5", "most": "4"}
    assert conclusions.bench({"cases": [case(tilewise=1)]}) == []
    measured = {"seconds": 2.0, "ideal": 1.5, "losses": {"launch": 0.1, "kernel": 0.4}}
    told = says(conclusions.losses(measured), "losses.most")
    assert told == {"name": "@l.kernel", "time": "400 ms", "share": "20.0%"}
    assert conclusions.losses({**measured, "losses": {"launch": 0.0}}) == [["k.losses.none", {}]]
    assert says(conclusions.losses({**measured, "ideal": 3.0}), "losses.above") == {"share": "150%"}
