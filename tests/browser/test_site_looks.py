"""Every page of the site, both languages, on a phone and on a desktop, light and dark: nothing overflows, overlaps or fades.

A page is loaded once and looked at in several states: width and colours are changed under it. A page that has no Chinese version
is shown in English under zh/, and looked at once. Pages without a picture are looked at with TILEWISE_BROWSER=all (minutes).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

if not (Path(__file__).parents[2] / "build" / "site" / "index.html").exists():
    pytest.skip("no site here: make docs", allow_module_level=True)  # said before test_site, which then has no fixtures

from tests.browser.test_site import SITE, SIZES, address, driver

__all__ = ["address", "driver"]
LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")
DOCS = SITE.parents[1] / "docs"
LOADED = [page.relative_to(SITE) for page in sorted(SITE.rglob("*.html")) if page.name != "report.html"]
PAGES = [page for page in LOADED if page.parts[0] != "zh" or (DOCS / Path(*page.parts[1:])).with_suffix(".zh.md").exists()]
EITHER = (("desktop", "default"), ("phone", "slate"))
PICTURED = (*EITHER, ("phone", "default"), ("desktop", "slate"))


def _resize(driver: Any, size: str) -> None:
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def _look(driver: Any, size: str, scheme: str) -> list[str]:
    _resize(driver, size)
    driver.execute_script("document.body.dataset.mdColorScheme = arguments[0]", scheme)
    return [f"({size}, {scheme}) {what}" for what in driver.execute_script(LOOK)]


@pytest.mark.parametrize("driver", [("desktop", False)], indirect=True, ids=str)
def test_every_page_looks_right(driver: Any, address: str) -> None:
    wrong = []
    for page in PAGES:
        pictured = 'role="img"' in (SITE / page).read_text(encoding="utf-8")
        if not pictured and os.environ.get("TILEWISE_BROWSER") != "all":
            continue
        _resize(driver, "desktop")
        driver.get(f"{address}/{page}")
        wrong += [f"{page} {what}" for state in (PICTURED if pictured else EITHER) for what in _look(driver, *state)]
    wrong += [entry["message"] for entry in driver.get_log("browser")]
    assert len(PAGES) > 100 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("driver", [("desktop", False)], indirect=True, ids=str)
def test_the_colours_follow_the_system(driver: Any, address: str) -> None:
    for system, scheme in (("light", "default"), ("dark", "slate"), ("light", "default")):
        feature = {"name": "prefers-color-scheme", "value": system}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        driver.get(f"{address}/index.html")
        assert driver.execute_script("return document.body.dataset.mdColorScheme") == scheme
