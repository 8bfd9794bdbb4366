"""What each chart shows, in sentences: every figure in them is computed from the data that the chart draws.

A sentence is a key of `conclusions.toml` and what fills its gaps; what begins with @ is a key of the texts itself.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from tilewise.display import format_bytes, format_number, format_seconds
from tilewise.model.tile import RESOLUTION

Sentence = list[Any]
"""[key, {gap: text}]"""
MATRICES = ("S", "P", "E")
STATE = ("acc", "m", "l")


def say(key: str, **gaps: str) -> Sentence:
    return [f"k.{key}", gaps]


def percent(part: float, whole: float = 1.0, digits: int = 0) -> str:
    return f"{100 * part / whole if whole else 0.0:.{digits}f}%"


def times(more: float, less: float) -> str:
    return format_number(more / less) if less else "∞"


def short(error: float) -> str:
    return f"{error:.1e}" if error else "0"


def tensor_bytes(point: dict[str, Any], names: tuple[str, ...]) -> int:
    return sum(sum(point["bytes"].get(name, (0, 0))) for name in names)


def roofline(found: dict[str, Any], device: dict[str, Any]) -> list[Sentence]:
    """Which side of the ridge standard attention and the plan are on, and how the predicted time compares with the roof's."""
    ridge, marks = device["flops"] / device["dramBandwidth"], found["schedules"]
    said = []
    for way in ("standard", "plan"):
        mark = marks[way]
        side = "memory" if mark["total"] / device["dramBandwidth"] > mark["executed"] / device["flops"] else "arithmetic"
        gaps = {"intensity": format_number(mark["intensity"]), "share": percent(mark["rate"], device["flops"])}
        said.append(say(f"roof.{way}.{side}", **gaps, ridge=format_number(ridge)))
    if found["predicted"] is not None:
        least = marks["plan"]["seconds"]
        time = format_seconds(found["predicted"])
        if found["predicted"] < least:  # it rests on what the machine can do, a measured roof on how the machine was that day
            said.append(say("roof.below", time=time, least=format_seconds(least)))
        else:
            gaps = {"times": times(found["predicted"], least), "binding": f"@r.{found['binding']}"}
            said.append(say("roof.predicted", time=time, **gaps))
    return said


def tiles(name: str, results: dict[str, dict[str, Any]], others: list[str]) -> list[Sentence]:
    """Whether one of the page's own tiles is predicted faster than what runs; the reasons then say why it is not taken."""
    at, runs = name.rpartition("|")[0], results[name]
    timed = [results[f"{at}|{other}"] for other in others]
    timed = [one for one in timed if one["predicted"] is not None]
    if runs["predicted"] is None or not timed:
        return []
    best = min(timed, key=lambda one: one["predicted"])
    gaps = {"runs": runs["tile"], "time": format_seconds(runs["predicted"]), "rivals": ", ".join(one["tile"] for one in timed)}
    if best["predicted"] >= runs["predicted"]:
        return [say("tiles.best", **gaps)]
    rival = {"tile": best["tile"], "own": best["own"], "rival": format_seconds(best["predicted"])}
    faster = runs["predicted"] / best["predicted"] - 1
    if faster < RESOLUTION:
        return [say("tiles.same", **gaps, **rival)]
    return [say("tiles.rival", **gaps, **rival, less=percent(faster))]


def traffic(found: dict[str, Any]) -> list[Sentence]:
    marks = found["schedules"]
    standard, v1, v2, plan = (marks[way]["total"] for way in ("standard", "v1", "v2", "plan"))
    said = [say("traffic.less", v1=times(standard, v1), v2=times(standard, v2))]
    said.append(say("traffic.cache", kept=percent(v2 - plan, v2)) if plan < v2 else say("traffic.nocache"))
    gaps = {"plan": format_bytes(plan), "times": times(plan, found["compulsory"])}
    return [*said, say("traffic.once", **gaps) if gaps["times"] == "1" else say("traffic.floor", **gaps)]


def shares(found: dict[str, Any]) -> list[Sentence]:
    marks = found["schedules"]
    groups = {"standard": MATRICES, "v1": STATE, "v2": ("K", "V")}
    parts = {way: percent(tensor_bytes(marks[way], names), marks[way]["total"]) for way, names in groups.items()}
    return [say("shares", **parts)]


def tile_map(rows: list[list[int]]) -> list[Sentence]:
    counts = [sum(sum(runs[i + 1] for i in range(0, len(runs), 2) if runs[i] == kind) for runs in rows) for kind in range(3)]
    visited = counts[1] + counts[2]
    gaps = {"partial": percent(counts[1], visited), "full": percent(counts[2], visited)}
    return [say("map", empty=percent(counts[0], sum(counts)), **gaps)]


def budget(shown: dict[str, Any]) -> list[Sentence]:
    """What is left, and whether one more stage of what streams past would fit there."""
    if not shown["passes"]:
        return [say("budget.none")]
    said = []
    for row in shown["passes"]:
        gaps = {"pass": f"@p.{row['pass']}", "used": format_bytes(row["used"]), "room": format_bytes(shown["room"])}
        said.append(say("budget.used", **gaps, left=format_bytes(row["left"]), share=percent(row["used"], shown["room"])))
        if row["pass"] == "forward" and row["stages"] > 1 and {"K", "V"} <= set(row["buffers"]):
            stage = (row["buffers"]["K"] + row["buffers"]["V"]) // row["stages"]
            key = "fits" if stage <= row["left"] else "full"
            gaps = {"stage": format_bytes(stage), "stages": str(row["stages"]), "left": format_bytes(row["left"])}
            said.append(say(f"budget.{key}", **gaps))
    return said


def banks(shown: dict[str, Any]) -> list[Sentence]:
    plain, padded, swizzled = (shown["layouts"][name] for name in ("plain", "padded", "swizzled"))
    gaps = {"plain": plain["transactions"], "padded": padded["transactions"], "swizzled": swizzled["transactions"]}
    counts = {name: f"{count:,}" for name, count in gaps.items()}
    if plain["degree"] == 1:
        return [say("banks.free", plain=counts["plain"], extra=format_bytes(padded["extra"]))]
    degrees = {f"{name}Degree": str(one["degree"]) for name, one in shown["layouts"].items()}
    slower = times(plain["transactions"], swizzled["transactions"])
    return [say("banks.conflict", **counts, **degrees, times=slower, extra=format_bytes(padded["extra"]))]


def timeline(runs: list[dict[str, Any]]) -> list[Sentence]:
    one, two, three = (run["total"] for run in runs)
    slower = "load" if runs[0]["load"] > runs[0]["compute"] else "compute"
    gaps = {"load": format_seconds(runs[0]["load"]), "compute": format_seconds(runs[0]["compute"])}
    more = say("timeline.third", less=percent(1 - three / two, digits=1)) if three < 0.9995 * two else say("timeline.enough")
    return [say("timeline.two", share=percent(two, one)), say(f"timeline.{slower}", **gaps), more]


def walk(walks: dict[str, Any], mask: str, row: str) -> list[Sentence]:
    v1, v2 = (walks[f"{mask}|{schedule}"]["bytes"][-1] for schedule in ("v1", "v2"))
    states = walks[f"{mask}|v2"]["rows"][row]
    grew = sum(state["alpha"] < 1 for state in states[1:])
    moved = say("walk.moved", v1=format_bytes(v1), v2=format_bytes(v2), times=times(v1, v2))
    return [say("walk.row", row=row, tiles=str(len(states)), grew=str(grew)), moved]


def parallel_tiles(shown: dict[str, Any], ranks: int) -> list[Sentence]:
    cells = [rank for row in shown["tiles"] for rank in row if rank >= 0]
    counts = [cells.count(rank) for rank in range(ranks)]
    return [say("parallel.tiles", least=str(min(counts)), most=str(max(counts)), all=str(len(cells)))]


def parallel_time(shown: dict[str, Any]) -> list[Sentence]:
    timed = [row for row in shown["schedules"] if row["seconds"] is not None]
    best, worst = min(timed, key=lambda row: row["seconds"]), max(timed, key=lambda row: row["seconds"])
    end = max(event[4] for event in shown["events"])
    gaps = {"best": f"@way.{best['name']}", "time": format_seconds(best["seconds"]), "worst": f"@way.{worst['name']}"}
    return [say("parallel.time", end=format_seconds(end), **gaps, slowest=format_seconds(worst["seconds"]))]


def memory(shown: dict[str, list[int]], room: int) -> list[Sentence]:
    rows = list(zip(shown["length"], shown["standard"], shown["io"], shown["v2"], strict=True))
    passes = next((n for n, standard, io, _ in rows if standard > io), None)
    too_much = next((n for n, standard, *_ in rows if standard > room), None)
    n, standard, io, v2 = rows[-1]
    said = [say("memory.last", tokens=f"{n:,}", standard=format_bytes(standard), v2=format_bytes(v2), part=percent(v2, io, 1))]
    if passes:
        said.append(say("memory.passes", tokens=f"{passes:,}"))
    return [*said, say("memory.full", tokens=f"{too_much:,}", room=format_bytes(room))] if too_much else said


def precision(results: list[dict[str, Any]], data: str) -> list[Sentence]:
    """What the narrowest tile's rescalings cost in fp32, and which path errs most and least at the widest."""
    own = [row for row in results if row["data"] == data]
    if not own:
        return []
    fp32 = [row for row in own if row["path"] == "fp32"]
    narrow, wide = min(fp32, key=lambda row: row["width"]), max(fp32, key=lambda row: row["width"])
    cost = narrow["relative"] / narrow["relative_without"] if narrow["relative_without"] else 1.0
    key = "costs" if cost > 1.25 else "free"
    gaps = {"width": str(narrow["width"]), "rescalings": f"{narrow['rescalings']:.3g}", "cost": f"{cost:.2g}"}
    first = say(f"precision.{key}", **gaps, narrow=short(narrow["relative"]), without=short(narrow["relative_without"]))
    last = [row for row in own if row["width"] == wide["width"]]
    least, most = min(last, key=lambda row: row["relative"]), max(last, key=lambda row: row["relative"])
    ends = {"least": f"@path.{least['path']}", "most": f"@path.{most['path']}"}
    return [first, say("precision.ends", **ends, low=short(least["relative"]), high=short(most["relative"]))]


def bench(record: dict[str, Any], own: str = "tilewise") -> list[Sentence]:
    """Against the fastest of the others in each case."""
    ratios = []
    for case in record["cases"]:
        others = [spread["p50"] for name, spread in case["times"].items() if name != own]
        if own in case["times"] and others:
            ratios.append(min(others) / case["times"][own]["p50"])
    if not ratios:
        return []
    first = sum(ratio > 1 for ratio in ratios)
    middle = {"median": f"{median(ratios):.3g}", "least": f"{min(ratios):.3g}", "most": f"{max(ratios):.3g}"}
    return [say("bench", first=str(first), cases=str(len(ratios)), **middle)]


def losses(measured: dict[str, Any]) -> list[Sentence]:
    worst = max(measured["losses"], key=lambda name: measured["losses"][name])
    seconds = measured["losses"][worst]
    if measured["ideal"] > measured["seconds"]:
        return [say("losses.above", share=percent(measured["ideal"], measured["seconds"]))]
    if seconds <= 0:
        return [say("losses.none")]
    return [say("losses.most", name=f"@l.{worst}", time=format_seconds(seconds), share=percent(seconds, measured["seconds"], 1))]



def conclude(data: dict[str, Any]) -> dict[str, Any]:
    """Every conclusion of the page, by chart and by what the chart is looked up with."""
    results, devices, maps, walks = data["results"], data["devices"], data["maps"], data["walks"]
    others = [tile for tile in data["axes"]["tile"] if tile != "plan"]
    room = next(figure["value"] for figure in devices["h200"]["figures"] if figure["name"] == "dram_bytes")
    return {
        "roofline": {name: roofline(found, devices[name.split("|")[0]]) for name, found in results.items()},
        "tiles": {name: tiles(name, results, others) for name in results if name.endswith("|plan")},
        "traffic": {name: traffic(found) for name, found in results.items()},
        "shares": {name: shares(found) for name, found in results.items()},
        "budget": {name: budget(found["budget"]) for name, found in results.items()},
        "map": {name: tile_map(rows) for name, rows in maps.items()},
        "banks": {name: banks(shown) for name, shown in data["banks"].items()},
        "timeline": {name: timeline(runs) for name, runs in data["timelines"].items()},
        "rowchart": {
            f"{mask}|{row}": walk(walks, mask, row) for mask in data["axes"]["mask"] for row in walks[f"{mask}|v2"]["rows"]
        },
        "parallelTiles": {m: parallel_tiles(s, data["parallel"]["ranks"]) for m, s in data["parallel"]["masks"].items()},
        "parallelTime": {mask: parallel_time(shown) for mask, shown in data["parallel"]["masks"].items()},
        "memory": {dim: memory(shown, room) for dim, shown in data["memory"].items()},
        "precision": {kind: precision(data["precision"], kind) for kind in {row["data"] for row in data["precision"]}},
        "bench": {str(i): bench(record) for i, record in enumerate(data["records"]["bench"])},
        "losses": {"": losses(data["run"]["explanation"]["measured"])},
    }
