"""From a Problem and its tensors to the kernels' structs. Nothing here imports triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.gpu.launch import bias_view, broadcast_strides, interpreting, view
from tilewise.backends.gpu.operands import padded
from tilewise.backends.gpu.structs import Attention, KernelConfig, MaskArgs, MaskLayout, View
from tilewise.masks import MaskProgram, may_have_empty_rows
from tilewise.numerics.philox import drop_threshold
from tilewise.problem import Problem


def mask_args(program: MaskProgram, device: torch.device, batch: int) -> MaskArgs:
    """The program's integers and tensors with the strides the device functions expect, 0 where a side broadcasts."""
    tensors: list[Tensor] = []
    strides: list[int] = []
    for term in program.terms():
        for kind, _, given in term:
            for x in given:
                t = torch.as_tensor(x, device=device)
                if kind.per_head:
                    if kind.is_selected:
                        t = t.to(torch.int32).contiguous()
                    else:
                        t = (t if t.dtype == torch.bool else t != 0).contiguous().view(torch.uint8)
                    # the rows and columns of tables and lists are counted, not broadcast, and lie one after another
                    sides = broadcast_strides(t)[2:] if kind.is_dense else [t.shape[3], t.shape[2]]
                    strides += [*broadcast_strides(t)[:2], *sides]
                elif kind.is_tree:  # who sees whom as bytes, then integers
                    t = t.to(torch.uint8 if t.dtype == torch.bool else torch.int32).contiguous()
                    strides += broadcast_strides(t)[:1]
                else:
                    t = t if kind.is_documents else t.expand(batch)  # one integer for each sequence
                    t = t.to(torch.int32).contiguous()
                    strides += broadcast_strides(t)[:1] if kind.is_documents else []
                tensors.append(t)
    return MaskArgs(program.ints, tuple(tensors), tuple(strides))


def attention_args(
    problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor, splits: int = 1, mask: MaskArgs | None = None
) -> Attention:
    """The problem as the kernels see it; `inputs` are `ready`. `mask` is that of the call, if it is there already."""
    return Attention(
        q=view(inputs.q),
        k=view(inputs.k),
        v=view(inputs.v),
        out=view(out),
        lse_ptr=lse,
        bias=None if inputs.bias is None else bias_view(inputs.bias),
        alibi=None if inputs.alibi is None else View(inputs.alibi, *[*broadcast_strides(inputs.alibi), 0, 0]),
        sinks_ptr=inputs.sinks,
        seed_ptr=inputs.seed,
        cu_q=inputs.cu_q if problem.varlen else None,
        cu_k=inputs.cu_k if problem.varlen else None,
        origins=inputs.origins,
        mask=mask_args(problem.program, inputs.q.device, problem.batch) if mask is None else mask,
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        len_q=problem.seqlen_q,
        len_k=problem.seqlen_k,
        splits=splits,
        scale=float(problem.scale),
        softcap=float(problem.softcap),
        drop_below=drop_threshold(problem.dropout_p),
        keep_scale=1.0 / (1.0 - problem.dropout_p),
    )


def config_for(problem: Problem, inputs: Inputs, precision: str) -> KernelConfig:
    """What the kernels are compiled for, tiles aside."""
    plain = inputs.bias is None and inputs.alibi is None and problem.softcap == 0
    return KernelConfig(
        MASK=MaskLayout.of(problem.program.structure),
        D=problem.head_dim,
        DV=problem.head_dim_v,
        BLOCK_D=padded(problem.head_dim),
        BLOCK_DV=padded(problem.head_dim_v),
        VARLEN=problem.varlen,
        SOFTCAP=problem.softcap > 0,
        FOLD=plain and problem.scale > 0,
        DROPOUT=problem.dropout_p > 0,
        PRECISION=precision,
        INTERPRET=interpreting(),
        EMPTY_ROWS=inputs.bias is not None
        or problem.varlen
        or may_have_empty_rows(problem.program, problem.seqlen_q, problem.seqlen_k),
    )


def empty_fp16_split(x: Tensor) -> Tensor:
    """Fresh memory for the two fp16 parts of a tensor, one after another along the batch, rows at multiples of 16 bytes.

    Behind them, in the same memory, is room for a scale of fp32 for each token.
    """
    b, h, s, d = x.shape
    wide = -(-d // 8) * 8
    whole = torch.empty(2 * b * h * s * (wide + 1), dtype=torch.float16, device=x.device)
    return whole[: 2 * b * h * s * wide].view(2 * b, h, s, wide)[..., :d]


def partial_results(like: Tensor, shape: Sequence[int], splits: int) -> tuple[Tensor, Tensor]:
    """Fresh fp32 memory, where `like` is, for `splits` pairs (out, lse), one after another along the batch; `shape` is out's."""
    b, h, m, dv = shape
    b *= splits
    part = like.new_empty_strided((b, h, m, dv), (h * m * dv, m * dv, dv, 1), dtype=torch.float32)
    return part, like.new_empty_strided((b, h, m), (h * m, m, 1), dtype=torch.float32)


def split_view(parts: Tensor) -> View:
    """Parts along the batch as one tensor; unlike `view`, sides of 1 keep their stride."""
    return View(parts, *parts.stride())
