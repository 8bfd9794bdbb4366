"""`tilewise bench`: side by side with SDPA and whatever else is installed; no speed is printed for a wrong result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.console import Json, console, human_error, human_seconds, human_spread, print_json, progress

if TYPE_CHECKING:
    from tilewise.lab.bench.cases import Case
    from tilewise.lab.bench.engine import Mean, Record, Result
    from tilewise.lab.bench.overhead import Overhead
    from tilewise.lab.bench.timing import Effort

OVERHEAD = "overhead"
OWN = "own"


def bench_command(
    suite: Annotated[
        str, typer.Option(help="quick, smoke, cpu, cpu-avx512, cpu-avx512-16, gpu, or overhead (a call beside its arithmetic).")
    ] = "quick",
    case: Annotated[list[str] | None, typer.Option(metavar="<str>", help="Only this case of the suite; may be repeated.")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<str>",
            help="Against whom: sdpa, standard, flash_attn, xformers, tilewise:<backend>; may be repeated.",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help=r"A case of your own instead of a suite: batch,heads\[/kv heads],length\[/keys],head dim."),
    ] = None,
    mask: Annotated[str, typer.Option(help="With --shape: a mask such as 'causal & window(256)'.")] = "full",
    dtype: Annotated[str, typer.Option(help="With --shape.")] = "float32",
    backward: Annotated[bool, typer.Option("--backward", help="With --shape: time forward and backward.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: as the suite says.")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long to time each case.")] = 3.0,
    save: Annotated[Path | None, typer.Option(help="Also write the record as JSON into this directory.")] = None,
    json: Json = False,
) -> None:
    """Time tilewise side by side with its peers, interleaved; exit status 1 for a wrong result or a broken promise."""
    from tilewise.lab.bench import records
    from tilewise.lab.bench.engine import geometric_means
    from tilewise.lab.bench.suites import suite as by_name
    from tilewise.lab.bench.timing import Effort

    effort = Effort(seconds=seconds)
    if suite == OVERHEAD and shape is None:
        found = run_overhead(effort)
        document = records.document(OVERHEAD, [], overhead=[one.to_dict() for one in found])
        ok = all(one.passed is not False for one in found)
        if not json:
            show_overhead(found, document)
    else:
        chosen = own_case(shape, mask, dtype, backward, device) if shape else cases(suite, case, device)
        measured = run(chosen, peer, effort)
        means = [] if shape or case else geometric_means(measured, by_name(suite).means)
        document = records.document(OWN if shape else suite, measured, means=[mean.to_dict() for mean in means])
        ok = all(record.right and record.passed is not False for record in measured) and all(m.passed for m in means)
        if not json:
            show(measured, means, document)
    document["ok"] = ok
    if json:
        print_json(document)
    if save:
        path = records.save(document, save)
        if not json:
            console().print(f"[dim]written to {path}[/]")
    raise typer.Exit(0 if ok else 1)


def cases(suite: str, wanted: Sequence[str] | None, device: str | None) -> list[Case]:
    from dataclasses import replace

    from tilewise.errors import ArgumentError
    from tilewise.lab.bench.suites import suite as by_name

    found = [replace(one, device=device) if device else one for one in by_name(suite).cases]
    for name in wanted or ():
        if name not in {one.name for one in found}:
            raise ArgumentError(f"case: got {name!r}, suite {suite!r} has {', '.join(one.name for one in found)}")
    return [one for one in found if not wanted or one.name in wanted]


def own_case(shape: str, mask: str, dtype: str, backward: bool, device: str | None) -> list[Case]:
    from tilewise.errors import ArgumentError
    from tilewise.lab.bench.cases import Case

    try:
        batch, heads, length, dim = shape.split(",")
        (h, *hk), (m, *n) = ([int(x) for x in part.split("/")] for part in (heads, length))
        case = Case(
            OWN,
            batch=int(batch),
            heads=h,
            kv_heads=hk[0] if hk else None,
            seqlen=m,
            kv_seqlen=n[0] if n else None,
            head_dim=int(dim),
            mask=mask,
            dtype=dtype,
            passes="training" if backward else "forward",
            device=device or "cpu",
        )
    except ValueError:
        raise ArgumentError(
            f"shape: got {shape!r}, need batch,heads[/kv heads],length[/keys],head dim such as 1,16/4,2048,64"
        ) from None
    case.problem()
    return [case]


def run(chosen: Sequence[Case], peers: Sequence[str] | None, effort: Effort) -> list[Record]:
    from tilewise.lab.bench.contenders import contender, default_peers
    from tilewise.lab.bench.engine import OURS, measure
    from tilewise.lab.bench.machine import require_device

    for case in chosen:
        require_device(case.device)
    records = []
    with progress() as bar:
        task = bar.add_task("", total=float(len(chosen)))
        for done, case in enumerate(chosen):
            names = dict.fromkeys([OURS, *case.against, *(peers or default_peers(case))])
            records.append(
                measure(
                    case,
                    [contender(name) for name in names],
                    effort,
                    lambda what, share, done=done: bar.update(task, description=what, completed=done + share),  # type: ignore[misc]
                )
            )
    return records


def run_overhead(effort: Effort) -> list[Overhead]:
    from tilewise.lab.bench.overhead import measure_overhead

    with progress() as bar:
        task = bar.add_task("", total=1.0)
        return measure_overhead(effort, lambda what, share: bar.update(task, description=what, completed=share))


def show(records: Sequence[Record], means: Sequence[Mean], document: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from tilewise.model.tables import Folded

    out = console()
    out.print(f"[bold]tilewise bench, suite {document['suite']}[/]")
    table = Table(box=None)
    table.add_column("", no_wrap=True)
    compared = any(record.errors for record in records)
    for name in ("median", "p20 – p80", "tilewise is", "error", "of bound", *(["errors of its"] if compared else [])):
        table.add_column(name, justify="right", no_wrap=True)
    notes = []
    for record in records:
        table.add_row()
        table.add_row(f"[bold]{record.case.name}[/]")
        for result in record.results:
            table.add_row(*columns(record, result)[: len(table.columns)])
            if result.reasons:
                notes.append(f"{record.case.name}, {result.contender}: {escape('; '.join(result.reasons))}")
    out.print(Folded(table))
    out.print()
    for mean in means:
        ratio = "unknown, a case has no ratio" if mean.ratio is None else f"{mean.ratio:.2f}×"
        verdict = f"[green]≥ {mean.floor}[/]" if mean.passed else f"[red]below {mean.floor}[/]"
        out.print(f"[bold]{mean.group}[/]: geometric mean {ratio} {verdict}")
    for record in records:
        out.print(f"[dim]{record.case.name}: {record.case.words()}[/]")
    for note in notes:
        out.print(f"[yellow]not run[/] {note}")
    show_machine(document)
    out.print("[dim]Contenders take turns. Error: largest difference from float64 on the rows recomputed.[/]")
    if compared:
        out.print(
            "[dim]Errors of its: tilewise's largest and relative Frobenius error in the rival's, over all elements; "
            "the worst of output and gradients.[/]"
        )


def columns(record: Record, result: Result) -> tuple[str, ...]:
    from tilewise.lab.bench.engine import OURS

    name = f"  {result.contender}"
    if result.contender == OURS:
        name = f"  [cyan]{OURS}[/] [dim]{record.choice['backend']}[/]"
    if result.judgement is None:
        return name, "[yellow]not run[/]"
    error, used = human_error(result.judgement.error), f"{result.judgement.used:.0%}"
    if result.times is None:
        return name, "[red]wrong[/]", "no speed", "", f"[red]{error}[/]", f"[red]{used}[/]"
    spread = f"[dim]{human_spread(result.times.p20, result.times.p80)}[/]"
    return name, human_seconds(result.times.p50), spread, speed(record, result), error, used, accuracy(record, result)


def speed(record: Record, result: Result) -> str:
    """How tilewise compares with this contender; for the fastest rival by paired rounds, with the floor."""
    from tilewise.lab.bench.engine import OURS

    ours = record.result(OURS)
    if result.contender == OURS or not ours or not ours.times or not result.times:
        return ""
    if record.ratio is None or result.contender != record.rival:
        return f"{result.times.p50 / ours.times.p50:.2f}×"
    text = f"{record.ratio.p50:.2f}×"
    if record.fast is None:
        return text
    return f"[green]{text} ≥ {record.case.floor}[/]" if record.fast else f"[red]{text} < {record.case.floor}[/]"


def accuracy(record: Record, result: Result) -> str:
    """Our errors beside the rival's, where the case asks."""
    if record.errors is None or result.contender != record.rival:
        return ""
    colour = "green" if record.accurate else "red"
    return f"[{colour}]{record.errors.largest:.2f} / {record.errors.frobenius:.2f}[/]"


def show_overhead(found: Sequence[Overhead], document: dict[str, Any]) -> None:
    from rich.table import Table

    from tilewise.model.tables import Folded

    out = console()
    out.print("[bold]A call without its arithmetic, against all of an SDPA call[/]  [dim]1×1×16×64, CPU[/]")
    table = Table()
    for name in ("call", "tilewise", "SDPA", "in SDPA calls", "p20 – p80", "limit"):
        table.add_column(name, justify="left" if name == "call" else "right", no_wrap=True)
    for one in found:
        colour = {True: "green", False: "red", None: "default"}[one.passed]
        table.add_row(
            one.name,
            human_seconds(one.null.p50),
            human_seconds(one.sdpa.p50),
            f"[{colour}]{one.cost.p50:.2f}[/]",
            f"{one.cost.p20:.2f} – {one.cost.p80:.2f}",
            f"≤ {one.limit}" if one.limit else "–",
        )
    out.print(Folded(table))
    show_machine(document)


def show_machine(document: dict[str, Any]) -> None:
    machine, versions = document["machine"], document["versions"]
    devices = "".join(f", {gpu['name']}" for gpu in machine["gpus"])
    place = f"{machine['cpu']}, {machine['threads']} threads{devices}"
    console().print(f"[dim]{place}; torch {versions['torch']}, {document['date']}[/]")
