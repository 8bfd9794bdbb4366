"""Masks are values: write them, combine them, look at the tiles they leave, attend with them.

python examples/masks.py
"""

from __future__ import annotations

import torch

import tilewise as tw
from tilewise.masks import Binding, MaskShape, TileClass, TileMap

SEQLEN, TILE = 512, 32
SHADES = {TileClass.EMPTY: "·", TileClass.PARTIAL: "▒", TileClass.FULL: "█"}


def draw(mask: tw.Mask) -> str:
    """One character for each tile: skipped, masked element by element, or computed whole."""
    shape = MaskShape(batch=1, heads=1, seqlen_q=SEQLEN, seqlen_k=SEQLEN)
    tiles = TileMap(mask.lower(Binding(shape, varlen=False)), shape, TILE, TILE)
    return "\n".join("".join(SHADES[TileClass(kind)] for kind in tiles.row(i)) for i in range(tiles.rows))


def main() -> None:
    documents = torch.arange(SEQLEN)[None] // 200  # three documents, 200 + 200 + 112 tokens
    masks = {
        "causal": tw.causal(),
        "sliding window of 100 keys": tw.window(100),
        "prefix-LM: all see the first 128, the rest is causal": tw.causal() | tw.prefix(128),
        "causal within documents": tw.causal() & tw.documents(documents),
    }
    q, k, v = torch.randn(3, 1, 4, SEQLEN, 64).unbind()
    for name, mask in masks.items():
        picture = draw(mask)
        skipped = picture.count(SHADES[TileClass.EMPTY]) / len(picture.replace("\n", ""))
        out = tw.attention(q, k, v, mask=mask)
        print(f"{name}: {skipped:.0%} of the tiles are never computed, output {tuple(out.shape)}\n{picture}\n")


if __name__ == "__main__":
    main()
