"""The CPU backend: kernels compiled for this machine, called with a block of words, shared out over threads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Grads, Inputs, Verdict, empty_out, sink_gradient
from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu import frames, plan, schedule, spec
from tilewise.backends.cpu.blind import Rows, without_blind
from tilewise.backends.cpu.spec import BACKWARD, GRADIENTS, HOT, Kernel, argument_names, mask_args, mask_tensors
from tilewise.hardware.probe import probe_cpu
from tilewise.problem import Problem

ARCHITECTURES = ("aarch64", "x86_64")
_HOT = struct.Struct(f"={len(HOT)}q")
_GRADIENTS = struct.Struct(f"={len(GRADIENTS)}q")
_WORD = struct.Struct("=q")
_ADDRESSES = struct.Struct("=7q")
_COUNT = 8 * HOT.index("count")
_REST = 8 * len(HOT)
_empty_like, _num_threads, _inference = torch.empty_like, torch.get_num_threads, torch.is_inference_mode_enabled


def _allocator() -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """What compiled graphs allocate with: it asks no dispatcher, and takes 1.2 µs on a Neoverse N1; empty_like takes 2.1."""
    try:
        guards: Any = torch._C._dynamo.guards  # its stub lacks the function
        found: Callable[..., Tensor] = guards._empty_strided_cpu
        return found
    except AttributeError:  # another torch
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cpu")


_empty = _allocator()


class Plan(NamedTuple):
    """All that is the same for every call of a problem with so many threads."""

    call: Any
    template: bytes  # of the words after the hot ones
    slots: dict[str, int]  # where each word stands
    size: int  # of a thread's buffer
    threads: int
    work: int  # elements shared by splits
    done: int
    real: torch.dtype
    kernel: Kernel
    lse: Tensor  # an empty one is made like it faster than from a shape
    end: int  # of the template in the argument block
    plain: bool  # nothing but q, k and v goes into a call

    def patch(self, view: memoryview, words: Iterable[tuple[str, int]]) -> None:
        for name, value in words:
            _WORD.pack_into(view, 8 * self.slots[name], value)


@cache
def _obstacle() -> str | None:
    """Why kernels cannot be made here; None if they can."""
    if find_spec("llvmlite") is None:
        return "llvmlite is not installed; pip install llvmlite"
    spec = probe_cpu()
    if spec.arch not in ARCHITECTURES:
        return f"has register tiles for {' and '.join(ARCHITECTURES)}, this machine is {spec.arch}"
    reason = compiler.obstacle()
    if reason is not None or spec.arch != "x86_64" or spec.isa in ("avx2", "avx512"):
        return reason
    enough = {"+avx2", "+fma"} <= set(compiler.host().features.split(","))
    return None if enough else "needs AVX2 and FMA, which this processor does not have"


class CpuBackend:
    name = "cpu"
    any_address = True
    """No call is refused for where its tensors begin."""

    def usable(self, device: str) -> Verdict:
        if device != "cpu":
            return Verdict(False, (f"computes on the CPU; the tensors are on {device}",))
        return Verdict.of(_obstacle())

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        return Verdict.of(
            _obstacle(),
            None if problem.device == "cpu" else f"computes on the CPU; the tensors are on {problem.device}",
            "sums are plain; precision='compensated' is served by tiled" if problem.precision == "compensated" else None,
            _too_long(problem.program.structure),
        )

    def declines(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> str | None:
        return None

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        q, k, v = inputs[:3]
        q_stride, k_stride, v_stride = q.stride(), k.stride(), v.stride()
        ready = problem.__dict__.get("_cpu_ready")
        if ready is None or ready[0] != _num_threads() or k_stride[3] != 1 or v_stride[3] != 1:
            ready = _ready(problem, inputs)
        _, ready, same = ready
        out = _empty_like(q) if same else empty_out(q, problem.head_dim_v)
        o_stride = out.stride()
        if o_stride[3] != 1:
            out = empty_out(q, problem.head_dim_v)
            o_stride = out.stride()
        lse = _empty_like(ready.lse)
        here = schedule.here
        desk = here.take()
        try:
            view, address = desk.view, desk.address
            desk.holds = None
            _HOT.pack_into(
                view, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), 0, address + _COUNT,
                *q_stride, *k_stride, *v_stride, *o_stride,
            )  # fmt: skip
            view[_REST : ready.end] = ready.template
            if ready.plain:
                if ready.threads == 1:
                    ready.call(address, desk.room(ready.size))
                else:
                    schedule.pool.run(ready.call, desk, ready.size, ready.threads)
                return out, lse
            words, alive = _rare_words(problem, inputs, ready)
            if ready.done:
                work = torch.empty(ready.work, dtype=ready.real, device="cpu")
                done = torch.zeros(ready.done, dtype=torch.int64, device="cpu")
                words += [("work", work.data_ptr()), ("done", done.data_ptr())]
                alive += [work, done]
            ready.patch(view, words)
            schedule.pool.run(ready.call, desk, ready.size, ready.threads)
            return out, lse
        finally:
            here.desks.append(desk)

    def launcher(self, problem: Problem, inputs: Inputs) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """With the strides known too, a call is words that stay and five addresses."""
        q, k, v = inputs[:3]
        o_stride = _empty_like(q).stride()
        planned = _plan(problem, inputs, "forward")
        if problem.head_dim != problem.head_dim_v or o_stride[3] != 1 or not planned.plain:
            return None
        call, size, invited = planned.call, planned.size, planned.threads
        threads, like_lse = _num_threads(), planned.lse
        small = like_lse.numel() * like_lse.element_size() <= schedule.BIN_BYTES
        hot = _HOT.pack(*(0,) * 7, *q.stride(), *k.stride(), *v.stride(), *o_stride)
        words, here, pack = hot + planned.template, schedule.here, _ADDRESSES.pack_into
        shape, dtype = tuple(q.shape), q.dtype

        def launch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if _num_threads() != threads:
                return self.forward(problem, Inputs(q, k, v))[0]
            out = _empty_like(q) if _inference() else _empty(shape, o_stride, dtype)
            lse = None if small else _empty_like(like_lse)
            desks = here.desks
            try:  # as in `Here.take`, written out
                desk = desks.pop()
            except IndexError:
                desk = schedule.Desk()
            try:
                if desk.holds is not words:
                    desk.prepare(words, size)
                unseen, address = desk.bin if lse is None else lse.data_ptr(), desk.address
                pack(desk.view, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), unseen, 0, address + _COUNT)
                if invited == 1:
                    call(address, desk.buffer)
                else:
                    schedule.pool.run(call, desk, size, invited)
            finally:
                desks.append(desk)
            return out

        return launch

    def backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        out, lse, dout, dlse, needs = given
        q, dout, dlse = without_blind(self.forward, problem, inputs, lse, Rows(inputs.q, dout, dlse))
        k, v = inputs.k, inputs.v
        ready = _plan(problem, inputs, "backward", needs.dbias)
        words, _alive = _rare_words(problem, inputs, ready)
        dq = _like(q) if needs.dq else None
        dk, dk_sum = _accumulator(k, ready, needs.dk)
        dv, dv_sum = _accumulator(v, ready, needs.dv)
        lse = lse.contiguous()
        delta = _empty_like(lse)
        dlse = None if dlse is None else dlse.to(lse.dtype).contiguous()
        dbias = None
        if needs.dbias and inputs.bias is not None:
            dbias = torch.zeros(inputs.bias.shape, dtype=ready.real, device="cpu")
        count = problem.batch * problem.heads * ready.done
        turns = _empty((count,), (1,), torch.int64).zero_()
        here = schedule.here
        desk = here.take()
        try:
            view = desk.view
            desk.holds = None
            _HOT.pack_into(
                view, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), 0,
                desk.address + _COUNT, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
            )  # fmt: skip
            view[_REST : ready.end] = ready.template
            found = (dout, dlse, delta, dq, dk_sum, dv_sum, dbias, turns)
            _GRADIENTS.pack_into(
                view, 8 * ready.slots[GRADIENTS[0]], *(0 if x is None else x.data_ptr() for x in found), schedule.pause(),
                *dout.stride(), *(_NOWHERE if dq is None else dq.stride()), *(_NOWHERE if dbias is None else _steps(dbias)),
            )  # fmt: skip
            ready.patch(view, words)
            schedule.pool.run(ready.call, desk, ready.size, ready.threads)
        finally:
            here.desks.append(desk)
        dsinks = None
        if needs.dsinks and inputs.sinks is not None:
            dsinks = sink_gradient(inputs.sinks, lse, delta)
        if dbias is not None and inputs.bias is not None:
            dbias = dbias.to(inputs.bias.dtype)
        return Grads(dq, _settle(dk, dk_sum), _settle(dv, dv_sum), dbias, dsinks)


def _too_long(structure: str) -> str | None:
    """Why a mask's integers and tensors do not fit into the argument block; None if they do."""
    left, wanted = schedule.BLOCK_WORDS - len(BACKWARD), len(mask_args(structure))
    return None if wanted <= left else f"the mask takes {wanted} argument words, more than {left}; write it with fewer terms"


def _ready(problem: Problem, inputs: Inputs) -> tuple[int, Plan, bool]:
    """(threads, plan, does the output look like q) of a forward; kept with the problem if every such call is alike."""
    ready = _plan(problem, inputs, "forward")
    found = (torch.get_num_threads(), ready, problem.head_dim == problem.head_dim_v)
    if ready.plain and inputs.k.stride(3) == 1 and inputs.v.stride(3) == 1:
        problem.__dict__["_cpu_ready"] = found
    return found


def _plan(problem: Problem, inputs: Inputs, kind: str, dbias: bool = False) -> Plan:
    """The plan of a problem, remembered with the problem; packed batches are planned for their longest sequence each time."""
    bias = "" if inputs.bias is None else str(inputs.bias.dtype)[6:]
    threads = torch.get_num_threads()
    longest = problem.seqlen_q
    if inputs.cu_q is not None:
        starts = inputs.cu_q.tolist()
        longest = max((b - a for a, b in pairwise(starts)), default=0)
    if longest == 1 and kind == "forward" and _decodes(problem, inputs):
        kind = "decode"
    key = (kind, threads, bias, dbias, longest)
    plans: dict[Any, Plan] = problem.__dict__.setdefault("_cpu_plans", {})
    found = plans.get(key)
    if found is None:
        found = plans[key] = _make_plan(problem, key)
    return found


def _make_plan(problem: Problem, key: tuple[str, int, str, bool, int]) -> Plan:
    kind, threads, bias, dbias, longest = key
    kernel = plan.kernel_for(problem, kind, bias, dbias, longest)
    tiles = plan.tiles_for(problem, kernel, longest, threads)
    if dbias and not _own_cells(problem):
        tiles = tiles._replace(threads=1)
    words = plan.words_for(problem, kernel, tiles)
    names = argument_names(kernel)
    values = [words.get(name, 0) for name in names[len(HOT) :]]
    call = compiler.worker(kernel)
    if threads > 1 and compiler.awake():
        schedule.team()  # what else needs LLVM comes along now, and not in a later call
    rare = kernel.bias or kernel.alibi or kernel.dropout or kernel.varlen or problem.sinks or tiles.splits > 1
    return Plan(
        call=call,
        template=struct.pack(f"={len(values)}q", *values),
        slots={name: n for n, name in enumerate(names)},
        size=frames.frame(problem, kernel, tiles),
        threads=tiles.threads,
        work=frames.workspace(problem, kernel, tiles),
        done=tiles.blocks if kind == "backward" else (tiles.tasks // tiles.splits if tiles.splits > 1 else 0),
        real=torch.float64 if kernel.real == "float64" else torch.float32,
        kernel=kernel,
        lse=_lse_like(problem),
        end=_REST + 8 * len(values),
        plain=not (rare or mask_tensors(kernel.structure)),
    )


def _lse_like(problem: Problem) -> Tensor:
    batch = 1 if problem.varlen else problem.batch
    dtype = torch.float64 if problem.dtype == "float64" else torch.float32
    # one element seen as many: a plan must not hold on to memory of the problem's size
    return torch.empty(1, dtype=dtype, device="cpu").expand(batch, problem.heads, problem.seqlen_q)


def _decodes(problem: Problem, inputs: Inputs) -> bool:
    """Is it the decode kernel's: one query a head, keys in an interval, nothing done to the scores, adjacent columns?"""
    return (
        not (problem.softcap or problem.alibi or problem.dropout_p or problem.bias)
        and set(problem.program.structure) <= set("0btork")
        and inputs.k.stride(3) == 1
        and inputs.v.stride(3) == 1
        and plan.decode_register(problem) is not None
    )


def _own_cells(problem: Problem) -> bool:
    """Does every task have its own cells of the bias?"""
    return problem.bias is not None and problem.bias[:3] == (problem.batch, problem.heads, problem.seqlen_q)


def _rare_words(problem: Problem, inputs: Inputs, ready: Plan) -> tuple[list[tuple[str, int]], list[Tensor]]:
    """The words of everything but q, k and v, and the tensors that must outlive the call."""
    words: list[tuple[str, int]] = []
    alive: list[Tensor] = []
    if inputs.bias is not None:
        steps = zip("bhsd", _steps(inputs.bias), strict=True)
        words += [("bias", inputs.bias.data_ptr()), *((f"bias_{axis}", step) for axis, step in steps)]
    if inputs.alibi is not None:
        slopes = inputs.alibi.to(ready.real).contiguous()
        alive.append(slopes)
        words += [("alibi", slopes.data_ptr()), ("alibi_b", slopes.stride(0) if slopes.shape[0] > 1 else 0)]
    if inputs.sinks is not None:
        sinks = inputs.sinks.to(ready.real).contiguous()
        alive.append(sinks)
        words.append(("sinks", sinks.data_ptr()))
    if problem.dropout_p and inputs.seed is not None:
        words.append(("seed", int(inputs.seed)))
    for name, cu in (("cu_q", inputs.cu_q), ("cu_k", inputs.cu_k)):
        if cu is not None:
            cu = cu.to(torch.int32).contiguous()
            alive.append(cu)
            words.append((name, cu.data_ptr()))
    structure = ready.kernel.structure
    if mask_tensors(structure):
        for n, x in enumerate(problem.program.tensors):
            tensor = torch.as_tensor(x, device="cpu")
            tensor = tensor if tensor.dtype == torch.bool else tensor.to(torch.int32)
            alive.append(tensor)
            words.append((f"mask_t{n}", tensor.data_ptr()))
            sides = zip(range(tensor.ndim), tensor.shape, tensor.stride(), strict=True)
            words += [(f"mask_t{n}_{axis}", step if side > 1 else 0) for axis, side, step in sides]
    return words, alive


_NOWHERE = (0, 0, 0, 0)


def _steps(bias: Tensor) -> tuple[int, ...]:
    """Strides of a bias, which is repeated along sides of one element."""
    return tuple(0 if side == 1 else step for side, step in zip(bias.shape, bias.stride(), strict=True))


def _like(x: Tensor) -> Tensor:
    """Memory laid out like x, its columns adjacent."""
    found = _empty_like(x)
    return found if found.stride(3) == 1 else empty_out(x, x.shape[3])


def _accumulator(x: Tensor, ready: Plan, needed: bool) -> tuple[Tensor | None, Tensor | None]:
    """(gradient, its running sum): the same memory where the kernel can add to the gradient itself."""
    if not needed:
        return None, None
    batch, heads, rows, dim = x.shape
    columns = spec.round_up(dim, ready.kernel.tile.rows)
    size = rows * columns
    total = _empty((batch, heads, rows, columns), (heads * size, size, columns, 1), ready.real).zero_()
    same = x.dtype == ready.real and columns == dim
    return (total if same else _like(x)), total


def _settle(gradient: Tensor | None, total: Tensor | None) -> Tensor | None:
    if gradient is not None and total is not None and gradient is not total:
        gradient.copy_(total[..., : gradient.shape[3]])
    return gradient


backend = CpuBackend()
