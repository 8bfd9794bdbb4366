"""`tilewise env`: the machine, what is installed, which backends are usable here and why the rest are not."""

from __future__ import annotations

from typing import Any

from tilewise.cli.console import Json, console, human_bytes, print_json


def env_command(json: Json = False) -> None:
    """Show what is usable on this machine, and why the rest is not."""
    facts = gather()
    if json:
        print_json(facts)
    else:
        show(facts)


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


def show(facts: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    machine = facts["machine"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    caches = ", ".join(
        f"{level} {human_bytes(machine[key])}"
        for level, key in (("L1d", "l1_bytes"), ("L2", "l2_bytes"), ("L3", "l3_bytes"))
        if machine[key]
    )
    grid.add_row("system", f"{machine['system']} {machine['architecture']}")
    grid.add_row(
        "cpu", f"{machine['cpu']}, {machine['cores']} cores ({machine['isa']}), {machine['threads']} torch threads"
    )
    grid.add_row("memory", f"{human_bytes(machine['memory_bytes'])}; {caches}")
    for gpu in machine["gpus"]:
        grid.add_row("gpu", f"{gpu['name']} ({gpu['arch']}), {human_bytes(gpu['memory_bytes'])}")
    if not machine["gpus"]:
        grid.add_row("gpu", "[dim]none visible to torch[/]")
    grid.add_row("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    if facts["missing"]:
        grid.add_row("not installed", f"[dim]{', '.join(facts['missing'])}[/]")
    out.print(grid)
    out.print()

    table = Table(title="Backends, in order of preference", title_justify="left", title_style="bold", expand=False)
    table.add_column("backend", style="bold")
    table.add_column("usable on")
    table.add_column("why not elsewhere")
    for backend in facts["backends"]:
        usable = f"[green]{', '.join(backend['usable'])}[/]" if backend["usable"] else "[yellow]nothing here[/]"
        against = "\n".join(f"{device}: {'; '.join(reasons)}" for device, reasons in backend["reasons"].items())
        table.add_row(backend["name"], usable, f"[dim]{against or '–'}[/]")
    out.print(table)
    out.print("[dim]reference builds all N × N scores and is used only when asked for by name.[/]")
