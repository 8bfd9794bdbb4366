"""The command `tilewise`. Modules of commands import torch and the rest of the package only when they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tilewise.cli.bench import bench_command
from tilewise.cli.check import check_command
from tilewise.cli.console import with_error_line
from tilewise.cli.demo import demo_command
from tilewise.cli.env import env_command
from tilewise.cli.explain import explain_command
from tilewise.cli.plan import plan_command
from tilewise.cli.report import report_command
from tilewise.cli.simulate import simulate_command
from tilewise.cli.verify_traffic import verify_traffic_command
from tilewise.cli.warmup import warmup_command


def _quiet_flags(params: list[Any]) -> list[Any]:
    """Flags take no value, so their help names none."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _quiet_flags(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _quiet_flags(super().get_params(ctx))


app = typer.Typer(
    name="tilewise",
    cls=_Group,
    help="Exact attention, computed tile by tile, that knows what it costs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from tilewise import __version__

        typer.echo(f"tilewise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exact attention, computed tile by tile, that knows what it costs."""


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo_command,
    "check": check_command,
    "bench": bench_command,
    "env": env_command,
    "plan": plan_command,
    "explain": explain_command,
    "simulate": simulate_command,
    "report": report_command,
    "verify-traffic": verify_traffic_command,
    "warmup": warmup_command,
}
for _name, _run in COMMANDS.items():
    app.command(_name, cls=_Command)(with_error_line(_run))

