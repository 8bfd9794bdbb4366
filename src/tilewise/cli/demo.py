"""`tilewise demo`: exact attention over a long sequence on this machine, against standard attention and SDPA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import (
    Json,
    console,
    human_bytes,
    human_error,
    human_seconds,
    human_spread,
    print_json,
    progress,
)

if TYPE_CHECKING:
    from rich.table import Table

    from tilewise.lab.bench.demo import Demo, Run

BAR = 24
KEPT = 4 * 2**20  # freed pages that an allocator had kept serve a small need unseen


def demo_command(
    seqlen: Annotated[int, typer.Option(min=64, help="Tokens.")] = 16384,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 1,
    head_dim: Annotated[int, typer.Option(min=1, help="Head dimension.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")] = "float32",
    mask: Annotated[str, typer.Option(help="A mask such as 'causal & window(4096)'.")] = "causal",
    backward: Annotated[bool, typer.Option("--backward", help="Training: forward and backward.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is timed, at most.")] = 3,
    json: Json = False,
) -> None:
    """Attend over a long sequence, exactly; compare time, peak memory and error with standard attention and SDPA."""
    from tilewise.lab.bench.cases import Case
    from tilewise.lab.bench.demo import run_demo
    from tilewise.lab.bench.machine import require_device

    require_device(device)
    passes = "training" if backward else "forward"
    case = Case("demo", heads, seqlen, head_dim, dtype=dtype, mask=mask, passes=passes, device=device)
    case.problem()
    with progress() as bar:
        task = bar.add_task("", total=1.0)
        demo = run_demo(case, rounds, lambda what, share: bar.update(task, description=what, completed=share))
    if json:
        print_json(demo.to_dict())
    else:
        show(demo)
    raise typer.Exit(0 if demo.ok else 1)


def show(demo: Demo) -> None:
    from rich.markup import escape
    from rich.panel import Panel
    from rich.text import Text

    from tilewise.model.tables import Folded

    out = console()
    out.print()
    out.print(f"[bold]Exact attention over {demo.case.seqlen:,} tokens[/]  [dim]{demo.case.words()}[/]")
    out.print(Folded(contest(demo)))
    for run in demo.runs.values():
        if run.reason:
            out.print(f"[yellow]not run[/] {NAMES[run.contender]}: {escape(run.reason)}")
    out.print("[dim]Peak memory is beyond the inputs. Errors are against float64, on the rows recomputed.[/]")
    if demo.growth:
        out.print()
        out.print("[bold]Peak memory as the sequence grows[/]")
        out.print(Folded(growth(demo)))
    out.print()
    out.print(
        Panel(
            Text("\n").join(Text.from_markup(line) for line in proof(demo)), title="What this shows", title_align="left"
        )
    )


def contest(demo: Demo) -> Table:
    from rich.table import Table

    from tilewise.dispatch import select
    from tilewise.lab.bench.engine import OURS
    from tilewise.lab.bench.timing import Spread

    table = Table()
    table.add_column("", no_wrap=True)
    for name in ("time", "p20 – p80", "peak memory", "error", "of bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in demo.runs.values():
        name = NAMES[run.contender]
        if run.contender == OURS:
            name = f"[bold cyan]{OURS}[/] [dim]{select(demo.case.problem()).backend.name}[/]"
        if run.judgement is None:
            table.add_row(name, "[yellow]not run[/]")
            continue
        memory, error = human_bytes(run.peak_bytes), human_error(run.judgement.error)
        if not run.judgement.ok:
            table.add_row(name, "[red]wrong[/]", "no speed", memory, f"[red]{error}[/]", f"{run.judgement.used:.1f}×")
            continue
        times = Spread.of(run.seconds)
        spread = f"[dim]{human_spread(times.p20, times.p80)}[/]"
        table.add_row(name, human_seconds(times.p50), spread, memory, error, f"{run.judgement.used:.0%}")
    return table


NAMES = {"standard": "standard", "sdpa": "torch SDPA", "tilewise": "tilewise"}
LONG_NAMES = {**NAMES, "standard": "standard attention"}


def growth(demo: Demo) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("tilewise", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("all scores at once", justify="right", style="dim", no_wrap=True)
    most = max(demo.growth.values()) or 1
    for seqlen, peak in demo.growth.items():
        bar = "█" * max(1, round(BAR * peak / most))
        table.add_row(f"{seqlen:,}", human_bytes(peak), f"[cyan]{bar}[/]", human_bytes(demo.scores_bytes(seqlen)))
    return table


def proof(demo: Demo) -> list[str]:
    """What the figures of this run show, and nothing that they do not."""
    from tilewise.lab.bench.demo import SDPA, STANDARD
    from tilewise.lab.bench.engine import OURS

    ours, sdpa, standard = (demo.runs[name] for name in (OURS, SDPA, STANDARD))
    if ours.judgement is None or not ours.judgement.ok:
        reason = ours.reason or "its result is outside the bound"
        return [f"[red]Nothing: tilewise did not give a right result ({reason}).[/]"]
    rows = f"{ours.judgement.checked:.1%} of the rows" if ours.judgement.checked < 1 else "all rows"
    lines = [
        f"[green]✓[/] Exact: {rows}, recomputed in float64, differ by at most {human_error(ours.judgement.error)}. "
        f"That is {ours.judgement.used:.0%} of what rounding in {demo.case.problem().dtype} explains."
    ]
    lines.append(memory_line(demo, ours, standard))
    for other in (standard, sdpa):
        if line := faster(ours, other):
            lines.append(line)
    return lines


def memory_line(demo: Demo, ours: Run, standard: Run) -> str:
    """A tick only if it took less than standard attention and no more than doubled with the sequence."""
    peak, half = ours.peak_bytes or 1, demo.case.seqlen >> 1
    other = standard.peak_bytes or demo.scores_bytes(demo.case.seqlen)
    who = "standard attention took" if standard.peak_bytes else "the scores alone would be"
    more = peak / max(1, demo.growth[half])
    linear = peak <= 2 * demo.growth[half] + KEPT
    sign = "[green]✓[/]" if peak < other and linear else "[yellow]•[/]"
    return (
        f"{sign} Memory: {human_bytes(peak)}, as the operating system counts it; {who} {human_bytes(other)}, "
        f"{other / peak:,.0f}× as much. From {half:,} tokens to twice as many it grew {more:.1f}×, all scores 4×."
    )


def faster(ours: Run, other: Run) -> str | None:
    from tilewise.lab.bench.timing import ratio

    if not (ours.seconds and other.seconds and other.judgement and other.judgement.ok):
        return None
    times = ratio(other.seconds, ours.seconds).p50
    sign = "[green]✓[/]" if times >= 1 else "[yellow]•[/]"
    return f"{sign} Speed: {times:.2f}× that of {LONG_NAMES[other.contender]} in this run."
