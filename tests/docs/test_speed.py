"""Tables of speed follow the records; notes say what is true now, and stay short."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tools.site import records, speed

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = speed.pages()
NOTES = [path for path in DOCS.glob("*.md") if path.name not in ("models.md", "models.zh.md")]


def _drawn(name: str, language: str = "en") -> str:
    return speed.fill(f"<!-- speed: {name} -->\n<!-- /speed -->", language)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_follow_the_records(path: Path) -> None:
    """`python -m tools.site.speed --write` draws the tables anew."""
    text = path.read_text(encoding="utf-8")
    assert speed.fill(text, speed.language_of(path)) == text


def test_every_table_stands_on_a_page() -> None:
    named = {name for path in PAGES for name in re.findall(r"<!-- speed: ([\w-]+) -->", path.read_text(encoding="utf-8"))}
    assert named == set(speed.TABLES)


CHANGES = {
    "hopper-forward": ("hopper-forward-h200", ("time", "64", "d64 full 512", "tflops", "tilewise"), 7123.4, "| 7123 (18.70) |"),
    "hopper-backward": ("hopper-backward-h200", ("time", "64", "d64 full 512", "tflops", "tilewise"), 7123.4, "| 7123 (24.09) |"),
    "hopper-forward-cells": ("hopper-forward-h200", ("time", "64", "d64 full 512", "p20, p80", "fa4", 0), 7.1, "(7–301)"),
    "hopper-backward-cells": ("hopper-backward-h200", ("time", "64", "d64 full 512", "tflops", "cudnn"), 712.3, "712 (261–265)"),
    "predicted": ("hopper-forward-h200", ("time", "64", "d64 full 8192", "tflops", "tilewise"), 7123.4, "| 7123 |"),
    "gpu": ("gpu-2026-11-15", ("records", 0, "ratio", "p50"), 71.23, "–71.23)"),
    "gpu-cells": ("gpu-2026-11-15", ("records", 0, "ratio", "p50"), 71.23, "| 71.23 (1.14–1.17) |"),
    "gpu-decode": ("gpu-parts-2026-11-15", ("records", -34, "ms", "plan", "p50"), 0.0001, "| 5368.71 | 4.03 |"),
    "gpu-host": ("gpu-parts-2026-11-15", ("records", 0, "us", "p50"), 7123.4, "| 7123.4 (29.6–32.3) |"),
    "masks-gpu": ("masks-h200-2026-11-17", ("rows", 0, "ratio", "p50"), 71.23, "| 71.23 (1.04–1.08) |"),
    "hopper-features": ("features-h200-2026-11-17", ("rows", 3, "seconds", "plain", "p50"), 0.01, "| 10000 ("),
    "cpu": ("cpu-2026-11-15", ("records", 0, "ratio", "p50"), 71.23, "–71.23 |"),
    "cpu-n1": ("cpu-2026-11-15", ("records", 0, "ratio", "p80"), 71.23, "1.25 (1.23–71.23)"),
    "cpu-xeon": ("cpu-avx512-16-2026-11-15", ("records", 0, "ratio", "p50"), 71.23, "| 71.23 (1.37–1.53) |"),
    "cpu-errors": ("cpu-2026-11-15", ("records", 0, "errors", "largest"), 71.23, "–71.23 |"),
    "cache-gpu": ("cache-h200-2026-11-19", ("rows", 0, "ratio", 1), 71.23, "–71.23 |"),
    "sweep": ("sweep-n1-2026-11-16", ("rows", 0, "ratio"), 71.23, "| 71.230 |"),
    "sweep-gpu": ("sweep-hopper-h200-2026-11-19", ("rows", 0, "ratio"), 71.23, "| 71.230 |"),
    "tiles": (
        "hopper-forward-h200",
        ("levers, TFLOP/s (p20, p50, p80)", "tiles", "d64 full 512", "wide", 1),
        7123.4,
        "| 192×128 | 18.27 |",
    ),
    "readme": ("cpu-2026-11-15", ("records", 0, "ratio", "p50"), 71.23, "–71.23 / "),
}
"""By table: a record, a place in it, another figure, and what the table says then."""


@pytest.mark.parametrize("table", CHANGES, ids="table-{}".format)
def test_another_record_gives_another_table(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, keys, figure, said = CHANGES[table]
    before = _drawn(table)
    shutil.copytree(records.RESULTS, tmp_path / "results")
    path = tmp_path / "results" / f"{record}.json"
    changed = json.loads(path.read_text(encoding="utf-8"))
    part = changed
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = figure
    path.write_text(json.dumps(changed), encoding="utf-8")
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    after = _drawn(table)
    assert said in after and said not in before


def test_every_table_is_tried() -> None:
    assert set(CHANGES) == set(speed.TABLES)


@pytest.mark.parametrize("table", speed.TABLES, ids="table-{}".format)
def test_both_languages_have_the_same_figures(table: str) -> None:
    english, chinese = (re.findall(r"\d[\d.]*\d|\d", _drawn(table, language)) for language in ("en", "zh"))
    assert sorted(english) == sorted(chinese)


def test_a_ratio_below_one_reads_so() -> None:
    assert (records.shown(0.9956), records.shown(0.9949), records.shown(1.0012)) == ("0.996", "0.99", "1.00")


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.name)
def test_notes_are_short(path: Path) -> None:
    """What was tried, predicted and measured stands under docs/experiments."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150
