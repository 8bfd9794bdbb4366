"""How the report reads in a browser: no label over another, Chinese throughout, conclusions that say what the charts draw."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest

from tests.browser.report_page import CHARTS, DESKTOP, PHONE, Open, complaints, drawn, put, shoot
from tests.lab.test_report_chinese import english_in
from tilewise.display import format_bytes
from tilewise.lab.report import page

pytest.importorskip("selenium.webdriver")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("no chromium here", allow_module_level=True)

POSITIONS = (
    {},
    {"device": "here", "mask": "documents", "dim": "128", "length": "8192"},
    {"device": "a100-80", "mask": "window", "length": "1024", "tile": "64x64", "data": "slow", "access": "matrix"},
)
"""Of the controls: what each changes."""

LABELS = """
const found = [];
for (const chart of document.querySelectorAll('.chart:not(.off), .banks')) {
  const boxes = [];
  for (const node of chart.querySelectorAll('svg text, figcaption')) {
    const box = node.getBoundingClientRect(), style = getComputedStyle(node);
    const seen = style.visibility !== 'hidden' && style.opacity !== '0';
    const shown = node.textContent.trim() && box.width > 0 && box.height > 0 && seen;
    if (shown && !node.closest('.hoverlayer')) boxes.push([node.textContent.trim(), box.left, box.top, box.right, box.bottom]);
  }
  const frame = chart.getBoundingClientRect();
  boxes.forEach((a, i) => {
    if (a[1] < frame.left - 1 || a[3] > frame.right + 1) found.push([chart.id, a[0], 'leaves the chart']);
    for (const b of boxes.slice(i + 1)) {
      const wide = Math.min(a[3], b[3]) - Math.max(a[1], b[1]), high = Math.min(a[4], b[4]) - Math.max(a[2], b[2]);
      if (wide > 1 && high > 2) found.push([chart.id, a[0], b[0]]);
    }
  });
}
return found;
"""
"""Labels of a chart whose boxes lie over each other by more than a hair, or that leave it."""

TEXTS = """
document.querySelectorAll('details').forEach((fold) => { fold.open = true; });
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
while (walker.nextNode()) {
  const node = walker.currentNode, parent = node.parentElement;
  if (parent.closest('script, style, code, [lang="en"], #language')) continue;
  if (node.textContent.trim()) found.push(node.textContent.trim());
}
for (const node of document.querySelectorAll('[aria-label], [title], [alt]'))
  for (const name of ['aria-label', 'title', 'alt']) if (node.getAttribute(name)) found.push(node.getAttribute(name));
for (const chart of document.querySelectorAll('.js-plotly-plot')) for (const trace of chart.data)
  for (const key of ['name', 'text', 'hovertext', 'hovertemplate'])
    for (const text of [trace[key]].flat(3)) if (typeof text === 'string') found.push(text);
return [...new Set(found), document.title];
"""
"""Everything a reader may see: text nodes with all folds open, titles and labels, and what charts show under the pointer."""

CELLS = """
const cells = (figure, kind) => figure.querySelectorAll('.' + kind).length;
return [...document.querySelectorAll('#banks figure')].map((f) => [f.dataset.layout, cells(f, 'shared'), cells(f, 'alone')]);
"""
SAID = "return Object.fromEntries([...document.querySelectorAll('.says')].map((p) => [p.id.slice(0, -2), p.textContent]))"
ENDS = "return document.getElementById('timeline').data.map((t) => Math.max(...t.x.map((x, i) => x + t.base[i])))"


TURN = """
Object.assign(state, arguments[0]);
for (const [name, value] of Object.entries(arguments[0])) document.getElementById(name).value = value;
show();
"""


def turn(driver: Any, position: dict[str, str]) -> None:
    """Several controls at once: the page is drawn once."""
    driver.execute_script(TURN, position)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_no_label_lies_over_another(browse: Open, size: tuple[int, int], language: str) -> None:
    driver = browse(size)
    put(driver, "language", language)
    for position in POSITIONS:
        turn(driver, position)
        assert driver.execute_script(LABELS) == [], position
        assert driver.execute_script("return document.documentElement.scrollWidth") <= size[0], position
    for record in driver.execute_script("return R.records.bench.map((_, i) => String(i))"):
        put(driver, "record", record)
        assert [found for found in driver.execute_script(LABELS) if found[0] == "bench"] == [], record
    assert complaints(driver) == []


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_chinese_page_is_chinese(browse: Open, size: tuple[int, int]) -> None:
    driver = browse(size)
    put(driver, "language", "zh")
    names = driver.execute_script("return Object.values(R.devices).map((d) => d.name)")
    left: dict[str, list[str]] = {}
    for position in POSITIONS:
        turn(driver, position)
        for text in driver.execute_script(TEXTS):
            bare = re.sub(r"%\{[^}]*\}|</?\w+>", " ", text)
            for name in names:
                bare = bare.replace(name, "")
            if words := english_in(bare):
                left[text] = words
    assert not left
    assert complaints(driver) == []
    for theme in ("light", "dark"):
        put(driver, "theme", theme)
        shoot(driver, f"{'phone' if size == PHONE else 'desktop'}-{theme}-zh")


def test_it_opens_on_an_h200(browse: Open) -> None:
    driver = browse()
    assert driver.execute_script("return state.device") == "h200"
    order = driver.execute_script("return [...document.querySelectorAll('h2')].map((h) => h.id)")
    assert order.index("roofline-h") < order.index("banks-h") < order.index("machine-h") < order.index("certificate-h")


@pytest.mark.parametrize("position", POSITIONS, ids=["first", "here", "a100"])
def test_conclusions_say_what_the_charts_draw(browse: Open, position: dict[str, str]) -> None:
    driver = browse()
    turn(driver, position)
    said = driver.execute_script(SAID)
    for chart in (*CHARTS, "banks"):
        assert said[chart] and "undefined" not in said[chart] and "{" not in said[chart], chart
    (bars,) = drawn(driver, "traffic")
    standard, v1, v2, plan = bars["y"]
    assert f"v1 moves {standard / v1:.3g} times fewer" in said["traffic"] and f"v2 {standard / v2:.3g} times" in said["traffic"]
    assert format_bytes(plan) in said["traffic"]
    cells = driver.execute_script("return document.getElementById('map').data[0].z.flat()")
    assert said["map"].startswith(f"{100 * cells.count(0) / len(cells):.0f}% of the tiles")
    held = {trace["name"]: trace["x"] for trace in drawn(driver, "budget")}
    room = sum(sizes[0] for sizes in held.values())
    used = format_bytes(1024 * (room - held[page.texts()["en"]["budget.left"]][0]))
    assert said["budget"].startswith(f"Forward: {used} of {format_bytes(1024 * room)} in use")
    shown = driver.execute_script(CELLS)
    access = driver.execute_script("return R.banks[state.dim + '|' + state.access].layouts")
    for name, shared, alone in shown:
        layout = access[name]
        assert (shared > 0) == (layout["degree"] > 1) and shared + alone == len(layout["cells"])
    assert f"{access['plain']['transactions']:,}" in said["banks"]
    marks = {trace["name"]: (trace["x"][0], trace["y"][0]) for trace in drawn(driver, "roofline") if len(trace["x"]) == 1}
    peak = max(drawn(driver, "roofline")[0]["y"])
    assert f"{100 * marks['standard'][1] / peak:.0f}% of the peak" in said["roofline"]
    ends = driver.execute_script(ENDS)
    assert f"Two buffers take {100 * ends[3] / ends[1]:.0f}%" in said["timeline"]
    errors = [trace for trace in drawn(driver, "precision") if trace["name"] == "fp32"]
    assert f"{errors[0]['y'][0]:.1e}" in said["precision"]
    assert complaints(driver) == []
