"""`tilewise env`: the machine, what is installed, which backends are usable here and why the rest are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.console import Json, output, progress

if TYPE_CHECKING:
    from tilewise.display import Shown


def env_command(
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure the machine's ceilings anew.")] = False,
    json: Json = False,
) -> None:
    """Show what is usable on this machine, and why the rest is not."""
    facts = gather(remeasure)
    output(shown(facts), facts, json)


def gather(remeasure: bool = False) -> dict[str, Any]:
    import torch

    from tilewise import dispatch
    from tilewise.lab.bench.machine import OPTIONAL, PACKAGES, machine, version_of, versions

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    backends = []
    for name in dispatch.REGISTRY:
        verdicts = {device: dispatch.usable(name, device) for device in devices}
        backends.append(
            {
                "name": name,
                "usable": [device for device, verdict in verdicts.items() if verdict.ok],
                "reasons": {device: list(verdict.reasons) for device, verdict in verdicts.items() if not verdict.ok},
            }
        )
    return {
        "machine": machine(),
        "versions": versions(),
        "missing": [name for name in (*PACKAGES, *OPTIONAL) if version_of(name) is None],
        "backends": backends,
        "ceilings": ceilings(devices, remeasure),
    }


def ceilings(devices: list[str], remeasure: bool) -> dict[str, Any]:
    """What was measured of each device with as many threads as now, or is measured now; None where nothing was."""
    from tilewise.hardware.ceilings import measure, stored

    kept: dict[str, Any] = {}
    with progress() as update:
        for number, device in enumerate(devices):
            if remeasure:
                update(f"measuring {device}: matrix products, copies, reads, exponentials", number / len(devices))
            found = measure(device, refresh=True) if remeasure else stored(device)
            kept[device] = found and {**asdict(found), "noisy": found.noisy, "words": found.words}
    return kept


def shown(facts: dict[str, Any]) -> Shown:
    from tilewise.display import Cell, Group, Table, Text, format_bytes
    from tilewise.display import facts as facts_table

    machine = facts["machine"]
    levels = {"L1d": machine["l1_bytes"], "L2": machine["l2_bytes"], "L3": machine["l3_bytes"]}
    caches = ", ".join(f"{level} {format_bytes(size)}" for level, size in levels.items() if size)
    cpu = f"{machine['cpu']}, {machine['cores']} cores ({machine['isa']}), {machine['threads']} torch threads"
    rows: list[tuple[str, Cell]] = [
        ("system", f"{machine['system']} {machine['architecture']}"),
        ("cpu", cpu),
        ("memory", f"{format_bytes(machine['memory_bytes'])}; {caches}"),
        *(("gpu", f"{gpu['name']} ({gpu['arch']}), {format_bytes(gpu['memory_bytes'])}") for gpu in machine["gpus"]),
    ]
    if not machine["gpus"]:
        rows.append(("gpu", ("none visible to torch", "dim")))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())))
    if facts["missing"]:
        rows.append(("not installed", (", ".join(facts["missing"]), "dim")))
    backends: list[list[Cell]] = []
    for backend in facts["backends"]:
        usable = (", ".join(backend["usable"]), "green") if backend["usable"] else ("nothing here", "yellow")
        against = "\n".join(f"{device}: {'; '.join(reasons)}" for device, reasons in backend["reasons"].items())
        backends.append([(backend["name"], "bold"), usable, (against or "–", "dim")])
    columns = ("backend", "usable on", "why not elsewhere")
    table = Table("Backends, in order of preference", columns, backends, wraps=(1, 2))
    note = Text(("reference builds all N × N scores and is used only when asked for by name.", "dim"))
    return Group(facts_table(rows), table, note, *ceilings_tables(facts["ceilings"]))


def ceilings_tables(measured: dict[str, Any]) -> Iterator[Shown]:
    """What was measured, a figure a row with the spread of its samples."""
    from tilewise.display import Cell, Table, Text, format_count

    for device, found in measured.items():
        if found is None:
            yield Text((f"No ceilings of {device} were measured with these threads; --remeasure measures them.", "dim"))
            continue
        figures = {f"gemm {dtype}": (rate, "FLOP/s") for dtype, rate in found["gemm"].items()}
        figures |= {"copy": (found["copy"], "B/s"), "read": (found["read"], "B/s"), "exp": (found["exp"], "exp/s")}
        rows: list[list[Cell]] = []
        for name, (rate, unit) in figures.items():
            spread = found["spread"].get(name)
            noisy = name in found["noisy"]
            words = "–" if spread is None else f"{spread:.1%}" + ", noisy: not kept" * noisy
            rows.append([name, format_count(rate, unit), (words, "yellow" if noisy else "dim")])
        yield Table(f"Ceilings of {device}, measured {found['words']}", ("figure", "rate", "spread"), rows, wraps=(2,))
