"""The documentation site in Debian's chromium: nothing is asked of other hosts, no errors, nothing wider than the screen."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.docs import playground
from tilewise.masks import parse

webdriver = pytest.importorskip("selenium.webdriver")
SITE = Path(__file__).parents[2] / "build" / "site"
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("no chromium here", allow_module_level=True)
if not (SITE / "index.html").exists():
    pytest.skip("no site here: make docs", allow_module_level=True)

from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
PAGES = (
    *("index", "tutorials/three-kernels", "tutorials/tiling-by-hand", "tutorials/choosing-tiles", "how-to/masks"),
    *("playground", "background/glossary", "reference/masks"),
)
PROBLEM = {
    "queries": 1000, "keys": 1200, "blockQ": 64, "blockK": 96, "headDim": 80, "dtype": "float32",
    "batch": 2, "heads": 6, "kvHeads": 2,
}  # fmt: skip
TEXT = "causal & (window(300) | prefix(40)) & key_padding([900, 1200])"
COLOURS = """const canvas = document.getElementById("pg-canvas"), count = {};
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
for (let i = 0; i < pixels.length; i += 4) { const key = pixels.slice(i, i + 4).join(); count[key] = (count[key] || 0) + 1; }
return Object.values(count);"""
ADD = "const code = document.createElement('script'); code.text = arguments[0]; document.head.append(code);"


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
    driver.wanted_scheme, driver.name_of_size = "slate" if dark else "default", size
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


def _until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the page did not get there"
        time.sleep(0.05)


def _shoot(driver: Any, name: str) -> None:
    if folder := os.environ.get("TILEWISE_SHOTS"):
        driver.save_screenshot(str(Path(folder) / f"{name}-{driver.wanted_scheme}-{driver.name_of_size}.png"))


def _type(driver: Any, name: str, text: str) -> None:
    field = driver.find_element("id", f"pg-{name}")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(text)


@pytest.mark.parametrize("language", ["", "zh/"], ids=["en", "zh"])
def test_the_playground_shows_what_the_package_says(driver: Any, address: str, language: str) -> None:
    driver.get(f"{address}/{language}playground.html")
    ask = driver.execute_script
    _until(lambda: ask("return document.getElementById('pg').dataset.ready") == "yes")
    presets = json.loads(ask("return document.getElementById('pg-presets').textContent"))
    assert [ask("return document.getElementById('pg-' + arguments[0]).value", name) for name in ("blockQ", "blockK")] == [
        str(presets[0][name]) for name in ("blockQ", "blockK")
    ]
    for name, value in PROBLEM.items():
        if name == "dtype":
            Select(driver.find_element("id", "pg-dtype")).select_by_visible_text(str(value))
        else:
            _type(driver, name, str(value))
    _type(driver, "mask", TEXT)
    want = playground.expected(PROBLEM, parse(TEXT))
    counts = [row.text.split()[1] for row in driver.find_elements("css selector", "#pg-counts tr")]
    assert counts == [f"{n:,}" for n in want["counts"]]
    total = sum(sum(side.values()) for side in want["traffic"]["v2"].values())
    assert f"{total:,} B" in driver.find_element("id", "pg-tensors").text
    assert "tw.key_padding([900, 1200])" in driver.find_element("id", "pg-python").text
    assert len(ask("return [...document.querySelectorAll('#pg-b option')].map(o => o.value)")) == PROBLEM["batch"]
    colours = ask(COLOURS)
    assert sum(count > 2000 for count in colours) >= 3  # empty, partial and full places
    assert ask("return document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    _shoot(driver, f"playground-{language[:2] or 'en'}")

    _type(driver, "mask", "causal & windw(3)")
    error = driver.find_element("id", "pg-error")
    assert "windw" in error.text and ("Position 10" if not language else "第 10 个字符") in error.text
    assert "key_padding" in error.text and ask("return document.documentElement.scrollWidth - innerWidth") <= 0
    _shoot(driver, f"playground-error-{language[:2] or 'en'}")
    _type(driver, "mask", "full")
    assert not error.is_displayed()
    driver.get(driver.current_url)
    driver.refresh()
    assert ask("return document.getElementById('pg-mask').value") == "full"  # the address held it
    assert ask("return document.getElementById('pg-queries').value") == "1000"
    assert [entry["message"] for entry in driver.get_log("browser")] == []
    assert _hosts(driver) == {address.removeprefix("http://")}


@pytest.mark.parametrize("driver", [("desktop", False)], indirect=True, ids=str)
def test_ten_thousand_random_tiles_on_the_built_page(driver: Any, address: str) -> None:
    driver.get(f"{address}/playground.html")
    driver.execute_script(ADD, playground.CALL)
    ask = playground.asker(lambda code: str(driver.execute_script(f"return {code}")))
    playground.check(playground.compare(ask, range(playground.ROUNDS)))


@pytest.mark.parametrize("language", ["", "zh/"], ids=["en", "zh"])
def test_the_walk_steps_within_a_tutorial(driver: Any, address: str, language: str) -> None:
    driver.get(f"{address}/{language}tutorials/tiling-by-hand.html")
    frame = driver.find_element("css selector", "iframe.tw-walk")
    driver.execute_script("arguments[0].scrollIntoView()", frame)
    _until(lambda: frame.get_attribute("style"))  # the frame said how high it is
    driver.switch_to.frame(frame)
    ask = driver.execute_script
    theme = "dark" if driver.wanted_scheme == "slate" else "light"
    _until(lambda: ask("return document.documentElement.dataset.theme") == theme)
    seen = "[...document.querySelectorAll('h1, h2, select, .chart')].filter(e => e.getBoundingClientRect().width).map(e => e.id)"
    assert sorted(ask(f"return {seen}")) == ["mask", "row", "rowchart", "schedule"]
    words = driver.find_element("id", "stepWords")
    before = words.text
    assert before.startswith("Step" if not language else "第")
    driver.find_element("id", "forth").send_keys(Keys.ENTER)
    assert words.text != before
    legend = ask("return [...document.querySelectorAll('#rowchart .legendtext')].map(e => e.getBoundingClientRect().width)")
    assert len(legend) == 4 and min(legend) > 3  # texts were measured, and take room
    _until(lambda: ask("return document.documentElement.scrollHeight - innerHeight") <= 0)
    assert ask("return document.documentElement.scrollWidth - innerWidth") <= 0
    driver.switch_to.default_content()
    driver.execute_script("arguments[0].scrollIntoView()", frame)
    _shoot(driver, f"walk-{language[:2] or 'en'}")
    assert [entry["message"] for entry in driver.get_log("browser")] == []
    assert _hosts(driver) == {address.removeprefix("http://")}
