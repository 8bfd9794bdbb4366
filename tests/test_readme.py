"""What the README shows runs, and the commands and files it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from tilewise.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_in_order() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 2
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)


def test_the_first_example_is_on_the_first_screen() -> None:
    assert README.index("```python") < 400
    assert README[: README.index("tw.attention(")].count("\n") < 20


def test_named_commands_exist_with_their_options() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    (line,) = re.findall(r"^Commands, after .*", README, re.MULTILINE)
    assert sorted(re.findall(r"`([a-z-]+)`", line)) == sorted(commands)
    assert set(re.findall(r"`tilewise ([\w-]+)", README)) <= set(commands)
    page = (ROOT / "docs/how-to/commands.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `tilewise ([\w-]+)` \|(.*)\|$", page, re.MULTILINE))
    assert set(table) == set(commands)
    for name, text in table.items():
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", text)) <= options
        assert "--json" in options


def test_it_is_short_and_has_one_picture() -> None:
    assert len(README.splitlines()) <= 120
    assert len(re.findall(r"^!\[[^\]]+\]\(docs/[\w.]+\.svg\)$", README, re.MULTILINE)) == 1


def test_named_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name} links to {link}"
    for path in re.findall(r"`((?:src|docs|tests)/[\w/.]+)`", README):
        assert (ROOT / path).exists()
