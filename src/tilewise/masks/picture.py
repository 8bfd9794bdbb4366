"""A mask as a picture of its tiles: text with three shades in a terminal, a small SVG in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from tilewise.display import Line, Shown
from tilewise.errors import MaskError
from tilewise.masks.algebra import Blocks, Dense, Documents, Mask, Selected
from tilewise.masks.arrays import Binding
from tilewise.masks.build import integer
from tilewise.masks.forms import mask_sides, text
from tilewise.masks.rectangles import Array
from tilewise.masks.tiles import TileClass, TileCounts, TileMap

USUAL = 1024
"""Queries and keys of a mask that holds no tensors to tell them."""
FEWEST, MOST = 16, 1024
"""Tiles of the longer side if no tile is asked for: not so few if they can be smaller, not so many if they can be larger."""
USUAL_TILE = 128
TEXT_WIDTH, HTML_WIDTH = 64, 96
"""Places of the longer side; where there are more tiles, several share one."""
SHADES = {TileClass.EMPTY: "·", TileClass.PARTIAL: "▒", TileClass.FULL: "█"}
_COLOURS = {TileClass.PARTIAL: "#8fb8de", TileClass.FULL: "#2f6fab"}
_LINE = '<div style="font:13px/1.5 system-ui,sans-serif">{}</div>'


@dataclass(frozen=True)
class TilePicture(Shown):
    """The tiles of one sequence and head, and how many there are of each class."""

    mask: Mask
    queries: int
    keys: int
    tile: tuple[int, int]
    counts: TileCounts
    part: str
    """Which of several sequences and heads is shown; "" of one."""
    tiles: TileMap

    def __repr__(self) -> str:
        return str(self)

    def text_lines(self, width: int) -> Iterator[Line]:
        most = min(TEXT_WIDTH, width)
        share = -(-max(self.tiles.rows, self.tiles.cols) // most) or 1
        doubled = 2 * max(self.tiles.rows, self.tiles.cols) <= most  # characters are twice as high as wide
        cells = _reduced(self.tiles, share if doubled else 2 * share, share)
        for row in cells:
            yield [("".join(SHADES[TileClass(x)] * (1 + doubled) for x in row), "")]
        yield from ([(line, "dim")] for line in self._captions(cells.shape))

    def html(self) -> str:
        share = -(-max(self.tiles.rows, self.tiles.cols) // HTML_WIDTH) or 1
        cells = _reduced(self.tiles, share, share)
        rows, cols = cells.shape
        side = max(2, min(16, 320 // max(1, rows, cols)))
        body = "".join(
            f'<rect x="{a}" y="{y}" width="{b - a}" height="1" fill="{_COLOURS[kind]}"/>'
            for y, row in enumerate(cells)
            for a, b, kind in _runs(row)
        )
        frame = f'<rect width="{cols}" height="{rows}" fill="none" stroke="#888" stroke-width="{1 / side:.3f}"/>'
        view = f'width="{cols * side}" height="{rows * side}" viewBox="0 0 {cols} {rows}" shape-rendering="crispEdges"'
        drawing = f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img">{body}{frame}</svg>'
        captions = "".join(_LINE.format(escape(line)) for line in self._captions(cells.shape))
        return f"<div>{_LINE.format(f'<code>{escape(text(self.mask))}</code>')}{drawing}{captions}</div>"

    def _captions(self, shape: tuple[int, ...]) -> Iterator[str]:
        rows, cols = self.tiles.rows, self.tiles.cols
        yield f"{self.queries:,} queries × {self.keys:,} keys in tiles of {self.tile[0]} × {self.tile[1]}{self.part}"
        total = max(1, sum(self.counts))
        classes = zip(SHADES.values(), TileCounts._fields, self.counts, strict=True)
        yield "   ".join(f"{shade} {name.upper()} {count:,} ({count / total:.1%})" for shade, name, count in classes)
        if (rows, cols) != shape:
            yield f"each place stands for up to {-(-rows // max(1, shape[0]))} × {-(-cols // max(1, shape[1]))} tiles"


def picture(mask: Mask, Sq: int | None = None, Sk: int | None = None, tile: Any = None) -> TilePicture:
    """The picture of a mask; what is None follows from its tensors."""
    own_q, own_k = _lengths(mask)
    keys = integer("show: Sk", Sk, 0) if Sk is not None else own_k or (None if Sq is None else integer("show: Sq", Sq, 0))
    queries = integer("show: Sq", Sq, 0) if Sq is not None else own_q or keys
    queries = USUAL if queries is None else queries
    keys = queries if keys is None else keys
    sizes = _tile(tile, max(queries, keys))
    shape = mask_sides(mask, queries, keys)
    tiles = TileMap(mask.lower(Binding(shape, asarray=_array)), shape, *sizes)
    total = np.zeros(3, dtype=np.int64)
    for row in range(tiles.rows):
        total += np.bincount(tiles.row(row, 0, 0), minlength=3)
    several = [(shape.batch if tiles.per_batch else 1, "sequence"), (shape.heads if tiles.per_head else 1, "head")]
    part = "".join(f", {name} 0 of {count}" for count, name in several if count > 1)
    return TilePicture(mask, queries, keys, sizes, TileCounts(*map(int, total)), part, tiles)


def _lengths(mask: Mask) -> tuple[int | None, int | None]:
    """Queries and keys as far as the mask's tensors tell them."""
    queries, keys = [0], [0]
    for leaf in mask.leaves():
        match leaf:
            case Documents(ids=ids, q_ids=q_ids):
                keys.append(np.shape(ids)[-1])
                queries.append(np.shape(ids if q_ids is None else q_ids)[-1])
            case Blocks(table=table, size_q=size_q, size_k=size_k) if table.ndim >= 2:
                queries.append(table.shape[-2] * size_q)
                keys.append(table.shape[-1] * size_k)
            case Selected(indices=indices, size_q=size_q) if indices.ndim >= 2:
                queries.append(indices.shape[-2] * size_q)
            case Dense(tensor=tensor) if tensor.ndim >= 2:
                queries.append(tensor.shape[-2] if tensor.shape[-2] > 1 else 0)
                keys.append(tensor.shape[-1] if tensor.shape[-1] > 1 else 0)
    exact = [leaf for leaf in mask.leaves() if isinstance(leaf, (Documents, Dense))]
    if exact and len(exact) < sum(1 for leaf in mask.leaves() if not leaf.static):  # blocks may reach past the last position
        sides = [_lengths(leaf) for leaf in exact]
        return max(q or 0 for q, _ in sides) or None, max(k or 0 for _, k in sides) or None
    return max(queries) or None, max(keys) or max(queries) or None


def _tile(tile: Any, longest: int) -> tuple[int, int]:
    if tile is None:
        size = USUAL_TILE
        while size > 1 and longest < FEWEST * size:
            size //= 2
        while longest > MOST * size:
            size *= 2
        return size, size
    pair = tile if isinstance(tile, (tuple, list)) else (tile, tile)
    if len(pair) != 2:
        raise MaskError(f"show: tile is {tile!r}, need an int or a pair (queries, keys)")
    return integer("show: tile", pair[0], 1), integer("show: tile", pair[1], 1)


def _array(x: Any) -> Array:
    """A tensor of any device as numpy's."""
    return x.detach().cpu().numpy() if hasattr(x, "is_cuda") else np.asarray(x)


def _reduced(tiles: TileMap, high: int, wide: int) -> Array:
    """Places of high × wide tiles: EMPTY or FULL if all of them are, else PARTIAL."""
    places = np.zeros((-(-tiles.rows // high), -(-tiles.cols // wide)), dtype=np.uint8)
    for i in range(len(places)):
        lines = np.stack([tiles.row(row, 0, 0) for row in range(i * high, min((i + 1) * high, tiles.rows))])
        least, most = lines.min(axis=0), lines.max(axis=0)
        at = np.arange(0, tiles.cols, wide)
        if len(at):
            least, most = np.minimum.reduceat(least, at), np.maximum.reduceat(most, at)
            places[i] = np.where(least == most, least, TileClass.PARTIAL)
    return places


def _runs(row: Array) -> Iterator[tuple[int, int, TileClass]]:
    """[first, past) of neighbours of one class that is drawn."""
    ends = [*(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
    first = 0
    for past in ends:
        if past > first and row[first]:
            yield first, past, TileClass(row[first])
        first = past
