"""Both READMEs show the same commands and examples; only the prose differs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")}
ENGLISH, CHINESE = TEXTS.values()


def examples(text: str) -> list[str]:
    """Python blocks without their comments."""
    return [ast.dump(ast.parse(block)) for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


def commands(text: str) -> dict[str, list[str]]:
    """Commands of the table with the options shown for each."""
    rows = re.findall(r"^\| `tilewise ([\w-]+)` \|(.*)\|$", text, re.MULTILINE)
    return {name: re.findall(r"`(--[^`]+)`", text) for name, text in rows}


def codes(text: str) -> list[str]:
    """What is set as code in the left column of the tables of meaning."""
    return re.findall(r"^\| [^|`]*`([^`]+)`[^|]*\|", text, re.MULTILINE)


def test_the_same_examples() -> None:
    assert examples(ENGLISH) and examples(ENGLISH) == examples(CHINESE)


def test_the_same_commands_with_the_same_options() -> None:
    assert commands(ENGLISH) and commands(ENGLISH) == commands(CHINESE)


def test_the_same_make_targets() -> None:
    targets = [re.findall(r"^make ([a-z-]+)", text, re.MULTILINE) for text in TEXTS.values()]
    assert targets[0] and targets[0] == targets[1]


def test_the_same_install_commands() -> None:
    lines = [re.findall(r"^pip install \S+", text, re.MULTILINE) for text in TEXTS.values()]
    assert lines[0] and lines[0] == lines[1]


def test_the_same_meanings_are_told() -> None:
    assert codes(ENGLISH) == codes(CHINESE)


def test_each_leads_to_the_other() -> None:
    assert "(README.zh-CN.md)" in ENGLISH and "(README.md)" in CHINESE
    for link in re.findall(r"\]\(([^)#]+)\)", CHINESE):
        assert (ROOT / link).exists(), link
