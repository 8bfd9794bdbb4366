"""The Triton backend's launches for a problem and a device that need not be there: what compiling and measuring tools work on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tilewise.backends.base import BackwardInputs, EntropyCotangent, Inputs, Jvp, Needs, Tangents, empty_statistics
from tilewise.backends.gpu.launch import EARLY_SINCE, Descriptor, view
from tilewise.backends.gpu.operands import padded
from tilewise.backends.gpu.record import Launch
from tilewise.backends.pages import NewTokens, PagedPart, Pages, Turning
from tilewise.backends.triton import derive, joined, paged, plan, rows, run, statistics
from tilewise.hardware import DeviceSpec
from tilewise.model.tile import TilePlan
from tilewise.problem import MAX_HEAD_DIM, Problem

PASSES = {
    "forward": "forward",
    "decode": "decode",
    "merge": "merge",
    "fp16_split": "fp16_split",
    "prepare": "backward_preprocess",
    "keys": "backward_dkdv",
    "queries": "backward_dq",
    "bias": "backward_dbias",
}
"""The pass of each launch, by the name that `launches` gives it."""
SPARE = 8 << 10
"""Bytes of shared memory that a plan may count too many."""


def pass_of(name: str, tiles: dict[str, TilePlan]) -> str:
    """The pass of a launch; one kernel serves the forward and decoding."""
    return "decode" if name == "forward" and "decode" in tiles else PASSES[name]


def plan_faults(facts: Any, ptx: str, tile: TilePlan, pipelined: bool) -> list[str]:
    """Where a compiled kernel is not what the plan says. Without `pipelined` loads stand behind branches, and Triton gives some
    of them no buffers."""
    said, used = tile.on_chip_bytes, facts.shared
    copies = [int(number, 0) for number in re.findall(r"cp\.async\.wait_group\s+(\w+);", ptx)]
    wrong = {
        f"{used} B of shared memory, the plan says {said}": used > said or (pipelined and said - used > SPARE),
        f"{facts.registers} registers, the plan says at most {tile.registers}": facts.registers > tile.registers,
        f"the plan has {tile.stages} buffers, but copies are waited for at once": pipelined
        and tile.stages > 1
        and ".target sm_80" in ptx
        and max(copies, default=0) < 1,
    }
    return [text for text, is_wrong in wrong.items() if is_wrong]


def launches(
    problem: Problem,
    inputs: Inputs,
    spec: DeviceSpec,
    *,
    needs: Needs | None = None,
    maps: bool | None = None,
) -> list[tuple[str, Launch]]:
    """The launches of a forward, or of a backward where `needs` says of what; tensors may be without memory. Each has the name of
    what it is for: forward, decode, merge, prepare, fp16_split, keys, queries or bias.

    `maps` None: with tensor maps where the device has them, however short the call.
    """
    q, v = inputs.q, inputs.v
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    found: list[Launch] = []
    if maps is None:
        maps = spec.capability is not None and spec.capability[0] in (9, 10)
    with standing_in(spec, found, maps):
        if needs is None:
            run.run_forward(problem, inputs, out, lse)
        else:
            run.run_backward(problem, inputs, BackwardInputs(out, lse, out, needs=needs))
    return [(_name(launch), launch) for launch in found]


def page_launches(problem: Problem, inputs: Inputs, spec: DeviceSpec, scaled: str) -> list[tuple[str, Launch]]:
    """The launches of attention over pages: a table of int32 over twice the pages that the batch takes. `scaled`: what has a
    scale, "head" or "token"."""
    q, page, heads = inputs.q, problem.page, problem.kv_heads
    most = problem.seqlen_k // (problem.batch * page)
    dims = (problem.head_dim, problem.head_dim_v)
    latent = problem.head_dim > MAX_HEAD_DIM
    stored = getattr(torch, problem.stored or problem.dtype)
    k, v = (q.new_empty((2 * problem.batch * most, page, heads, d), dtype=stored) for d in dims)
    scale = q.new_empty(k.shape[:3] if scaled == "token" else heads, dtype=torch.float32).expand(k.shape[:3])
    own = {"k_scale": scale, "v_scale": scale} if scaled else {}
    table, lengths = (q.new_empty(size, dtype=torch.int32) for size in ((problem.batch, most), problem.batch))
    pages = Pages.of(k, k[..., : dims[1]] if latent else v, table, None, lengths, **own, latent=latent)
    found: list[Launch] = []
    with standing_in(spec, found, maps=False):
        paged.run_paged(problem, inputs, pages)
        packed = q[0].transpose(0, 1)
        new = [x.new_empty((q.shape[2], heads, d), dtype=q.dtype) for x, d in zip((k, v), dims, strict=True)]
        angles = q.new_empty((4096, problem.head_dim // 4), dtype=torch.float32)
        turning = Turning(angles, angles, False, None)
        paged.run_append(pages, NewTokens(packed, *new, q_rows=problem.rows, rows=problem.rows, turning=turning))
        own = (q.new_empty((1, *q.shape[1:3], dims[1]), dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32))
        level = PagedPart(*(x.expand(9, *x.shape[1:]).contiguous() for x in own), table.flatten())
        found.append(joined.join_launch([PagedPart(*own), level], None, q[..., : dims[1]], own[1]))
    return [(_name(launch), launch) for launch in found]


def derivative_launches(problem: Problem, inputs: Inputs, spec: DeviceSpec) -> list[tuple[str, Launch]]:
    """The launches of a JVP and, where there is one, of a double backward, with every tangent that there can be."""
    q, k, v = inputs[:3]
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tangents = Tangents(q, k, v, inputs.bias, inputs.sinks)
    found = [("jvp", derive.jvp_launch(problem, inputs, tangents, Jvp(out, lse, out, lse), spec))]
    if plan.derives(problem, spec, derivative="double_backward").ok:
        given = BackwardInputs(out, lse, out, lse)
        t = derive.tangent_args(tangents, out, lse)
        t = t._replace(dout=view(out), delta_ptr=lse, delta_t_ptr=lse, dq=view(q), dk=view(k), dv=view(v))
        several = derive.second_launches(problem, inputs, given, t, tangents, spec)
        found += zip(("second_queries", "second_keys"), several, strict=True)
        if inputs.bias is not None:
            dbias = inputs.bias.float()
            found.append(("second_bias", derive.second_bias_launch(problem, inputs, given, t, dbias, spec)))
    return found


def row_launches(problem: Problem, inputs: Inputs) -> list[tuple[str, Launch]]:
    """The launches of what context parallelism does with rows: a partial result merged into sums, and the sums of gradients."""
    q, v = inputs.q, inputs.v
    part = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    sums, lse = part.float(), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    merge = rows.row_launch(rows.merge_rows_kernel, sums, part, lse, lse)
    return [("merge_rows", merge), ("row_products", rows.row_launch(rows.row_products_kernel, part, part, lse, None))]


def statistics_launches(problem: Problem, inputs: Inputs, spec: DeviceSpec) -> list[tuple[str, Launch]]:
    """The launches of a forward with statistics, and of the gradient of its entropy."""
    q, v = inputs.q, inputs.v
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    problem = replace(problem, stats=("max_logit", "entropy", "key_mass", "top(8)"))
    found: list[Launch] = []
    with standing_in(spec, found, spec.capability is not None and spec.capability[0] in (9, 10)):
        several = statistics.statistics_launches(problem, inputs, (out, lse), empty_statistics(problem, lse), spec)
        found += several
        given = BackwardInputs(out, lse, out, needs=Needs(dbias=inputs.bias is not None))
        found += [x[0] for x in statistics.entropy_launches(problem, inputs, given, EntropyCotangent(lse, lse), spec)]
    return [(_name(launch), launch) for launch in found]


def _name(launch: Launch) -> str:
    name: str = launch.kernel.__name__.removesuffix("_kernel")
    if getattr(launch.config, "CAREFUL", False):
        return f"{name} careful"
    return "decode" if name == "forward" and launch.config.SPLIT else name


@contextmanager
def standing_in(spec: DeviceSpec, found: list[Launch], maps: bool) -> Iterator[None]:
    """The backend believes in a device, and instead of running its launches it adds them to `found`."""

    def descriptors(x: torch.Tensor, y: torch.Tensor, tokens: int, wanted: bool) -> tuple[Any, Any]:
        if not maps or not wanted or max(x.shape[3], y.shape[3]) > 256:
            return None, None
        return Descriptor.of(x, tokens, padded(x.shape[3])), Descriptor.of(y, tokens, padded(y.shape[3]))

    def get(problem: Any, key: Any, device: Any, plan: Any) -> Any:
        kept: dict[str, Any] = {
            "repeat": lambda tensors: False,
            "record": lambda tensors, launches: found.extend(launches),
        }
        return SimpleNamespace(plan=plan(), **kept)

    with (
        mock.patch.multiple(
            run,
            spec_of=lambda device: spec,
            descriptors=descriptors,
            worth_maps=lambda problem: True,
            takes_early=lambda capability: capability is not None and capability >= EARLY_SINCE,
            on_hip=lambda: spec.vendor == "AMD",
            recorder=SimpleNamespace(get=get),
        ),
        mock.patch.multiple(
            paged,
            spec_of=lambda device: spec,
            on_hip=lambda: spec.vendor == "AMD",
            recorder=SimpleNamespace(get=get),
            Recording=lambda device, plan: get(None, None, None, lambda: plan),
            _appends={},
        ),
        mock.patch.object(joined, "spec_of", lambda device: spec),
        mock.patch.object(Launch, "run", lambda launch: found.append(launch)),
    ):
        yield
