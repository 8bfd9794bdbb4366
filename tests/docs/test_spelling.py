"""The English is spelled right; `make docs` says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.site import spelling

pytest.importorskip("spellchecker")


@pytest.mark.parametrize("path", spelling.documents(), ids=lambda path: str(path.relative_to(spelling.ROOT)))
def test_every_word_is_known(path: Path) -> None:
    assert spelling.unknown(spelling.read(path)) == []


def test_mistakes_are_found_with_their_lines() -> None:
    text = "Atention is right.\n\n```python\nxyzzy = 1\n```\n\nThe `kwargs` recieve it, see [teh page](xyzzy.md) and $\\alpha$."
    assert spelling.unknown(text) == [(1, "atention"), (7, "recieve"), (7, "teh")]


def test_chinese_and_names_are_left_out() -> None:
    assert spelling.unknown("《Tiling分块技术》 and `frobnicate`, tests/docs/xyzzyx.py, a_xyzzy, https://xyzzyq.org/abcqd") == []


def test_the_list_is_in_order_and_holds_nothing_that_the_dictionary_has() -> None:
    listed = [line for line in spelling.WORDS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert listed == sorted(set(listed))
    assert spelling._dictionary().known(listed) == set()
