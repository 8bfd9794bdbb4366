"""Masks: values that combine, classify tiles without building N × N, and lower to one program for every backend."""

from tilewise.masks.algebra import Full, Lowered, Mask
from tilewise.masks.arrays import Binding
from tilewise.masks.build import blocks, causal, dense, documents, full, key_padding, prefix, selected, tree, window
from tilewise.masks.forms import describe_mask
from tilewise.masks.parse import parse
from tilewise.masks.program import UNBOUNDED, Interval, Literal, MaskProgram, MaskShape, allowed
from tilewise.masks.tiles import TileClass, TileCounts, TileMap
from tilewise.masks.visits import may_have_empty_rows, visited_tiles, visits

__all__ = [
    "UNBOUNDED",
    "Binding",
    "Full",
    "Interval",
    "Literal",
    "Lowered",
    "Mask",
    "MaskProgram",
    "MaskShape",
    "TileClass",
    "TileCounts",
    "TileMap",
    "allowed",
    "blocks",
    "causal",
    "dense",
    "describe_mask",
    "documents",
    "full",
    "key_padding",
    "may_have_empty_rows",
    "parse",
    "prefix",
    "selected",
    "tree",
    "visited_tiles",
    "visits",
    "window",
]
