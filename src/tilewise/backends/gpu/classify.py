"""Making lists of tiles (`lists.py`) and keeping them: the one place where the GPU backends get theirs.

Lists are kept with the problem (`kept.py`), and by the same rules with the first leaf of a mask that holds tensors, for as long
as that value lives: layers whose problems differ share them.

Nothing is read by the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.gpu.arguments import mask_args
from tilewise.backends.gpu.kept import KEPT, capturing, kept, lengths_of, version
from tilewise.backends.gpu.launch import LaunchOptions, broadcast_strides
from tilewise.backends.gpu.lists import CHUNK, ListLayout, TileLists, list_layout, most_runs, run_width
from tilewise.backends.gpu.record import Launch, current_stream
from tilewise.backends.gpu.structs import MaskArgs, MaskLayout
from tilewise.masks import Literal, Mask, MaskProgram
from tilewise.problem import Problem

MOST_CELLS = 64
"""Entries of a table within a tile that are looked at one by one; where there are more, so are all elements."""
TILES_OF_WORD = 16
PACK_ROWS, PACK_WORDS = 32, 4
Strides = tuple[int, ...]
_kept: WeakKeyDictionary[Mask, dict[Hashable, tuple[TileLists, Any]]] = WeakKeyDictionary()


class ListSpec(NamedTuple):
    """Which lists: for tiles of so many queries and keys, rows of query tiles or of key tiles."""

    block_q: int
    block_k: int
    by_key: bool = False
    at_least_one: bool = False


class ClassifyArgs(NamedTuple):
    mask: MaskArgs
    cu_q: Any
    cu_k: Any
    batch: int
    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    tiles: int  # of the rows of a head
    rows_h: int
    runs: Any
    counts: Any
    terms: Any
    width: int
    terms_b: int
    summaries: tuple[Any, ...]
    summary_strides: Strides
    maps: tuple[Any, ...]
    map_b: Strides
    map_h: Strides
    map_words: int
    out: Any = None  # of `map_kernel`


class ClassifyConfig(NamedTuple):
    MASK: MaskLayout
    LAYOUT: ListLayout
    BLOCK_M: int
    BLOCK_N: int
    VARLEN: bool
    BY_KEY: bool
    AT_LEAST_ONE: bool
    CHUNK: int
    CELLS: tuple[tuple[tuple[int, int], ...], ...]  # of each literal: entries of its table within a tile
    MAPS: tuple[tuple[int, ...], ...]  # its map, or -1
    SUMMARIES: tuple[tuple[int, ...], ...]  # its first summary
    MOST_FULL: int  # runs in a chunk; 0: there is room for all
    MOST_PARTIAL: int
    TERM: int = 0  # of `map_kernel`
    LITERAL: int = 0


class SummaryArgs(NamedTuple):
    ids: Any
    out: Any
    cu: Any
    stride: int
    batch: int
    length: int
    tiles: int


class SummaryConfig(NamedTuple):
    BLOCK: int
    VARLEN: bool


class PackArgs(NamedTuple):
    dense: Any
    out: Any
    strides: Strides
    heads: int
    rows: int
    keys: int
    words: int
    columns: int
    row_blocks: int


class PackConfig(NamedTuple):
    ROWS: int
    WORDS: int
    NEGATED: bool
    SHARED: bool


def lists_for(problem: Problem, inputs: Inputs, spec: ListSpec) -> TileLists:
    """The lists of a problem whose mask is listed: kept ones, or new ones, which the current stream makes."""
    return kept(problem, inputs.q, spec, lambda: _shared_lists(problem, inputs, spec), lengths_of(inputs))


def _shared_lists(problem: Problem, inputs: Inputs, spec: ListSpec) -> TileLists:
    """Lists that problems with the same mask share."""
    memory, key, held = _memory(problem, inputs, spec)
    found: TileLists | None = None if memory is None else memory.get(key, (None,))[0]
    if found is not None:
        return found
    lists = make_lists(problem, inputs, spec)
    if memory is not None:
        if len(memory) >= KEPT:
            memory.clear()
        memory[key] = lists, held
    return lists


def _memory(problem: Problem, inputs: Inputs, spec: ListSpec) -> tuple[dict[Hashable, Any] | None, Hashable, Any]:
    """Where lists are kept, under which key, and what must live as long as they do; None where they are not kept."""
    if capturing(inputs.q):
        return None, None, None
    leaves = [leaf for leaf in problem.mask.leaves() if not leaf.static]
    versions = [one for leaf in leaves for one in _versions(leaf)]
    offsets = lengths_of(inputs)
    versions += [version(x) for x in offsets]
    if not leaves or None in versions:
        return None, None, None
    program = problem.program
    stream = current_stream(inputs.q.device.index) if inputs.q.is_cuda else 0
    sizes = (problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k)
    others = (*leaves[1:], *offsets)
    key = (
        *(program.structure, program.ints, inputs.q.device, stream, sizes, spec),
        *(tuple(map(id, others)), tuple(versions)),
    )
    return _kept.setdefault(leaves[0], {}), key, others


def _versions(leaf: Mask) -> Iterator[int | None]:
    """Of the tensors of a leaf; None for one that counts none."""
    for one in fields(leaf):  # type: ignore[arg-type]  # every leaf is a dataclass
        value = getattr(leaf, one.name)
        for x in value.tensors if isinstance(value, MaskProgram) else (value,):
            if isinstance(x, Tensor | np.ndarray):
                yield version(x)


def tile_count(problem: Problem, block: int, keys: bool) -> int:
    """Tiles of one side; those of packed sequences are counted together, as an upper bound."""
    length = problem.seqlen_k if keys else problem.seqlen_q
    return length // block + problem.batch if problem.varlen else -(-length // block)


def make_lists(problem: Problem, inputs: Inputs, spec: ListSpec) -> TileLists:
    """New lists, by a few small kernels on the current stream."""
    return Maker(problem, inputs, spec).make()


class Maker:
    """One making of lists."""

    def __init__(self, problem: Problem, inputs: Inputs, spec: ListSpec) -> None:
        self.problem, self.spec, self.device = problem, spec, inputs.q.device
        self.cu_q, self.cu_k = (inputs.cu_q, inputs.cu_k) if problem.varlen else (None, None)
        self.program, self.terms = problem.program, list(problem.program.terms())
        self.mask, self.structure = mask_args(self.program, self.device, problem.batch), MaskLayout.of(self.program.structure)
        self.layout = list_layout(self.program, spec.block_q, spec.block_k)
        literals = [one for term in self.terms for one in term]
        tensors = [(one.kind, t) for one in literals for t in one.tensors]
        per_batch = not problem.varlen and any(t.shape[0] > 1 for _, t in tensors)
        self.rows_b = problem.batch if per_batch else 1
        self.rows_h = problem.heads if any(kind.per_head and t.shape[1] > 1 for kind, t in tensors) else 1
        self.summaries: list[Tensor] = []
        self.summary_strides: list[int] = []
        self.maps: list[tuple[Tensor, int, int]] = []

    def empty(self, *sides: int) -> Tensor:
        return torch.empty(sides, dtype=torch.int32, device=self.device)

    def make(self) -> TileLists:
        from tilewise.backends.gpu.classifier import classify_kernel

        problem, (block_q, block_k, by_key, at_least_one) = self.problem, self.spec
        own, other = (block_k, block_q) if by_key else (block_q, block_k)
        tiles = tile_count(problem, own, by_key)
        across = -(-(problem.seqlen_q if by_key else problem.seqlen_k) // other)
        rows = self.rows_b * self.rows_h * tiles
        width = run_width(self.program, across, (block_q, block_k), by_key)
        runs, counts = self.empty(rows, width), self.empty(rows, 2)
        sequences = problem.batch if problem.varlen else self.rows_b
        terms_b = 4 * len(self.terms) if sequences > 1 else 0
        terms = self.empty(sequences, len(self.terms), 4)
        config = self.config(across, at_least_one)
        args = self.arguments(tiles, runs, counts, terms, width, terms_b)
        launch(classify_kernel, rows, (args,), config)
        q_ids, k_ids, q_ids_b, k_ids_b = self.ids()
        bits, bits_strides = self.bits()
        return TileLists(
            runs=runs,
            counts=counts,
            order=longest_first(counts),
            terms=terms,
            q_ids=q_ids,
            k_ids=k_ids,
            bits=bits,
            width=width,
            stride_b=tiles * self.rows_h if self.rows_b > 1 else 0,
            stride_h=tiles if self.rows_h > 1 else 0,
            terms_b=terms_b,
            q_ids_b=q_ids_b,
            k_ids_b=k_ids_b,
            bits_b=bits_strides[0],
            bits_h=bits_strides[1],
            bits_row=bits_strides[2],
            bits_w=bits_strides[3],
        )

    def arguments(
        self, tiles: int, runs: Tensor, counts: Tensor, terms: Tensor, width: int, terms_b: int
    ) -> ClassifyArgs:
        problem = self.problem
        return ClassifyArgs(
            mask=self.mask,
            cu_q=self.cu_q,
            cu_k=self.cu_k,
            batch=problem.batch,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            len_q=problem.seqlen_q,
            len_k=problem.seqlen_k,
            tiles=tiles,
            rows_h=self.rows_h,
            runs=runs,
            counts=counts,
            terms=terms,
            width=width,
            terms_b=terms_b,
            summaries=tuple(self.summaries),
            summary_strides=tuple(self.summary_strides),
            maps=tuple(one[0] for one in self.maps),
            map_b=tuple(one[1] for one in self.maps),
            map_h=tuple(one[2] for one in self.maps),
            map_words=self.map_words,
        )

    @property
    def map_words(self) -> int:
        return -(-tile_count(self.problem, self.spec.block_k, True) // TILES_OF_WORD)

    def config(self, across: int, at_least_one: bool) -> ClassifyConfig:
        """What the classifier is compiled for; makes what it reads of documents and dense masks."""
        cells, maps, summaries = [], [], []
        for t, term in enumerate(self.terms):
            cells.append(tuple(self.cells(one) for one in term))
            maps.append(tuple(self.map(t, i, one, cells[t][i]) for i, one in enumerate(term)))
            summaries.append(tuple(self.summary(one) for one in term))
        full, partial = most_runs(len(self.terms))
        tables = any(kind.reads_data and not kind.is_documents for kind in self.program.kinds)
        return ClassifyConfig(
            MASK=self.structure,
            LAYOUT=self.layout,
            BLOCK_M=self.spec.block_q,
            BLOCK_N=self.spec.block_k,
            VARLEN=self.problem.varlen,
            BY_KEY=self.spec.by_key,
            AT_LEAST_ONE=at_least_one,
            CHUNK=min(CHUNK, max(16, 1 << (across - 1).bit_length())),
            CELLS=tuple(cells),
            MAPS=tuple(maps),
            SUMMARIES=tuple(summaries),
            MOST_FULL=0 if tables else full,
            MOST_PARTIAL=partial,
        )

    def cells(self, literal: Literal) -> tuple[int, int]:
        """Entries of a literal's table that a tile may touch."""
        if not (literal.kind.is_blocks or literal.kind.is_selected):
            return 0, 0
        rows, columns = zip((self.spec.block_q, self.spec.block_k), literal.ints[:2], strict=True)
        return _touched(*rows), _touched(*columns)

    def map(self, t: int, i: int, literal: Literal, cells: tuple[int, int]) -> int:
        """The number of the map of a literal that has one, which is made here; -1 for others."""
        many = literal.kind.is_blocks and cells[0] * cells[1] > MOST_CELLS and not self.problem.varlen
        if not (literal.kind.is_dense or many):
            return -1
        from tilewise.backends.gpu.classifier import map_kernel

        problem, (block_q, block_k, *_) = self.problem, self.spec
        size_b, size_h = literal.tensors[0].shape[:2]
        tiles = -(-problem.seqlen_q // block_q)
        out = self.empty(size_b, size_h, tiles, self.map_words)
        config = ClassifyConfig(
            self.structure, self.layout, block_q, block_k, False, False, False, 16, (), (), (), 0, 0, t, i
        )
        args = self.arguments(tiles, out, out, out, 0, 0)._replace(rows_h=size_h, out=out)
        launch(map_kernel, out.numel(), (args,), config)
        self.maps.append((out, tiles * size_h if size_b > 1 else 0, tiles if size_h > 1 else 0))
        return len(self.maps) - 1

    def summary(self, literal: Literal) -> int:
        """The number of the first of a literal's summaries, which are made here; -1 for what has none."""
        if not literal.kind.is_documents:
            return -1
        from tilewise.backends.gpu.classifier import summary_kernel

        first, problem = len(self.summaries), self.problem
        for x, block, keys in zip(literal.tensors, self.spec[:2], (False, True), strict=True):
            ids = torch.as_tensor(x, device=self.device).to(torch.int32).contiguous()
            tiles = tile_count(problem, block, keys)
            out, cu = self.empty(ids.shape[0], tiles, 3), self.cu_k if keys else self.cu_q
            args = SummaryArgs(ids, out, cu, ids.shape[1], problem.batch, ids.shape[1], tiles)
            launch(summary_kernel, ids.shape[0] * tiles, (args,), SummaryConfig(block, problem.varlen))
            self.summaries.append(out)
            self.summary_strides.append(tiles if ids.shape[0] > 1 else 0)
        return first

    def ids(self) -> tuple[Tensor | None, Tensor | None, int, int]:
        """The ids that kernels compare in PARTIAL tiles."""
        if self.layout.program or not self.layout.ids:
            return None, None, 0, 0
        place = next(one for one in self.structure.terms[0].literals if one.kind.is_documents)
        q_ids, k_ids = self.mask.tensors[place.tensors : place.tensors + 2]
        return q_ids, k_ids, *self.mask.strides[place.strides : place.strides + 2]

    def bits(self) -> tuple[Tensor | None, Strides]:
        """The packed bits of the dense mask that kernels read in PARTIAL tiles, and their strides."""
        if self.layout.program or not self.layout.bits:
            return None, (0, 0, 0, 0)
        literal = next(one for one in self.terms[0] if one.kind.is_dense)
        return pack_bits(torch.as_tensor(literal.tensors[0], device=self.device), literal.kind.negated)


def bits_by_key(problem: Problem, lists: TileLists, device: torch.device) -> TileLists:
    """Lists by key whose bits stand by key as well: words of 32 queries."""
    literal = next(one for term in problem.program.terms() for one in term if one.kind.is_dense)
    dense = torch.as_tensor(literal.tensors[0], device=device)
    bits, strides = pack_bits(dense.transpose(2, 3), literal.kind.negated)
    return lists._replace(bits=bits, bits_b=strides[0], bits_h=strides[1], bits_row=strides[2], bits_w=strides[3])


def pack_bits(dense: Tensor, negated: bool) -> tuple[Tensor, Strides]:
    """A mask (B|1, H|1, Sq|1, Sk|1) as words of 32 keys, and the words' strides along b, h, q and words; or the same of
    its transpose, as words of queries."""
    from tilewise.backends.gpu.classifier import pack_kernel

    dense = dense.bool().view(torch.uint8)
    size_b, size_h, rows, keys = dense.shape
    words = -(-keys // 32)
    out = torch.empty((size_b, size_h, rows, words), dtype=torch.int32, device=dense.device)
    columns, row_blocks = -(-words // PACK_WORDS), -(-rows // PACK_ROWS)
    args = PackArgs(
        dense, out, tuple(broadcast_strides(dense)), size_h, rows, keys, words, columns=columns, row_blocks=row_blocks
    )
    config = PackConfig(PACK_ROWS, PACK_WORDS, negated, SHARED=keys == 1)
    launch(pack_kernel, columns * row_blocks * size_h * size_b, (args,), config)
    return out, (*broadcast_strides(out)[:3], 0 if keys == 1 else 1)


def longest_first(counts: Tensor) -> Tensor:
    """Rows by falling number of tiles."""
    return torch.argsort(counts.sum(1, dtype=torch.int32), descending=True, stable=True).to(torch.int32)


def launch(kernel: Any, programs: int, args: tuple[Any, ...], config: Any) -> None:
    Launch(kernel, programs, args, config, LaunchOptions(4, 1)).run()


@cache
def _touched(block: int, size: int) -> int:
    """Blocks of `size` that a tile of `block` positions may touch; tiles and blocks both start at multiples of theirs."""
    if size % block == 0:
        return 1
    return block // size if block % size == 0 else -(-(block - 1) // size) + 1
