"""`tilewise bench`: side by side with SDPA and whatever else is installed; no speed is printed for a wrong result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.console import INTERRUPTED, Interruption, Json, console, keeping, print_json, progress
from tilewise.cli.sweep import run_sweeps
from tilewise.display import Cell, Group, Table, Text, format_seconds, format_spread
from tilewise.errors import ArgumentError
from tilewise.lab.bench.cases import OURS, Case

if TYPE_CHECKING:
    from tilewise.lab.bench.engine import Mean, Record, Result

OVERHEAD = "overhead"
OWN = "own"


def bench_command(
    suite: Annotated[
        str,
        typer.Option(
            help="quick, smoke, cpu, cpu-avx512, cpu-avx512-16, features, cache; on a GPU gpu, features-gpu, masks-gpu, "
            "cache-gpu, hopper, hopper-backward, hopper-features; "
            "or overhead (a call beside its arithmetic)."
        ),
    ] = "quick",
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Only this case of the suite, or all with this in their names; may be repeated."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<str>",
            help="Against whom: sdpa, sdpa-flash, sdpa-cudnn, sdpa-efficient, flex, fa4, fa4-packed, flash_attn, xformers, "
            "standard, "
            "tilewise:<backend>; over a cache contiguous, plain, unshared, cache-sdpa, cache-cudnn, cudnn-paged, varlen_attn; "
            "may be repeated.",
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
    against: Annotated[
        list[Path] | None,
        typer.Option(metavar="<path>", help="Another checkout of tilewise, in a process of its own; may be repeated."),
    ] = None,
    sweep: Annotated[str | None, typer.Option(help="tiles: every tile of a kernel, beside its predicted time.")] = None,
    backend: Annotated[str, typer.Option(help="With --sweep: whose tiles; auto: whoever serves the case.")] = "auto",
    pass_: Annotated[
        str, typer.Option("--pass", help="With --sweep: which kernel: auto, forward, decode, backward, backward_dq, ….")
    ] = "auto",
    workers: Annotated[int, typer.Option(min=0, help="Processes that compile kernels before the first case.")] = 0,
    limit: Annotated[float | None, typer.Option(help="Seconds after which no further case is begun.")] = None,
    save: Annotated[Path | None, typer.Option(help="Also write the record as JSON into this directory.")] = None,
    json: Json = False,
) -> None:
    """Time tilewise side by side with its peers, interleaved; exit status 1 for a wrong result or a broken promise."""
    from tilewise.lab.bench import records
    from tilewise.lab.bench.engine import geometric_means, measure_all
    from tilewise.lab.bench.overhead import measure_overhead
    from tilewise.lab.bench.suites import suite as by_name
    from tilewise.lab.bench.sweep import jobs_for
    from tilewise.lab.bench.timing import Effort

    effort = Effort(seconds=seconds)
    if sweep not in (None, "tiles"):
        raise ArgumentError(f"sweep: got {sweep!r}, need tiles")
    chosen = own_case(shape, mask, dtype, backward, device) if shape else cases(suite, case, device) if suite != OVERHEAD else []
    if sweep:
        if over := [one.name for one in chosen if one.cache]:
            raise ArgumentError(f"sweep: {over[0]} is over a cache, whose tiles are not swept; choose a suite without")
        document = run_sweeps(jobs_for(chosen, backend, pass_), effort, workers, limit, quiet=json)
        ok = document["ok"]
    elif suite == OVERHEAD and shape is None:
        with progress() as update:
            overheads = measure_overhead(effort, update)
        document = records.document(OVERHEAD, [], overhead=overheads)
        ok = all(one["passed"] is not False for one in overheads)
        if not json:
            show_overhead(document)
    else:
        measured: list[Record] = []
        with keeping(measured) as interruption, progress() as update:
            measure_all(chosen, peer, effort, against or (), workers, limit, update, measured.append)
        means = [] if shape else geometric_means(contested(measured, suite, whole=not case), by_name(suite).means)
        document = records.document(OWN if shape else suite, measured, means=[mean._asdict() for mean in means])
        if left_out := [one.name for one in chosen[len(measured) :]]:
            document["left_out"] = left_out
        document["interrupted"] = interruption.came
        ok = all(record.right and record.passed is not False for record in measured) and all(m.passed for m in means)
        if not json:
            show(measured, means, document, interruption)
    document["ok"] = ok
    if json:
        print_json(document)
    if save:
        path = records.save(document, save)
        if not json:
            console().print(f"[dim]written to {path}[/]")
    raise typer.Exit(INTERRUPTED if document.get("interrupted") else 0 if ok else 1)


def cases(suite: str, wanted: Sequence[str] | None, device: str | None) -> list[Case]:
    from tilewise.lab.bench.suites import suite as by_name

    known = {one.name: replace(one, device=device) if device else one for one in by_name(suite).cases}
    chosen = set() if wanted else set(known)
    for word in wanted or ():
        found = {word} & set(known) or {name for name in known if word in name}
        if not found:
            raise ArgumentError(f"case: got {word!r}, suite {suite!r} has {', '.join(known)}")
        chosen |= found
    return [one for name, one in known.items() if name in chosen]


def contested(records: Sequence[Record], suite: str, whole: bool) -> list[Record]:
    """Those whose ratios make means: unless the suite is run as a `whole`, of groups that are all there."""
    from tilewise.lab.bench.suites import suite as by_name

    names = {record.case.name for record in records}
    partly = set() if whole else {one.group for one in by_name(suite).cases if one.name not in names}
    return [record for record in records if record.contested and record.case.group not in partly]


def own_case(shape: str, mask: str, dtype: str, backward: bool, device: str | None) -> list[Case]:
    try:
        batch, heads, length, dim = shape.split(",")
        (h, *hk), (m, *n) = ([int(x) for x in part.split("/")] for part in (heads, length))
        case = Case(OWN, h, m, int(dim), int(batch), hk[0] if hk else None, n[0] if n else None)
    except ValueError:
        needed = "batch,heads[/kv heads],length[/keys],head dim such as 1,16/4,2048,64"
        raise ArgumentError(f"shape: got {shape!r}, need {needed}") from None
    case = replace(case, mask=mask, dtype=dtype, passes="training" if backward else "forward", device=device or "cpu")
    case.problem()
    return [case]


def show(records: Sequence[Record], means: Sequence[Mean], document: dict[str, Any], interruption: Interruption) -> None:
    from tilewise.lab.bench.engine import checkout_means

    compared = any(record.errors for record in records)
    rates = any(result.rate for record in records for result in record.results)
    more = ["errors of its"] if compared else ["GB/s"] if rates else []
    columns = ["", "median", "p20 – p80", "tilewise is", "error", "of bound", *more]
    rows: list[list[Cell]] = []
    notes = []
    for record in records:
        rows += [[""], [(record.case.name, "bold")]]
        for result in record.results:
            rows.append(cells(record, result)[: len(columns)])
            if result.reasons:
                reasons = "; ".join(result.reasons)
                notes.append(Text(("not run", "yellow"), f" {record.case.name}, {result.contender}: {reasons}"))
    if left_out := document.get("left_out"):
        notes.append(Text(("left out", "yellow"), f" {interruption}: {', '.join(left_out)}"))
    lines = [
        *map(mean_line, means),
        *(Text((name, "bold"), f": tilewise is {average:.3f}× as fast in geometric mean, {lowest:.3f}× at worst")
          for name, average, lowest in checkout_means(records)),
        *(Text((f"{record.case.name}: {record.case.words()}", "dim")) for record in records),
        *notes,
        machine_line(document),
        Text(("Contenders take turns. Error: largest difference from float64 on the rows recomputed.", "dim")),
    ]
    if compared:
        explained = "Errors of its: tilewise's largest and relative Frobenius error in the rival's, over all elements; "
        lines.append(Text((explained + "the worst of output and gradients.", "dim")))
    if rates:
        explained = "GB/s: bytes of K and V that a call reads; caches take turns, so that none is found in L2 or L3."
        lines.append(Text((explained, "dim")))
    title = Text((f"tilewise bench, suite {document['suite']}", "bold"))
    console().print(Group(title, Table("", columns, rows), *lines))


def mean_line(mean: Mean) -> Text:
    ratio = "unknown, a case has no ratio" if mean.ratio is None else f"{mean.ratio:.2f}×"
    verdict = (f"≥ {mean.floor}", "green") if mean.passed else (f"below {mean.floor}", "red")
    return Text((mean.group, "bold"), f": geometric mean {ratio} ", verdict)


def cells(record: Record, result: Result) -> list[Cell]:
    name: Cell = f"  {result.contender}"
    if result.contender == OURS:
        name = [(f"  {OURS}", "cyan"), (f" {record.choice['backend']}", "dim")]
    if result.judgement is None and (result.judged or result.times is None):
        return [name, ("not run", "yellow")]
    error, used = "not judged", ""  # who draws weights to drop, or leaves out a feature, computes something else
    if result.judgement is not None:
        error, used = f"{result.judgement.error:.1e}", f"{result.judgement.used:.0%}"
    if result.times is None:
        return [name, ("wrong", "red"), "no speed", "", (error, "red"), (used, "red")]
    times = result.times
    spread = (format_spread(times.p20, times.p80), "dim")
    last = reading(record, result) if result.rate else accuracy(record, result)
    return [name, format_seconds(times.p50), spread, speed(record, result), error, used, last]


def speed(record: Record, result: Result) -> Cell:
    """How tilewise compares with this contender; for the fastest rival by paired rounds, with the floor."""
    ours = record.result(OURS)
    if result.contender == OURS or not ours or not ours.times or not result.times:
        return ""
    if result.contender in record.checkouts:
        return f"{record.checkouts[result.contender].p50:.3f}×"
    if result.contender in record.least:
        return held(record.least[result.contender].p50, dict(record.case.least)[result.contender], "×", digits=3)
    if record.ratio is None or result.contender != record.rival:
        return f"{result.times.p50 / ours.times.p50:.2f}×"
    return held(record.ratio.p50, record.case.floor, "×", digits=3 if record.case.cache else 2)


def held(value: float, floor: float | None, unit: str = "", digits: int = 2) -> Cell:
    """A figure and what it must reach."""
    text = f"{value:.{digits}f}{unit}"
    if floor is None:
        return text
    return (f"{text} ≥ {floor:g}", "green") if value >= floor else (f"{text} < {floor:g}", "red")


def reading(record: Record, result: Result) -> Cell:
    """Gigabytes of K and V a second."""
    floor = record.case.rate if result.contender == OURS else None
    return held((result.rate or 0.0) / 1e9, None if floor is None else floor / 1e9, digits=1)


def accuracy(record: Record, result: Result) -> Cell:
    """Our errors beside the rival's, where the case asks."""
    if record.errors is None or result.contender != record.rival:
        return ""
    return (f"{record.errors.largest:.2f} / {record.errors.frobenius:.2f}", "green" if record.accurate else "red")


def show_overhead(document: dict[str, Any]) -> None:
    rows: list[list[Cell]] = []
    for one in document["overhead"]:
        cost, color = one["cost"], {True: "green", False: "red", None: ""}[one["passed"]]
        times = (format_seconds(spread["p50"]) for spread in one["seconds"].values())
        limit = f"≤ {one['limit']}" if one["limit"] else "–"
        rows.append([one["name"], *times, (f"{cost['p50']:.2f}", color), f"{cost['p20']:.2f} – {cost['p80']:.2f}", limit])
    title = Text(("A call without its arithmetic, against all of an SDPA call", "bold"), ("  1×1×16×64, CPU", "dim"))
    columns = ("call", "tilewise", "SDPA", "in SDPA calls", "p20 – p80", "limit")
    console().print(Group(title, Table("", columns, rows), machine_line(document)))


def machine_line(document: dict[str, Any]) -> Text:
    machine, versions = document["machine"], document["versions"]
    devices = "".join(f", {gpu['name']}" for gpu in machine["gpus"])
    place = f"{machine['cpu']}, {machine['threads']} threads{devices}"
    return Text((f"{place}; torch {versions['torch']}, {document['date']}", "dim"))
