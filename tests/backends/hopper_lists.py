"""Tile lists for tests, made on the CPU from what a mask shows: `backends/gpu/lists.py` in plain loops, with needless cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tilewise.backends.gpu.lists import COUNT_SHIFT, LIVE_BITS, LIVE_SHIFT, TileLists, run_width
from tilewise.backends.hopper.list_plan import Words, has_bounds, per_batch, per_head
from tilewise.masks import MaskShape
from tilewise.masks.program import allowed, assemble
from tilewise.problem import Problem

GARBAGE = (1 << 30) + 12345
"""In what nobody may read."""


def visible(problem: Problem) -> np.ndarray:
    """What the mask shows, [B or 1, H or 1, M, N]."""
    program, shape = problem.program, MaskShape(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    found = allowed(program, shape, (0, problem.seqlen_q), (0, problem.seqlen_k), torch.arange)
    sides = (problem.batch if per_batch(problem) else 1, problem.heads if per_head(problem) else 1)
    return np.asarray(torch.as_tensor(found).expand(*sides, problem.seqlen_q, problem.seqlen_k))


def make_lists(problem: Problem, config: Any, by_key: bool, seed: int = 0) -> TileLists:
    """The lists of a pass. Runs are cut where they need not be. Now and then a tile that shows nothing is PARTIAL, where the
    mask of the tile hides it: tables are no part of that."""
    rng, shown, block_q, block_k = np.random.default_rng(seed), visible(problem), config.BLOCK_M, config.BLOCK_N
    own, other = (block_k, block_q) if by_key else (block_q, block_k)
    length, across = (problem.seqlen_k, problem.seqlen_q) if by_key else (problem.seqlen_q, problem.seqlen_k)
    tiles, columns = -(-length // own), -(-across // other)
    literals = [literal for term in problem.program.terms() for literal in term]
    needless = 0.0 if any(x.kind.is_blocks or x.kind.is_selected for x in literals) else 0.1
    size_b, size_h = shown.shape[:2]
    width = max(run_width(problem.program, columns, (block_q, block_k), by_key), 2 * columns)
    runs = np.full((size_b, size_h, tiles, width), GARBAGE, dtype=np.int32)
    counts = np.zeros((size_b, size_h, tiles, 2), dtype=np.int32)
    for b, h, i in np.ndindex(size_b, size_h, tiles):
        plane = shown[b, h].T if by_key else shown[b, h]
        line = plane[i * own : (i + 1) * own]
        parts = [line[:, j * other : (j + 1) * other] for j in range(columns)]
        classes = [class_of(tile, (own, other), by_key, rng.random() < needless) for tile in parts]
        for which, kind in enumerate((2, 1)):
            numbers = [j for j, found in enumerate(classes) if found == kind]
            counts[b, h, i, which] = len(numbers)
            for r, (first, count, live) in enumerate(cut(numbers, problem, config, (b, h, i, by_key), kind, rng)):
                at = width - 1 - r if kind == 1 else r
                assert runs[b, h, i, at] == GARBAGE
                runs[b, h, i, at] = first | (count - 1) << COUNT_SHIFT | live << LIVE_SHIFT
    shape = MaskShape(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    terms = torch.tensor([problem.program.intervals(shape, b) for b in range(size_b)], dtype=torch.int32)
    totals = torch.from_numpy(counts).sum(-1).reshape(-1)
    ids: list[Any] = [None, None]
    if config.LISTS.ids:
        documents = next(x for x in literals if x.kind.is_documents)
        ids = [torch.as_tensor(x).int().contiguous() for x in documents.tensors]
    bits, strides = pack(next(x for x in literals if x.kind.is_dense), by_key) if config.LISTS.bits else (None, (0, 0, 0, 0))
    return TileLists(
        runs=torch.from_numpy(runs), counts=torch.from_numpy(counts), terms=terms, q_ids=ids[0], k_ids=ids[1], bits=bits,
        order=torch.argsort(totals, descending=True, stable=True).int(), width=width,
        stride_b=tiles * size_h if size_b > 1 else 0, stride_h=tiles if size_h > 1 else 0,
        terms_b=4 * terms.shape[1] if size_b > 1 else 0,
        q_ids_b=0 if ids[0] is None or ids[0].shape[0] == 1 else ids[0].shape[1],
        k_ids_b=0 if ids[1] is None or ids[1].shape[0] == 1 else ids[1].shape[1],
        bits_b=strides[0], bits_h=strides[1], bits_row=strides[2], bits_w=strides[3],
    )  # fmt: skip


def make_bounds(problem: Problem, lists: TileLists, config: Any, by_key: bool) -> torch.Tensor | None:
    """What `hopper/bounds.py` writes, in plain loops: of each position what it sees in PARTIAL tiles, as an interval."""
    if not has_bounds(config.LISTS):
        return None
    own, other = (config.BLOCK_N, config.BLOCK_M) if by_key else (config.BLOCK_M, config.BLOCK_N)
    shown = visible(problem)
    shown = shown.swapaxes(2, 3) if by_key else shown
    size_b, size_h, length, across = shown.shape
    tiles = -(-length // own)
    counts, runs = lists.counts.reshape(-1, 2).tolist(), lists.runs.reshape(-1, lists.width).tolist()
    bounds = np.zeros((size_b * size_h * tiles, own), dtype=np.int64)
    for row, (full, partial) in enumerate(counts):
        positions = partial_positions(runs[row][::-1], partial, other)
        whole = partial == 0 < full
        for r in range(own):
            (b, h), q = divmod(row // tiles, size_h), row % tiles * own + r
            seen = [n for n, k in enumerate(positions) if k < across and q < length and shown[b, h, q, k]]
            if len(seen) and seen[-1] - seen[0] + 1 != len(seen):
                bounds[row] = -1
                break
            first, width = (positions[seen[0]], positions[seen[-1]] + 1 - positions[seen[0]]) if seen else (0, 0)
            bounds[row, r] = 1 << 62 if whole else first | width << 32
    return torch.from_numpy(bounds).reshape(-1)


def partial_positions(runs: list[int], partial: int, other: int) -> list[int]:
    """All positions of a row's PARTIAL tiles, in order."""
    found: list[int] = []
    for word in runs:
        if len(found) == partial * other:
            break
        first, count = word & 0xFFFF, (word >> COUNT_SHIFT & 0xFF) + 1
        found += range(first * other, (first + count) * other)
    return found


def class_of(tile: np.ndarray, sides: tuple[int, int], by_key: bool, needless: bool) -> int:
    """0, 1 or 2 as in `TileClass`."""
    if not tile.any():
        return int(needless)
    cut_short = tile.shape != sides if by_key else tile.shape[1] != sides[1]
    return 2 if tile.all() and not cut_short else 1


def cut(numbers: list[int], problem: Problem, config: Any, row: tuple[int, ...], kind: int, rng: Any) -> list[list[int]]:
    """Runs (first, count, live terms) of tiles in ascending order."""
    found: list[list[int]] = []
    single = kind == 1 and config.LISTS.live
    full = (1 << LIVE_BITS) - 1 if kind == 2 and config.LISTS.live else 0
    for j in numbers:
        if found and not single and found[-1][0] + found[-1][1] == j and rng.random() < 0.8:
            found[-1][1] += 1
        else:
            found.append([j, 1, live_terms(problem, config, row, j) if single else full])
    return found


def live_terms(problem: Problem, config: Any, row: tuple[int, ...], j: int) -> int:
    """The terms whose tables show a tile, as a set of bits."""
    b, h, i, by_key = row
    tile_q, tile_k = (j, i) if by_key else (i, j)
    shape = MaskShape(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    live = 0
    for r, term in enumerate(problem.program.terms()):
        tables = [literal for literal in term if literal.kind.is_blocks or literal.kind.is_selected]
        q, k = tile_q * config.BLOCK_M, tile_k * config.BLOCK_N
        shown = allowed(assemble([tables]), shape, (q, q + 1), (k, k + 1), torch.arange) if tables else None
        if shown is None or bool(shown[min(b, shown.shape[0] - 1), min(h, shown.shape[1] - 1), 0, 0]):
            live |= 1 << r
    return live


def pack(literal: Any, by_key: bool) -> tuple[torch.Tensor, tuple[int, int, int, int]]:
    """A dense mask as words of 32 keys, or by key of 32 queries."""
    dense = torch.as_tensor(literal.tensors[0]).bool()
    dense = ~dense if literal.kind.negated else dense
    dense = dense.transpose(2, 3) if by_key else dense
    shared = dense.shape[3] == 1
    if shared:
        dense = dense.expand(*dense.shape[:3], 32)
    words = words_of(dense, padding=False)
    one = [stride if side > 1 else 0 for stride, side in zip(words.stride(), dense.shape, strict=True)]
    return words, (one[0], one[1], one[2], 0 if shared else 1)


def words_of(bits: torch.Tensor, padding: bool) -> torch.Tensor:
    """int32 words along the last side; bits past its end are `padding`."""
    size = bits.shape[-1]
    whole = -(-size // 256) * 256 if padding else -(-size // 32) * 32
    filled = torch.nn.functional.pad(bits.to(torch.int64), (0, whole - size), value=int(padding))
    return (filled.unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1).to(torch.int32).contiguous()


def make_words(problem: Problem, config: Any) -> tuple[Words | None, Words | None]:
    """Which keys are seen and which queries see, where a pass asks."""
    shown = torch.from_numpy(visible(problem).copy())
    result = []
    for asked, axis in ((config.UNSEEN_KEYS, 2), (getattr(config, "EMPTY_ROWS", False), 3)):
        words = words_of(shown.any(axis), padding=True)
        strides = (words.stride(0) if words.shape[0] > 1 else 0, words.stride(1) if words.shape[1] > 1 else 0)
        result.append(Words(words, *strides) if asked else None)
    return result[0], result[1]


def order_of(arguments: Any) -> torch.Tensor | None:
    """The order of a plan's work tiles; any one where the device writes it."""
    order = arguments.order
    if order is None or isinstance(order, str):
        return None if order is None else make_order(arguments)
    return torch.from_numpy(order).reshape(-1)


def owners_of(arguments: Any) -> torch.Tensor | None:
    """Whose tiles those of a packed batch were, with other lengths: right or wrong by chance."""
    if arguments.owners is None:
        return None
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(arguments.batch, (arguments.blocks.value,), generator=numbers, dtype=torch.int32)


def make_order(arguments: Any) -> torch.Tensor:
    """Every work tile once, in any order."""
    total, programs = arguments.total, arguments.programs
    order = torch.full(((-(-total // programs) + 1) * programs,), -1, dtype=torch.int32)
    order[:total] = torch.randperm(total, generator=torch.Generator().manual_seed(0)).int()
    return order
