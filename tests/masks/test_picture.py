"""`show`: the picture of a mask is that of its tiles."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.errors import ArgumentTypeError, MaskError
from tilewise.masks import Mask, TileClass, TileMap
from tilewise.masks.picture import SHADES

IDS = np.repeat(np.arange(4), [300, 500, 200, 900])


def drawn(mask: Mask, queries: int, keys: int, tile: tuple[int, int]) -> np.ndarray[Any, Any]:
    """The classes by looking at every element."""
    dense = np.asarray(mask.to_dense(queries, keys)[0, 0])
    rows, cols = -(-queries // tile[0]), -(-keys // tile[1])
    parts = [[dense[i * tile[0] :][: tile[0], j * tile[1] :][:, : tile[1]] for j in range(cols)] for i in range(rows)]
    return np.array([[2 if part.all() else int(part.any()) for part in row] for row in parts])


@pytest.mark.parametrize(
    ("mask", "lengths", "tile"),
    [
        (tw.causal(), (100, 100), (16, 16)),
        (tw.window(40, 3), (90, 130), (16, 8)),
        (tw.documents(np.repeat([0, 1, 2], [30, 50, 20])), (None, None), (10, 10)),
        (~tw.prefix(20) | tw.causal(), (64, 64), (8, 8)),
        (tw.selected(torch.tensor([[0, 1], [3, -1]]), 16, 32), (None, None), (16, 16)),
    ],
)
def test_text_shows_every_tile(mask: Mask, lengths: tuple[Any, Any], tile: tuple[int, int]) -> None:
    shown = mask.show(*lengths, tile=tile)
    want = drawn(mask, shown.queries, shown.keys, tile)
    lines = str(shown).splitlines()
    wide = len(lines[0]) // want.shape[1]
    assert lines[: len(want)] == ["".join(SHADES[TileClass(x)] * wide for x in row) for row in want]
    assert list(shown.counts) == np.bincount(want.ravel(), minlength=3).tolist()
    for name, count in zip(("EMPTY", "PARTIAL", "FULL"), shown.counts, strict=True):
        assert f"{name} {count:,} (" in lines[-1]


def test_html_draws_the_same() -> None:
    mask = tw.causal() & tw.documents(IDS)
    shown = mask.show(tile=100)
    svg = re.search(r"<svg.*</svg>", shown.html())
    assert svg
    cells = np.zeros((19, 19), dtype=int)
    for rect in ElementTree.fromstring(svg[0]).iter("{http://www.w3.org/2000/svg}rect"):
        if rect.get("fill") != "none":
            x, y, width = (int(rect.get(name) or 0) for name in ("x", "y", "width"))
            cells[y, x : x + width] = {"#8fb8de": 1, "#2f6fab": 2}[str(rect.get("fill"))]
    assert (cells == drawn(mask, 1900, 1900, (100, 100))).all()
    assert "causal() &amp; documents(" in shown.html()


def test_many_tiles_share_places() -> None:
    """EMPTY and FULL only where all tiles of a place are."""
    shown = tw.causal().show(128 * 1024)
    lines = str(shown).splitlines()
    assert len(lines) == 32 + 3 and set(map(len, lines[:32])) == {64}
    assert lines[5][:14] == "█" * 10 + "▒▒··"
    assert "32 × 16 tiles" in lines[-1]
    assert shown.counts.partial == 1024


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (tw.causal(), (1024, 1024)),
        (tw.documents(IDS) & tw.window(9), (1900, 1900)),
        (tw.documents(IDS, IDS[:7]), (7, 1900)),
        (tw.blocks(np.ones((3, 5), dtype=bool), (10, 4)), (30, 20)),
        (tw.dense(np.ones((1, 77), dtype=bool)), (77, 77)),
        (tw.documents(IDS) & tw.blocks(np.ones((19, 19), dtype=bool), 101), (1900, 1900)),
        (tw.selected(np.zeros((2, 3, 5, 1), dtype=int), 16, 32), (160, 160)),
        (tw.key_padding([3, 4]), (1024, 1024)),
    ],
)
def test_lengths_follow_from_tensors(mask: Mask, lengths: tuple[int, int]) -> None:
    shown = mask.show()
    assert (shown.queries, shown.keys) == lengths
    assert mask._repr_html_().startswith("<div>")


def test_of_several_the_first_is_shown() -> None:
    table = torch.zeros(2, 3, 4, 4, dtype=torch.bool)
    table[0, 0] = True
    shown = tw.blocks(table, 8).show(tile=8)
    assert shown.counts == (0, 0, 16)
    assert "sequence 0 of 2, head 0 of 3" in str(shown)


def test_empty_and_bad() -> None:
    assert str(tw.causal().show(0)).startswith("0 queries × 0 keys")
    assert "8 queries × 0 keys" in str(tw.causal().show(8, 0))
    with pytest.raises(ArgumentTypeError, match=r"show: Sq is 1\.5"):
        tw.causal().show(1.5)  # type: ignore[arg-type]
    with pytest.raises(MaskError, match="show: tile is 0, need at least 1"):
        tw.causal().show(tile=0)
    with pytest.raises(MaskError, match=r"show: tile is \(1, 2, 3\), need an int or a pair"):
        tw.causal().show(tile=(1, 2, 3))  # type: ignore[arg-type]
    misfits = tw.documents(IDS) & tw.dense(np.ones((3, 3), dtype=bool))
    with pytest.raises(MaskError, match=r"documents|dense"):
        misfits.show()
    assert misfits._repr_html_().startswith("<code>documents(")


def test_the_picture_is_drawn_from_tiles() -> None:
    """A million tokens: lines of tiles, never all of them."""
    shown = tw.window(4096).show(1 << 20)
    assert shown.tile == (1024, 1024) and isinstance(shown.tiles, TileMap)
    assert len(str(shown).splitlines()) == 35
