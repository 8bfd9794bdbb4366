"""The report in Debian's chromium, headless, opened from a file: how tests open it, turn its controls and read its charts."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DESKTOP, PHONE = (1280, 900), (390, 844)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
CHARTS = ("roofline", "traffic", "shares", "map", "rowchart", "budget", "timeline", "parallelTiles", "parallelTime", "memory",
          "precision", "bench", "losses")  # fmt: skip
SHOTS = "TILEWISE_SHOTS"
"""A directory to leave screenshots in, for people to look at."""

Open = Callable[..., Any]


def start(page: Path, profile: Path, size: tuple[int, int], dark: bool) -> Any:
    """A fresh browser of a given size with the page; phones are emulated with touch."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size={},{}".format(*size)):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    if size == PHONE:
        metrics = {"width": size[0], "height": size[1], "pixelRatio": 2.0, "touch": True}
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
    driver = webdriver.Chrome(service=webdriver.ChromeService(shutil.which("chromedriver")), options=options)
    if dark:
        feature = {"name": "prefers-color-scheme", "value": "dark"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.get(page.as_uri())
    until(lambda: driver.execute_script("return document.documentElement.dataset.ready") == "yes")
    return driver


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the page did not get there"
        time.sleep(0.05)


def complaints(driver: Any) -> list[str]:
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def choose(driver: Any, name: str, value: str) -> None:
    """As a person does: with the keyboard, on the focused control."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    control = driver.find_element(By.ID, name)
    values = [option.get_attribute("value") for option in control.find_elements(By.TAG_NAME, "option")]
    here = values.index(control.get_attribute("value"))
    driver.execute_script("arguments[0].focus()", control)
    step = values.index(value) - here
    for _ in range(abs(step)):
        control.send_keys(Keys.ARROW_DOWN if step > 0 else Keys.ARROW_UP)
    until(lambda: bool(control.get_attribute("value") == value))


def put(driver: Any, name: str, value: str) -> None:
    """Turn a control at once."""
    turn = "const s = document.getElementById(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))"
    driver.execute_script(turn, name, value)


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
