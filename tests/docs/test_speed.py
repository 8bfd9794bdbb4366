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
NOTES = [path for path in DOCS.glob("*.md") if path.name != "models.md"]


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


@pytest.mark.parametrize(
    ("table", "record", "keys", "figure"),
    [
        ("hopper-forward", "hopper-forward-h200", ("time", "64", "d64 full 512", "tflops", "tilewise"), 123.4),
        ("hopper-backward-cells", "hopper-backward-h200", ("time", "64", "d64 full 512", "tflops", "tilewise"), 123.4),
        ("predicted", "hopper-forward-h200", ("time", "64", "d64 full 8192", "tflops", "tilewise"), 123.4),
        ("gpu", "gpu-2026-11-15", ("records", 0, "ratio", "p50"), 0.123),
        ("gpu-cells", "gpu-2026-11-15", ("records", 0, "ratio", "p50"), 0.123),
        ("gpu-decode", "gpu-parts-2026-11-15", ("records", -30, "case"), "decode B 1 1/1 123: 1.00"),
        ("gpu-host", "gpu-parts-2026-11-15", ("records", 0, "us", "p50"), 123.4),
        ("cpu", "cpu-2026-11-15", ("records", 0, "ratio", "p50"), 0.123),
        ("cpu-n1", "cpu-2026-11-15", ("records", 0, "ratio", "p50"), 0.123),
        ("cpu-xeon", "cpu-avx512-16-2026-11-15", ("records", 0, "ratio", "p50"), 0.123),
        ("cpu-errors", "cpu-2026-11-15", ("records", 0, "errors", "largest"), 1.23),
        ("sweep", "sweep-n1-2026-11-16", ("rows", 0, "ratio"), 1.23),
        ("readme", "cpu-2026-11-15", ("records", 0, "ratio", "p50"), 0.123),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_record_gives_another_table(
    table: str,
    record: str,
    keys: tuple[str | int, ...],
    figure: float | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _drawn(table)
    shutil.copytree(records.RESULTS, tmp_path / "results")
    path = tmp_path / "results" / f"{record}.json"
    changed = json.loads(path.read_text(encoding="utf-8"))
    part = changed
    for key in keys[:-1]:
        part = part[key]
    if table == "gpu-decode":
        part["work"], part["ms"] = 1.23e9, {"plan": {"p50": 1.0}, "cudnn": {"p50": 1.0}}
    part[keys[-1]] = figure
    path.write_text(json.dumps(changed), encoding="utf-8")
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    assert _drawn(table) != before
    assert re.search(r"\b0?\.?1\.?23|\b123\b", _drawn(table))


@pytest.mark.parametrize("table", speed.TABLES)
def test_both_languages_have_the_same_figures(table: str) -> None:
    english, chinese = (re.findall(r"\d[\d.]*\d|\d", _drawn(table, language)) for language in ("en", "zh"))
    assert sorted(english) == sorted(chinese)


def test_a_ratio_below_one_reads_so() -> None:
    assert (records.shown(0.9956), records.shown(0.9949), records.shown(1.0012)) == ("0.996", "0.99", "1.00")


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.name)
def test_notes_are_short(path: Path) -> None:
    """What was tried, predicted and measured stands under docs/experiments."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150
