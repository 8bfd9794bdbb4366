"""`tilewise demo`: exact attention over a long sequence on this machine, against standard attention and SDPA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import Json, console, print_json, progress
from tilewise.display import Bar, Cell, Group, Panel, Shown, Table, Text, format_bytes, format_seconds, format_spread
from tilewise.lab.bench.cases import OURS, Case

if TYPE_CHECKING:
    from tilewise.lab.bench.demo import Demo, Run

NAMES = {"standard": "standard attention", "sdpa": "torch SDPA", OURS: OURS}
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
    from tilewise.lab.bench.demo import run_demo
    from tilewise.lab.bench.machine import require_device

    require_device(device)
    passes = "training" if backward else "forward"
    case = Case("demo", heads, seqlen, head_dim, dtype=dtype, mask=mask, passes=passes, device=device)
    case.problem()
    with progress() as update:
        demo = run_demo(case, rounds, update)
    if json:
        print_json(demo.to_dict())
    else:
        show(demo)
    raise typer.Exit(0 if demo.ok else 1)


def show(demo: Demo) -> None:
    title = Text((f"Exact attention over {demo.case.seqlen:,} tokens", "bold"), (f"  {demo.case.words()}", "dim"))
    blocks: list[Shown] = [title, contest(demo)]
    for run in demo.runs.values():
        if run.reason:
            blocks.append(Text(("not run", "yellow"), f" {NAMES[run.contender]}: {run.reason}"))
    note = "Peak memory is beyond the inputs. Errors are against float64, on the rows recomputed."
    blocks.append(Text((note, "dim")))
    if demo.growth:
        blocks.append(growth(demo))
    console().print(Group(*blocks, Panel("What this shows", Table("", ("", ""), proof(demo), wraps=(1,)))))


def contest(demo: Demo) -> Table:
    from tilewise.dispatch import select
    from tilewise.lab.bench.timing import Spread

    rows: list[list[Cell]] = []
    for run in demo.runs.values():
        name: Cell = NAMES[run.contender]
        if run.contender == OURS:
            name = [(OURS, "bold cyan"), (f" {select(demo.case.problem()).backend.name}", "dim")]
        if run.judgement is None:
            rows.append([name, ("not run", "yellow")])
            continue
        memory, error = format_bytes(run.peak_bytes), f"{run.judgement.error:.1e}"
        if not run.judgement.ok:
            rows.append([name, ("wrong", "red"), "no speed", memory, (error, "red"), f"{run.judgement.used:.1f}×"])
            continue
        times = Spread.of(run.seconds)
        spread = (format_spread(times.p20, times.p80), "dim")
        rows.append([name, format_seconds(times.p50), spread, memory, error, f"{run.judgement.used:.0%}"])
    return Table("", ("", "time", "p20 – p80", "peak memory", "error", "of bound"), rows)


def growth(demo: Demo) -> Table:
    most = max(demo.growth.values()) or 1
    rows = [
        (f"{seqlen:,}", format_bytes(peak), (format_bytes(demo.case.scores_bytes(seqlen)), "dim"), Bar(peak / most, "cyan"))
        for seqlen, peak in demo.growth.items()
    ]
    columns = ("tokens", "tilewise", "all scores at once", "")
    return Table("Peak memory as the sequence grows", columns, rows, left=0, wraps=(3,))


def proof(demo: Demo) -> list[list[Cell]]:
    """What the figures of this run show, and nothing that they do not; each with a mark."""
    standard, sdpa, ours = (demo.runs[name] for name in NAMES)
    if ours.judgement is None or not ours.judgement.ok:
        reason = ours.reason or "its result is outside the bound"
        return [[("✗", "red"), f"Nothing: tilewise did not give a right result ({reason})."]]
    rows = f"{ours.judgement.checked:.1%} of the rows" if ours.judgement.checked < 1 else "all rows"
    exact = (
        f"Exact: {rows}, recomputed in float64, differ by at most {ours.judgement.error:.1e}. "
        f"That is {ours.judgement.used:.0%} of what rounding in {demo.case.problem().dtype} explains."
    )
    speeds = [line for other in (standard, sdpa) if (line := speed_line(ours, other))]
    return [ticked(True, exact), memory_line(demo, ours, standard), *speeds]


def ticked(good: bool, sentence: str) -> list[Cell]:
    return [("✓", "green") if good else ("•", "yellow"), sentence]


def memory_line(demo: Demo, ours: Run, standard: Run) -> list[Cell]:
    """A tick only if it took less than standard attention and no more than doubled with the sequence."""
    peak, half = ours.peak_bytes or 1, demo.case.seqlen >> 1
    other = standard.peak_bytes or demo.case.scores_bytes(demo.case.seqlen)
    who = "standard attention took" if standard.peak_bytes else "the scores alone would be"
    more = peak / max(1, demo.growth[half])
    linear = peak <= 2 * demo.growth[half] + KEPT
    return ticked(
        peak < other and linear,
        f"Memory: {format_bytes(peak)}, as the operating system counts it; {who} {format_bytes(other)}, "
        f"{other / peak:,.0f}× as much. From {half:,} tokens to twice as many it grew {more:.1f}×, all scores 4×.",
    )


def speed_line(ours: Run, other: Run) -> list[Cell] | None:
    from tilewise.lab.bench.timing import ratio

    if not (ours.seconds and other.seconds and other.judgement and other.judgement.ok):
        return None
    times = ratio(other.seconds, ours.seconds).p50
    return ticked(times >= 1, f"Speed: {times:.2f}× that of {NAMES[other.contender]} in this run.")
