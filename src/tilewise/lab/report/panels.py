"""Two panels about the chip: on which banks of shared memory a tile falls, and what the plan's tiles take of its room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilewise.backends.cpu.frames import ROOM
from tilewise.hardware import DeviceSpec
from tilewise.lab.simulator.banks import ACCESSES, BANKS, WORD, Layout, accesses, layouts, tile_conflicts
from tilewise.model import Plan, TilePlan

KEYS, ITEMSIZE = 128, 2
"""The tile of K whose banks are shown, in a 16-bit dtype."""
SMALL = 0.02
"""Buffers that take less of the room are shown as one, but for those of the call's tensors."""
TENSORS = ("Q", "K", "V", "O")
COPIES = {"W": "P", "kept": "P"}
"""Strips of weights, beside those named for the tensor they hold in another order, such as Q_panels."""


def banks(dims: Iterable[int]) -> dict[str, dict[str, Any]]:
    """By head dim and access: where one access falls in each layout, and what reading the whole tile takes."""
    return {f"{dim}|{access}": _access(dim, access) for dim in dims for access in ACCESSES}


def _access(dim: int, access: str) -> dict[str, Any]:
    row_bytes = dim * ITEMSIZE
    groups = accesses(KEYS, row_bytes, access)
    shown = groups[len(groups) // 3]
    table = {}
    for name, layout in layouts(access, row_bytes).items():
        found = tile_conflicts(KEYS, dim, ITEMSIZE, access, layout)
        table[name] = {
            "cells": cells(shown, layout, row_bytes),
            "degree": found.degree,
            "transactions": found.transactions,
            "ideal": found.ideal,
            "extra": KEYS * layout.pad,
        }
    return {"dim": dim, "access": access, "keys": KEYS, "banks": BANKS, "layouts": table}


def cells(group: list[tuple[int, int]], layout: Layout, row_bytes: int) -> list[list[int]]:
    """For each word of one access: its place in the access's rows, its bank, and how many words that bank must give."""
    words = [layout.address(row, byte, row_bytes) // WORD for row, byte in group]
    load = [len({other for other in words if other % BANKS == word % BANKS}) for word in words]
    start = group[0][0]
    return [[row - start, word % BANKS, goes] for (row, _), word, goes in zip(group, words, load, strict=True)]


def budget(found: Plan) -> dict[str, Any]:
    """What each kernel of the call holds on the chip, buffer by buffer, of the room that one block (a thread's frame) has."""
    room = room_of(found)
    shown = found.passes or ((found.tile,) if found.on_chip else ())
    rows = [_pass(tile, dict(tile.on_chip) or _of(found, tile), room) for tile in shown]
    return {"room": room, "frame": found.figures_of == "cpu", "resident": found.resident, "passes": [row for row in rows if row]}


def _of(found: Plan, tile: TilePlan) -> dict[str, int]:
    """The evaluation's buffers, where the tile itself does not say."""
    return dict(found.on_chip) if tile is found.tile or tile.pass_ == found.tile.pass_ else {}


def room_of(found: Plan) -> int:
    """Bytes that the buffers of a block may take: of shared memory, of a CPU thread's frame, of L1 where the model plans."""
    spec: DeviceSpec = found.spec
    return ROOM if found.figures_of == "cpu" else spec.sram_per_block if spec.is_gpu else spec.sram_bytes


def _pass(tile: TilePlan, buffers: dict[str, int], room: int) -> dict[str, Any] | None:
    if not buffers or tile.pass_ in ("backward_preprocess", "backward_postprocess", "merge"):
        return None
    held: dict[str, int] = {}
    for name, size in buffers.items():
        of = COPIES.get(name, name.removesuffix("_panels").removesuffix("_columns"))
        held[of] = held.get(of, 0) + size
    large = {name: size for name, size in held.items() if name in TENSORS or size >= SMALL * room}
    used = sum(buffers.values())
    return {
        "pass": tile.pass_,
        "tile": str(tile),
        "stages": tile.stages,
        "buffers": large,
        "small": used - sum(large.values()),
        "used": used,
        "left": room - used,
    }
