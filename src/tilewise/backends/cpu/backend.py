"""The CPU backend: kernels compiled for this machine, called with a block of arguments, their tasks shared by threads.

Everything that is the same for every call of a problem is a `CpuLaunch`, which `prepare` makes and keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from tilewise.backends.base import (
    Backend,
    BackwardInputs,
    CompileJob,
    Direction,
    EntropyCotangent,
    Grads,
    Inputs,
    Jvp,
    PagedLaunch,
    PagedLauncher,
    Statistics,
    Tangents,
    Verdict,
    cpu_only,
    empty_lse,
    empty_out,
    empty_statistics,
    rounded,
    sink_gradient,
)
from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu import plan, schedule
from tilewise.backends.cpu.blind import without_blind
from tilewise.backends.cpu.directions import (
    NO_STRIDES,
    broadcast_strides,
    moving_arguments,
    moving_sink_gradient,
    readable_direction,
)
from tilewise.backends.cpu.grouped import REASON, as_heads, as_rows
from tilewise.backends.cpu.launch import (
    ADDRESSES,
    COUNT_AT,
    PACKED_HOT,
    CpuLaunch,
    empty,
    empty_like,
    inference_mode,
    new,
    num_threads,
)
from tilewise.backends.cpu.lowering import lowered
from tilewise.backends.cpu.prepare import adjacent, kernel_for, launch_for, launch_key, optional_arguments
from tilewise.backends.cpu.repeat import paged_launcher
from tilewise.backends.cpu.spec import STATISTICS, round_up
from tilewise.backends.pages import Pages
from tilewise.hardware.probe import probe_cpu
from tilewise.hardware.spec import DeviceSpec
from tilewise.masks import Lowered
from tilewise.problem import Problem


@cache
def _obstacle() -> str | None:
    """Why kernels cannot be made here; None if they can."""
    if find_spec("llvmlite") is None:
        return "llvmlite is not installed; pip install llvmlite"
    return compiler.obstacle()


class CpuBackend(Backend):
    name = "cpu"
    any_address = True
    reads_pages = True
    invariant = plan.INVARIANT
    finds_direction = True

    def usable(self, device: str) -> Verdict:
        return Verdict.of(cpu_only(device) or _obstacle())

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        planned = plan.supports(problem, probe_cpu(num_threads()), backward=backward)
        return Verdict.of(_obstacle(), *planned.reasons, _scattered(problem, inputs))

    def forward(self, problem: Problem, inputs: Inputs, more: Iterable[tuple[str, int]] = ()) -> tuple[Tensor, Tensor]:
        """`more` are the arguments of a kernel with statistics."""
        q, k, v = inputs[:3]
        problem = lowered(problem, inputs)
        launch = launch_for(problem, inputs, "forward")
        out = _like(q) if problem.head_dim == problem.head_dim_v else empty_out(q, problem.head_dim_v)
        lse = new(*launch.lse)
        if launch.plain:
            launch.run((q, k, v, out, lse))
            return out, lse
        if launch.kernel.stats and not more:  # the kernel writes statistics, whoever asks
            return self.statistics(problem, inputs)[:2]
        args, _alive = optional_arguments(problem, inputs, launch)
        if launch.counters:
            work = torch.empty(launch.workspace, dtype=launch.real, device="cpu")
            done = torch.zeros(launch.counters, dtype=torch.int64, device="cpu")
            args += [("work", work.data_ptr()), ("done", done.data_ptr())]
        launch.run((q, k, v, out, lse), [*args, *more])
        return out, lse

    def statistics(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Statistics]:
        like = empty_lse(inputs.q, problem.precision)
        stats = empty_statistics(problem, like)
        rows = {name: torch.empty_like(like) for name in STATISTICS["forward"]} if plan.watched(problem) else {}
        out, lse = self.forward(problem, inputs, [(name, x.data_ptr()) for name, x in rows.items()])
        stats = stats._replace(**{name: x for name, x in rows.items() if getattr(stats, name) is not None})
        if stats.key_mass is not None or stats.weights is not None:
            self._sweep(problem, inputs, (out, lse), stats)
        return out, lse, stats

    def _sweep(self, problem: Problem, inputs: Inputs, results: tuple[Tensor, Tensor], stats: Statistics) -> None:
        """`key_mass` and the largest weights, where they are asked for."""
        problem = lowered(problem, inputs)
        launch = launch_for(problem, inputs, "sweep")
        args, _alive = optional_arguments(problem, inputs, launch)
        turns = empty((launch.counters,), (1,), torch.int64).zero_()
        given = {"mass": stats.key_mass, "top_weights": stats.weights, "top_indices": stats.indices, "progress": turns}
        args += [(name, x.data_ptr()) for name, x in given.items() if x is not None]
        launch.run((*inputs[:3], *results), [*args, ("pause", schedule.pause())])

    def derives(self, problem: Problem, inputs: Inputs | None = None, *, derivative: str) -> Verdict:
        return plan.derives(problem, probe_cpu(num_threads()), derivative=derivative)

    def jvp(self, problem: Problem, inputs: Inputs, tangents: Tangents) -> Jvp:
        problem = lowered(problem, inputs)
        launch = launch_for(problem, inputs, "jvp")
        out, out_t = empty_out(inputs.q, problem.head_dim_v), empty_out(inputs.q, problem.head_dim_v)
        lse, lse_t = new(*launch.lse), new(*launch.lse)
        args, _alive = optional_arguments(problem, inputs, launch)
        args += moving_arguments(tangents, out_t, lse_t)
        if tangents.sinks is not None:
            _alive.append(tangents.sinks.to(launch.real).contiguous())
            args.append(("sinks_t", _alive[-1].data_ptr()))
        launch.run((*inputs[:3], out, lse), args)
        return Jvp(out, lse, out_t, lse_t)

    def paged(self, problem: Problem, inputs: Inputs, pages: Pages) -> tuple[Tensor, Tensor]:
        """Single queries and longer runs of them have kernels of their own: where a batch has both, each has its launch."""
        single = None if problem.rows else _single(inputs)
        if single is None:
            return self._paged(problem, inputs, pages)
        out = _empty_part(problem, inputs.q)
        lse = empty_lse(inputs.q, problem.precision)
        for of, part in _by_rows(problem, inputs, pages, single):
            out[:, :, of], lse[:, :, of] = self._paged(*part)
        return out, lse

    def paged_launches(self, problem: Problem, inputs: Inputs, pages: Pages, spec: DeviceSpec) -> list[PagedLaunch]:
        single, launches = None if problem.rows else _single(inputs), []
        parts = [(problem, inputs, pages)]
        if single is not None:
            parts = [part for _, part in _by_rows(problem, inputs, pages, single)]
        for part, given, some in parts:
            rows = as_rows(part, given)
            part, given = rows or (part, given)
            *_, longest, columns = launch_key(part, given, "forward", dbias=False)
            tile = plan.tile_for(part, spec, "forward", longest, columns)
            tile = replace(tile, reasons=(*tile.reasons, REASON)) if rows else tile
            launches.append(PagedLaunch(part, given, some, {tile.pass_: tile}))
        return launches

    def _paged(self, problem: Problem, inputs: Inputs, pages: Pages) -> tuple[Tensor, Tensor]:
        if rows := as_rows(problem, inputs):
            out, lse = self._paged(*rows, pages)
            return as_heads(problem, out), as_heads(problem, lse)
        launch = launch_for(problem, inputs, "forward")
        q, k, v, out = *inputs[:3], _empty_part(problem, inputs.q)
        lse = new(*launch.lse)
        args, _alive = optional_arguments(problem, inputs, launch)
        seen = pages.seen
        args += [(name, x.data_ptr()) for name, x in (("entries", pages.entries), ("starts", pages.starts), ("lengths", seen))]
        for name, scale in (("k_scale", pages.k_scale), ("v_scale", pages.v_scale)):
            if scale is not None:
                steps = zip("bsh", scale.stride(), strict=True)
                args += [(name, scale.data_ptr()), *((f"{name}_{axis}", step) for axis, step in steps)]
        if launch.counters:
            work = torch.empty(launch.workspace, dtype=launch.real, device="cpu")
            done = torch.zeros(launch.counters, dtype=torch.int64, device="cpu")
            args += [("work", work.data_ptr()), ("done", done.data_ptr())]
        launch.run((q, k, v, out, lse), args)
        return out, lse

    def paged_launcher(self, problem: Problem, inputs: Inputs, pages: Pages) -> PagedLauncher | None:
        own = type(self).paged is CpuBackend.paged
        return paged_launcher(problem, inputs, pages) if own and not as_rows(problem, inputs) else None

    def missing_kernels(
        self, problem: Problem, inputs: Inputs, given: BackwardInputs | None = None
    ) -> list[CompileJob]:
        problem, dbias = lowered(problem, inputs), given is not None and given.needs.dbias
        kernel = kernel_for(problem, inputs, "forward" if given is None else "backward", dbias)
        if compiler.is_ready(kernel):
            return []
        make = partial(compiler.worker, kernel)
        return [CompileJob(f"cpu {kernel.kind}", make, make)]

    def launcher(self, problem: Problem, inputs: Inputs) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """With the strides known too, only five addresses of the arguments change."""
        q, k, v = inputs[:3]
        o_stride = empty_like(q).stride()
        problem = lowered(problem, inputs)
        prepared = launch_for(problem, inputs, "forward")
        if problem.head_dim != problem.head_dim_v or o_stride[3] != 1 or not prepared.plain:
            return None
        entry, size, invited = prepared.entry, prepared.size, prepared.threads
        threads, like_lse = num_threads(), prepared.lse
        small = math.prod(like_lse[0]) * prepared.real.itemsize <= schedule.DISCARD_BYTES
        hot = PACKED_HOT.pack(*(0,) * 7, *q.stride(), *k.stride(), *v.stride(), *o_stride)
        arguments, thread, pack = hot + prepared.template, schedule.thread, ADDRESSES.pack_into
        shape, dtype = tuple(q.shape), q.dtype

        def launch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if num_threads() != threads:
                return self.forward(problem, Inputs(q, k, v))[0]
            out = empty_like(q) if inference_mode() else empty(shape, o_stride, dtype)
            lse = None if small else new(*like_lse)
            free = thread.free
            try:  # `thread.take()`, inlined
                scratch = free.pop()
            except IndexError:
                scratch = schedule.ThreadScratch()
            try:
                if scratch.prepared is not arguments:
                    scratch.prepare(arguments, size)
                at_lse, address = scratch.discard if lse is None else lse.data_ptr(), scratch.address
                pack(scratch.view, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), at_lse, 0, address + COUNT_AT)
                if invited == 1:
                    entry(address, scratch.buffer)
                else:
                    schedule.pool.run(entry, scratch, size, invited)
            finally:
                free.append(scratch)
            return out

        return launch

    def entropy_backward(
        self, problem: Problem, inputs: Inputs, given: BackwardInputs, entropy: EntropyCotangent
    ) -> Grads:
        return self.backward(problem, inputs, given, entropy)

    def double_backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs, direction: Direction) -> Grads:
        return self.backward(problem, inputs, given, direction=direction)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        given: BackwardInputs,
        entropy: EntropyCotangent | None = None,
        direction: Direction | None = None,
    ) -> Grads:
        """The gradients, or, with a direction, their derivative along it."""
        problem = lowered(problem, inputs)
        inputs, given, blind = without_blind(self.forward, problem, inputs, given)
        out, lse, dout, dlse, needs = given
        launch = launch_for(problem, inputs, "backward" if direction is None else "double_backward", needs.dbias)
        args, _alive = ([], []) if launch.plain else optional_arguments(problem, inputs, launch)
        if entropy is not None:
            _alive += [x.to(lse.dtype).contiguous() for x in entropy]
            args += zip(STATISTICS["backward"], (x.data_ptr() for x in _alive[-2:]), strict=True)
        lse = lse.contiguous()
        moving = None
        if direction is not None:
            moving = readable_direction(direction, blind, launch.kernel.bias, inputs, lse)
            args += [*moving_arguments(*moving[:3]), ("delta_t", moving.delta_t.data_ptr())]
            if moving.out_t is None and launch.workspace:
                _alive += [empty((launch.workspace,), (1,), launch.real), torch.zeros(1, dtype=torch.int64, device="cpu")]
                args += zip(("work", "done"), (x.data_ptr() for x in _alive[-2:]), strict=True)
        dq = _like(inputs.q) if needs.dq else None
        dk_sum, dv_sum = (_zero_sum(x, launch) if need else None for x, need in ((inputs.k, needs.dk), (inputs.v, needs.dv)))
        delta = empty_like(lse)
        dlse = None if dlse is None else dlse.to(lse.dtype).contiguous()
        dbias = None
        if needs.dbias and inputs.bias is not None:
            dbias = torch.zeros(inputs.bias.shape, dtype=launch.real, device="cpu")
        turns = empty((launch.counters,), (1,), torch.int64).zero_()
        pointers = (0 if x is None else x.data_ptr() for x in (dout, dlse, delta, dq, dk_sum, dv_sum, dbias, turns))
        strides = (*dout.stride(), *(NO_STRIDES if dq is None else dq.stride()), *broadcast_strides(dbias))
        launch.run((*inputs[:3], out, lse), args, (*pointers, schedule.pause(), *strides))
        dsinks = None
        if needs.dsinks and inputs.sinks is not None:
            dsinks = sink_gradient(inputs.sinks, lse, delta)
            if moving is not None:
                dsinks = moving_sink_gradient(inputs.sinks, given._replace(lse=lse), delta, moving)
        return Grads(
            dq,
            _rounded(dk_sum, inputs.k),
            _rounded(dv_sum, inputs.v),
            None if dbias is None or inputs.bias is None else rounded(dbias, inputs.bias.dtype),
            dsinks,
        )


def _single(inputs: Inputs) -> Tensor | None:
    """Which sequences of a packed batch have one query, if some have and some have not."""
    assert inputs.cu_q is not None
    ends = inputs.cu_q.numpy()
    alone = (ends[1:] - ends[:-1]) == 1
    return None if alone.all() or not alone.any() else torch.from_numpy(alone)


def _by_rows(
    problem: Problem, inputs: Inputs, pages: Pages, single: Tensor
) -> Iterator[tuple[Tensor, tuple[Problem, Inputs, Pages]]]:
    """The `single` sequences of a batch and the others as batches of their own, each with its place among the queries."""
    assert inputs.cu_q is not None
    rows = inputs.cu_q.diff()
    owner = torch.repeat_interleave(single, rows)
    for some, tokens in ((single, owner), (~single, ~owner)):
        at, of = some.nonzero()[:, 0], tokens.nonzero()[:, 0]
        part = replace(problem, batch=len(at), seqlen_q=len(of), mask=Lowered(problem.program.for_sequences(at)))
        cu = torch.cat([rows.new_zeros(1), rows[at].cumsum(0, dtype=torch.int32)])
        bias, alibi = (_of_sequences(x, at) for x in (inputs.bias, inputs.alibi))
        given = inputs._replace(q=inputs.q[:, :, of], cu_q=cu, bias=bias, alibi=alibi)
        yield of, (part, given, pages.of_sequences(at))


def _of_sequences(x: Tensor | None, at: Tensor) -> Tensor | None:
    """What belongs to some sequences, of a tensor that all share or that has a row for each."""
    return x if x is None or x.shape[0] == 1 else x[at]


def _empty_part(problem: Problem, q: Tensor) -> Tensor:
    """Memory for the output, or, of a partial one, in the dtype of the arithmetic."""
    out = empty_out(q, problem.head_dim_v)
    if not problem.partial:
        return out
    return torch.empty_strided(out.shape, out.stride(), dtype=getattr(torch, problem.arithmetic), device="cpu")


def _scattered(problem: Problem, inputs: Inputs | None) -> str | None:
    """Decoding loads vectors of a row: a tile for it cannot be served where columns are not adjacent."""
    if inputs is None or not problem.asked("decode") or problem.asked("forward") or adjacent(inputs):
        return None
    return "tile: the decode kernel takes adjacent columns of K and V"


def _like(x: Tensor) -> Tensor:
    """Memory laid out like x, its columns adjacent."""
    if x.is_contiguous():
        return new(tuple(x.shape), x.stride(), x.dtype)
    result = empty_like(x)
    return result if result.stride()[3] == 1 else empty_out(x, x.shape[3])


def _zero_sum(x: Tensor, launch: CpuLaunch) -> Tensor:
    """Where the kernel adds up the gradient of x: rows of whole register tiles."""
    batch, heads, rows, dim = x.shape
    columns = round_up(dim, launch.kernel.tile.rows)
    size = rows * columns
    return empty((batch, heads, rows, columns), (heads * size, size, columns, 1), launch.real).zero_()


def _rounded(total: Tensor | None, x: Tensor) -> Tensor | None:
    """The gradient of x from its running sum: the same memory, where that is laid out and rounded like x."""
    if total is None or (x.dtype == total.dtype and x.shape[3] == total.shape[3]):
        return total
    total = total[..., : x.shape[3]]
    return _like(x).copy_(rounded(total, x.dtype) if total.dtype == torch.float64 else total)


backend = CpuBackend()
