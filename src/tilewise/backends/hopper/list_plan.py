"""Masks that are no intervals, as tile lists: which of them the kernels walk, and with what arguments. No tensor is read here."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.gpu.lists import EQUAL, MOST_TILES, ListLayout, TileLists, list_layout, run_width
from tilewise.backends.hopper.structs import Lists
from tilewise.masks import Literal, MaskShape
from tilewise.problem import Problem

MOST_WORDS = 1 << 31
"""Of a dense mask's bits in one head: they are counted in 32 bits."""


def list_obstacle(problem: Problem, backward: bool, sizes: list[tuple[int, int]]) -> str | None:
    """Why the kernels do not walk lists for a mask that is no interval. `sizes` are tiles: of the forward, one of which must do,
    or of the backward, all of which must."""
    if problem.varlen:
        return "a mask that is no interval is not served in a packed batch"
    if backward and problem.group > 1 and per_head(problem):
        return "the mask differs between heads that share keys"
    formless = [list_layout(problem.program, *pair).program for pair in sizes]
    if any(formless) if backward else all(formless):
        return "the mask's tiles have no form of intervals, one pair of ids and one dense mask"
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if longest // 64 + 1 >= MOST_TILES:
        return f"lists hold tile numbers up to {MOST_TILES}, and {longest} positions have more"
    if problem.seqlen_q * problem.seqlen_k // 32 >= MOST_WORDS:
        return "a dense mask of so many elements is not served"
    return None


def per_batch(problem: Problem) -> bool:
    """Does the mask differ between sequences?"""
    return any(t.shape[0] > 1 for t in problem.program.tensors)


def per_head(problem: Problem) -> bool:
    literals = (literal for term in problem.program.terms() for literal in term)
    return any(t.shape[1] > 1 for literal in literals if literal.kind.per_head for t in literal.tensors)


def all_seen(problem: Problem) -> bool:
    """Is every key surely seen by some query, and does every query see some key? Where each position sees itself, or it is
    known."""
    if problem.covered:
        return True
    if problem.seqlen_q != problem.seqlen_k or problem.varlen:
        return False
    shape = MaskShape(1, 1, problem.seqlen_q, problem.seqlen_k)
    return any(all(_on_diagonal(literal, shape) for literal in term) for term in problem.program.terms())


def hides_in_tiles(problem: Problem) -> bool:
    """May a visited tile hold keys that no query sees, or queries that see no key? Not where masks are made of whole tiles."""
    terms = list(problem.program.terms())
    tables = all(_of_whole_tiles(literal, problem.seqlen_k) for term in terms for literal in term)
    return not (tables or all_seen(problem))


def _of_whole_tiles(literal: Literal, keys: int) -> bool:
    """The tables that lists are served for are the same all over each tile."""
    kind, ints, _ = literal
    return kind.is_blocks or kind.is_selected or (kind.is_range and ints[0] <= 0 and ints[1] >= keys)


def _on_diagonal(literal: Literal, shape: MaskShape) -> bool:
    kind, ints, tensors = literal
    if kind.is_band and not kind.is_offset:
        lo, hi = literal.band(literal.shift(shape))
        return lo <= 0 <= hi
    if kind.is_range:
        return ints[0] <= 0 and ints[1] >= shape.seqlen_k
    return kind.is_documents and not kind.negated and _same_memory(*tensors)


def _same_memory(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if not (hasattr(a, "data_ptr") and hasattr(b, "data_ptr")):
        return False
    return bool(a.data_ptr() == b.data_ptr() != 0 and a.shape == b.shape and a.stride() == b.stride())


class Type(str):
    """A type in place of an address: another one is another address, even of the same type."""


class Words(NamedTuple):
    """Words of bits by position, (B or 1, H or 1, words), and their strides."""

    words: Any
    stride_b: int
    stride_h: int


def has_bounds(layout: ListLayout) -> bool:
    """Are PARTIAL tiles masked by bounds (`bounds.py`) where these say it all? Not without ids: those masks are cheap, or no
    intervals."""
    return layout.ids == EQUAL and not layout.bits and not layout.live


def lists_of(lists: TileLists, words: Any = None, bounds: Any = None) -> Lists:
    """The lists of a pass as its kernel takes them; `words` are those of seen keys and of seeing queries."""
    seen, seeing = words or (None, None)
    return Lists(
        runs=lists.runs,
        counts=lists.counts,
        terms=lists.terms,
        width=lists.width,
        strides=(lists.stride_b or None, lists.stride_h or None),
        terms_stride=lists.terms_b or None,
        q_ids=lists.q_ids,
        k_ids=None if same_ids(lists) else lists.k_ids,
        ids_strides=(lists.q_ids_b or None, None if same_ids(lists) else lists.k_ids_b or None),
        bits=lists.bits,
        bits_strides=None if lists.bits is None else (lists.bits_b or None, lists.bits_h or None, lists.bits_row, lists.bits_w),
        bounds=bounds,
        seen=None if seen is None else seen.words,
        seeing=None if seeing is None else seeing.words,
        seen_strides=(None, None) if seen is None else (seen.stride_b or None, seen.stride_h or None),
        seeing_strides=(None, None) if seeing is None else (seeing.stride_b or None, seeing.stride_h or None),
    )  # fmt: skip


def same_ids(lists: TileLists) -> bool:
    """Are the keys' ids those of the queries?"""
    return lists.k_ids is lists.q_ids or _same_memory(lists.q_ids, lists.k_ids)


def planned_lists(problem: Problem, config: Any, by_key: bool) -> TileLists:
    """The lists of a pass with types in place of addresses, for what is compiled without tensors."""
    program, layout = problem.program, config.LISTS
    block, length = (config.BLOCK_N, problem.seqlen_k) if by_key else (config.BLOCK_M, problem.seqlen_q)
    other, across = (config.BLOCK_M, problem.seqlen_q) if by_key else (config.BLOCK_N, problem.seqlen_k)
    tiles, rows_h = -(-length // block), problem.heads if per_head(problem) else 1
    literals = [literal for term in program.terms() for literal in term]
    q_ids, k_ids = next((x.tensors for x in literals if x.kind.is_documents), (None, None))
    dense: Any = next((x.tensors[0] for x in literals if x.kind.is_dense), None)
    words, ids = -(-(problem.seqlen_q if by_key else problem.seqlen_k) // 32), Type("*i32")
    rows, columns = (3, 2) if by_key else (2, 3)
    return TileLists(
        runs="*i32",
        counts="*i32",
        order="*i32",
        terms="*i32",
        q_ids=ids if layout.ids else None,
        k_ids=(ids if _same_memory(q_ids, k_ids) else "*i32") if layout.ids else None,
        bits="*i32" if layout.bits else None,
        width=run_width(program, -(-across // other), (config.BLOCK_M, config.BLOCK_N), by_key),
        stride_b=tiles * rows_h if per_batch(problem) else 0,
        stride_h=tiles if rows_h > 1 else 0,
        terms_b=4 * layout.intervals if per_batch(problem) else 0,
        q_ids_b=problem.seqlen_q if layout.ids and q_ids.shape[0] > 1 else 0,
        k_ids_b=problem.seqlen_k if layout.ids and k_ids.shape[0] > 1 else 0,
        bits_b=words if layout.bits and dense.shape[0] > 1 else 0,
        bits_h=words if layout.bits and dense.shape[1] > 1 else 0,
        bits_row=words if layout.bits and dense.shape[rows] > 1 else 0,
        bits_w=1 if layout.bits and dense.shape[columns] > 1 else 0,
    )


def planned_words(problem: Problem, config: Any) -> tuple[Words | None, Words | None]:
    """The words a pass reads, with types in place of addresses."""
    strides = int(per_batch(problem)), int(per_head(problem))
    some = Words("*i32", *strides)
    return (some if config.UNSEEN_KEYS else None), (some if getattr(config, "EMPTY_ROWS", False) else None)


def list_arguments(problem: Problem, config: Any) -> Lists | None:
    """The lists of a kernel that walks some, with types in place of addresses."""
    if config.LISTS is None:
        return None
    by_key = config.LISTED_BY_KEY
    bounds = "*i64" if has_bounds(config.LISTS) else None
    return lists_of(planned_lists(problem, config, by_key), planned_words(problem, config), bounds)
