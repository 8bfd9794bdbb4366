"""`tilewise env`: the machine, what is installed, which backends are usable here and why the rest are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewise.cli.console import Json, output

if TYPE_CHECKING:
    from tilewise.display import Shown


def env_command(json: Json = False) -> None:
    """Show what is usable on this machine, and why the rest is not."""
    facts = gather()
    output(shown(facts), facts, json)


def gather() -> dict[str, Any]:
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
    }


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
    return Group(facts_table(rows), table, note)
