"""The pictures that are drawn from rules keep them: the Hopper pipeline's barriers, and the README's picture."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from tools.site import readme_picture
from tools.site.pipeline import CONFIG, Pipeline, clocks, simulate

TILES = 8


@pytest.fixture(scope="module")
def run() -> Pipeline:
    return simulate(TILES)


def test_tiles_are_read_when_they_have_landed(run: Pipeline) -> None:
    for n in range(TILES):
        for group in range(CONFIG.WARPGROUPS):
            assert run.of("K", n).end <= run.of("S", n, group).start
            if n + 1 < TILES:
                assert run.of("V", n).end <= run.of("O", n, group).start


def test_a_stage_is_filled_again_when_all_have_read_it(run: Pipeline) -> None:
    for n in range(TILES - run.stages - 1):
        for group in range(CONFIG.WARPGROUPS):
            assert run.of("S", n, group).end <= run.of("K", n + run.stages).start
            assert run.of("O", n, group).end <= run.of("V", n + run.stages).start


def test_products_are_issued_in_turns_and_the_softmax_runs_under_them(run: Pipeline) -> None:
    products = sorted((e for e in run.events if e.role == "product" and e.tile + (e.name == "O") > 0), key=lambda e: e.start)
    assert all(a.end <= b.start for a, b in pairwise(products))
    order = [(e.name, e.group) for e in products]
    assert order[:8] == [("S", 0), ("O", 0), ("S", 1), ("O", 1)] * 2
    for n in range(1, TILES - 1):
        softmax, other = run.of("P", n, 0), run.of("S", n, 1)
        assert softmax.start >= run.of("S", n, 0).end
        assert softmax.start < run.of("O", n - 1, 0).end and other.start < softmax.end, "nothing overlaps"


def test_only_one_thing_is_loaded_at_a_time_and_clocks_are_those_of_the_plan(run: Pipeline) -> None:
    loads = [e for e in run.events if e.role == "load"]
    assert [(e.name, e.tile) for e in loads][:4] == [("K", 0), ("V", 0), ("K", 1), ("V", 1)]
    assert all(a.end <= b.start for a, b in pairwise(loads))
    load, product, softmax = clocks()
    assert product == pytest.approx(2 * 64 * CONFIG.BLOCK_N * CONFIG.BLOCK_D / 4096, rel=0.05), "4,096 FLOPs a clock"
    assert load > 0 and softmax > 0


@pytest.mark.parametrize("language", readme_picture.FILES)
def test_the_readme_has_the_picture_that_the_code_draws(language: str) -> None:
    path = readme_picture.FILES[language]
    drawn = readme_picture.draw(language)
    assert path.read_text(encoding="utf-8") == drawn, "python -m tools.site.readme_picture writes it anew"
    ElementTree.fromstring(drawn)
    assert not re.search(r"(?:href|src)=|url\((?!#)", drawn), "an image fetches nothing"
    readme = readme_picture.ROOT / ("README.md" if language == "en" else "README.zh-CN.md")
    assert f"(docs/{path.name})" in readme.read_text(encoding="utf-8")


def test_its_mask_is_that_of_the_first_example() -> None:
    readme = (readme_picture.ROOT / "README.md").read_text(encoding="utf-8")
    written = re.sub(r"(causal|window|prefix)", r"tw.\1", readme_picture.EXAMPLE.words)
    assert f"mask = {written} " in readme
