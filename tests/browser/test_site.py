"""The documentation site in Debian's chromium: nothing is asked of other hosts, no errors, nothing wider than the screen."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver")
SITE = Path(__file__).parents[2] / "build" / "site"
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("no chromium here", allow_module_level=True)
if not (SITE / "index.html").exists():
    pytest.skip("no site here: make docs", allow_module_level=True)

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
PAGES = ("index", "tutorials/three-kernels", "tutorials/choosing-tiles", "how-to/masks", "background/glossary", "reference/masks")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.fixture(params=[(size, dark) for size in SIZES for dark in (False, True)], ids=str)
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    size, dark = request.param
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
    for flag in (*flags, f"--user-data-dir={tmp_path}", "--window-size={},{}".format(*SIZES[size])):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    if size == "phone":
        metrics = {"width": 390, "height": 844, "pixelRatio": 2.0, "touch": True}
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
    driver = webdriver.Chrome(service=webdriver.ChromeService(shutil.which("chromedriver")), options=options)
    feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.wanted_scheme = "slate" if dark else "default"
    yield driver
    driver.quit()


def _hosts(driver: Any) -> set[str]:
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return {address.split("/")[2] for address in asked if address.startswith(("http", "ws"))}


def test_every_page_in_both_languages(driver: Any, address: str) -> None:
    for page in PAGES:
        for language, other in (("", "zh/"), ("zh/", "")):
            driver.get(f"{address}/{language}{page}.html")
            ask = driver.execute_script
            assert ask("return document.body.dataset.mdColorScheme") == driver.wanted_scheme
            assert ask("return document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0, page
            assert ask("return [...document.querySelectorAll('math, figure svg')].every(e => e.getBoundingClientRect().width)")
            switch = ask("return [...document.querySelectorAll('.md-header a[hreflang]')].map(a => new URL(a.href).pathname)")
            assert f"/{other}{page}.html" in switch or (page == "index" and f"/{other}" in switch), (page, switch)
    assert [entry["message"] for entry in driver.get_log("browser")] == []
    assert _hosts(driver) == {address.removeprefix("http://")}
