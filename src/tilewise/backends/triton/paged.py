"""Attention over keys and values in pages: the forward's kernel, which reads them through the table.

Nothing here looks at values: lengths, tables and cumulative lengths stay on the device, and launches depend on shapes alone. A
CUDA graph of a call serves sequences that grow.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, PagedLauncher, empty_lse, empty_out
from tilewise.backends.gpu import arguments as host
from tilewise.backends.gpu.launch import LaunchOptions, interpreting, on_device, on_hip, view
from tilewise.backends.gpu.operands import in_two, padded
from tilewise.backends.gpu.record import Launch, Recording, recorder
from tilewise.backends.gpu.structs import Attention, KernelConfig, MaskLayout, PageArgs, PageLayout, Scale, View
from tilewise.backends.pages import QUANTIZED, NewTokens, Pages
from tilewise.backends.triton import plan
from tilewise.backends.triton.fixed import pieces
from tilewise.backends.triton.onchip import WARPGROUP_ROWS
from tilewise.backends.triton.run import (
    arguments,
    forward_tiles,
    in_pieces,
    key_of,
    merges_early,
    merging,
    options,
    ready,
    spec_of,
)
from tilewise.hardware import DeviceSpec
from tilewise.model import TilePlan
from tilewise.problem import Problem

ONE_PAGE = 1 << 30
"""The size of a page that holds all of a sequence."""
FP8_SINCE = (8, 9)
PAIRS = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.uint8: "e4m3"}
INTEGERS = (torch.int32, torch.int64)
APPENDS = 256
_appends: dict[Hashable, Recording] = {}
"""The launches that write tokens, by all they depend on but addresses: when there are APPENDS, all are dropped."""


def run_paged(
    problem: Problem, inputs: Inputs, pages: Pages, results: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """out (1, H, T, Dv) and lse (1, H, T), new or those of `results`; of what is partial the parts, (parts, H, T, Dv) and
    (parts, H, T), which somebody merges with others."""
    pages = _readable(pages, spec_of(inputs.q.device))
    inputs = ready(problem, inputs)._replace(k=pages.k.transpose(1, 2), v=pages.v.transpose(1, 2), cu_k=None)
    if problem.rows:
        inputs = inputs._replace(cu_q=None)
    recording = recording_of(problem, key_of_pages(problem, inputs, pages), pages)
    out, lse = results or (empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q))
    partials = partials_of(recording, problem, pages, out.shape)
    if problem.partial:
        out, lse = partials or (torch.empty_like(out, dtype=torch.float32), lse)
    tensors = (*inputs, out, lse, *(() if problem.partial else partials), *beside(pages))
    if not recording.repeat(tensors):
        recording.record(tensors, paged_launches(problem, inputs, pages, (out, lse), partials, recording.plan))
    return out, lse


def paged_launcher(problem: Problem, inputs: Inputs, pages: Pages) -> PagedLauncher | None:
    """See `Backend.paged_launcher`: launches are repeated by addresses, so a repeated call needs no views of rank 4."""
    pages = _readable(pages, spec_of(inputs.q.device))
    key = key_of_pages(problem, inputs, pages)
    if not problem.rows or problem.partial or key is None:
        return None
    batch, rows, heads, dim = pages.starts.shape[0], problem.rows, problem.heads, problem.head_dim_v
    tokens = batch * rows
    shape, steps = (batch, rows, heads, dim), (rows * heads * dim, heads * dim, dim, 1)
    lse_shape, lse_steps = (1, heads, tokens), (heads * tokens, tokens, 1)

    def run(q: Tensor, pages: Pages, out: Tensor, lse: Tensor) -> None:
        recording = recording_of(problem, key, pages)
        partials = partials_of(recording, problem, pages, (1, heads, tokens, dim))
        if not recording.repeat((q, pages.k, pages.v, out, lse, *partials, *beside(pages))):
            run_paged(problem, Inputs(_as_row(q), pages.k, pages.v), pages, (_as_row(out), lse))

    def launch(q: Tensor, pages: Pages, want_lse: bool) -> tuple[Tensor, Tensor]:
        out = q.new_empty_strided(shape, steps)
        lse = q.new_empty_strided(lse_shape, lse_steps, dtype=torch.float32)
        on_device(q.device, run, q, pages, out, lse)
        return out, lse.reshape(heads, batch, rows).transpose(0, 1) if want_lse else lse

    return launch


def recording_of(problem: Problem, key: Hashable | None, pages: Pages) -> Recording:
    device = pages.k.device
    return recorder.get(problem, key, device, partial(paged_tiles, problem, pages, spec_of(device)))


def partials_of(recording: Recording, problem: Problem, pages: Pages, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Fresh memory for partial results of an output of the shape, where keys are split."""
    if "merge" not in recording.plan:
        return ()
    return host.partial_results(pages.lengths, shape, _partials(problem, pages, recording.plan["decode"]))


def beside(pages: Pages) -> tuple[Tensor | None, ...]:
    """What kernels read of pages beside keys and values."""
    return pages.entries, pages.starts, pages.counts, pages.lengths, pages.k_scale, pages.v_scale


def key_of_pages(problem: Problem, inputs: Inputs, pages: Pages) -> Hashable | None:
    """What launches depend on beside the problem: of q (1, H, T, D) and the pages."""
    if problem.program.tensors:  # they are converted in each call, and no part of what is recorded
        return None
    facts = tuple([None if x is None else (x.dtype, x.shape, x.stride()) for x in beside(pages)])
    return key_of(problem, inputs, "pages", pages.k.shape, pages.latent, pages.most, facts)


def paged_tiles(problem: Problem, pages: Pages, spec: DeviceSpec) -> dict[str, TilePlan]:
    """What the plan has, which counts as many keys for each sequence: where one may have so many that their parts take too much
    memory, it gets them from one program."""
    tiles = forward_tiles(problem, spec)
    if problem.invariant and "merge" in tiles and plan.held(problem, _partials(problem, pages, tiles["decode"])) > plan.MOST_HELD:
        return {"decode": replace(tiles["decode"], splits=1)}
    return tiles


def _partials(problem: Problem, pages: Pages, tile: TilePlan) -> int:
    """Partial results of a row: one of each program or, where the bits count, of each part that a sequence may have."""
    return max(1, -(-pages.most * pages.page // plan.SPAN)) if problem.invariant else tile.splits


def paged_launches(
    problem: Problem,
    inputs: Inputs,
    pages: Pages,
    results: tuple[Tensor, Tensor],
    partials: tuple[Tensor, ...],
    tiles: dict[str, TilePlan],
) -> list[Launch]:
    """Attention, and the merge of what was split, unless it is to be merged with more."""
    from tilewise.backends.triton.forward import forward_kernel

    spec = spec_of(results[0].device)
    tile = tiles["decode" if "decode" in tiles else "forward"]
    a, config = paged_arguments(problem, inputs, pages, results, tile)
    if partials:
        a = a._replace(out=host.split_view(partials[0]), lse_ptr=partials[1])
        config = config._replace(SPLIT=True, EARLY=merges_early(spec))
    programs = _row_tiles(problem, tile.block_q) * problem.kv_heads * tile.splits
    launches = [Launch(forward_kernel, programs, (a, None, None), config, options(tile, spec))]
    if partials and not problem.partial:
        merge = replace(tiles["merge"], splits=_partials(problem, pages, tile))
        launches.append(merge_launch(problem, inputs, results, partials, merge))
    return launches


def merge_launch(
    problem: Problem, inputs: Inputs, results: tuple[Tensor, Tensor], partials: tuple[Tensor, ...], tile: TilePlan
) -> Launch:
    """The merge of what was split."""
    from tilewise.backends.triton.split import merge_kernel

    a, config = arguments(problem, inputs, *results, tile)
    programs = -(-problem.seqlen_q // tile.block_q) * problem.heads
    config = in_pieces(config, tile)._replace(MASK=MaskLayout(), SPAN=plan.SPAN if problem.invariant else 0)
    args = (a, host.split_view(partials[0]), partials[1])
    spec = spec_of(results[0].device)
    return merging(Launch(merge_kernel, programs * pieces(tile), args, config, options(tile, spec)), spec)


def paged_arguments(
    problem: Problem, inputs: Inputs, pages: Pages, results: tuple[Tensor, Tensor], tile: TilePlan
) -> tuple[Attention, KernelConfig]:
    a, config = arguments(problem, inputs, *results, tile)
    latent = pages.latent and inputs.bias is None and padded(problem.head_dim_v) == problem.head_dim_v
    first, rest = in_two(problem.head_dim, problem.head_dim_v) if latent else in_two(problem.head_dim)
    blocks = (first, rest, padded(problem.head_dim_v))
    pairs = in_pairs(inputs, pages, tile, blocks)
    layout = PageLayout(
        PAGE=_known_page(pages),
        EVEN=problem.rows > 0,
        SCALED=pages.k_scale is not None,
        PER_TOKEN=_per_token(pages.k_scale) or _per_token(pages.v_scale),
        BITS=pages.k.dtype == torch.uint8,
        LATENT=latent,
        PAIRS=pairs,
        Q_FACTORS=pairs == "e4m3" and inputs.q.dtype == torch.bfloat16,
    )
    args = _page_args(pages, problem.rows)._replace(parts=_partials(problem, pages, tile) if problem.invariant else 0)
    config = config._replace(PAGED=True, PAGES=layout, PACK=problem.group, BLOCK_D=first, REST=rest, EMPTY_ROWS=True)
    return a._replace(pages=args), config._replace(SPAN=plan.SPAN) if problem.invariant else config


def in_pairs(inputs: Inputs, pages: Pages, tile: TilePlan, blocks: tuple[int, ...]) -> str:
    """What numbers pages have, "int8" or "e4m3", where kernels read two columns of them as one of 16 bits; "" where they do not.

    `blocks`: columns of tiles, 0 for none; halves of them are multiplied, 16 at least. Tiles of many rows are multiplied where
    they lie in shared memory: there is no way through registers.
    """
    fits = (
        not on_hip()
        and pages.k_scale is not None
        and pages.v.dtype == pages.k.dtype
        and inputs.q.dtype in (torch.float16, torch.bfloat16)
        and inputs.bias is None
        and tile.block_q < WARPGROUP_ROWS
        and not any(0 < block < 32 for block in blocks)
        and all(_even(x) for x in (pages.k, pages.v))
    )
    return PAIRS.get(pages.k.dtype, "") if fits else ""


def _even(x: Tensor) -> bool:
    """Do an even column and the one after it lie in one 16-bit number, in every row?"""
    beside = x.stride(3) == 1 and x.shape[3] % 2 == 0
    return beside and x.data_ptr() % 2 == 0 and all(step % 2 == 0 for step in x.stride()[:3])


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


def _as_row(x: Tensor) -> Tensor:
    """(B, Sq, H, D) as (1, H, T, D)."""
    return x.flatten(0, 1).transpose(0, 1)[None]


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
    if pages.indptr is None and pages.most == 1 and pages.entries.shape[0] == pages.starts.shape[0]:
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
