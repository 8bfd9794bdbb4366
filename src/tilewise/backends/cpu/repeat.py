"""A call over pages, prepared: all but the addresses of its tensors is in the argument block already."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, PagedLauncher, empty_out
from tilewise.backends.cpu import schedule
from tilewise.backends.cpu.launch import ADDRESSES, ARGUMENT, COUNT_AT, PACKED_HOT, new
from tilewise.backends.cpu.prepare import launch_for, optional_arguments
from tilewise.backends.pages import Pages
from tilewise.problem import Problem


def paged_launcher(problem: Problem, inputs: Inputs, pages: Pages) -> PagedLauncher | None:
    """The launch of a call with as many threads as torch has now."""
    q, k, v = inputs[:3]
    example = empty_out(q, problem.head_dim_v)
    if not problem.rows or problem.partial or not example.transpose(1, 2).is_contiguous():
        return None
    prepared = launch_for(problem, inputs, "forward")
    if prepared.held is None:
        return None
    fixed, alive = optional_arguments(problem, inputs, prepared)
    scales = [(name, x) for name, x in (("k_scale", pages.k_scale), ("v_scale", pages.v_scale)) if x is not None]
    for name, scale in scales:
        fixed += [(f"{name}_{axis}", step) for axis, step in zip("bsh", scale.stride(), strict=True)]
    block = bytearray(PACKED_HOT.pack(*(0,) * 7, *q.stride(), *k.stride(), *v.stride(), *example.stride()) + prepared.template)
    for name, value in fixed:
        ARGUMENT.pack_into(block, prepared.offsets[name], value)
    arguments, dtype, pack, put = bytes(block), q.dtype, ADDRESSES.pack_into, ARGUMENT.pack_into
    entry, size, invited = prepared.entry, prepared.size, prepared.threads
    heads, rows, dim = problem.heads, problem.rows, problem.head_dim_v
    batch = q.shape[2] // rows
    shape, steps = (batch, rows, heads, dim), (rows * heads * dim, heads * dim, dim, 1)
    small = math.prod(prepared.lse[0]) * prepared.real.itemsize <= schedule.DISCARD_BYTES
    at_entries, at_starts, at_lengths = (prepared.offsets[name] for name in ("entries", "starts", "lengths"))
    scale_at = [prepared.offsets[name] for name, _ in scales]
    counters, workspace, real = prepared.counters, prepared.workspace, prepared.real
    at_work, at_done = (prepared.offsets[name] for name in ("work", "done")) if counters else (0, 0)

    def launch(q: Tensor, pages: Pages, want_lse: bool) -> tuple[Tensor, Tensor]:
        _ = alive  # addresses in the block are theirs
        lengths = pages.lengths.int()
        out = new(shape, steps, dtype)
        lse = new(*prepared.lse) if want_lse or not small else None
        scratch = schedule.thread.take()
        try:
            if scratch.prepared is not arguments:
                scratch.prepare(arguments, size)
            view, address = scratch.view, scratch.address
            at_lse = scratch.discard if lse is None else lse.data_ptr()
            pack(view, 0, q.data_ptr(), pages.k.data_ptr(), pages.v.data_ptr(), out.data_ptr(), at_lse, 0, address + COUNT_AT)
            put(view, at_entries, pages.entries.data_ptr())
            put(view, at_starts, pages.starts.data_ptr())
            put(view, at_lengths, lengths.data_ptr())
            for at, scale in zip(scale_at, (pages.k_scale, pages.v_scale), strict=False):
                put(view, at, scale.data_ptr())  # type: ignore[union-attr]  # pages have both or none
            if counters:
                work = torch.empty(workspace, dtype=real, device="cpu")
                done = torch.zeros(counters, dtype=torch.int64, device="cpu")
                put(view, at_work, work.data_ptr())
                put(view, at_done, done.data_ptr())
            if invited == 1:
                entry(address, scratch.buffer)
            else:
                schedule.pool.run(entry, scratch, size, invited)
        finally:
            schedule.thread.free.append(scratch)
        if lse is None or not want_lse:
            return out, out
        return out, lse.reshape(heads, batch, rows).transpose(0, 1)

    return launch
