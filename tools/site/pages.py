"""The code on the pages of the site: found, run page by page, and compared with the output that the page shows.

A page's Python blocks run in order, in one scope. A `text` block that follows one is what it prints, to the character; with a
title it is a record of one machine, and is not compared. Lines of `bash` blocks that begin with `tilewise` run as well. A
block that cannot run everywhere says so in the line before it:

    <!-- not run: reason -->        never
    <!-- own process -->            anywhere on the page: it runs in a fresh interpreter
    <!-- setup … -->                lines of Python that run before the first block and are not shown

Blocks run in a folder of their own, so that what they write is not left in the repository. A Chinese page that has the code and
the outputs of the English one is not run again.

`python -m tools.site.pages` runs every page, `--write` puts what the blocks print into the pages.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LANGUAGES = frozenset({"python", "text", "bash", "console", "make"})
_FENCE = re.compile(r"^( *)```+(.*)$")
_MARK = re.compile(r"<!-- (not run: \S.*) -->")
_SETUP = re.compile(r"^<!-- setup\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_RESULT = "text"


@dataclass(frozen=True)
class Fence:
    """One fenced block: its language, its title if it has one, the lines between, and the mark before it."""

    language: str
    title: str
    code: str
    first: int
    """Line of the page, counted from 0, on which the code begins."""
    after: int
    """The line after the closing fence."""
    mark: str


def pages() -> list[Path]:
    """Every page that the site was written for; see `notes`, too."""
    inner = [path for path in DOCS.rglob("*.md") if path.parent != DOCS]
    return sorted([*inner, *DOCS.glob("index*.md"), *DOCS.glob("playground*.md")])


def notes() -> list[Path]:
    """The notes at the top of docs/, which are read in the repository as well."""
    return sorted({*DOCS.glob("*.md")} - {*pages()})


def fences(text: str) -> list[Fence]:
    """The fenced blocks of a page, in order."""
    found: list[Fence] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if opening is None:
            at += 1
            continue
        indent, info = len(opening[1]), opening[2].strip()
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
        before = next((line for line in reversed(lines[:at]) if line.strip()), "")
        mark = _MARK.search(before)
        title = re.search(r'title="([^"]*)"', info)
        code = "\n".join(line[indent:] for line in lines[at + 1 : end])
        language = info.split(" ")[0]
        found.append(Fence(language, title[1] if title else "", code, at + 1, end + 1, mark[1] if mark else ""))
        at = end + 1
    return found


def outputs(text: str) -> Iterator[tuple[Fence, Fence | None]]:
    """Each block that can run, with the block of its output."""
    found, lines = fences(text), text.splitlines()
    for fence, following in zip_longest(found, found[1:]):
        if fence.language not in ("python", "bash"):
            continue
        shown = None
        if following is not None and following.language == _RESULT and not following.title:
            between = lines[fence.after : following.first - 1]
            shown = following if not "".join(between).strip() else None
        yield fence, shown


def run_python(code: str, name: str, first: int, scope: dict[str, Any]) -> str:
    """What a block prints. Line numbers of errors are the page's."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * first + code, name, "exec"), scope)
    return printed.getvalue()


def run_bash(code: str) -> str:
    """What the `tilewise` commands of a block print."""
    from typer.testing import CliRunner

    from tilewise.cli.app import app

    printed = ""
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["tilewise"]:
            done = CliRunner().invoke(app, words[1:], env={"COLUMNS": "100", "NO_COLOR": "1"})
            if done.exit_code:
                raise RuntimeError(f"{line}: exit status {done.exit_code}\n{done.output}") from done.exception
            printed += done.output
    return printed


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()).rstrip()


@dataclass
class Printed:
    """What one block printed, and what the page says that it prints."""

    fence: Fence
    shown: Fence | None
    text: str

    @property
    def wrong(self) -> bool:
        return self.shown is not None and tidy(self.text) != tidy(self.shown.code)


@contextlib.contextmanager
def _module() -> Iterator[dict[str, Any]]:
    """The scope of a page's blocks: that of a module which can be imported while they run, as torch.compile does."""
    module, before = types.ModuleType("__page__"), sys.modules.get("__page__")
    sys.modules["__page__"] = module
    try:
        yield vars(module)
    finally:
        del sys.modules["__page__"]
        if before is not None:
            sys.modules["__page__"] = before


def run_page(path: Path) -> list[Printed]:
    """Run a page's blocks in order, in a folder that is removed after; those with a mark are left out."""
    results, text = [], path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _module() as scope:
        for setup in _SETUP.finditer(text):
            run_python(setup[1], f"{path.name} (setup)", text[: setup.start(1)].count("\n"), scope)
        for fence, shown in outputs(text):
            if fence.mark:
                continue
            code = fence.code
            printed = run_python(code, str(path), fence.first, scope) if fence.language == "python" else run_bash(code)
            results.append(Printed(fence, shown, printed))
    return results


def _code(text: str) -> list[object]:
    """What a page runs and what it says that is printed: without comments, which are in the page's language."""
    found: list[object] = ["<!-- own process -->" in text, *(setup[1] for setup in _SETUP.finditer(text))]
    for fence, shown in outputs(text):
        if fence.language == "python":
            does = ast.dump(ast.parse(fence.code))
        else:
            does = "\n".join(line.split(" #")[0].rstrip() for line in fence.code.splitlines())
        found += [bool(fence.mark), does, tidy(shown.code) if shown else None]
    return found


def repeats(path: Path) -> bool:
    """Whether a page is the Chinese of one that runs the same code and shows the same outputs."""
    english = path.with_name(path.name.replace(".zh.md", ".md"))
    if english == path or not english.exists():
        return False
    here, there = (_code(one.read_text(encoding="utf-8")) for one in (path, english))
    return here == there


def needs_own_process(path: Path) -> bool:
    return "<!-- own process -->" in path.read_text(encoding="utf-8")


def run_apart(path: Path) -> str:
    """A page in a fresh interpreter: "" or what went wrong."""
    command = [sys.executable, "-m", "tools.site.pages", str(path), "--here"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def faults(path: Path) -> str:
    """Run a page where it is to run: "" or what went wrong."""
    if needs_own_process(path):
        return run_apart(path)
    wrong = [one for one in run_page(path) if one.wrong]
    return "\n".join(
        f"{path.name}:{one.fence.first}: prints\n{tidy(one.text)}\nand the page says\n{tidy(one.shown.code)}"
        for one in wrong
        if one.shown is not None
    )


def write(path: Path) -> int:
    """Put what the blocks print into the page; how many outputs changed."""
    wrong = [one for one in run_page(path) if one.wrong]
    lines = path.read_text(encoding="utf-8").splitlines()
    for one in reversed(wrong):
        assert one.shown is not None
        lines[one.shown.first : one.shown.after - 1] = tidy(one.text).splitlines()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("pages", nargs="*", type=Path, help="pages; all of them if none is named")
    parser.add_argument("--write", action="store_true", help="put what blocks print into the pages")
    parser.add_argument("--here", action="store_true", help="run even pages that want a process of their own in this one")
    args = parser.parse_args()
    bad = 0
    named = [one.resolve() for one in args.pages]
    for path in named or [*pages(), *notes()]:
        began = time.perf_counter()
        if not named and repeats(path):
            said = "the code of the English page"
        elif args.write:
            said = f"{write(path)} outputs written"
        elif args.here:
            wrong = [one for one in run_page(path) if one.wrong]
            said = "\n".join(f"line {one.fence.first}: prints\n{tidy(one.text)}" for one in wrong)
            bad += bool(wrong)
        else:
            said = faults(path)
            bad += bool(said)
        print(f"{time.perf_counter() - began:6.1f} s  {os.path.relpath(path, ROOT)}  {said or 'as shown'}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
