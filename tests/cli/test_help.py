"""Every command explains itself; a bracket in a help text is text, not markup."""

from __future__ import annotations

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tilewise.cli.app import app


@pytest.mark.parametrize("command", get_command(app).commands)  # type: ignore[attr-defined]
def test_help(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0, done.output
    assert "--json" in done.output
