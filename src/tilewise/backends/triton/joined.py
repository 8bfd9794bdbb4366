"""The launch that merges what several launches over pages computed. Nothing here looks at values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from tilewise.backends.base import empty_lse, empty_out
from tilewise.backends.gpu.arguments import split_view
from tilewise.backends.gpu.launch import LaunchOptions, interpreting, view
from tilewise.backends.gpu.operands import padded
from tilewise.backends.gpu.record import Launch, Recording
from tilewise.backends.pages import PagedPart
from tilewise.backends.triton.fixed import PARTS
from tilewise.backends.triton.run import merging, spec_of

JOINS = 256
_joins: dict[Hashable, Recording] = {}
"""The launches by all they depend on but addresses: when there are JOINS, all are dropped."""


def run_join(q: Tensor, parts: Sequence[PagedPart], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (1, H, T, Dv) in q's dtype, as q (1, H, T, D) lies in memory, and lse (1, H, T)."""
    parts = [part._replace(lse=part.lse.contiguous()) for part in parts]
    sinks = None if sinks is None else sinks.contiguous()
    out, lse = empty_out(q, parts[0].out.shape[3]), empty_lse(q)
    tensors = (*(x for part in parts for x in part), sinks, out, lse)
    key = (q.device, tuple(None if x is None else (x.dtype, x.shape, x.stride()) for x in tensors))
    recording = _joins.get(key)
    if recording is None:
        if len(_joins) >= JOINS:
            if q.is_cuda:
                torch.cuda.synchronize(q.device)
            _joins.clear()
        recording = _joins[key] = Recording(q.device.index, None)
    if not recording.repeat(tensors):
        recording.record(tensors, [join_launch(parts, sinks, out, lse)])
    return out, lse


def join_launch(parts: Sequence[PagedPart], sinks: Tensor | None, out: Tensor, lse: Tensor) -> Launch:
    """A program for each head of a token."""
    from tilewise.backends.triton.join import JoinArgs, JoinConfig, Source, join_kernel

    _, heads, tokens, width = out.shape
    sources = tuple(Source(split_view(x), y, place, x.shape[0], x.shape[2]) for x, y, place in parts)
    most = max(source.parts for source in sources)
    config = JoinConfig(
        SOURCES=len(sources),
        DV=width,
        BLOCK_DV=padded(width),
        BLOCK_N=min(PARTS, 1 << (most - 1).bit_length()),
        INTERPRET=interpreting(),
    )
    args = (JoinArgs(sources, view(out), lse, sinks, tokens, heads),)
    launch = Launch(join_kernel, tokens * heads, args, config, LaunchOptions(num_warps=4, num_stages=1))
    return merging(launch, spec_of(out.device))
