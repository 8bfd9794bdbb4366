"""What is shipped: a small pure wheel, typed, with one version everywhere and every development package pinned."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_is_small_and_pure(wheel: Path) -> None:
    assert wheel.stat().st_size < 1_200_000  # its source: no file of it is large
    assert wheel.name == f"tilewise-{tilewise.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert max(file.compress_size for file in archive.infolist() if not file.filename.endswith("RECORD")) < 10_000
        names = set(archive.namelist())
    sources = {str(path.relative_to(ROOT / "src").as_posix()) for path in (ROOT / "src" / "tilewise").rglob("*.py")}
    assert sources <= names
    assert "tilewise/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".so", ".pyd", ".dll", ".pyc", ".cubin"))]
    assert {name.partition("/")[0] for name in names} == {"tilewise", f"tilewise-{tilewise.__version__}.dist-info"}


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"tilewise-{tilewise.__version__}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert metadata["Version"] == tilewise.__version__ == PROJECT["version"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert "tilewise = tilewise.cli:main" in entry_points


def test_links_on_the_package_s_page_lead_somewhere(wheel: Path) -> None:
    """No file stands beside that page: a link is an address, or it is not there."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"tilewise-{tilewise.__version__}.dist-info/METADATA").decode())
    page = str(metadata.get_payload())
    assert "tw.attention(" in page and metadata["Description-Content-Type"].startswith("text/markdown")
    relative = [link for link in re.findall(r"\]\(([^)]+)\)", page) if "://" not in link and not link.startswith("#")]
    assert not relative
    place = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    assert bool(metadata.get_all("Project-URL")) == bool(place["repository"])


def test_links_become_addresses_once_there_is_one() -> None:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec and spec.loader
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    text = "[docs/a.md](docs/a.md) [CPU](docs/cpu.md) [out](https://example.org) [below](#why) `x[0](y)`"
    want = "docs/a.md CPU (docs/cpu.md) [out](https://example.org) [below](#why)"
    assert build.absolute(text, "").startswith(want)
    led = build.absolute(text, "https://example.org/blob/main/")
    assert "[CPU](https://example.org/blob/main/docs/cpu.md)" in led and "[below](#why)" in led
    picture = "before\n\n![a (b)](docs/a.svg)\n\nafter"
    assert build.absolute(picture, "") == "before\n\nafter"
    raw = "![a (b)](https://example.org/raw/main/docs/a.svg)"
    assert build.absolute(picture, "https://example.org/blob/main") == f"before\n\n{raw}\n\nafter"


def test_everything_for_development_is_pinned() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = dict(line.lower().split("==") for line in text.splitlines() if line and not line.startswith("#"))
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")
    wanted = PROJECT["dependencies"] + [need for extra in PROJECT["optional-dependencies"].values() for need in extra]
    names = {re.split(r"[<>=;\[ ]", need)[0].lower() for need in wanted}
    assert names - {"tilewise"} <= set(pins), f"not pinned: {sorted(names - set(pins))}"


def test_the_changelog_knows_this_version() -> None:
    assert f"## {tilewise.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
