"""The command `tilewise`. Modules of commands import torch and the rest of the package only when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from tilewise.cli.bench import bench_command
from tilewise.cli.check import check_command
from tilewise.cli.console import spoken
from tilewise.cli.demo import demo_command
from tilewise.cli.env import env_command
from tilewise.cli.explain import explain_command
from tilewise.cli.plan import plan_command
from tilewise.cli.report import report_command
from tilewise.cli.simulate import simulate_command
from tilewise.cli.verify_traffic import verify_traffic_command

app = typer.Typer(
    name="tilewise",
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


app.command("demo")(spoken(demo_command))
app.command("check")(spoken(check_command))
app.command("bench")(spoken(bench_command))
app.command("env")(spoken(env_command))
app.command("plan")(spoken(plan_command))
app.command("explain")(spoken(explain_command))
app.command("simulate")(spoken(simulate_command))
app.command("report")(spoken(report_command))
app.command("verify-traffic")(spoken(verify_traffic_command))


def main() -> None:
    app()
