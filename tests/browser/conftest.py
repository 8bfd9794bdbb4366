"""The browser tests are asked for by `make test-browser`; elsewhere they are not even collected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.report_page import DESKTOP, Open, start

collect_ignore_glob = [] if os.environ.get("TILEWISE_BROWSER") else ["test_*.py"]


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page with the project's own records."""
    from tilewise.lab.report import page

    return page.write(tmp_path_factory.mktemp("report") / "report.html", [Path(__file__).parents[2] / "benchmarks"])


@pytest.fixture
def browse(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Open the page in a fresh browser of a given size."""
    opened: list[Any] = []

    def open_page(size: tuple[int, int] = DESKTOP, dark: bool = False) -> Any:
        opened.append(start(report, tmp_path_factory.mktemp("profile"), size, dark))
        return opened[-1]

    yield open_page
    for driver in opened:
        driver.quit()
