"""The report in Debian's chromium: no errors, controls that work, nothing wider than the screen."""

from __future__ import annotations

import shutil

import pytest

from tests.browser.report_page import CHARTS, DESKTOP, PHONE, Open, choose, complaints, drawn, shoot, until
from tilewise.lab.report import page

pytest.importorskip("selenium.webdriver")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("no chromium here", allow_module_level=True)

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys


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


def test_counted_bytes_are_folded_and_say_of_which_problem(browse: Open) -> None:
    driver = browse()
    table = driver.find_element(By.ID, "countedTable")
    assert not table.is_displayed()
    driver.find_element(By.CSS_SELECTOR, "#countedBox summary").send_keys(Keys.ENTER)
    assert table.is_displayed()
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
    choose(driver, "device", "a100-80")
    choose(driver, "dim", "128")
    choose(driver, "tile", "64x64")
    found = results["a100-80|8192|128|window|64x64"]
    (bars,) = drawn(driver, "traffic")
    assert bars["y"] == [found["schedules"][way]["total"] for way in ("standard", "v1", "v2", "plan")]
    assert drawn(driver, "map")[0]["z"] == 8192 // 64
    assert "64×64" in driver.find_element(By.ID, "runs").text and found["runs"] in driver.find_element(By.ID, "runs").text
    for chart in ("roofline", "traffic", "shares", "map", "budget", "timeline", "memory"):
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
    for _ in range(70):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(driver.execute_script("return document.activeElement.id"))
    controls = "language theme device length dim mask tile log schedule row back play forth step access data"
    assert set(controls.split()) <= reached


def test_the_theme_can_be_chosen(browse: Open) -> None:
    driver = browse()
    choose(driver, "theme", "dark")
    assert driver.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert complaints(driver) == []
