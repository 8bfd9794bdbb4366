"""Every command at 80 and 60 columns, in a pipe and in a terminal: nothing is cut, and no line is too long."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tilewise.cli import app as commands
from tilewise.cli import bench, check, console, demo
from tilewise.lab.bench import demo as runs
from tilewise.lab.bench import selftest
from tilewise.lab.bench.judge import Judgement

COMMANDS = [
    "demo",
    "check -b tiled -b triton",
    "bench --suite smoke --seconds 0.01",
    "explain --device a100 --tile 64x64",
    "env",
    "plan",
    "plan --device h200",
    "plan --all-devices",
    "plan --ranks 8 --seqlen 16384 --heads 32 --mask causal --device h200",
    "plan --ranks 4-8 --lengths 900,8x500 --mask causal&window(64) --device h200",
    "plan --seqlen 1 --kv-seqlen 4096 --heads 32 --kv-heads 8 --mask causal --device a100",
    "explain",
    "explain --device h200 --backend triton",
    "explain --device cpu --seqlen 256 --measure",
    "simulate --mask causal",
    "simulate --schedule standard,v1,v2,backward --seqlen 512",
    "simulate --precision",
]
CUT = re.compile(r"\d\.\de(?![-+]\d\d)|\w…")


class Consoles:
    """What is printed once, on consoles of several widths."""

    def __init__(self) -> None:
        self.all = [
            Console(file=io.StringIO(), width=width, highlight=False, force_terminal=terminal)
            for width in (80, 60)
            for terminal in (False, True)
        ]

    def print(self, *things: Any, **options: Any) -> None:
        for one in self.all:
            one.print(*things, **options)


def shown_demo(case: Any, rounds: int, progress: Any) -> runs.Demo:
    """A demo as a long one looks, without the wait."""
    right = Judgement(True, 1.3e-07, 0.31, 0.016)
    peaks = {"standard": 17 * 2**30, "sdpa": 48 * 2**20, "tilewise": 41 * 2**20}
    found = {name: runs.Run(name, peak, [0.4123, 0.5123, 0.6123], right) for name, peak in peaks.items()}
    return runs.Demo(case, found, {case.seqlen >> 1: 21 * 2**20, case.seqlen: 41 * 2**20})


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_cut(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    consoles = Consoles()
    monkeypatch.setattr(selftest, "TRIALS", selftest.TRIALS[:2])
    monkeypatch.setattr(runs, "run_demo", shown_demo)
    for module in (bench, check, demo, console):
        monkeypatch.setattr(module, "console", lambda: consoles)
    done = CliRunner().invoke(commands.app, command.split())
    assert done.exit_code == 0, done.output
    for one in consoles.all:
        assert isinstance(one.file, io.StringIO)
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", one.file.getvalue())
        assert text.strip()
        for line in text.splitlines():
            assert len(line) <= one.width, f"{len(line)} characters: {line}"
            assert not CUT.search(line), f"cut at {one.width}: {line}"
