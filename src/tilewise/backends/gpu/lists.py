"""Lists of tiles: what a mask that is no plain interval becomes before attention runs, in one format for every GPU kernel.

A classifier (`classify.py`) finds for each tile of one side the tiles of the other side that it visits, once for a mask and a
pair of tile sizes. The attention kernels walk the lists and never ask what the mask is made of. A **row** is a query tile with
its key tiles ("by query": forward, dQ), or a key tile with its query tiles ("by key": dK and dV).

**Rows.** row = b · stride_b + h · stride_h + tile. The strides count rows and are 0 where sequences or heads share a mask. In a
packed batch `tile` is the tile's number among the tiles of all sequences, cu[b] // block + b + its number in sequence b, and
stride_b is 0.

**counts** int32 [rows, 2]: how many FULL and how many PARTIAL tiles a row visits. Either may be 0, and both. With
`at_least_one` a row that sees nothing visits tile 0 as PARTIAL, all of it hidden.

**runs** int32 [rows, width]: run r of the FULL tiles at [row, r], run r of the PARTIAL ones at [row, width - 1 - r], each in
ascending order. A run is one word of 28 bits: its first tile (bits 0 to 15), the number of its tiles less one (16 to 23), and
the set of live terms (24 to 27; of FULL runs all). Only as many runs are written as the counts ask for.

**A FULL tile needs no mask at all.** A tile that the end of the keys cuts is PARTIAL, by key also one that the end of the queries
cuts.

**A PARTIAL tile's visibility** takes one form for all masks (`ListLayout`), a conjunction of

    intervals   some term r has lo <= k - q <= hi and start <= k < end; with `live`, some r of the run's set of live terms.
                terms int32 [B or 1, intervals, 4] holds lo, hi, start, end, offsets, padding and lengths counted in
    ids         q_ids[q] == k_ids[k] (or !=): int32, in the row of the batch; at the sequence's tokens in a packed one
    bits        bit k % 32 of bits[b, h, q, k // 32], int32 words with strides; 0 where a side is broadcast. Hopper's kernels of
                dK and dV hold rows of keys and read bit q % 32 of bits[b, h, k, q // 32], made beside these

or `program`: the mask of the tile is evaluated literal by literal. That is left for what has no such form: several documents
masks in one mask, blocks that are not made of whole tiles, dense masks in unions.

Documents are sorted as a rule: then a row's FULL and PARTIAL tiles are few runs. Ids in any other order are right and may visit
tiles in vain: EMPTY is concluded from the least and the largest id of a tile and a set of hashes, and where a row has more runs
than there is room for, one run covers them all.

**order** int32 [rows]: rows by falling number of tiles, for kernels to begin with the longest.

Memory in bytes, for R rows of C tiles each and T terms: R · (4 · width + 12), where `width` is (3 · T + 4) · ⌈C / 256⌉ for
intervals and documents, n · (lists and blocks that a tile touches) for `selected` by query, and C at most for other tables;
16 · T for each sequence; 12 for the ids of each tile; for a dense mask 2 bits a tile and 1 bit for each of its bytes, in
Hopper's backward one more. All sizes follow from shapes, and nothing is read by the host.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

from tilewise.masks import Literal, MaskProgram
from tilewise.masks.program import is_interval
from tilewise.problem import Problem

FIRST_BITS, COUNT_BITS, LIVE_BITS = 16, 8, 4
COUNT_SHIFT, LIVE_SHIFT = FIRST_BITS, FIRST_BITS + COUNT_BITS
CHUNK = 1 << COUNT_BITS
"""Tiles that the classifier looks at together; no run is longer, or crosses a multiple of it."""
MOST_TILES = 1 << FIRST_BITS
MOST_TOKENS = 32 * MOST_TILES
"""Of a side, whatever the tiles are."""
MOST_INTERVALS = LIVE_BITS
ALL_LIVE = (1 << LIVE_BITS) - 1 << LIVE_SHIFT
"""All terms of a run are live. So kernels that mask a row's first tile, whatever its class is, find a FULL one visible."""
EQUAL, DIFFERENT = 1, 2
"""How `ListLayout.ids` compares."""


class ListLayout(NamedTuple):
    """What kernels are compiled for: how the visibility of a PARTIAL tile is computed."""

    intervals: int = 0
    """Terms whose intervals are joined."""
    ids: int = 0
    """0: none, EQUAL or DIFFERENT."""
    bits: bool = False
    live: bool = False
    """PARTIAL runs say which terms are live in their tiles; such runs have one tile each."""
    program: bool = False
    """The visibility is that of the mask's program; the fields above say nothing."""


class TileLists(NamedTuple):
    """The lists of one pass as the kernels see them; what a layout does not need is None."""

    runs: Any
    counts: Any
    order: Any
    terms: Any
    q_ids: Any
    k_ids: Any
    bits: Any
    width: int
    stride_b: int
    stride_h: int
    terms_b: int
    """4 · intervals, or 0 where the sequences share their terms."""
    q_ids_b: int
    """Rows of the ids along the batch: their length, or 0."""
    k_ids_b: int
    bits_b: int
    bits_h: int
    bits_row: int
    bits_w: int


@cache
def is_listed(structure: str) -> bool:
    """Do kernels walk lists for a mask of this structure? Intervals they know themselves."""
    return bool(structure) and not is_interval(structure)


def walks_lists(problem: Problem) -> bool:
    """Do kernels walk lists for a problem? Not where keys are split among programs or lie in pages: these evaluate the mask."""
    return not problem.decodes and not problem.page and is_listed(problem.program.structure)


def too_long(problem: Problem) -> str | None:
    """Why there are no lists for a problem."""
    if walks_lists(problem) and max(problem.seqlen_q, problem.seqlen_k) > MOST_TOKENS:
        return f"the mask is no interval, and lists of tiles reach up to {MOST_TOKENS} tokens"
    return None


def whole_tiles(literal: Literal, block_q: int, block_k: int) -> bool:
    """Is a literal that reads a table the same all over each tile?"""
    kind, ints, _ = literal
    return (kind.is_blocks or kind.is_selected) and ints[0] % block_q == 0 and ints[1] % block_k == 0


def list_layout(program: MaskProgram, block_q: int, block_k: int) -> ListLayout:
    """How the visibility of a PARTIAL tile is computed under a mask."""
    terms = [[literal for literal in term if literal.kind.reads_data] for term in program.terms()]
    if len(terms) > MOST_INTERVALS:
        return ListLayout(program=True)
    common = [one for one in terms[0] if all(any(_same(one, x) for x in term) for term in terms[1:])]
    own = [one for term in terms for one in term if not any(_same(one, x) for x in common)]
    ids = [one for one in common if one.kind.is_documents]
    dense = [one for one in common if one.kind.is_dense]
    tables = [one for one in common if not (one.kind.is_documents or one.kind.is_dense)]
    if len(ids) > 1 or len(dense) > 1 or not all(whole_tiles(one, block_q, block_k) for one in (*tables, *own)):
        return ListLayout(program=True)
    compare = 0 if not ids else DIFFERENT if ids[0].kind.negated else EQUAL
    return ListLayout(len(terms), compare, bool(dense), live=bool(own))


def _same(a: Literal, b: Literal) -> bool:
    """The same literal over the same memory?"""
    return a.kind == b.kind and a.ints == b.ints and all(map(_same_memory, a.tensors, b.tensors))


def _same_memory(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if not (hasattr(a, "data_ptr") and hasattr(b, "data_ptr")):
        return False
    same = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return bool(same and a.data_ptr() == b.data_ptr() != 0)


def block_sizes(program: MaskProgram) -> tuple[int, int]:
    """Queries and keys by which the blocks of all tables of a mask can be divided; (0, 0) where there are no tables."""
    tables = [one.ints for term in program.terms() for one in term if one.kind.is_blocks or one.kind.is_selected]
    return math.gcd(*(ints[0] for ints in tables)), math.gcd(*(ints[1] for ints in tables))


def most_runs(terms: int) -> tuple[int, int]:
    """FULL and PARTIAL runs that a chunk of tiles has room for, where sorted ids need no more than `terms` and twice as many."""
    return terms + 2, 2 * terms + 2


def memory_pattern(tensors: tuple[Any, ...]) -> tuple[int, ...]:
    """For each tensor the first one of the same memory: what `list_layout` asks of tensors."""
    return tuple([next(i for i, other in enumerate(tensors) if _same_memory(other, x)) for x in tensors])


def run_width(program: MaskProgram, tiles: int, tile_sizes: tuple[int, int], by_key: bool) -> int:
    """Words of a row: a bound for its runs."""
    terms = list(program.terms())
    few = sum(most_runs(len(terms))) * -(-tiles // CHUNK)
    tables = [one for term in terms for one in term if one.kind.is_blocks or one.kind.is_dense or one.kind.is_selected]
    if not tables:
        return few
    if len(terms) == 1 and not by_key and all(one.kind.is_selected and not one.kind.negated for one in tables):
        per, block, _, count = tables[0].ints
        lists, spread = -(-tile_sizes[0] // per) + 1, -(-block // tile_sizes[1]) + 1
        return max(1, min(tiles, lists * spread * count))
    return max(1, tiles)
