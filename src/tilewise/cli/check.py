"""`tilewise check`: every usable backend against the float64 oracle, within derived bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.console import Json, console, human_seconds, print_json, progress

if TYPE_CHECKING:
    from tilewise.bench.selftest import TrialResult

Findings = dict[tuple[str, str], "list[TrialResult]"]


def check_command(
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", help="Only this one; may be repeated.")
    ] = None,
    json: Json = False,
) -> None:
    """Test every backend that is usable here against float64 attention; exit status 1 if one is wrong."""
    findings = run(backend)
    ok = bool(findings) and all(result.status != "failed" for results in findings.values() for result in results)
    if json:
        print_json({"ok": ok, "backends": [summary(key, results) for key, results in findings.items()]})
    else:
        show(findings, ok)
    raise typer.Exit(0 if ok else 1)


def run(wanted: list[str] | None) -> Findings:
    import torch

    from tilewise import dispatch
    from tilewise.bench.selftest import TRIALS, selftest

    for name in wanted or ():
        dispatch.get(name)  # raises for a name nobody knows
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    places = [(n, d) for n in wanted or dispatch.REGISTRY for d in devices if dispatch.usable(n, d).ok]
    findings: Findings = {}
    with progress() as bar:
        task = bar.add_task("", total=len(places) * len(TRIALS))
        for name, device in places:
            findings[name, device] = []
            for result in selftest(name, device):
                findings[name, device].append(result)
                bar.update(task, advance=1, description=f"{name} on {device}: {result.trial}")
    return findings


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


def show(findings: Findings, ok: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from tilewise.tables import Folded

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
    out.print(Folded(table))
    for (name, device), results in findings.items():
        for result in results:
            if result.status == "failed":
                out.print(f"[red]failed[/] {name} on {device}, {result.trial}: {escape(why(result))}")
        for reason, trials in by_reason(results).items():
            out.print(f"[yellow]declined[/] {name} on {device}: {escape(reason)} [dim]({', '.join(trials)})[/]")
    if ok:
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
