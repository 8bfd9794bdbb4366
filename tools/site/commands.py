"""The command line's reference, from the commands themselves."""

from __future__ import annotations

import re

import click
from typer.main import get_command


def _plain(text: str | None) -> str:
    """Help without rich's markup, on one line, fit for a table."""
    return " ".join(re.sub(r"\[/?[a-z ]+\]", "", text or "").split()).replace("|", "\\|")


def _options(command: click.Command) -> list[str]:
    rows = ["| option | meaning | default |", "|---|---|---|"]
    for parameter in command.params:
        names = ", ".join(f"`{name}`" for name in parameter.opts)
        default = parameter.default
        shown = "" if default is None or callable(default) or parameter.required or default is False else f"`{default}`"
        if not isinstance(parameter.default, str | int | float | bool) and default is not None:
            shown = ""
        rows.append(f"| {names} | {_plain(getattr(parameter, 'help', ''))} | {shown} |")
    return rows


def commands() -> str:
    """Every command with its help and options, as markdown."""
    from tilewise.cli.app import app

    lines: list[str] = []
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        lines += [f"## `tilewise {name}`", "", _plain(command.help), "", *_options(command), ""]
    return "\n".join(lines)
