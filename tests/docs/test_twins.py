"""The site is in English and Chinese, page by page: every page has a twin, and Chinese pages lead to Chinese ones.

That twins say the same is tested by test_pages.py, and of the table of models by tests/integrations/test_model_types.py.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ONCE = "reference"
"""What is written once: names, signatures and messages, which are English in both languages."""
ENGLISH = [path for path in sorted(DOCS.rglob("*.md")) if not path.name.endswith(".zh.md")]
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def _twin(path: Path) -> Path:
    return path.with_name(f"{path.stem}.zh.md")


def without_twin(pages: list[Path], docs: Path) -> list[str]:
    """Pages outside the reference that are in English only."""
    names = [path.relative_to(docs) for path in pages if not _twin(path).exists()]
    return [str(name) for name in names if name.parts[0] != ONCE]


def test_every_page_is_there_in_both_languages() -> None:
    assert without_twin(ENGLISH, DOCS) == []


def test_a_page_in_one_language_is_found(tmp_path: Path) -> None:
    names = ("both.md", "both.zh.md", "alone.md", "how-to/alone.md", "reference/names.md")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    english = [tmp_path / name for name in names if ".zh" not in name]
    assert without_twin(english, tmp_path) == ["alone.md", "how-to/alone.md"]


def test_every_chinese_page_has_an_english_one() -> None:
    assert set(DOCS.rglob("*.zh.md")) <= {_twin(path) for path in ENGLISH}


def test_only_the_reference_is_said_to_be_in_english() -> None:
    for path in DOCS.rglob("*.zh.md"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "英文" in line and (links := _LINK.findall(line)):
                assert any(ONCE in link for link in links), f"{path.name}: {line}"


def test_the_chinese_readme_leads_to_chinese_pages() -> None:
    links = _LINK.findall((ROOT / "README.zh-CN.md").read_text(encoding="utf-8"))
    pages = [link.split("#")[0] for link in links if link.startswith("docs/") and ".md" in link]
    assert pages and [page for page in pages if not page.endswith(".zh.md")] == []
