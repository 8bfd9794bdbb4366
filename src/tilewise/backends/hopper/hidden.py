"""What a bias of -inf hides may hold NaN, and 0 · NaN is NaN.

Kernels with a bias compute as if it hid nothing, and raise a flag where something infinite came out. Then, on the device, the
call is made once more: from copies in which keys that mask and bias together hide from every query, and queries from which they
hide every key, are zeros. Where the flag is down, which is nearly always, these launches end at once: the host pays for them, so
one kernel makes all copies, and takes the flag down for the next call. `FLAGS` has its neighbours.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.gpu.arguments import mask_args
from tilewise.backends.gpu.kept import kept
from tilewise.backends.gpu.launch import Address, LaunchOptions, Part, bias_view, view
from tilewise.backends.gpu.operands import padded
from tilewise.backends.gpu.program import allowed
from tilewise.backends.gpu.record import Launch
from tilewise.backends.gpu.structs import MaskArgs, MaskLayout
from tilewise.backends.gpu.tile import seq_info
from tilewise.problem import Problem

PROGRAMS = 128
BLOCK = 64
FLAGS = 5
"""Integers, all 0 before a first call: the flag that kernels raise; how many programs have looked at it; and, at a multiple of 16
bytes, what it was then: the second time looks at that. A flag that is up by mistake costs time and changes nothing."""


class HiddenArguments(NamedTuple):
    """One or two tensors of one side, of keys or of queries, and their copies."""

    flag: Any
    x: Any
    x_copy: Any
    y: Any  # where there is none: x
    y_copy: Any
    bias: Any
    mask: MaskArgs
    cu_q: Any  # of a packed batch, else anything
    cu_k: Any
    batch: int
    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    cleared: Any  # memory that the second time adds to, and its size
    size: int
    none: None = None  # Triton 3.6 loses constants of a struct without a None


class HiddenConfig(NamedTuple):
    """Head dims of x, and of y, 0 where there is none: of the side of keys, then of queries."""

    MASK: MaskLayout
    VARLEN: bool
    K_D: int
    K_DV: int
    Q_D: int
    Q_DV: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK: int = BLOCK


@triton.jit
def shown_rows(a, seq, rows, heads, len_other, BY_KEY: tl.constexpr, C: tl.constexpr):
    """Which of these keys (or queries) mask and bias show to some query (or show some key), in so many heads from seq.h on."""
    shown = rows < 0
    for i in range(heads):
        start = a.bias.ptr + seq.b.to(tl.int64) * a.bias.stride_b + (seq.h + i).to(tl.int64) * a.bias.stride_h
        for first in range(0, len_other, C.BLOCK):
            others = first + tl.arange(0, C.BLOCK)
            if BY_KEY:
                q = others[None, :]
                k = rows[:, None]
            else:
                q = rows[:, None]
                k = others[None, :]
            ok = allowed(a.mask, seq, q, k, C)
            at = q.to(tl.int64) * a.bias.stride_s + k.to(tl.int64) * a.bias.stride_d
            x = tl.load(start + at, mask=ok, other=float("-inf"))
            shown |= tl.max((x != float("-inf")).to(tl.int32), 1) > 0
    return shown


@triton.jit
def copy_shown(source, target, row, h, tokens, ok, shown, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = ok[:, None] & (d < D)
    at = tokens[:, None].to(tl.int64)
    from_ = source.ptr + row.to(tl.int64) * source.stride_b + h.to(tl.int64) * source.stride_h
    to = target.ptr + row.to(tl.int64) * target.stride_b + h.to(tl.int64) * target.stride_h
    x = tl.load(from_ + at * source.stride_s + d * source.stride_d, mask=inside & shown[:, None], other=0.0)
    tl.store(to + at * target.stride_s + d * target.stride_d, x, mask=inside)


@triton.jit
def copy_side(a, BY_KEY: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr):
    """The copies of keys, or of queries, and zeros to the memory that the second time adds to."""
    pid = tl.program_id(0)
    group = a.heads // a.kv_heads
    heads = a.kv_heads if BY_KEY else a.heads
    tiles = tl.cdiv(a.len_k if BY_KEY else a.len_q, C.BLOCK)
    for t in range(pid, tiles * heads * a.batch, tl.num_programs(0)):
        b = t // tiles // heads
        h = t // tiles % heads
        rows = t % tiles * C.BLOCK + tl.arange(0, C.BLOCK)
        seq = seq_info(a, b, h * group if BY_KEY else h, C)
        if BY_KEY:
            shown = shown_rows(a, seq, rows, group, seq.len_q, BY_KEY, C)
            ok = rows < seq.len_k
            tokens = seq.k_start + rows
        else:
            shown = shown_rows(a, seq, rows, 1, seq.len_k, BY_KEY, C)
            ok = rows < seq.len_q
            tokens = seq.q_start + rows
        copy_shown(a.x, a.x_copy, seq.row, h, tokens, ok, shown, D, C.BLOCK_D)
        if DV > 0:
            copy_shown(a.y, a.y_copy, seq.row, h, tokens, ok, shown, DV, C.BLOCK_DV)
    for first in range(pid * 1024, a.size, tl.num_programs(0) * 1024):
        i = first + tl.arange(0, 1024)
        tl.store(a.cleared + i, tl.zeros([1024], a.cleared.dtype.element_ty), mask=i < a.size)


@triton.jit
def hidden_kernel(keys, queries, C: tl.constexpr):
    """If the flag is up, copies with zeros in rows that the bias hides. Who is the last to look hands it on and takes it down."""
    raised = tl.load(keys.flag)
    tl.debug_barrier()  # all threads have looked
    if tl.atomic_add(keys.flag + 1, 1) == tl.num_programs(0) - 1:
        tl.store(keys.flag + 4, raised)
        tl.store(keys.flag, 0)
        tl.store(keys.flag + 1, 0)
    if raised != 0:
        copy_side(keys, True, C.K_D, C.K_DV, C)
        copy_side(queries, False, C.Q_D, C.Q_DV, C)


class Copies(NamedTuple):
    """FLAGS, and memory for copies of tensors of one dtype, one after another. The flags are kept for calls of this thread on
    this stream, which come one after the other."""

    flag: Tensor
    memory: Tensor

    @classmethod
    def of(cls, problem: Problem, *tensors: Tensor) -> Copies:
        """Of q, k, v and what else has one's shape: how much that is, the problem remembers."""
        x, key = tensors[0], ("hidden copies", len(tensors))
        size = problem.memory.get(key)
        if size is None:
            size = problem.memory[key] = sum([room(x) for x in tensors])
        flags = kept(problem, x, ("hidden flags", get_ident()), lambda: x.new_zeros(FLAGS, dtype=torch.int32))
        return cls(flags, x.new_empty_strided((size,), (1,)))

    @property
    def second(self) -> Address:
        """The flag that the second time looks at."""
        return Address(16, self.flag)

    def parts(self, *tensors: Tensor) -> list[Part]:
        """The copies of these tensors."""
        found, first = [], 0
        for x in tensors:
            found.append(Part(first * x.element_size(), self.memory, x.shape))
            first += room(x)
        return found


def room(x: Tensor) -> int:
    """Numbers of a copy: the next one begins at a multiple of 16 bytes, as tensor maps want it."""
    return -(-x.numel() // 64) * 64


def hidden_mask(problem: Problem, q: Tensor) -> MaskArgs:
    """The mask as `hidden_kernel` reads it. Asked for once a call: its tensors are among those of the call."""
    if not problem.program.tensors:
        return MaskArgs(problem.program.ints, (), ())
    return kept(problem, q, "hidden", lambda: mask_args(problem.program, q.device, problem.batch))


Pairs = tuple[tuple[Tensor, Tensor | Part], ...]
"""One or two tensors of one side, each with its copy."""
Cleared = tuple[Any, int]
"""fp32 memory that becomes zeros with the copies, and its size."""


def hidden_launch(
    problem: Problem, inputs: Inputs, mask: MaskArgs, flag: Tensor, keys: Pairs, queries: Pairs,
    cleared: tuple[Cleared | None, Cleared | None] = (None, None),
) -> Launch:  # fmt: skip
    """The launch that fills the copies of both sides; each may have memory to clear."""
    sides = [side_of(problem, inputs, mask, flag, pairs, x) for pairs, x in zip((keys, queries), cleared, strict=True)]
    dims = [(pairs[0][0].shape[3], pairs[1][0].shape[3] if len(pairs) == 2 else 0) for pairs in (keys, queries)]
    (k_d, k_dv), (q_d, q_dv) = dims
    layout = MaskLayout.of(problem.program.structure)
    config = HiddenConfig(layout, problem.varlen, k_d, k_dv, q_d, q_dv, padded(max(k_d, q_d)), padded(max(k_dv, q_dv)))
    return Launch(hidden_kernel, PROGRAMS, tuple(sides), config, LaunchOptions(4, 1))


def side_of(
    problem: Problem, inputs: Inputs, mask: MaskArgs, flag: Tensor, pairs: Pairs, cleared: Cleared | None
) -> HiddenArguments:
    (x, x_copy), (y, y_copy) = pairs[0], pairs[-1]
    assert inputs.bias is not None
    memory, size = (flag, 0) if cleared is None else cleared
    return HiddenArguments(
        flag=flag,
        x=view(x),
        x_copy=view(x_copy),
        y=view(y),
        y_copy=view(y_copy),
        bias=bias_view(inputs.bias),
        mask=mask,
        cu_q=flag if inputs.cu_q is None else inputs.cu_q,
        cu_k=flag if inputs.cu_k is None else inputs.cu_k,
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        len_q=problem.seqlen_q,
        len_k=problem.seqlen_k,
        cleared=memory,
        size=size,
    )
