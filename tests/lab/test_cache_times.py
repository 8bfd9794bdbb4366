"""What a call over a cache runs on the device, by kernel."""

from __future__ import annotations

from typing import Any

import pytest
from tools import cache_times

from tilewise.backends.triton import paged
from tilewise.lab.bench import caches
from tilewise.lab.bench.cache_suites import over
from tilewise.model import TilePlan

SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "head_dim": 16}


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "COLD", {"cpu": 1 << 16, "cuda": 1 << 16})


def test_kernels_of_a_call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = over("shared", (2, 4, 2, 320), shared=256, plan=True, **SMALL)
    monkeypatch.setattr(cache_times, "CACHE_GPU", (case, over("decode", (1, 4, 2, 64), **SMALL)))
    cache_times.main(["--case", "shared/16", "--device", "cpu", "--rounds", "2", "--contenders", "tilewise", "cache-cudnn"])
    title, header, *rows, refused = capsys.readouterr().out.splitlines()
    assert title.startswith(f"{case.name}, tilewise: ") and "µs a call as called" in title
    assert header.split() == ["µs", "count", "each", "name"] and refused.startswith(f"{case.name}, cache-cudnn: ")
    times = [float(row.split()[0]) for row in rows]
    assert times == sorted(times, reverse=True) and len(times) > 3
    caches.forget_pools()


def test_cases_and_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    cache_times.main(["--list", "--case", "shared/", "--case", "graph/64"])
    assert capsys.readouterr().out.splitlines() == ["shared/16 64×32/8×33024", "graph/64 1×64/8×8192"]
    for words in (["--case", "nobody"], ["--case", "shared/", "--tile", "64x64"], ["--tile", "60x64x3x4"]):
        with pytest.raises(SystemExit):
            cache_times.main(words)


def test_another_tile_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many rows alone; without parts there is nothing to merge."""
    planned = {"decode": TilePlan(128, 128, 2, 8, pass_="decode", splits=8), "merge": TilePlan(1, 32, 1, 4, pass_="merge")}
    monkeypatch.setattr(paged, "paged_tiles", lambda problem, *more: dict(planned))
    many, few = (over("decode", (1, 4, 2, 1024), rows=rows).problem() for rows in (64, 1))
    with cache_times.instead(cache_times.Tile.parse("64x32x3x4", 1)):
        found = paged.paged_tiles(many, None, None)  # type: ignore[arg-type]
        assert list(found) == ["decode"]
        assert (found["decode"].sizes, found["decode"].stages, found["decode"].warps) == ((64, 32), 3, 4)
        assert paged.paged_tiles(few, None, None) == planned  # type: ignore[arg-type]
    with cache_times.instead(cache_times.Tile.parse("", 4)):
        assert paged.paged_tiles(many, None, None)["decode"].splits == 4  # type: ignore[arg-type]
