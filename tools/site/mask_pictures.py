"""Every mask as a picture of its tiles: what `mask.show` says, coloured."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tools.site.svg import drawing, rect, text

from tilewise import masks
from tilewise.masks.picture import picture
from tilewise.masks.tiles import TileClass

Words = Callable[[str, str], str]
KINDS = {TileClass.EMPTY: "empty", TileClass.PARTIAL: "partial", TileClass.FULL: "full"}


class Shown(NamedTuple):
    """A mask, as one writes it, and the lengths it is drawn for."""

    make: Callable[[], masks.Mask]
    words: str
    queries: int = 1024
    keys: int = 1024
    tile: int = 64


def _selected() -> masks.Mask:
    lists = np.full((8, 3), -1)
    for row in range(8):
        named = sorted({0, row // 2, row})
        lists[row, : len(named)] = named
    return masks.selected(lists, block=128, per=128)


def _dense() -> masks.Mask:
    place = np.arange(1024)
    return masks.dense(np.abs(place[:, None] - place) * np.abs(place[:, None] + place - 1023) < 2**15)


MASKS: dict[str, Shown] = {
    "full": Shown(masks.full, "tw.full()"),
    "causal": Shown(masks.causal, "tw.causal()"),
    "offset": Shown(lambda: masks.causal(offset=256), "tw.causal(offset=256)", queries=512),
    "window": Shown(lambda: masks.causal() & masks.window(300), "tw.causal() & tw.window(300)"),
    "two-sided": Shown(lambda: masks.window(200, 200), "tw.window(200, 200)"),
    "prefix": Shown(lambda: masks.causal() | masks.prefix(256), "tw.causal() | tw.prefix(256)"),
    "sink-window": Shown(
        lambda: masks.causal() & (masks.window(256) | masks.prefix(64)),
        "tw.causal() & (tw.window(256) | tw.prefix(64))",
    ),
    "documents": Shown(
        lambda: masks.causal() & masks.documents(np.repeat([0, 1, 2], (300, 424, 300))[None]),
        "tw.causal() & tw.documents(ids)",
    ),
    "key-padding": Shown(lambda: masks.key_padding([700]), "tw.key_padding([700])"),
    "blocks": Shown(lambda: masks.blocks(np.eye(4, dtype=bool) | (np.arange(4) == 0), 256), "tw.blocks(table, 256)"),
    "selected": Shown(_selected, "tw.selected(chosen, block=128, per=128)"),
    "tree": Shown(
        lambda: masks.causal() & masks.tree([-1, 0, 0, 1, 1, 2, 2, 3]), "tw.causal() & tw.tree(parents)", 8, 16, 1
    ),
    "dense": Shown(_dense, "tw.dense(own)"),
    "not-window": Shown(lambda: masks.causal() & ~masks.window(300), "tw.causal() & ~tw.window(300)"),
}


def tiles_of(shown: Shown, side: float, left: float, top: float) -> tuple[list[str], tuple[int, ...]]:
    """The squares of a mask's tiles, and how many are EMPTY, PARTIAL and FULL."""
    seen = picture(shown.make(), shown.queries, shown.keys, shown.tile)
    squares = [
        rect(left + side * j, top + side * i, side, side, KINDS[TileClass(kind)], round_=0)
        for i, row in enumerate(seen.tiles.classes())
        for j, kind in enumerate(row)
    ]
    return squares, tuple(seen.counts)


def mask_picture(name: str, say: Words) -> tuple[str, str]:
    """What a mask shows of each tile."""
    shown = MASKS[name]
    side, left, top = 15, 74, 56
    parts, counts = tiles_of(shown, side, left, top)
    rows, columns = shown.queries // shown.tile, shown.keys // shown.tile
    right = left + columns * side + 24
    parts.append(text(left, 20, shown.words, anchor="start"))
    parts.append(text(left + columns * side / 2, top - 10, say("keys →", "键 →"), kind="small"))
    parts.append(text(left - 8, top + rows * side / 2, say("queries ↓", "查询 ↓"), anchor="end", kind="small"))
    for i, (kind, count) in enumerate(zip(TileClass, counts, strict=True)):
        y = top + 6 + 34 * i
        parts.append(rect(right, y, side, side, KINDS[kind], round_=0))
        parts.append(text(right + 26, y + 13, f"{kind.name}  {count}", anchor="start"))
    sizes = f"{shown.queries:,} × {shown.keys:,}"
    tile = f"{shown.tile} × {shown.tile}"
    title = say(
        f"{shown.words}: {sizes} queries and keys in tiles of {tile}", f"{shown.words}：{sizes} 个查询与键，{tile} 的分块"
    )
    return drawing(480, max(top + rows * side + 16, 170), title, *parts), title
