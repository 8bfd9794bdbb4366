"""An Explanation as a person reads it: in a terminal and in a notebook."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tilewise.diagnostics import html
from tilewise.model.show import amount, duration, problem_line, rate
from tilewise.model.tables import Folded

if TYPE_CHECKING:
    from tilewise.diagnostics.explanation import Choice, Explanation

BAR = 16


def count(number: float, unit: str) -> str:
    """A large number with a decimal prefix, three significant digits."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def render(found: Explanation) -> RenderableType:
    parts: list[RenderableType] = [_head(found), _backends(found)]
    if found.planned:
        parts += [_traffic(found), _resources(found)]
    if found.planned and found.measured is not None:
        parts.append(_losses(found))
    why = Table.grid(padding=(0, 1))
    for line in reasons(found):
        why.add_row(Text(" •", style="cyan"), Text(line))
    if why.row_count:
        parts += [Text("why", style="bold"), why]
    return Group(*parts)


def reasons(found: Explanation) -> tuple[str, ...]:
    """Why the plan is as it is, where there is one to be shown, and what else is to be known."""
    return (*(found.plan.reasons if found.planned else ()), *found.notes)


def as_text(found: Explanation) -> str:
    """The same without colours."""
    out = Console(file=io.StringIO(), width=110, color_system=None)
    out.print(render(found))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def headline(found: Explanation) -> list[tuple[str, str]]:
    """The first facts, by name."""
    plan = found.plan
    rows = [
        ("problem", problem_line(found.problem)),
        ("device", f"{found.spec.name}{'' if found.live else ' (not this machine)'}"),
        ("backend", _server(found)),
    ]
    if whose := _figures(found):
        rows.append(("figures", whose))
    rows += _planned(found) if found.planned else [("work", f"{count(plan.work.useful, 'FLOP')} useful")]
    if found.measured is not None:
        taken = found.measured
        useful = plan.work.useful / taken.seconds if taken.seconds else 0.0
        words = f"{duration(taken.seconds)}, {rate(useful)}: {taken.of_ceiling:.0%} of the ceiling"
        rows.append(("measured", f"{words}; largest loss: {taken.loss}" if found.planned else words))
    return rows


def _server(found: Explanation) -> str:
    if found.server is not None:
        return found.server if found.live else f"{found.server} would serve it there"
    return f"none: {found.asked} was asked for and cannot" if found.asked != "auto" else "none can"


def _figures(found: Explanation) -> str | None:
    """Whose the figures are, where they are not those of the backend that serves the call."""
    instead = "the model's for GPUs" if found.spec.is_gpu else "the cpu backend's"
    if found.server == "hopper":
        return "the model's for this GPU; the hopper kernels choose tiles of their own"
    if found.server == "aten":
        return "those of the cpu backend; torch's own kernel chooses its tiles itself"
    if found.planned:
        return None
    why = {
        "tiled": "plain torch walks tiles in an order of its own",
        "reference": "it computes all scores at once, in O(N²) memory, without tiles",
        "triton": "the interpreter is for tests",
        None: "nobody serves the call",
    }.get(found.server, f"{found.server} has no plan")
    return f"none: {why}; tilewise plan shows {instead}"


def _planned(found: Explanation) -> list[tuple[str, str]]:
    """The figures of the plan."""
    plan, tiles, roof = found.plan, found.tiles, found.plan.roofline
    share = tiles.skipped / tiles.total if tiles.total else 0.0
    return [
        ("tile", f"{plan.tile}, {amount(plan.on_chip_bytes)} on chip"),
        (
            "tiles",
            f"{tiles.visited:,} visited, {tiles.masked:,} of them masked; {tiles.skipped:,} skipped ({share:.0%})",
        ),
        ("work", f"{count(plan.work.useful, 'FLOP')} useful, {count(plan.work.executed, 'FLOP')} executed"),
        ("HBM", f"{amount(plan.dram.total)}; {amount(plan.tile_traffic.total)} between cache and units"),
        (
            "roofline",
            f"{_plain(roof.intensity)} FLOP/B, ridge {_plain(roof.ridge)}: {roof.bound} side, "
            f"{rate(roof.attainable)} attainable",
        ),
        ("predicted", f"{duration(plan.seconds)}, {rate(plan.flops_per_second)}, bound by {plan.binding}"),
    ]


def _head(found: Explanation) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    styles = {"backend": "bold cyan", "predicted": "green", "measured": "bold green"}
    for name, words in headline(found):
        grid.add_row(name, Text(words, style=styles.get(name, "")))
    return Panel(grid, title="explain", title_align="left", border_style="cyan", box=box.ROUNDED)


def _titled(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _backends(found: Explanation) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for choice in found.choices:
        mark = ("✓", "bold green") if choice.chosen else ("·", "cyan") if choice.serves else ("✗", "dim")
        reason = _reason(found, choice)
        table.add_row(Text(*mark), Text(choice.name, style="bold" if choice.chosen else ""), Text(reason))
    return Group(Text("backends", style="bold"), table, Text(""))


def _reason(found: Explanation, choice: Choice) -> str:
    if choice.chosen:
        return "chosen" if found.live else "would serve it there"
    return "; ".join(choice.reasons)


def traffic_rows(found: Explanation) -> list[tuple[str, str, str, str]]:
    least, tile, dram = found.plan.compulsory, found.plan.tile_traffic, found.plan.dram
    rows = [
        (
            name,
            amount(least.reads[name] + least.writes[name]),
            amount(dram.reads[name] + dram.writes[name]),
            amount(r + w),
        )
        for name, r, w in tile.tensors()
    ]
    return [*rows, ("all", amount(least.total), amount(dram.total), amount(tile.total))]


def _traffic(found: Explanation) -> RenderableType:
    table = _titled("bytes by tensor", "tensor", "at least", "HBM", "cache to units")
    rows = traffic_rows(found)
    for row in rows[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*rows[-1])
    return Folded(table)


def _resources(found: Explanation) -> RenderableType:
    plan = found.plan
    table = Table(
        title="time by resource", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("resource")
    table.add_column("alone", justify="right")
    table.add_column("of the predicted time")
    for name, seconds in sorted(plan.limits.items(), key=lambda item: -item[1]):
        share = seconds / plan.seconds if plan.seconds else 0.0
        bar = Text("█" * round(share * BAR), style="yellow" if name == plan.binding else "blue")
        table.add_row(name, duration(seconds), Text.assemble(bar, f" {share:.0%}"))
    return table


def _losses(found: Explanation) -> RenderableType:
    taken = found.measured
    assert taken is not None
    table = Table(
        title="where the time went", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("")
    table.add_column("time", justify="right")
    table.add_column("of the measured time")
    for name, seconds in {"the roof allows": taken.ideal, **taken.losses}.items():
        share = seconds / taken.seconds if taken.seconds else 0.0
        bar = Text("█" * round(share * BAR), style="green" if name == "the roof allows" else "red")
        table.add_row(name, duration(seconds), Text.assemble(bar, f" {share:.0%}"))
    return table


def as_html(found: Explanation) -> str:
    plan = found.plan
    longest = max(plan.limits.values(), default=0.0) or 1.0
    parts = [
        html.table(headline(found), numbers=9),
        html.text("Backends", dim=True),
        html.table(
            [
                (
                    "✓" if choice.chosen else "·" if choice.serves else "✗",
                    choice.name,
                    _reason(found, choice),
                )
                for choice in found.choices
            ],
            numbers=9,
        ),
    ]
    if found.planned:
        parts += [
            html.text("Bytes by tensor", dim=True),
            html.table(traffic_rows(found), ("tensor", "at least", "HBM", "cache to units")),
            html.text("Time by resource", dim=True),
            html.bars((name, s / longest, duration(s)) for name, s in sorted(plan.limits.items(), key=lambda x: -x[1])),
        ]
    if found.planned and found.measured is not None:
        taken = found.measured
        spent = {"the roof allows": taken.ideal, **taken.losses}
        parts += [
            html.text("Where the time went", dim=True),
            html.bars((name, s / taken.seconds, duration(s)) for name, s in spent.items()),
        ]
    parts += [html.text(f"• {line}") for line in reasons(found)]
    return html.card("explain", parts, "#3b82c4")
