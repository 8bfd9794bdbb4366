"""`tilewise plan`: the tile for a problem on a machine, its traffic, its predicted time, and why; or its division over many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import Json, output, progress
from tilewise.cli.options import Backend, Device, Pass, Tile, parse_tile, takes_problem
from tilewise.errors import ArgumentError

if TYPE_CHECKING:
    from tilewise.problem import Problem

Ranks = Annotated[str | None, typer.Option(help="Divide the sequence over so many devices: 64, or 8-1024, or 8,64,512.")]
Lengths = Annotated[str | None, typer.Option(help="With --ranks: sequences packed one after another, such as 4096,1000,2x512.")]
MOST_RANKS = 4096


@takes_problem()
def plan_command(
    problem: Problem,
    device: Device = None,
    pass_: Pass = "auto",
    tile: Tile = None,
    backend: Backend = "auto",
    all_devices: Annotated[bool, typer.Option("--all-devices", help="Every catalogued machine side by side.")] = False,
    ranks: Ranks = None,
    lengths: Lengths = None,
    json: Json = False,
) -> None:
    """Choose the tile for a problem and say what it moves, how long it should take, and why.

    With --ranks: divide the sequence over so many devices, and compare ring, all-gather, Ulysses, 2-D and planned.
    """
    from tilewise.diagnostics.plan import plan

    if ranks is not None or lengths is not None:
        if ranks is None or all_devices or tile is not None or pass_ != "auto" or backend != "auto":
            raise ArgumentError("ranks: takes --device and --lengths beside a problem, no other option; --lengths needs --ranks")
        _compare_schedules(problem, parse_ranks(ranks), device, parse_lengths(lengths), json)
        return
    if all_devices:
        _compare_devices(problem, pass_, backend, json)
        return
    chosen = plan(problem, device, backend=backend, pass_=pass_, tile=parse_tile(tile))
    output(chosen, chosen.to_dict(), json)


def _compare_devices(problem: Problem, pass_: str, backend: str, json: bool) -> None:
    from tilewise.diagnostics.plan import plan
    from tilewise.display import Group, Text
    from tilewise.errors import PlanError
    from tilewise.hardware import catalogue
    from tilewise.model.show import show_comparison

    plans, impossible = [], {}
    for key, spec in catalogue().items():
        try:
            plans.append(plan(problem, spec, pass_=pass_, backend=backend))
        except PlanError as error:
            impossible[key] = str(error)
    notes = [Text((f"{key}: {why}", "dim")) for key, why in impossible.items()]
    data = {"plans": [one.to_dict() for one in plans], "impossible": impossible}
    output(Group(show_comparison(plans), *notes), data, json)


def parse_ranks(text: str) -> list[int]:
    """`64`, `8,64`, or `8-1024`: from 8 on, doubling up to 1024."""
    found: list[int] = []
    for part in text.replace("–", "-").split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ArgumentError(f"ranks: got {text!r}, need a number of devices such as 64, or several such as 8-1024 or 8,64")
        first = int(low)
        last = min(int(high), MOST_RANKS + 1) if dash else first
        found += [first << power for power in range(MOST_RANKS.bit_length() + 1) if first << power <= last]
    if not found or min(found) < 1 or max(found) > MOST_RANKS:
        raise ArgumentError(f"ranks: got {text!r}, need from 1 to {MOST_RANKS} devices")
    return sorted(set(found))


def parse_lengths(text: str | None) -> tuple[int, ...] | None:
    """`4096,1000,2x512`: one sequence of 4096 tokens, one of 1000 and two of 512."""
    if text is None:
        return None
    lengths: list[int] = []
    for part in text.lower().replace("×", "x").split(","):
        times, _, length = part.strip().rpartition("x")
        if not length.isdigit() or not (times or "1").isdigit():
            raise ArgumentError(f"lengths: got {text!r}, need lengths such as 4096,1000,2x512")
        lengths += [int(length)] * int(times or 1)
    return tuple(lengths)


def _compare_schedules(
    problem: Problem, ranks: list[int], device: str | None, lengths: tuple[int, ...] | None, json: bool
) -> None:
    from dataclasses import replace

    from tilewise import distributed, hardware
    from tilewise.distributed.timeline import show_ranks, show_schedules
    from tilewise.model.show import describe_problem

    spec = hardware.device(device)
    if lengths is not None:
        problem = replace(problem, batch=1, seqlen_q=sum(lengths), seqlen_k=sum(lengths))
    table = {}
    with progress() as update:
        for done, count in enumerate(ranks):
            update(f"{count} ranks", done / len(ranks))
            table[count] = distributed.compare(problem, count, spec, lengths=lengths)
    packed = "" if lengths is None else f" · {len(lengths)} packed sequences"
    title = f"{describe_problem(problem)}{packed} · {spec.name}"
    if len(table) == 1:
        shown = show_schedules(f"{title} · {ranks[0]} ranks", table[ranks[0]])
    else:
        shown = show_ranks(title, table)
    data = {
        "device": spec.key,
        "mask": str(problem.mask),
        "lengths": lengths,
        "ranks": [{"ranks": count, "schedules": [row.to_dict() for row in rows]} for count, rows in table.items()],
    }
    output(shown, data, json)
