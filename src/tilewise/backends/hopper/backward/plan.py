"""The plan of a shape's backward: which kernels, compiled for what, over which tiles in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from tilewise.backends.hopper.backward.compile import pointer
from tilewise.backends.hopper.backward.config import (
    APART,
    CAPPED,
    KEYS,
    QUERIES,
    UNMASKED,
    KeysConfig,
    QueriesConfig,
    widths,
)
from tilewise.backends.hopper.backward.structs import Edges, Plane, Walk
from tilewise.backends.hopper.intervals import Form, form_of
from tilewise.backends.hopper.launch import LOG2E
from tilewise.backends.hopper.order import tile_order, visited_keys
from tilewise.backends.hopper.structs import Divisor, Rows, Term
from tilewise.masks import may_have_empty_rows
from tilewise.problem import Problem

L2_BYTES = 24 << 20
"""Of the L2 cache (50 MiB on H100 and H200) for what is streamed past the tiles of heads that are walked together."""
FEW_KEYS = {128: 400}
"""By head dim: up to so many keys for each query, on average, dQ by a kernel of its own costs less than clearing and casting its
sums. H200: at 128 causal 512 (320 keys in tiles) 246 against 235 TFLOP/s, causal 1k 334 against 365; at 64 217 against 234."""


class Step(NamedTuple):
    """One kernel of a plan; the addresses in its arguments are still to come, but for the order."""

    name: str
    kernel: Any
    config: KeysConfig | QueriesConfig
    arguments: Walk | Edges
    programs: int


class Plan(NamedTuple):
    """All of a call that does not depend on its tensors, and the calls made so far."""

    steps: tuple[Step, ...]
    stats: int  # numbers of scratch memory: of the statistics, and of dQ
    dq: int
    calls: dict[tuple[Any, ...], tuple[Callable[[], Any], ...]]


def tile_of(problem: Problem, form: Form) -> KeysConfig:
    """The table's tile. dQ gets a kernel of its own where bits must repeat, rows are short, or the scores are more than products
    to start at -lse (there seeds fail, and without them 128 queries find no registers)."""
    dims = widths(problem.head_dim, problem.head_dim_v)
    tile = KEYS[dims]
    unseeded = tile.SEEDED and (problem.softcap > 0 or problem.scale <= 0)
    if problem.deterministic or unseeded or keys_each(problem, form, tile) <= FEW_KEYS.get(tile.BLOCK_D, 0):
        everything = not form.terms and not problem.varlen
        return (CAPPED if problem.softcap > 0 else UNMASKED if everything else APART)[dims]
    return tile


def keys_each(problem: Problem, form: Form, tile: KeysConfig) -> float:
    """Keys in the tiles that a query sees, on average; in a packed batch as if its sequences were equally long."""
    sequences = problem.batch if problem.varlen else 1
    queries, keys = max(1, problem.seqlen_q // sequences), max(1, problem.seqlen_k // sequences)
    if not form.band:
        return keys
    return float(visiting_queries(form, tile, queries, keys).sum()) * tile.BLOCK_N / queries


def make_plan(
    problem: Problem, processors: int, compile_: Any, with_dlse: bool = False, tile: KeysConfig | None = None
) -> Plan:
    """The plan on a GPU with so many multiprocessors; `compile_(name, dtype, arguments, config)` gives the kernels, `tile`
    overrides the table's."""
    form = form_of(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
    assert isinstance(form, Form), "the backend has said no to this problem"
    dims = widths(problem.head_dim, problem.head_dim_v)
    tile = tile or tile_of(problem, form)
    about: dict[str, Any] = {
        "TERMS": len(form.terms),
        "BAND": form.band,
        "LEFT": form.left,
        "VARLEN": problem.varlen,
        "BOTTOM": form.bottom,
        "BLIND": problem.varlen or may_have_empty_rows(problem.program, problem.seqlen_q, problem.seqlen_k),
        "SCORES": "softcap" if problem.softcap > 0 else "fold",
    }
    config = tile._replace(**about)
    plain = config._replace(TERMS=0, BAND=False, LEFT=False, SCORES="fold", BOTTOM=False, BLIND=False)
    stat_blocks = blocks_of(problem, problem.seqlen_q, config.BLOCK_M)
    tiles = stat_blocks * problem.heads * (1 if problem.varlen else problem.batch)
    edges = edges_of(problem, config, stat_blocks, with_dlse)

    def step(name: str, own: KeysConfig | QueriesConfig, arguments: Walk | Edges, programs: int) -> Step:
        return Step(name, compile_(name, problem.dtype, types_of(arguments), own), own, arguments, programs)

    keys = walk_of(problem, form, config, stat_blocks, processors)
    first = step("prepare_kernel", plain, edges, tiles)
    second = step("split_kernel" if config.SPLIT else "keys_kernel", config, keys, keys.programs)
    if config.REDUCE:
        third = step("cast_kernel", plain, edges, tiles)
    else:
        assert not config.SEEDED, "dQ's kernel reads plain statistics"
        own = QUERIES[dims]._replace(STAT_ROWS=config.BLOCK_M, **about)
        queries = walk_of(problem, form, own, stat_blocks, processors)
        third = step("queries_kernel", own, queries, queries.programs)
    scratch = (tiles + 1) * config.BLOCK_M * config.BLOCK_D if config.REDUCE else 0
    return Plan((first, second, third), 2 * tiles * config.BLOCK_M, scratch, {})


def types_of(arguments: Walk | Edges) -> Walk | Edges:
    """The arguments with the order as the type of its pointer: kernels do not depend on what stands in it."""
    if isinstance(arguments, Edges) or arguments.order is None:
        return arguments
    return arguments._replace(order="*i32")


def blocks_of(problem: Problem, length: int, block: int) -> int:
    """Tiles of a head; what packed sequences of any lengths need at most, see find_sequence."""
    return length // block + problem.batch if problem.varlen else -(-length // block)


def walk_of(
    problem: Problem, form: Form, config: KeysConfig | QueriesConfig, stat_blocks: int, processors: int
) -> Walk:
    """Arguments of a kernel that walks over tiles of keys, or of queries."""
    of_keys = isinstance(config, KeysConfig)
    length, block = (problem.seqlen_k, config.BLOCK_N) if of_keys else (problem.seqlen_q, config.BLOCK_M)
    own_heads = problem.kv_heads if of_keys else problem.heads
    blocks = blocks_of(problem, length, block)
    heads = own_heads * (1 if problem.varlen else problem.batch)
    programs = min(blocks * heads, processors)
    order = None
    if config.BAND and not problem.varlen:
        if isinstance(config, KeysConfig):
            # tiles of keys are numbered from the first to the last
            times = visiting_queries(form, config, problem.seqlen_q, problem.seqlen_k)[::-1] * problem.group
        else:
            times = visited_keys(form, config, problem.seqlen_q)  # type: ignore[arg-type]
        tiles, _ = tile_order(times, heads, heads_together(problem, config, heads), programs)
        order = torch.from_numpy(tiles)
    packed = "*i32" if problem.varlen else None
    rows = Rows(pointer(problem.dtype), 0, 0, 0) if problem.varlen else None
    return Walk(
        cu_q=packed,
        cu_k=packed,
        order=order,
        terms=tuple(Term(*term[:4], *(None if t is None else "*i32" for t in term[4:])) for term in form.terms),
        heads=Divisor.of(own_heads),
        group=Divisor.of(problem.group),
        blocks=Divisor.of(blocks),
        batch=problem.batch,
        len_q=problem.seqlen_q,
        len_k=problem.seqlen_k,
        stat_blocks=stat_blocks,
        stat_tiles=stat_blocks * problem.heads * (1 if problem.varlen else problem.batch),
        total=blocks * heads,
        programs=programs,
        unit=(problem.softcap or problem.scale) * LOG2E,
        slope=problem.scale / problem.softcap if problem.softcap else 0.0,
        scale=float(problem.scale),
        stats_ptr="*fp32",
        dq_ptr="*fp32",
        dq=rows,
        dk=rows,
        dv=rows,
    )


def edges_of(problem: Problem, config: KeysConfig, stat_blocks: int, with_dlse: bool) -> Edges:
    anywhere = Plane(pointer(problem.dtype), 0, 0, 0, 0)
    unit = problem.scale * LOG2E
    return Edges(
        out=anywhere,
        dout=anywhere,
        dq=anywhere,
        lse_ptr="*fp32",
        dlse_ptr="*fp32" if with_dlse else None,
        stats_ptr="*fp32",
        dq_ptr="*fp32",
        cu_q="*i32" if problem.varlen else None,
        heads=Divisor.of(problem.heads),
        blocks=Divisor.of(stat_blocks),
        batch=problem.batch,
        len_q=problem.seqlen_q,
        factor=-LOG2E / unit if config.SEEDED else LOG2E,
        scale=float(problem.scale),
    )


def visiting_queries(form: Form, config: KeysConfig, queries: int, keys: int) -> np.ndarray:
    """Queries in the tiles that see each tile of keys, int64 [blocks]; `schedule.visiting` on the host.

    Numbers that only the device knows (offsets, padding) are taken as absent.
    """
    n0 = np.arange(0, keys, config.BLOCK_N)
    lo = np.min([np.where(n0 < term.end, n0 + 1 - term.past, queries) for term in form.terms], axis=0)
    tiles = -(-queries // config.BLOCK_M)
    first = np.minimum(np.maximum(lo, 0) // config.BLOCK_M, tiles - 1)
    past = np.full_like(n0, queries)
    if form.left:
        n1 = np.minimum(n0 + config.BLOCK_N, form.terms[0].end) - 1
        past = np.minimum(np.where(n1 >= form.terms[0].start, n1 + 1 - form.terms[0].lo, 0), queries)
    return np.asarray(np.maximum(-(-past // config.BLOCK_M) - first, 1) * config.BLOCK_M)


def heads_together(problem: Problem, config: KeysConfig | QueriesConfig, heads: int) -> int:
    """How many heads are walked side by side: those whose streamed tensors (and sums of dQ) the L2 cache holds."""
    width = 2 * (config.BLOCK_D + config.BLOCK_DV)
    if isinstance(config, KeysConfig):
        each = problem.group * problem.seqlen_q * (width + 4 * config.BLOCK_D)
    else:
        each = -(-problem.seqlen_k * width // problem.group)
    most = max(1, L2_BYTES // each)
    return max(n for n in range(1, min(most, heads) + 1) if heads % n == 0)
