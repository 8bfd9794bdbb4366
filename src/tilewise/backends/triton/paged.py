"""Attention over keys and values in pages: the forward's kernel, which reads them through the table.

Nothing here looks at values: lengths, tables and cumulative lengths stay on the device, and launches depend on shapes alone. A
CUDA graph of a call serves sequences that grow.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.gpu import arguments as host
from tilewise.backends.gpu.launch import LaunchOptions, interpreting, on_hip, view
from tilewise.backends.gpu.operands import in_two, padded
from tilewise.backends.gpu.record import Launch, Recording, recorder
from tilewise.backends.gpu.structs import Attention, KernelConfig, MaskLayout, PageArgs, PageLayout, Scale, View
from tilewise.backends.pages import QUANTIZED, NewTokens, Pages
from tilewise.backends.triton.plan import SPAN
from tilewise.backends.triton.run import arguments, forward_tiles, key_of, options, ready, spec_of
from tilewise.hardware import DeviceSpec
from tilewise.model import TilePlan
from tilewise.problem import Problem

ONE_PAGE = 1 << 30
"""The size of a page that holds all of a sequence."""
FP8_SINCE = (8, 9)
INTEGERS = (torch.int32, torch.int64)
APPENDS = 256
_appends: dict[Hashable, Recording] = {}
"""The launches that write tokens, by all they depend on but addresses: when there are APPENDS, all are dropped."""


def run_paged(problem: Problem, inputs: Inputs, pages: Pages, out: Tensor, lse: Tensor) -> None:
    """Fill out (1, H, T, Dv) and lse (1, H, T)."""
    spec = spec_of(out.device)
    pages = _readable(pages, spec)
    inputs = ready(problem, inputs)._replace(k=pages.k.transpose(1, 2), v=pages.v.transpose(1, 2), cu_k=None)
    if problem.rows:
        inputs = inputs._replace(cu_q=None)
    owned = (pages.entries, pages.starts, pages.counts, pages.lengths, pages.k_scale, pages.v_scale)
    facts: Hashable = tuple(None if x is None else (x.dtype, x.shape, x.stride()) for x in owned)
    key = key_of(problem, inputs, "pages", pages.k.shape, pages.latent, pages.most, facts)
    if problem.program.tensors:  # they are converted in each call, and no part of what is recorded
        key = None
    recording = recorder.get(problem, key, out.device, partial(paged_tiles, problem, pages, spec))
    tiles: dict[str, TilePlan] = recording.plan
    partials = host.partial_results(out, tiles["decode"].splits) if "merge" in tiles else ()
    tensors = (*inputs, out, lse, *partials, *owned)
    if not recording.repeat(tensors):
        recording.record(tensors, paged_launches(problem, inputs, pages, (out, lse), partials, tiles))


def paged_tiles(problem: Problem, pages: Pages, spec: DeviceSpec) -> dict[str, TilePlan]:
    """What the plan has, which counts as many keys for each sequence: one that may have more keys than all parts hold gets its
    parts from one program."""
    tiles = forward_tiles(problem, spec)
    if problem.invariant and "merge" in tiles and pages.most * pages.page > tiles["decode"].splits * SPAN:
        return {"decode": replace(tiles["decode"], splits=1)}
    return tiles


def paged_launches(
    problem: Problem,
    inputs: Inputs,
    pages: Pages,
    results: tuple[Tensor, Tensor],
    partials: tuple[Tensor, ...],
    tiles: dict[str, TilePlan],
) -> list[Launch]:
    """Attention, and the merge of what was split."""
    from tilewise.backends.triton.forward import forward_kernel

    spec = spec_of(results[0].device)
    tile = tiles["decode" if "decode" in tiles else "forward"]
    a, config = paged_arguments(problem, inputs, pages, results, tile)
    if partials:
        a = a._replace(out=host.split_view(partials[0]), lse_ptr=partials[1])
        config = config._replace(SPLIT=True)
    programs = _row_tiles(problem, tile.block_q) * problem.kv_heads * tile.splits
    launches = [Launch(forward_kernel, programs, (a, None, None), config, options(tile, spec))]
    if partials:
        launches.append(merge_launch(problem, inputs, results, partials, replace(tiles["merge"], splits=tile.splits)))
    return launches


def merge_launch(
    problem: Problem, inputs: Inputs, results: tuple[Tensor, Tensor], partials: tuple[Tensor, ...], tile: TilePlan
) -> Launch:
    """The merge of what was split."""
    from tilewise.backends.triton.split import merge_kernel

    a, config = arguments(problem, inputs, *results, tile)
    programs = -(-problem.seqlen_q // tile.block_q) * problem.heads
    config = config._replace(MASK=MaskLayout(), SPAN=SPAN if problem.invariant else 0)
    args = (a, host.split_view(partials[0]), partials[1])
    return Launch(merge_kernel, programs, args, config, options(tile, spec_of(results[0].device)))


def paged_arguments(
    problem: Problem, inputs: Inputs, pages: Pages, results: tuple[Tensor, Tensor], tile: TilePlan
) -> tuple[Attention, KernelConfig]:
    a, config = arguments(problem, inputs, *results, tile)
    latent = pages.latent and inputs.bias is None and padded(problem.head_dim_v) == problem.head_dim_v
    first, rest = in_two(problem.head_dim, problem.head_dim_v) if latent else in_two(problem.head_dim)
    layout = PageLayout(
        PAGE=_known_page(pages),
        EVEN=problem.rows > 0,
        SCALED=pages.k_scale is not None,
        PER_TOKEN=_per_token(pages.k_scale) or _per_token(pages.v_scale),
        BITS=pages.k.dtype == torch.uint8,
        LATENT=latent,
    )
    args = _page_args(pages, problem.rows)
    config = config._replace(PAGED=True, PAGES=layout, PACK=problem.group, BLOCK_D=first, REST=rest, EMPTY_ROWS=True)
    return a._replace(pages=args), config._replace(SPAN=SPAN) if problem.invariant else config


def _page_args(pages: Pages, rows: int) -> PageArgs:
    return PageArgs(
        entries=pages.entries,
        starts=pages.starts,
        counts=pages.counts,
        lengths=pages.lengths,
        k_scale=_scale(pages.k_scale, pages),
        v_scale=_scale(pages.v_scale, pages),
        size=pages.entries.shape[0],
        page=pages.page,
        total=pages.k.shape[0],
        rows=rows,
    )


def run_append(pages: Pages, new: NewTokens) -> Tensor | None:
    """Write the tokens; the queries, turned."""
    spec = spec_of(pages.k.device)
    pages = _readable(pages, spec)
    turned = None if new.q is None or new.turning is None else torch.empty_like(new.q)
    owned = (pages.k, pages.v, pages.entries, pages.starts, pages.counts, pages.lengths, pages.k_scale, pages.v_scale)
    turning = (None,) * 3 if new.turning is None else (new.turning.cos, new.turning.sin, new.turning.positions)
    tensors = (*owned, *turning, new.q, new.k, new.v, new.cu, new.slots, turned)
    shapes = tuple(None if x is None else (x.dtype, x.shape, x.stride()) for x in tensors)
    key = (pages.k.device, pages.latent, new.q_rows, new.rows, new.turning is not None and new.turning.interleaved, shapes)
    recording = _appends.get(key)
    if recording is None:
        if len(_appends) >= APPENDS:
            _appends.clear()
        recording = _appends[key] = Recording(pages.k.device.index, None)
    if not recording.repeat(tensors):
        launch = append_launch(pages, new, turned)
        if launch.programs:
            recording.record(tensors, [launch])
    return new.q if turned is None else turned


def append_launch(pages: Pages, new: NewTokens, turned: Tensor | None) -> Launch:
    from tilewise.backends.triton.append import AppendArgs, AppendConfig, append_kernel

    q, (k, v) = new.q if turned is not None else None, (new.k, new.v)
    kv_heads, dim = pages.k.shape[2], pages.k.shape[3]
    heads, q_tokens = (0, 0) if q is None else (q.shape[1], q.shape[0])
    tokens = 0 if k is None or not pages.k.shape[0] else k.shape[0]
    turning = new.turning
    half = 0 if turning is None else turning.cos.shape[1]
    positions = None if turning is None or turning.positions is None else turning.positions
    stored = str(pages.v.dtype if pages.k.dtype != torch.uint8 else torch.float8_e4m3fn).removeprefix("torch.")
    wide = min(16, 1 << (max(kv_heads, heads) - 1).bit_length())
    config = AppendConfig(
        HEADS=wide,
        Q_PARTS=-(-heads // wide) if q_tokens else 0,
        PARTS=-(-kv_heads // wide) if tokens else 0,
        HALF=half,
        BLOCK_HALF=1 << max(0, half - 1).bit_length(),
        STEP=2 if turning is not None and turning.interleaved else 1,
        REST=dim - 2 * half,
        BLOCK_REST=1 << max(0, dim - 2 * half - 1).bit_length(),
        DV=pages.v.shape[3],
        BLOCK_DV=padded(pages.v.shape[3]),
        EVEN_Q=new.q_rows > 0,
        EVEN=new.rows > 0,
        LATENT=pages.latent,
        MOST=QUANTIZED.get(stored, 0.0),
        K_PER_TOKEN=_per_token(pages.k_scale),
        V_PER_TOKEN=_per_token(pages.v_scale),
        BITS=pages.k.dtype == torch.uint8,
        INTERPRET=interpreting(),
    )
    if not tokens:
        k = v = None
    args = AppendArgs(
        q=None if q is None else _token_view(q),
        turned=None if turned is None else _token_view(turned),
        k=None if k is None else _token_view(k),
        v=None if v is None else _token_view(v),
        k_pages=None if k is None else _view(pages.k, pages.k.transpose(1, 2)),
        v_pages=None if k is None else _view(pages.v, pages.v.transpose(1, 2)),
        pages=_page_args(pages, 0),
        cu=pages.lengths if new.cu is None else new.cu,
        cos=None if turning is None else _view(turning.cos, turning.cos[None, None]),
        sin=None if turning is None else _view(turning.sin, turning.sin[None, None]),
        positions=positions,
        slots=new.slots,
        batch=pages.lengths.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        q_tokens=q_tokens,
        tokens=tokens,
        q_rows=new.q_rows,
        rows=new.rows,
        angles=1 if turning is None else turning.cos.shape[0],
    )
    programs = max(q_tokens, tokens) * (config.Q_PARTS + config.PARTS)
    return Launch(append_kernel, programs, (args,), config, LaunchOptions(num_warps=4, num_stages=1))


def _view(x: Tensor, sides: Tensor) -> View:
    """A tensor as its view `sides` has them; recorded launches know the tensor."""
    return view(sides)._replace(ptr=x)


def _token_view(x: Tensor) -> View:
    return _view(x, x.transpose(0, 1)[None])


def _row_tiles(problem: Problem, block: int) -> int:
    """Tiles of rows (queries × heads of a group) of a key head, at most."""
    if problem.rows:
        return -(-problem.rows * problem.group // block) * problem.batch
    return problem.seqlen_q * problem.group // block + problem.batch


def _readable(pages: Pages, spec: DeviceSpec) -> Pages:
    """As kernels read them; nothing is copied that fits already."""
    lengths = pages.lengths
    if lengths.dtype not in INTEGERS or not lengths.is_contiguous():
        lengths = lengths.int().contiguous()
    k, v = pages.k, pages.v
    if k.dtype == torch.float8_e4m3fn and (on_hip() or spec.capability is None or spec.capability < FP8_SINCE):
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    return pages._replace(k=k, v=v, lengths=lengths)


def _known_page(pages: Pages) -> int:
    """The size of a page that kernels are compiled for; 0 for any."""
    if pages.indptr is None and pages.most == 1:
        return ONE_PAGE
    return pages.page if pages.page & (pages.page - 1) == 0 else 0


def _per_token(scale: Tensor | None) -> bool:
    """Does a head have more than one scale?"""
    return scale is not None and any(scale.stride()[:2])


def _scale(scale: Tensor | None, pages: Pages) -> Scale:
    if scale is None:
        return Scale(pages.lengths, 0, 0, 0)
    page, place, head = scale.stride()
    return Scale(scale, page, head, place)
