"""The report in Debian's chromium, headless, opened from a file: no errors, controls that work, nothing wider than the screen."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewise.lab.report import page

webdriver = pytest.importorskip("selenium.webdriver")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("no chromium here", allow_module_level=True)

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

DESKTOP, PHONE = (1280, 900), (390, 844)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
CHARTS = ("roofline", "traffic", "shares", "map", "rowchart", "timeline", "parallelTiles", "parallelTime", "memory",
          "precision", "losses")  # fmt: skip
SHOTS = "TILEWISE_SHOTS"
"""A directory to leave screenshots in, for people to look at."""

Open = Callable[..., Any]


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the project's own records."""
    return page.write(tmp_path_factory.mktemp("report") / "report.html", [Path(__file__).parents[2] / "benchmarks"])


@pytest.fixture
def browse(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Open the page in a fresh browser of a given size; phones are emulated with touch."""
    opened: list[Any] = []

    def start(size: tuple[int, int] = DESKTOP, dark: bool = False) -> Any:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in (
            *FLAGS,
            f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
            "--window-size={},{}".format(*size),
        ):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        if size == PHONE:
            metrics = {"width": size[0], "height": size[1], "pixelRatio": 2.0, "touch": True}
            options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
        driver = webdriver.Chrome(service=webdriver.ChromeService(shutil.which("chromedriver")), options=options)
        opened.append(driver)
        if dark:
            feature = {"name": "prefers-color-scheme", "value": "dark"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        driver.get(report.as_uri())
        until(lambda: driver.execute_script("return document.documentElement.dataset.ready") == "yes")
        return driver

    yield start
    for driver in opened:
        driver.quit()


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the page did not get there"
        time.sleep(0.05)


def complaints(driver: Any) -> list[str]:
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def choose(driver: Any, name: str, value: str) -> None:
    """As a person does: with the keyboard, on the focused control."""
    control = driver.find_element(By.ID, name)
    values = [option.get_attribute("value") for option in control.find_elements(By.TAG_NAME, "option")]
    here = values.index(control.get_attribute("value"))
    driver.execute_script("arguments[0].focus()", control)
    step = values.index(value) - here
    for _ in range(abs(step)):
        control.send_keys(Keys.ARROW_DOWN if step > 0 else Keys.ARROW_UP)
    until(lambda: bool(control.get_attribute("value") == value))


def drawn(driver: Any, chart: str) -> Any:
    """The traces of a chart, as plotly holds them."""
    held = "({x: t.x, y: t.y, z: t.z && t.z.length, name: t.name})"
    return driver.execute_script(f"return document.getElementById(arguments[0]).data.map(t => {held})", chart)


def shoot(driver: Any, name: str) -> None:
    if folder := os.environ.get(SHOTS):
        height = driver.execute_script("return document.documentElement.scrollHeight")
        width = driver.execute_script("return document.documentElement.clientWidth")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        time.sleep(1.0)
        driver.save_screenshot(str(Path(folder) / f"{name}.png"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_opens_without_errors_and_fits(browse: Open, size: tuple[int, int], dark: bool) -> None:
    driver = browse(size, dark)
    for chart in CHARTS:
        assert driver.find_elements(By.CSS_SELECTOR, f"#{chart} svg"), f"{chart} is not drawn"
    assert driver.execute_script("return document.documentElement.scrollWidth") <= size[0]
    assert driver.execute_script("return document.documentElement.dataset.theme") == ("dark" if dark else "light")
    paper = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in paper.removeprefix("rgb(").rstrip(")").split(","))
    assert (brightness < 150) == dark
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0  # nothing was fetched
    assert complaints(driver) == []
    shoot(driver, f"{'phone' if size == PHONE else 'desktop'}-{'dark' if dark else 'light'}")


def test_counted_bytes_say_of_which_problem(browse: Open) -> None:
    driver = browse()
    rows = driver.find_elements(By.CSS_SELECTOR, "#countedTable tr:has(td)")
    kernels = driver.execute_script("return R.records.traffic[0].kernels")
    assert len(rows) == sum(len(kernel["levels"]) for kernel in kernels) > 0
    first = rows[0].text
    assert f"{kernels[0]['case']['seqlen']:,}" in first and f"d {kernels[0]['case']['head_dim']}" in first


def test_the_controls_switch_results(browse: Open) -> None:
    driver = browse()
    results = driver.execute_script("return R.results")
    before = {chart: drawn(driver, chart) for chart in CHARTS}
    choose(driver, "mask", "window")
    choose(driver, "length", "8192")
    choose(driver, "device", "h200")
    choose(driver, "dim", "128")
    choose(driver, "tile", "64x64")
    found = results["h200|8192|128|window|64x64"]
    (bars,) = drawn(driver, "traffic")
    assert bars["y"] == [found["schedules"][way]["total"] for way in ("standard", "v1", "v2", "plan")]
    assert drawn(driver, "map")[0]["z"] == 8192 // 64
    assert "64×64" in driver.find_element(By.ID, "runs").text and found["runs"] in driver.find_element(By.ID, "runs").text
    for chart in ("roofline", "traffic", "shares", "map", "timeline", "memory"):
        assert drawn(driver, chart) != before[chart], chart
    times = found["schedules"]["standard"]["total"] / found["schedules"]["v2"]["total"]
    assert float(driver.find_element(By.CSS_SELECTOR, "#numbers b").text.rstrip("×")) == pytest.approx(times, rel=0.01)
    driver.find_element(By.ID, "log").send_keys(Keys.SPACE)
    assert len(drawn(driver, "traffic")) > 4  # stacked by tensor
    assert complaints(driver) == []


def test_the_walk_steps_and_plays(browse: Open) -> None:
    driver = browse()
    words = driver.find_element(By.ID, "stepWords")
    at = words.text
    driver.find_element(By.ID, "forth").send_keys(Keys.ENTER)
    assert words.text != at
    driver.find_element(By.ID, "back").send_keys(Keys.ENTER)
    assert words.text == at
    slider = driver.find_element(By.ID, "step")
    slider.send_keys(Keys.HOME)
    assert words.text.startswith("Step 1 of")
    driver.find_element(By.ID, "play").send_keys(Keys.ENTER)
    until(lambda: words.text.startswith("Step 3 of"))
    driver.find_element(By.ID, "play").send_keys(Keys.ENTER)
    seen = len(driver.find_elements(By.CSS_SELECTOR, "#grid .seen"))
    assert seen == int(words.text.split()[1])
    slider.send_keys(Keys.END)
    moved = driver.find_element(By.ID, "movedWords").text
    assert moved.split(" moved")[0] == moved.split("so far, ")[1].split(" in all")[0]
    v2 = moved
    choose(driver, "schedule", "v1")
    driver.find_element(By.ID, "step").send_keys(Keys.END)
    assert driver.find_element(By.ID, "movedWords").text != v2
    assert complaints(driver) == []


def test_it_speaks_chinese(browse: Open) -> None:
    driver = browse()
    choose(driver, "language", "zh")
    text = driver.find_element(By.TAG_NAME, "body").text
    assert driver.find_element(By.TAG_NAME, "h1").text == page.texts()["zh"]["title"]
    for key in ("roofline.h", "walk.h", "certificate.h", "controls"):
        assert page.texts()["zh"][key] in text and page.texts()["en"][key] not in text
    assert driver.execute_script("return document.documentElement.lang") == "zh-CN"
    assert complaints(driver) == []
    shoot(driver, "desktop-zh")


def test_everything_is_reached_by_tab(browse: Open) -> None:
    driver = browse()
    reached = set()
    for _ in range(60):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(driver.execute_script("return document.activeElement.id"))
    controls = "language theme device length dim mask tile log schedule row back play forth step data"
    assert set(controls.split()) <= reached


def test_the_theme_can_be_chosen(browse: Open) -> None:
    driver = browse()
    choose(driver, "theme", "dark")
    assert driver.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert complaints(driver) == []
