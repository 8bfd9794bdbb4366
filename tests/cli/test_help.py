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


@pytest.mark.parametrize("command", [[], *([name] for name in get_command(app).commands)], ids=str)  # type: ignore[attr-defined]
def test_options_show_what_is_typed(command: list[str]) -> None:
    """A flag takes no value, and what may be repeated is given one at a time."""
    shown = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, [*command, "--help"]).output
    assert "bool" not in shown.lower() and "list[" not in shown.lower(), shown
    assert "--help" in shown


def test_plan_and_explain_take_the_same_problem() -> None:
    plan, explain = (
        {param.name: (param.opts, param.default, param.help) for param in get_command(app).commands[name].params}  # type: ignore[attr-defined]
        for name in ("plan", "explain")
    )
    both = set(plan) & set(explain)
    assert {name: plan[name] for name in both} == {name: explain[name] for name in both}
    assert set(plan) - set(explain) == {"all_devices", "ranks", "lengths"} and set(explain) - set(plan) == {"measure"}
