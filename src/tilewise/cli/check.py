"""`tilewise check`: every usable backend against the float64 oracle, within derived bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.console import USAGE_ERROR, Json, console, print_json, progress
from tilewise.display import Cell, Group, Shown, Table, Text, format_seconds

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
        summaries = [summary(key, results) for key, results in findings.items()]
        print_json({"ok": ok, "backends": summaries, "unusable": unusable})
    else:
        show(findings, unusable, ok)
    raise typer.Exit(0 if ok else 1 if findings else USAGE_ERROR)


def run(wanted: list[str] | None, every: bool) -> tuple[Findings, Reasons]:
    """What the usable backends did, and why the others are not usable."""
    from tilewise import dispatch
    from tilewise.lab.bench.selftest import attempt, trials

    for name in wanted or ():
        dispatch.get(name)  # raises for a name nobody knows
    findings: Findings = {}
    unusable: Reasons = {}
    for name in wanted or dispatch.REGISTRY:
        verdicts = {device: dispatch.usable(name, device) for device in dispatch.REGISTRY[name].devices}
        findings |= {(name, device): [] for device, verdict in verdicts.items() if verdict.ok}
        if not any(verdict.ok for verdict in verdicts.values()):
            unusable[name] = {device: verdict.reasons for device, verdict in verdicts.items()}
    with progress() as update:
        planned = [(name, device, trials(name, device, every)) for name, device in findings]
        done, total = 0, sum(len(cases) for _, _, cases in planned)
        for name, device, cases in planned:
            for number, case in enumerate(cases, 1):
                update(f"{name} on {device}, {number} of {len(cases)}: {case.name}", done / total)
                findings[name, device].append(attempt(case, name, device))
                done += 1
    return findings, unusable


def summary(key: tuple[str, str], results: list[TrialResult]) -> dict[str, Any]:
    right = [result.judgement if result.judgement and result.judgement.ok else None for result in results]
    return {
        "backend": key[0],
        "device": key[1],
        **{status: sum(r.status == status for r in results) for status in ("passed", "failed", "declined")},
        "bound_used": max((judgement.used for judgement in right if judgement), default=0.0),
        "seconds": sum(result.seconds for result in results),
        "trials": [
            {
                "trial": result.trial,
                "status": result.status,
                "error": judgement.error if judgement else None,
                "bound_used": judgement.used if judgement else None,
                "reasons": list(result.reasons),
                "failure": result.failure,
            }
            for result, judgement in zip(results, right, strict=True)
        ],
    }


def show(findings: Findings, unusable: Reasons, ok: bool) -> None:
    rows: list[list[Cell]] = []
    notes: list[Shown] = []
    for (name, device), results in findings.items():
        facts = summary((name, device), results)
        used = facts["bound_used"]
        meter = f"{'█' * round(10 * used):░<10} {used:4.0%}"
        styles = {"passed": "green", "failed": "red", "declined": "yellow"}
        counts: list[Cell] = [(str(facts[kind]), style if facts[kind] else "") for kind, style in styles.items()]
        rows.append([name, device, *counts, meter, format_seconds(facts["seconds"])])
        for result in results:
            if result.status == "failed":
                notes.append(Text(("failed", "red"), f" {name} on {device}, {result.trial}: {why(result)}"))
        for reason in dict.fromkeys(reason for result in results for reason in result.reasons):
            names = ", ".join(result.trial for result in results if reason in result.reasons)
            notes.append(Text(("declined", "yellow"), f" {name} on {device}: {reason} ", (f"({names})", "dim")))
    for name, by_device in unusable.items():
        reasons = dict.fromkeys(reason for reasons in by_device.values() for reason in reasons)
        notes.append(Text(("not usable here", "yellow"), f" {name}: {'; '.join(reasons)}"))
    if not findings:
        verdict, meaning = ("Nothing was checked", "yellow"), "no backend asked for is usable here, which says nothing about it"
    elif ok:
        verdict, meaning = ("Right", "green"), "outputs, log-sum-exps and gradients lie within the bounds of their dtype and size"
    else:
        verdict, meaning = ("Wrong", "red"), "do not use a failed backend on this machine, and please report this output"
    columns = ("backend", "on", "passed", "failed", "declined", "worst, of bound", "time")
    table = [Table("Each backend against float64 attention", columns, rows, left=2)] if rows else []
    console().print(Group(*table, *notes, Text(verdict, f": {meaning}.")))


def why(result: TrialResult) -> str:
    """How a trial failed, in one line."""
    if result.judgement is None:
        return (result.failure or "").splitlines()[0]
    return f"off by {result.judgement.error:.1e}, {result.judgement.used:.1f}× its bound"
