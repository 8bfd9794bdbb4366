"""`tilewise check`: every usable backend against the float64 oracle, within derived bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.console import USAGE_ERROR, Json, console, human_seconds, print_json, progress

if TYPE_CHECKING:
    from tilewise.lab.bench.selftest import TrialResult

Findings = dict[tuple[str, str], "list[TrialResult]"]
Reasons = dict[str, dict[str, tuple[str, ...]]]
"""Why a backend cannot be checked here, by backend and device."""


def check_command(
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", metavar="<str>", help="Only this one; may be repeated.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every trial, also in Triton's interpreter, which takes minutes.")
    ] = False,
    json: Json = False,
) -> None:
    """Test every backend that is usable here against float64 attention; exit status 1 if one is wrong, 2 if none is usable."""
    findings, unusable = run(backend, every)
    ok = bool(findings) and all(result.status != "failed" for results in findings.values() for result in results)
    if json:
        told = [summary(key, results) for key, results in findings.items()]
        print_json({"ok": ok, "backends": told, "unusable": unusable})
    else:
        show(findings, unusable, ok)
    raise typer.Exit(0 if ok else 1 if findings else USAGE_ERROR)


def run(wanted: list[str] | None, every: bool) -> tuple[Findings, Reasons]:
    """What the usable backends did, and why the others are not usable."""
    from tilewise import dispatch
    from tilewise.lab.bench.selftest import selftest

    for name in wanted or ():
        dispatch.get(name)  # raises for a name nobody knows
    findings: Findings = {}
    unusable: Reasons = {}
    for name in wanted or dispatch.REGISTRY:
        verdicts = {device: dispatch.usable(name, device) for device in dispatch.REGISTRY[name].devices}
        findings |= {(name, device): [] for device, verdict in verdicts.items() if verdict.ok}
        if not any(verdict.ok for verdict in verdicts.values()):
            unusable[name] = {device: verdict.reasons for device, verdict in verdicts.items()}
    with progress() as bar:
        plans = {place: list(selftest(*place, every)) for place in findings}
        task = bar.add_task("", total=sum(len(trials) for trials in plans.values()))
        for (name, device), trials in plans.items():
            for number, (trial, attempt) in enumerate(trials, 1):
                bar.update(task, description=f"{name} on {device}, {number} of {len(trials)}: {trial}")
                findings[name, device].append(attempt())
                bar.update(task, advance=1)
    return findings, unusable


def summary(key: tuple[str, str], results: list[TrialResult]) -> dict[str, Any]:
    judged = [result.judgement for result in results if result.judgement]
    return {
        "backend": key[0],
        "device": key[1],
        **{status: sum(r.status == status for r in results) for status in ("passed", "failed", "declined")},
        "bound_used": max((j.used for j in judged if j.ok), default=0.0),
        "seconds": sum(result.seconds for result in results),
        "trials": [
            {
                "trial": result.trial,
                "status": result.status,
                "error": result.judgement.error if result.judgement and result.judgement.ok else None,
                "bound_used": result.judgement.used if result.judgement and result.judgement.ok else None,
                "reasons": list(result.reasons),
                "failure": result.failure,
            }
            for result in results
        ],
    }


def show(findings: Findings, unusable: Reasons, ok: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from tilewise.model.tables import Folded

    out = console()
    table = Table(title="Each backend against float64 attention", title_justify="left", title_style="bold")
    for name, justify in (
        ("backend", "left"),
        ("on", "left"),
        ("passed", "right"),
        ("failed", "right"),
        ("declined", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("worst, of bound", justify="left", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for key, results in findings.items():
        facts = summary(key, results)
        used = facts["bound_used"]
        meter = f"{'█' * round(10 * used):░<10} {used:4.0%}"
        failed = f"[red]{facts['failed']}[/]" if facts["failed"] else "0"
        declined = f"[yellow]{facts['declined']}[/]" if facts["declined"] else "0"
        table.add_row(
            key[0], key[1], f"[green]{facts['passed']}[/]", failed, declined, meter, human_seconds(facts["seconds"])
        )
    if findings:
        out.print(Folded(table))
    for (name, device), results in findings.items():
        for result in results:
            if result.status == "failed":
                out.print(f"[red]failed[/] {name} on {device}, {result.trial}: {escape(why(result))}")
        for reason, trials in by_reason(results).items():
            out.print(f"[yellow]declined[/] {name} on {device}: {escape(reason)} [dim]({', '.join(trials)})[/]")
    for name, by_device in unusable.items():
        reasons = dict.fromkeys(reason for reasons in by_device.values() for reason in reasons)
        out.print(f"[yellow]not usable here[/] {name}: {escape('; '.join(reasons))}")
    if not findings:
        out.print("[yellow]Nothing was checked[/]: no backend asked for is usable here, which says nothing about it.")
    elif ok:
        out.print("[green]Right[/]: outputs, log-sum-exps and gradients lie within the bounds of their dtype and size.")
    else:
        out.print("[red]Wrong[/]: do not use a failed backend on this machine, and please report this output.")


def by_reason(results: list[TrialResult]) -> dict[str, list[str]]:
    """The trials a backend declined, by reason."""
    found: dict[str, list[str]] = {}
    for result in results:
        for reason in result.reasons:
            found.setdefault(reason, []).append(result.trial)
    return found


def why(result: TrialResult) -> str:
    """How a trial failed, in one line."""
    if result.judgement is None:
        return (result.failure or "").splitlines()[0]
    return f"off by {result.judgement.error:.1e}, {result.judgement.used:.1f}× its bound"
