"""The portable GPU backend: what it can do, and the sequence of its kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import Grads, Inputs, Needs, Verdict, empty_lse, empty_out, sink_gradient
from tilewise.backends.gpu.arguments import (
    attention_args,
    config_for,
    dot_precision,
    padded,
    partial_results,
    split_view,
)
from tilewise.backends.gpu.launch import Descriptor, Options, bias_view, describable, interpreting, launch, view
from tilewise.backends.gpu.structs import Attention, Config, Gradients
from tilewise.backends.triton.plan import bias_tile, decoding, smaller, tile_for
from tilewise.errors import PlanError
from tilewise.planner import TilePlan
from tilewise.problem import Problem

DTYPES = ("float16", "bfloat16", "float32")


class Triton:
    """See the package's text."""

    name = "triton"

    def usable(self, device: str) -> Verdict:
        if importlib.util.find_spec("triton") is None:
            return Verdict(False, ("triton is not installed; pip install triton",))
        if interpreting():
            return Verdict.of(
                None if device == "cpu" else f"TRITON_INTERPRET is set: runs on cpu tensors only, not on {device}"
            )
        if device != "cuda":
            return Verdict(
                False, (f"runs on cuda (and, with TRITON_INTERPRET=1, in the interpreter on cpu); not on {device}",)
            )
        if not torch.cuda.is_available():
            return Verdict(False, ("torch finds no CUDA device",))
        if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
            major, minor = torch.cuda.get_device_capability()
            return Verdict(False, (f"needs compute capability 8.0 or newer, found {major}.{minor}",))
        return Verdict(True)

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        return Verdict.of(
            *self.usable(problem.device).reasons,
            None if problem.dtype in DTYPES else f"dtype {problem.dtype} is not among {', '.join(DTYPES)}",
            "precision='compensated' is not implemented here" if problem.precision == "compensated" else None,
        )

    def declines(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> str | None:
        return "the interpreter is for tests" if interpreting() else None

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        out, lse = empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q)
        if lse.numel() == 0:
            return out, lse
        with _on(inputs.q.device):
            run_forward(problem, inputs, out, lse)
        return out, lse

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        needs: Needs,
    ) -> Grads:
        with _on(inputs.q.device):
            return run_backward(problem, inputs, (out, lse, dout, dlse), needs)


def _on(device: torch.device) -> torch.cuda.device:
    return torch.cuda.device(device if device.type == "cuda" else -1)


class Launch(NamedTuple):
    """Everything one kernel runs with."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    config: Config
    options: Options


_fitting: dict[tuple[TilePlan, Config], TilePlan] = {}


def run_pass(
    problem: Problem, pass_: str, device: torch.device, build: Callable[[TilePlan], Launch], tile: TilePlan | None
) -> None:
    """Launch with the given tile, or with the planner's; should that not fit the device after all, with a smaller one."""
    if tile is not None or interpreting():
        launch(*build(tile or tile_for(problem, pass_, device)))
        return
    from triton.runtime.errors import OutOfResources

    planned = tile_for(problem, pass_, device)
    first = build(planned)
    known = _fitting.get((planned, first.config))
    if known is not None:
        launch(*(first if known == planned else build(known)))
        return
    for trial in (planned, *smaller(planned)):
        try:
            launch(*build(trial))
        except OutOfResources:
            continue
        _fitting[planned, first.config] = trial
        return
    raise PlanError(
        f"tile: no tile down to 16×16 fits {torch.cuda.get_device_name(device)} for {problem}; use backend='tiled'"
    )


def run_forward(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor, tile: TilePlan | None = None) -> None:
    """Fill out and lse; `tile` overrides the plan's."""
    from tilewise.backends.triton.forward import forward_kernel
    from tilewise.backends.triton.split import merge_kernel

    parts: list[tuple[Attention, Tensor, Tensor, Config]] = []

    def build(tile: TilePlan) -> Launch:
        a, config = arguments(problem, inputs, out, lse, tile)
        rows, heads = problem.seqlen_q, problem.heads
        if tile.pack_gqa:
            config = config._replace(PACK=problem.group)
            rows, heads = rows * problem.group, problem.kv_heads
        programs = grid(problem, rows, tile.block_q, heads) * tile.splits
        if tile.splits > 1:
            part, part_lse = partial_results(out, tile.splits)
            parts[:] = [(a, part, part_lse, config)]
            a, config = a._replace(out=split_view(part), lse_ptr=part_lse), config._replace(SPLIT=True)
        kv = descriptors(inputs.k, inputs.v, tile.block_k)
        return Launch(forward_kernel, programs, (a, *kv), config, Options(tile.warps, tile.stages))

    run_pass(problem, "decode" if decoding(problem) else "forward", out.device, build, tile)
    for a, part, part_lse, config in parts:
        rows = min(16, 1 << (problem.seqlen_q - 1).bit_length())
        merge = config._replace(STRUCTURE="", BLOCK_M=rows, PACK=1)
        programs = -(-problem.seqlen_q // rows) * out.shape[0] * problem.heads
        launch(merge_kernel, programs, (a, split_view(part), part_lse), merge, Options(4, 1))


def run_backward(
    problem: Problem,
    inputs: Inputs,
    saved: tuple[Tensor, Tensor, Tensor, Tensor | None],
    needs: Needs,
    tiles: dict[str, TilePlan] | None = None,
) -> Grads:
    """The gradients asked for, from (out, lse, dout, dlse); `tiles` overrides the plan's by pass."""
    from tilewise.backends.triton.backward import keys_kernel, prepare_kernel, queries_kernel

    out, lse, dout, dlse = saved
    tiles, device = tiles or {}, out.device
    dq = torch.empty_like(inputs.q) if needs.dq else None
    dk = torch.empty_like(inputs.k) if needs.dk else None
    dv = torch.empty_like(inputs.v) if needs.dv else None
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    dlse = None if dlse is None else dlse.contiguous()
    to_dq, to_dk, to_dv = (None if x is None else view(x) for x in (dq, dk, dv))
    g = Gradients(view(dout), to_dq, to_dk, to_dv, lse2, delta, dlse, dbias=None, bias_shape=None)

    rows = 16 if interpreting() else 64
    a, config = arguments(problem, inputs, out, lse, TilePlan(rows, 16, 1, 4))
    plain = config._replace(STRUCTURE="", DROPOUT=False, SOFTCAP=False, FOLD=True)
    launch(prepare_kernel, -(-problem.seqlen_q // rows) * problem.heads * out.shape[0], (a, g), plain, Options(4, 1))

    def build_keys(tile: TilePlan) -> Launch:
        a, config = arguments(problem, inputs, out, lse, tile)
        programs = grid(problem, problem.seqlen_k, tile.block_k, problem.kv_heads)
        streamed = descriptors(inputs.q, dout, tile.block_q)
        return Launch(keys_kernel, programs, (a, g, *streamed), config, Options(tile.warps, tile.stages))

    def build_queries(tile: TilePlan) -> Launch:
        a, config = arguments(problem, inputs, out, lse, tile)
        programs = grid(problem, problem.seqlen_q, tile.block_q, problem.heads)
        streamed = descriptors(inputs.k, inputs.v, tile.block_k)
        return Launch(queries_kernel, programs, (a, g, *streamed), config, Options(tile.warps, tile.stages))

    if needs.dk or needs.dv:
        run_pass(problem, "backward_dkdv", device, build_keys, tiles.get("backward_dkdv"))
    if needs.dq:
        run_pass(problem, "backward_dq", device, build_queries, tiles.get("backward_dq"))
    return Grads(
        dq,
        dk,
        dv,
        bias_gradient(problem, inputs, a, g) if needs.dbias and inputs.bias is not None else None,
        sink_gradient(inputs.sinks, lse, delta) if needs.dsinks and inputs.sinks is not None else None,
    )


def bias_gradient(problem: Problem, inputs: Inputs, a: Attention, g: Gradients) -> Tensor:
    """dBias, summed over what the bias was broadcast to."""
    from tilewise.backends.triton.bias import bias_kernel

    bias = inputs.bias
    assert bias is not None
    tile = bias_tile(problem)
    dbias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    config = config_for(problem, inputs, dot_precision(problem, torch.version.hip is not None))._replace(
        BLOCK_M=tile.block_q, BLOCK_N=tile.block_k, SUM_M=bias.shape[2] == 1, SUM_N=bias.shape[3] == 1
    )
    g = g._replace(dbias=bias_view(dbias), bias_shape=tuple(bias.shape))
    programs = bias.shape[0] * bias.shape[1] * -(-bias.shape[2] // tile.block_q) * -(-bias.shape[3] // tile.block_k)
    launch(bias_kernel, programs, (a, g), config, Options(tile.warps, tile.stages))
    return dbias.to(bias.dtype)


def arguments(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor, tile: TilePlan) -> tuple[Attention, Config]:
    a = attention_args(problem, inputs, out, lse, tile.splits)
    config = config_for(problem, inputs, dot_precision(problem, torch.version.hip is not None))
    return a, config._replace(BLOCK_M=tile.block_q, BLOCK_N=tile.block_k)


def descriptors(x: Tensor, y: Tensor, rows: int) -> tuple[Descriptor | None, Descriptor | None]:
    """Tensor maps of two streamed operands, on devices that have them and for tensors they can describe."""
    if x.device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(x.device) < (9, 0):
        return None, None
    if not (describable(x) and describable(y)) or max(x.shape[3], y.shape[3]) > 256:
        return None, None
    return Descriptor(x, rows, padded(x.shape[3])), Descriptor(y, rows, padded(y.shape[3]))


def grid(problem: Problem, rows: int, block: int, heads: int) -> int:
    """Programs for all tiles of all heads; for packed sequences an upper bound that needs no lengths."""
    if problem.varlen:
        return (rows // block + problem.batch) * heads
    return -(-rows // block) * heads * problem.batch


backend = Triton()
