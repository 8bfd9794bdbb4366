"""The CPU backend: kernels compiled for this machine, called with a block of arguments, their tasks shared by threads.

Everything that is the same for every call of a problem is a `CpuLaunch`. Launches are kept with the problem, whose life ends with
that of the cached call: one key (`_launch_for`), and at most LAUNCHES of them, for packed batches whose longest sequence varies.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import (
    Backend,
    BackwardInputs,
    EntropyCotangent,
    Grads,
    Inputs,
    Jvp,
    Pages,
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
from tilewise.backends.cpu import frames, plan, schedule
from tilewise.backends.cpu.blind import without_blind
from tilewise.backends.cpu.fixed import fixed_arguments
from tilewise.backends.cpu.spec import GRADIENTS, HOT, MOVING, STATISTICS, Kernel, argument_names, round_up
from tilewise.backends.sequence import sweep_statistics
from tilewise.hardware.probe import probe_cpu
from tilewise.masks import Lowered
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

LAUNCHES = 64
_HOT = struct.Struct(f"={len(HOT)}q")
_GRADIENTS = struct.Struct(f"={len(GRADIENTS)}q")
_ARGUMENT = struct.Struct("=q")
_ADDRESSES = struct.Struct("=7q")
_COUNT = 8 * HOT.index("count")
_REST = 8 * len(HOT)
_empty_like, _num_threads, _inference = torch.empty_like, torch.get_num_threads, torch.is_inference_mode_enabled


def _strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


_empty: Callable[..., Tensor] = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", _strided)
"""What compiled graphs allocate with: it asks no dispatcher, and takes 1.2 µs on a Neoverse N1; empty_like takes 2.1."""


def _new(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Fresh memory for a result; in inference mode, a tensor of that mode."""
    return (_strided if _inference() else _empty)(shape, strides, dtype)


class CpuLaunch(NamedTuple):
    """A compiled kernel, its tiles, and the arguments that are the same for every call of a problem with so many threads."""

    entry: Any
    kernel: Kernel
    tile: TilePlan
    template: bytes  # the arguments after the hot ones
    end: int  # of the template in the argument block
    offsets: dict[str, int]  # of the arguments in the block, in bytes
    size: int  # bytes of a thread's buffer
    threads: int
    workspace: int  # elements for the partial results of splits
    counters: int  # of splits that are done, or of query blocks whose turn it is
    real: torch.dtype
    lse: tuple[tuple[int, int, int], tuple[int, int, int], torch.dtype]  # its shape, strides and dtype
    plain: bool  # a call has no tensors but q, k and v

    def run(self, tensors: tuple[Tensor, ...], args: Iterable[tuple[str, int]] = (), gradients: Any = ()) -> None:
        """Call the kernel with q, k, v, out and lse, the arguments named, and those of a backward."""
        q, k, v, out, lse = tensors
        thread = schedule.thread
        scratch = thread.take()
        try:
            view, address = scratch.view, scratch.address
            scratch.prepared = None
            _HOT.pack_into(
                view, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), 0, address + _COUNT,
                *q.stride(), *k.stride(), *v.stride(), *out.stride(),
            )  # fmt: skip
            view[_REST : self.end] = self.template
            if gradients:
                _GRADIENTS.pack_into(view, self.offsets[GRADIENTS[0]], *gradients)
            for name, value in args:
                _ARGUMENT.pack_into(view, self.offsets[name], value)
            if self.threads == 1:
                self.entry(address, scratch.reserve(self.size))
            else:
                schedule.pool.run(self.entry, scratch, self.size, self.threads)
        finally:
            thread.free.append(scratch)


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

    def usable(self, device: str) -> Verdict:
        return Verdict.of(cpu_only(device) or _obstacle())

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        planned = plan.supports(problem, probe_cpu(_num_threads()), backward=backward)
        return Verdict.of(_obstacle(), *planned.reasons, _scattered(problem, inputs))

    def forward(self, problem: Problem, inputs: Inputs, more: Iterable[tuple[str, int]] = ()) -> tuple[Tensor, Tensor]:
        """`more` are the arguments of a kernel with statistics."""
        q, k, v = inputs[:3]
        launch = _launch_for(problem, inputs, "forward")
        out = _like(q) if problem.head_dim == problem.head_dim_v else empty_out(q, problem.head_dim_v)
        lse = _new(*launch.lse)
        if launch.plain:
            launch.run((q, k, v, out, lse))
            return out, lse
        if launch.kernel.stats and not more:  # the kernel writes statistics, whoever asks
            return self.statistics(problem, inputs)[:2]
        args, _alive = _optional_args(problem, inputs, launch)
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
        sweep_statistics(problem, inputs, lse, stats)
        return out, lse, stats

    def derives(self, problem: Problem, inputs: Inputs | None = None, *, derivative: str) -> Verdict:
        return plan.derives(problem, probe_cpu(_num_threads()), derivative=derivative)

    def jvp(self, problem: Problem, inputs: Inputs, tangents: Tangents) -> Jvp:
        launch = _launch_for(problem, inputs, "jvp")
        out, out_t = empty_out(inputs.q, problem.head_dim_v), empty_out(inputs.q, problem.head_dim_v)
        lse, lse_t = _new(*launch.lse), _new(*launch.lse)
        args, _alive = _optional_args(problem, inputs, launch)
        args += _tangent_args(tangents, launch, _alive)
        args += [("ot", out_t.data_ptr()), ("lse_t", lse_t.data_ptr())]
        args += [(f"ot_{axis}", step) for axis, step in zip("bhsd", out_t.stride(), strict=True)]
        launch.run((*inputs[:3], out, lse), args)
        return Jvp(out, lse, out_t, lse_t)

    def paged(self, problem: Problem, inputs: Inputs, pages: Pages) -> tuple[Tensor, Tensor]:
        """Single queries and longer runs of them have kernels of their own: where a batch has both, each has its launch."""
        assert inputs.cu_q is not None
        ends = inputs.cu_q.numpy()
        alone = (ends[1:] - ends[:-1]) == 1
        if alone.all() or not alone.any():
            return self._paged(problem, inputs, pages)
        rows, single = inputs.cu_q.diff(), torch.from_numpy(alone)
        out = empty_out(inputs.q, problem.head_dim_v)
        lse = empty_lse(inputs.q, problem.precision)
        owner = torch.repeat_interleave(single, rows)
        for some, tokens in ((single, owner), (~single, ~owner)):
            at, of = some.nonzero()[:, 0], tokens.nonzero()[:, 0]
            part = replace(problem, batch=len(at), seqlen_q=len(of), mask=Lowered(problem.program.for_sequences(at)))
            cu = torch.cat([rows.new_zeros(1), rows[at].cumsum(0, dtype=torch.int32)])
            bias, alibi = (_of_sequences(x, at) for x in (inputs.bias, inputs.alibi))
            given = inputs._replace(q=inputs.q[:, :, of], cu_q=cu, bias=bias, alibi=alibi)
            out[:, :, of], lse[:, :, of] = self._paged(part, given, pages.of_sequences(at))
        return out, lse

    def _paged(self, problem: Problem, inputs: Inputs, pages: Pages) -> tuple[Tensor, Tensor]:
        launch = _launch_for(problem, inputs, "forward")
        q, out = inputs.q, empty_out(inputs.q, problem.head_dim_v)
        lse = _new(*launch.lse)
        args, _alive = _optional_args(problem, inputs, launch)
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
        launch.run((q, pages.k.transpose(1, 2), pages.v.transpose(1, 2), out, lse), args)
        return out, lse

    def launcher(self, problem: Problem, inputs: Inputs) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """With the strides known too, only five addresses of the arguments change."""
        q, k, v = inputs[:3]
        o_stride = _empty_like(q).stride()
        prepared = _launch_for(problem, inputs, "forward")
        if problem.head_dim != problem.head_dim_v or o_stride[3] != 1 or not prepared.plain:
            return None
        entry, size, invited = prepared.entry, prepared.size, prepared.threads
        threads, like_lse = _num_threads(), prepared.lse
        small = math.prod(like_lse[0]) * prepared.real.itemsize <= schedule.DISCARD_BYTES
        hot = _HOT.pack(*(0,) * 7, *q.stride(), *k.stride(), *v.stride(), *o_stride)
        arguments, thread, pack = hot + prepared.template, schedule.thread, _ADDRESSES.pack_into
        shape, dtype = tuple(q.shape), q.dtype

        def launch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if _num_threads() != threads:
                return self.forward(problem, Inputs(q, k, v))[0]
            out = _empty_like(q) if _inference() else _empty(shape, o_stride, dtype)
            lse = None if small else _new(*like_lse)
            free = thread.free
            try:  # `thread.take()`, inlined
                scratch = free.pop()
            except IndexError:
                scratch = schedule.ThreadScratch()
            try:
                if scratch.prepared is not arguments:
                    scratch.prepare(arguments, size)
                at_lse, address = scratch.discard if lse is None else lse.data_ptr(), scratch.address
                pack(scratch.view, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), at_lse, 0, address + _COUNT)
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

    def backward(
        self, problem: Problem, inputs: Inputs, given: BackwardInputs, entropy: EntropyCotangent | None = None
    ) -> Grads:
        inputs, given = without_blind(self.forward, problem, inputs, given)
        out, lse, dout, dlse, needs = given
        launch = _launch_for(problem, inputs, "backward", needs.dbias)
        args, _alive = ([], []) if launch.plain else _optional_args(problem, inputs, launch)
        if entropy is not None:
            _alive += [x.to(lse.dtype).contiguous() for x in entropy]
            args += zip(STATISTICS["backward"], (x.data_ptr() for x in _alive[-2:]), strict=True)
        dq = _like(inputs.q) if needs.dq else None
        dk_sum, dv_sum = (_zero_sum(x, launch) if need else None for x, need in ((inputs.k, needs.dk), (inputs.v, needs.dv)))
        lse = lse.contiguous()
        delta = _empty_like(lse)
        dlse = None if dlse is None else dlse.to(lse.dtype).contiguous()
        dbias = None
        if needs.dbias and inputs.bias is not None:
            dbias = torch.zeros(inputs.bias.shape, dtype=launch.real, device="cpu")
        turns = _empty((launch.counters,), (1,), torch.int64).zero_()
        pointers = (0 if x is None else x.data_ptr() for x in (dout, dlse, delta, dq, dk_sum, dv_sum, dbias, turns))
        strides = (*dout.stride(), *(_NO_STRIDES if dq is None else dq.stride()), *_broadcast_strides(dbias))
        launch.run((*inputs[:3], out, lse), args, (*pointers, schedule.pause(), *strides))
        return Grads(
            dq,
            _rounded(dk_sum, inputs.k),
            _rounded(dv_sum, inputs.v),
            None if dbias is None or inputs.bias is None else rounded(dbias, inputs.bias.dtype),
            sink_gradient(inputs.sinks, lse, delta) if needs.dsinks and inputs.sinks is not None else None,
        )


def _of_sequences(x: Tensor | None, at: Tensor) -> Tensor | None:
    """What belongs to some sequences, of a tensor that all share or that has a row for each."""
    return x if x is None or x.shape[0] == 1 else x[at]


def _scattered(problem: Problem, inputs: Inputs | None) -> str | None:
    """Decoding loads vectors of a row: a tile for it cannot be served where columns are not adjacent."""
    if inputs is None or not problem.asked("decode") or problem.asked("forward") or _adjacent(inputs):
        return None
    return "tile: the decode kernel takes adjacent columns of K and V"


def _adjacent(inputs: Inputs) -> bool:
    return bool(inputs.k.stride()[3] == inputs.v.stride()[3] == 1)


def _launch_for(problem: Problem, inputs: Inputs, kind: str, dbias: bool = False) -> CpuLaunch:
    """The launch of a call, from the memory if there is one like it; packed batches are planned for their longest sequence."""
    longest, bias = problem.seqlen_q, inputs.bias
    if inputs.cu_q is not None:
        longest = max((b - a for a, b in pairwise(inputs.cu_q.tolist())), default=0)
    adjacent = longest != 1 or _adjacent(inputs)
    key = (kind, _num_threads(), None if bias is None else bias.dtype, dbias, longest, adjacent)
    launches: dict[Any, CpuLaunch] = problem.memory.setdefault("cpu launches", {})
    launch = launches.get(key)
    if launch is None:
        if len(launches) >= LAUNCHES:
            launches.clear()
        launch = launches[key] = _make_launch(problem, *key)
    return launch


def _make_launch(
    problem: Problem, kind: str, threads: int, bias: torch.dtype | None, dbias: bool, longest: int, adjacent: bool
) -> CpuLaunch:
    spec = probe_cpu(threads)
    tile = plan.tile_for(problem, spec, kind, longest, adjacent)
    kernel = plan.kernel_for(problem, tile, spec, str(bias)[6:] if bias else "", dbias)
    tiles = plan.grid_for(problem, tile, spec, longest)
    own_cells = problem.bias is not None and problem.bias[:3] == (problem.batch, problem.heads, problem.seqlen_q)
    if dbias and not own_cells:  # tasks would add to the same cells of dBias
        tiles = tiles._replace(threads=1)
    fixed = fixed_arguments(problem, kernel, tiles)
    names = argument_names(kernel)
    values = [fixed.get(name, 0) for name in names[len(HOT) :]]
    entry = compiler.worker(kernel)
    if threads > 1 and compiler.awake():
        schedule.team()  # what else needs LLVM is compiled now, and not in a later call
    changed = kernel.bias or kernel.alibi or kernel.dropout or kernel.varlen or kernel.stats
    optional = changed or problem.sinks or problem.program.tensors
    counters = tiles.tasks // tiles.splits if tiles.splits > 1 else 0
    real = torch.float64 if kernel.real == "float64" else torch.float32
    batch, heads, rows = 1 if problem.varlen else problem.batch, problem.heads, problem.seqlen_q
    return CpuLaunch(
        entry=entry,
        kernel=kernel,
        tile=tile,
        template=struct.pack(f"={len(values)}q", *values),
        end=_REST + 8 * len(values),
        offsets={name: 8 * n for n, name in enumerate(names)},
        size=frames.frame(problem, kernel, tiles),
        threads=tiles.threads,
        workspace=frames.workspace(problem, kernel, tiles),
        counters=problem.batch * problem.heads * tiles.blocks if kind == "backward" else counters,
        real=real,
        lse=((batch, heads, rows), (heads * rows, rows, 1), real),
        plain=not (optional or counters),
    )


def _optional_args(problem: Problem, inputs: Inputs, launch: CpuLaunch) -> tuple[list[tuple[str, int]], list[Tensor]]:
    """The arguments of all tensors but q, k and v, and those of the tensors that must outlive the call."""
    args: list[tuple[str, int]] = []
    alive: list[Tensor] = []
    if inputs.bias is not None:
        strides = zip("bhsd", _broadcast_strides(inputs.bias), strict=True)
        args += [("bias", inputs.bias.data_ptr()), *((f"bias_{axis}", stride) for axis, stride in strides)]
    if problem.dropout_p and inputs.seed is not None:
        args.append(("seed", int(inputs.seed)))
    wanted = {"alibi": launch.real, "sinks": launch.real, "cu_q": torch.int32, "cu_k": torch.int32}
    if launch.kernel.origins:
        wanted["origins"] = torch.int32
    for name, dtype in wanted.items():
        x: Tensor | None = getattr(inputs, name)
        if x is not None:
            alive.append(x.to(dtype).contiguous())
            args.append((name, alive[-1].data_ptr()))
    if inputs.alibi is not None:
        args.append(("alibi_b", inputs.alibi.shape[1] if inputs.alibi.shape[0] > 1 else 0))
    for n, given in enumerate(problem.program.tensors):
        tensor = torch.as_tensor(given, device="cpu")
        alive.append(tensor if tensor.dtype == torch.bool else tensor.to(torch.int32))
        args.append((f"mask_t{n}", alive[-1].data_ptr()))
        args += [(f"mask_t{n}_{axis}", stride) for axis, stride in enumerate(_broadcast_strides(alive[-1]))]
    return args, alive


def _tangent_args(tangents: Tangents, launch: CpuLaunch, alive: list[Tensor]) -> list[tuple[str, int]]:
    """The addresses of the tangents that are given, and their strides; copies join those that must outlive the call."""
    args: list[tuple[str, int]] = []
    for name, x in zip(MOVING, tangents, strict=False):
        if x is not None:
            strides = _broadcast_strides(x) if name == "bias_t" else x.stride()
            args += [(name, x.data_ptr()), *((f"{name}_{axis}", step) for axis, step in zip("bhsd", strides, strict=True))]
    if tangents.sinks is not None and "sinks_t" in launch.offsets:
        alive.append(tangents.sinks.to(launch.real).contiguous())
        args.append(("sinks_t", alive[-1].data_ptr()))
    return args


_NO_STRIDES = (0, 0, 0, 0)


def _broadcast_strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of a tensor that is repeated along sides of one element."""
    if x is None:
        return _NO_STRIDES
    return tuple(0 if side == 1 else step for side, step in zip(x.shape, x.stride(), strict=True))


def _like(x: Tensor) -> Tensor:
    """Memory laid out like x, its columns adjacent."""
    if x.is_contiguous():
        return _new(tuple(x.shape), x.stride(), x.dtype)
    result = _empty_like(x)
    return result if result.stride()[3] == 1 else empty_out(x, x.shape[3])


def _zero_sum(x: Tensor, launch: CpuLaunch) -> Tensor:
    """Where the kernel adds up the gradient of x: rows of whole register tiles."""
    batch, heads, rows, dim = x.shape
    columns = round_up(dim, launch.kernel.tile.rows)
    size = rows * columns
    return _empty((batch, heads, rows, columns), (heads * size, size, columns, 1), launch.real).zero_()


def _rounded(total: Tensor | None, x: Tensor) -> Tensor | None:
    """The gradient of x from its running sum: the same memory, where that is laid out and rounded like x."""
    if total is None or (x.dtype == total.dtype and x.shape[3] == total.shape[3]):
        return total
    total = total[..., : x.shape[3]]
    return _like(x).copy_(rounded(total, x.dtype) if total.dtype == torch.float64 else total)


backend = CpuBackend()
