"""The site: every block runs and prints what its page says, both languages say the same, and every name is where it is said
to be. What needs the built site is checked by `make docs`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from tools.site import pages, pictures

from tests.interpreter import needs_interpreter

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = pages.pages()
NAMES = [str(path.relative_to(DOCS)) for path in PAGES]
ENGLISH = [path for path in PAGES if not path.name.endswith(".zh.md")]
WITH_CODE = [p for p in [*PAGES, *pages.notes()] if pages.fences(p.read_text(encoding="utf-8")) and not pages.repeats(p)]
"""Pages to run. Chinese pages with the code and the outputs of the English ones are not run again."""
NOTES = [path for path in pages.notes() if not path.name.endswith(".zh.md")]
TERMS = (
    *("分块", "块大小", "外循环", "内循环", "双缓冲", "在线算法", "在线 softmax", "重标定", "重缩放", "算子融合", "重计算"),
    *("IO 感知", "屋顶线", "计算强度", "脊点", "拐点", "内存绑定", "计算绑定", "共享内存", "全局内存", "寄存器", "归一化"),
    *("占用率", "带宽", "延迟", "累加器"),
)
"""What the five tutorials call things."""
SOURCES = ("Williams, Waterman, Patterson", "1805.02867", "2112.05682", "2205.14135", "2307.08691", "2407.08608")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


class _Loader(yaml.SafeLoader):
    """mkdocs.yml names a function of Python, which is nothing to us."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)


def _chinese(path: Path) -> Path:
    return path.with_name(path.stem + ".zh.md")


PAIRS = [*(path for path in ENGLISH if path.parent.name != "reference"), *(path for path in NOTES if _chinese(path).exists())]


def _tree() -> dict[str, int]:
    """The files of the repository and their sizes, without those that are built."""
    found = {}
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [name for name in inner if not re.match(r"\.|__pycache__$|(build|dist)$|.*\.egg-info$", name)]
        found |= {os.path.join(folder, name): os.path.getsize(os.path.join(folder, name)) for name in files}
    return found


def _run(path: Path) -> None:
    before = _tree()
    assert pages.faults(path) == ""
    assert _tree() == before, "the page's blocks leave files in the repository"


@pytest.mark.parametrize("path", [p for p in WITH_CODE if not pages.needs_own_process(p)], ids=lambda p: str(p.relative_to(DOCS)))
def test_every_block_prints_what_the_page_says(path: Path) -> None:
    _run(path)


@needs_interpreter
@pytest.mark.parametrize("path", [p for p in WITH_CODE if pages.needs_own_process(p)], ids=lambda p: str(p.relative_to(DOCS)))
def test_pages_that_want_their_own_process(path: Path) -> None:
    _run(path)


@pytest.mark.parametrize("mark", ["", "<!-- own process -->\n"], ids=["here", "apart"])
def test_what_blocks_write_is_removed_with_their_folder(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        f"<!-- setup\nopen('first', 'w').close()\n-->\n{mark}\n```python\nimport os\nopen('second', 'w').close()\n"
        f"print(sorted(os.listdir()), os.getcwd() == {str(ROOT)!r})\n```\n\n```text\n['first', 'second'] False\n```\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    before = _tree()
    assert pages.faults(page) == ""
    assert _tree() == before
    assert os.listdir(tmp_path) == ["page.md"] == os.listdir()


def test_blocks_run_in_a_module_that_can_be_imported(tmp_path: Path) -> None:
    """torch.compile imports the module of a function by its name."""
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport importlib\n\ndef double(x):\n    return 2 * x\n```\n\n"
        "```python\nprint(importlib.import_module(double.__module__).double(4))\n```\n\n```text\n8\n```\n",
        encoding="utf-8",
    )
    assert pages.faults(page) == ""
    assert "__page__" not in sys.modules


def test_a_chinese_page_that_differs_is_run(tmp_path: Path) -> None:
    english, chinese = tmp_path / "page.md", tmp_path / "page.zh.md"
    text = "<!-- setup\nx = 1\n-->\n\n```python\nprint(x + 1)  # two\n```\n\n```text\n2\n```\n"
    english.write_text(text, encoding="utf-8")

    def repeats(old: str, new: str) -> bool:
        assert old in text
        chinese.write_text(text.replace(old, new), encoding="utf-8")
        return pages.repeats(chinese)

    assert repeats("# two", "# 二") and not pages.repeats(english)
    changes = (("x + 1", "x + 2"), ("x = 1", "x = 3"), ("text\n2", "text\n3"), ("```text", '```text title="x"'))
    assert not any(repeats(old, new) for old, new in changes)
    assert not repeats("```python", "<!-- not run: no -->\n```python")
    assert not repeats("-->\n\n", "-->\n<!-- own process -->\n\n")
    english.unlink()
    assert not pages.repeats(chinese)


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_blocks_are_of_known_languages_and_say_why_they_do_not_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert {fence.language for fence in pages.fences(text)} <= pages.LANGUAGES
    assert len(re.findall(r"^ *```python", text, re.M)) == sum(f.language == "python" for f in pages.fences(text))
    marks = re.findall(r"<!-- (?!picture: |own process|commands|playground|setup|walk|/?speed).*? -->", text)
    assert len(marks) == sum(bool(fence.mark) for fence in pages.fences(text)), "a mark without a reason, or before no block"


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_links_lead_to_pages(path: Path) -> None:
    for link in _LINK.findall(path.read_text(encoding="utf-8")):
        if "://" not in link and not link.startswith("#"):
            assert (path.parent / link.split("#")[0]).exists(), link


@pytest.mark.parametrize("path", PAIRS, ids=lambda p: str(p.relative_to(DOCS)))
def test_both_languages_say_the_same(path: Path) -> None:
    """The same code, outputs, pictures, links and headings, and the same figures in the text. Drawings have the same lines."""
    english, chinese = (one.read_text(encoding="utf-8") for one in (path, _chinese(path)))
    assert re.search(r"[\u4e00-\u9fff]{4}", chinese)

    def code(text: str) -> list[str]:
        printed = {shown.first for _, shown in pages.outputs(text) if shown}
        drawn = [f.first for f in pages.fences(text) if f.language == "text" and not f.title and f.first not in printed]
        return [
            ast.dump(ast.parse(f.code)) if f.language == "python"
            else re.sub(r"[\w\s]+", "", f.code) if f.first in drawn
            else f.code.split("#")[0]
            for f in pages.fences(text)
        ]

    def prose(text: str) -> str:
        return re.sub(r"```.*?```|\$[^$]*\$|\]\([^)]*\)|`[^`]*`|<!--.*?-->|\{#[^}]*\}", " ", text, flags=re.S)

    def figures(text: str) -> list[str]:
        return sorted(re.findall(r"\d[\d.,]*\d|\d", prose(text)))

    assert code(english) == code(chinese)
    for pattern in (r"<!-- picture: [\w-]+ -->", r"^#+ ", r"\$\$"):
        assert re.findall(pattern, english, re.M) == re.findall(pattern, chinese, re.M), pattern
    assert [link for link in _LINK.findall(english) if link != _chinese(path).name] == [
        link for link in _LINK.findall(chinese) if link != path.name
    ]
    assert figures(english) == figures(chinese)


def _nav(entries: object) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [page for entry in values for page in _nav(entry)]  # type: ignore[union-attr]


def test_every_page_is_in_the_navigation_and_every_heading_is_translated() -> None:
    assert set(_nav(CONFIG["nav"])) >= {str(path.relative_to(DOCS)) for path in ENGLISH}
    chinese = next(p["i18n"] for p in CONFIG["plugins"] if isinstance(p, dict) and "i18n" in p)["languages"][1]
    assert {key for entry in CONFIG["nav"] for key in entry} <= set(chinese["nav_translations"])


def test_every_public_name_is_in_the_reference() -> None:
    import tilewise

    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    shown = re.findall(r"^::: tilewise\.(\w+)$", text, re.M)
    assert sorted(shown) == sorted({*tilewise.__all__, "nn"} - {"__version__"})


INTEGRATIONS = ("transformers", "flash_attn", "flash_attn_interface", "flash_attn.cute")


@pytest.mark.parametrize("module", ["distributed", "nn", "errors", *(f"integrations.{name}" for name in INTEGRATIONS)])
def test_every_name_of_the_modules_is_in_the_reference(module: str) -> None:
    found = importlib.import_module(f"tilewise.{module}")
    names = getattr(found, "__all__", None) or [name for name in vars(found) if isinstance(vars(found)[name], type)]
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    shown = re.findall(r"^::: tilewise\.([\w.]+)$", text, re.M)
    whole = re.findall(r"^::: tilewise\.([\w.]+)\n    options:\n      members: true$", text, re.M)
    assert names
    assert module in whole or {f"{module}.{name}" for name in names} - {"errors.TilewiseError"} <= set(shown)


def test_every_reference_is_to_something_that_exists() -> None:
    for path in (DOCS / "reference").glob("*.md"):
        for name in re.findall(r"^::: (tilewise[\w.]+)$", path.read_text(encoding="utf-8"), re.M):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute) or importlib.util.find_spec(name), name


def test_the_sources_are_cited_and_the_terms_of_the_tutorials_are_mapped() -> None:
    for name in ("glossary.md", "glossary.zh.md"):
        text = (DOCS / "background" / name).read_text(encoding="utf-8")
        assert [work for work in SOURCES if work not in text] == []
        for term in TERMS:
            assert re.search(rf"^\|[^|]+\|[^|]*{term}[^|]*\|", text, re.M), term


def test_every_environment_variable_is_in_the_reference() -> None:
    text = (DOCS / "reference/environment.md").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    assert set(re.findall(r"\bTILEWISE_\w+", text)) == set(re.findall(r"\bTILEWISE_[A-Z_]+", source))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_picture_is_drawn_and_used(language: str) -> None:
    used = {name for path in PAGES for name in re.findall(r"<!-- picture: ([\w-]+) -->", path.read_text(encoding="utf-8"))}
    assert used == {*pictures.PICTURES, *(f"mask-{name}" for name in pictures.MASKS)}
    for name in used:
        assert re.match(r'<figure class="tw-picture(?: narrow)?"><div class="tw-scroll"><svg', pictures.figure(name, language))
    assert pictures.figure("memory", "zh") != pictures.figure("memory", "en")


def test_a_wrong_output_is_found(tmp_path: Path) -> None:
    text = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    (fence, shown), = pages.outputs(text)
    printed = pages.run_python(fence.code, "page", fence.first, {})
    assert shown is not None and pages.Printed(fence, shown, printed).wrong
    assert not pages.Printed(fence, shown, "3 \n").wrong
