"""`write`: gather, render and write the page."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilewise.errors import ArgumentError, require
from tilewise.lab.bench.machine import machine as this_machine
from tilewise.lab.bench.machine import versions
from tilewise.lab.report import chinese, conclusions, figures, machine, panels
from tilewise.lab.report.parallel import parallel
from tilewise.lab.report.walk import TILE, walks
from tilewise.lab.simulator.precision import experiment

CATALOGUED = ("h200", "a100-80")
LANGUAGES = ("en", "zh")
TABLES = ("text.toml", "conclusions.toml")
Progress = Callable[[str, float], None]


def gather(record_dirs: Iterable[Path] = (), progress: Progress | None = None) -> dict[str, Any]:
    """Everything the page shows, as data."""
    tell = progress or (lambda what, done: None)
    tell("the machine and its ceilings", 0.0)
    specs, described = machine.machines(CATALOGUED)
    tell("one run, certified", 0.1)
    run = machine.run_here()
    tell("the IO model over all problems", 0.3)
    results = figures.results(specs)
    tell("tiles and walks", 0.85)
    maps, steps = figures.tile_maps(figures.LENGTHS, results), walks()
    tell("a sequence over many devices", 0.88)
    divided = parallel()
    tell("the precision experiment", 0.92)
    data = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": this_machine(),
        "versions": versions(),
        "devices": described,
        "run": run,
        "axes": {
            "device": list(specs),
            "length": list(figures.LENGTHS),
            "dim": list(figures.HEAD_DIMS),
            "mask": list(figures.MASKS),
            "tile": [figures.tile_name(tile) for tile in figures.TILES],
        },
        "heads": figures.HEADS,
        "results": results,
        "maps": maps,
        "walks": steps,
        "walkTile": TILE,
        "timelines": figures.timelines(specs, results),
        "parallel": divided,
        "memory": {str(dim): figures.memory(dim) for dim in figures.HEAD_DIMS},
        "precision": [asdict(result) for result in experiment(rows=32)],
        "records": machine.records(record_dirs),
        "banks": panels.banks(figures.HEAD_DIMS),
    }
    return {**data, "says": conclusions.conclude(data), "phrases": chinese.phrases(data)}


def texts() -> dict[str, dict[str, str]]:
    """Every text of the page, by language and key."""
    pairs = {key: pair for name in TABLES for key, pair in tomllib.loads(_source(name)).items()}
    return {code: {key: pair[side] for key, pair in pairs.items()} for side, code in enumerate(LANGUAGES)}


def render(data: dict[str, Any], language: str = "en") -> str:
    """The page as one HTML document: plotly.js, styles, scripts, texts and data are all inside."""
    import jinja2
    from plotly.offline import get_plotlyjs

    if language not in LANGUAGES:
        raise ArgumentError(f"language: got {language!r}, need one of {', '.join(LANGUAGES)}")
    loader = jinja2.PackageLoader("tilewise.lab.report", "page")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    tables = texts()
    return environment.get_template("page.html").render(
        language=language,
        texts=tables[language],
        subtitle=tables[language]["subtitle"].format(**names_of(data)),
        style=_source("page/page.css"),
        scripts=[_source(f"page/{name}.js") for name in ("page", "charts", "panels", "parallel", "walk")],
        plotly=get_plotlyjs(),
        data=embed(data),
        table=embed(tables),
        axes=data["axes"],
    )


def names_of(data: dict[str, Any]) -> dict[str, str]:
    """The GPU with which the lesson opens, and this machine."""
    return {"gpu": data["devices"][CATALOGUED[0]]["name"], "machine": data["devices"]["here"]["name"]}


def write(path: Path, record_dirs: Iterable[Path] = (), language: str = "en", progress: Progress | None = None) -> Path:
    """Write the page and say where it is."""
    require("report", "jinja2", "plotly")
    page = render(gather(record_dirs, progress), language)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path.resolve()


def embed(value: Any) -> str:
    """JSON that may stand inside a script element; numbers of six digits, infinities as null."""
    text = json.dumps(_short(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return value


def _source(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
