"""The playground's scripts say what the package says: of tiles, pairs, FLOPs and traffic, and of what is no mask.

They run in V8 (`mini-racer`); tests/browser has the same comparison in chromium, on the built page.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable

import pytest
from tools.site import playground as site
from tools.site import walk

from tests.docs import playground
from tests.docs.playground import Ask, Case
from tilewise.errors import MaskError
from tilewise.masks import parse

py_mini_racer = pytest.importorskip("py_mini_racer")
PROBLEM = {
    "batch": 2, "heads": 4, "kvHeads": 2, "queries": 256, "keys": 256, "headDim": 64, "dtype": "float16",
    "blockQ": 64, "blockK": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def run() -> Callable[[str], str]:
    engine = py_mini_racer.MiniRacer()
    for source in [*playground.SOURCES, playground.CALL]:
        engine.eval(source)
    return lambda code: str(engine.eval(code))


@pytest.fixture(scope="module")
def ask(run: Callable[[str], str]) -> Ask:
    return playground.asker(run)


def test_ten_thousand_random_tiles_and_their_traffic(ask: Ask) -> None:
    playground.check(playground.compare(ask, range(playground.ROUNDS)))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("Math.floor(first / blockK)", "Math.ceil(first / blockK)"),
        ("past >= keys ? ceil(keys, blockK)", "past > keys ? ceil(keys, blockK)"),
        ("hi < UNBOUNDED ? [[hi + 1", "hi < UNBOUNDED ? [[hi"),
        ("a === b && c === d ? 2 : 1", "a === b ? 2 : 1"),
        ("4 * (rowLengths[i] + colLengths[j])", "8 * colLengths[j]"),
        ("found.keysUsed * repeat * kvHeads", "found.keysUsed * repeat * heads"),
    ],
)
def test_a_slip_in_the_scripts_is_found(right: str, wrong: str) -> None:
    engine = py_mini_racer.MiniRacer()
    assert sum(source.count(right) for source in playground.SOURCES) == 1
    for source in [*playground.SOURCES, playground.CALL]:
        engine.eval(source.replace(right, wrong))
    with pytest.raises(AssertionError):
        playground.compare(playground.asker(lambda code: str(engine.eval(code))), range(playground.ROUNDS))


def test_mistyped_masks_are_refused_where_python_refuses_them(ask: Ask) -> None:
    """Characters dropped, put in and exchanged; the position of the error is the same."""
    seen: Counter[str] = Counter()
    for seed in range(4000):
        case, r = Case(seed), random.Random(seed)
        if any(name in case.text for name in playground.OWN):
            continue
        letters = list(case.text)
        for _ in range(r.choice((1, 1, 2, 3))):
            at = r.randrange(len(letters) + 1)
            letters[at : at + r.choice((0, 1))] = r.choice(("", *"()&|~,=[]-a_$", *"   777", "window", "offset=3"))
        text = "".join(letters)
        said = ask(text, case.problem)
        try:
            parse(text)
        except MaskError as error:
            if "error" not in said or said["python"]:  # a length for one sequence needs no brackets in the playground
                assert "key_padding" in text and "need one integer for each sequence in a list" in str(error), text
                continue
            assert f"position {said['at'] + 1}:" in str(error), (text, said, str(error))
            seen[said["error"]] += 1
        else:
            assert said["python"] is not None, (text, said)
            seen["accepted"] += 1
    assert len(seen) > 12 and sum(seen.values()) - seen["accepted"] > 1000 and seen["accepted"] > 100, seen


@pytest.mark.parametrize(
    ("text", "at", "english"),
    [
        ("causal &", 8, "At the end: expected a mask"),
        ("causal windw(3)", 7, "Position 8: got 'windw'; expected &, | or the end"),
        ("windw(3)", 0, "expected a mask (full, causal, window"),
        ("causal $", 7, "got '$'"),
        ("window(0)", 0, "left is at least 1"),
        ("window(3, size=4)", 0, "it has no argument size; it has: left, right, align, offset"),
        ("causal(middle)", 7, "expected an integer, a list, bottom_right, top_left"),
        ("key_padding([1, 2, 3])", 0, "lengths has 3 integers; need 1, or one for each of the 2 sequences"),
        ("documents([100, 100])", 0, "lengths add up to 200, but there are 256 positions"),
        ("blocks([[1, 0], [1]], 128)", 0, "lists of equal length"),
        ("blocks([[1, 0], [1, 1]], 64)", 0, "2 × 2 cells, but these lengths and blocks need 4 × 4"),
        ("selected([[0]], per=64)", 0, "there are 1 lists, but the queries in blocks of 64 need 4"),
        ("~" * 300 + "full", 200, "nested too deeply"),
        ("", 0, "At the end: expected a mask"),
    ],
)
def test_errors_say_where_and_what_is_allowed(ask: Ask, text: str, at: int, english: str) -> None:
    said = ask(text, PROBLEM)
    assert said["at"] == at and english in said["said"][0]
    assert "{" not in "".join(said["said"]) and any("\u4e00" <= letter <= "\u9fff" for letter in said["said"][1])


def test_the_offered_masks_are_masks_and_the_offered_tiles_those_of_the_plan(ask: Ask) -> None:
    import tilewise as tw

    problem = {**PROBLEM, "batch": 1, "queries": site.LENGTH, "keys": site.LENGTH}
    assert all("error" not in ask(text, problem) for text in site.EXAMPLES)
    found = site.presets()
    assert [(one["headDim"], one["dtype"]) for one in found] == [(d, dtype) for *_, dtype in site.DEVICES for d in (64, 128)]
    h200 = tw.Problem.of(seqlen=site.LENGTH, heads=site.HEADS, head_dim=64, mask=tw.causal(), device="cuda")
    plan = tw.plan(h200, "h200")
    assert plan.passes and (found[0]["blockQ"], found[0]["blockK"]) == plan.tile.sizes
    assert str(plan.backend) in found[0]["name"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_form_is_there_in_both_languages(language: str) -> None:
    html = site.form(language, "../playground")
    page = (playground.SCRIPTS / "page.js").read_text(encoding="utf-8")
    assert set(re.findall(r'\$\("(\w+)"\)', page)) <= set(re.findall(r'id="pg-(\w+)"', html))
    assert bool(re.search("[\u4e00-\u9fff]", html)) == (language == "zh")
    assert all((playground.SCRIPTS / f"{name}.js").exists() for name in site.SCRIPTS)


def test_the_frame_shows_the_walk_of_a_report() -> None:
    report = f"<html><head><title>x</title></head><body><main></main>{walk.DATA}</script></body></html>"
    html = walk.framed(report)
    order = ("dataset.embed", "<body>", "Plotly.react", walk.DATA, "walkHeight", "</body>")
    assert sorted(order, key=html.index) == list(order)
    with pytest.raises(ValueError, match="the report has no"):
        walk.framed(report.replace(walk.DATA, ""))
    assert 'src="../../report.html?language=zh&amp;embed=walk"' in walk.frame("zh", "../..")


def test_every_word_of_the_page_is_there(run: Callable[[str], str]) -> None:
    page = (playground.SCRIPTS / "page.js").read_text(encoding="utf-8")
    keys = {*re.findall(r'say\("([\w-]+)"', page), "standard", "v1", "v2", "compulsory", "at", "at-end", "got"}
    for key in keys:
        assert run(f"TileWords.say({json.dumps(key)}, 'zh')") != run(f"TileWords.say({json.dumps(key)}, 'en')")


def test_every_error_has_a_sentence(run: Callable[[str], str]) -> None:
    source = "".join(playground.SOURCES[1:3])
    keys = set(re.findall(r'(?:MaskError\([^"]*?|fail\([^"]*?)"([\w-]+)"', source))
    assert len(keys) > 20
    for key in keys:
        error = json.dumps({"at": 0, "got": "x", "key": key, "values": {}})
        assert run(f"TileWords.error({error}, 'zh')")
