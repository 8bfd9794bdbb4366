"""A call over a cache as it is parsed: its queries in one row, its pages as they are now, its problem; and the parts it has where
sequences share pages. `attention_cached` runs what is parsed here, `explain` tells of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.api.cache import KVCache
from tilewise.api.cached_checks import check_mask, check_packing, check_splits, check_table, sees_all_before
from tilewise.api.cached_plan import CachedPlan, attend_shared, check_plan, join_parts
from tilewise.api.cached_write import check_lengths, even_steps, is_traced
from tilewise.api.call_cache import kept_problem
from tilewise.api.lengths import readable
from tilewise.api.options import DEFAULTS, ParsedOptions
from tilewise.api.parse import autocast, build_problem, check_dense, check_device, check_range, check_sinks
from tilewise.backends.base import Backend, Inputs
from tilewise.backends.pages import PagedPart, Pages, gathered
from tilewise.errors import ArgumentError, ArgumentTypeError, KernelError, LayoutError
from tilewise.masks import Mask
from tilewise.masks.arrays import INTEGERS
from tilewise.ops.run import empty_forward, forward, is_empty, own_precision
from tilewise.ops.tensors import dtype_name, interleaved, materialized, plain
from tilewise.problem import ITEMSIZE, Problem


class Queries(NamedTuple):
    """Queries packed, (T, H, D), where each sequence's begin, and how they came."""

    q: Tensor
    cu: Tensor
    shape: torch.Size

    def restored(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """out (1, H, T, Dv) and lse (1, H, T) in the form of the queries: LSE (H, T) or (B, H, Sq)."""
        out, lse = out[0].transpose(0, 1), lse[0]
        if len(self.shape) == 3:
            return out, lse
        batch, rows, heads, _ = self.shape
        return out.reshape(batch, rows, heads, out.shape[-1]), lse.reshape(heads, batch, rows).transpose(0, 1)


class CachedCall(NamedTuple):
    """Attention of some queries to some pages."""

    queries: Queries
    pages: Pages
    options: ParsedOptions
    fields: dict[str, Any]
    """Of the problem, what neither the tensors nor the options tell: splits, partial, invariant."""


Attend = Callable[[CachedCall], tuple[Tensor, Tensor]]
"""out (1, H, T, Dv) and lse (1, H, T) of a call; of one that is `partial` perhaps several parts, along the first dimension."""


def parse_cached(
    q: Any,
    cache: Any,
    cu_seqlens_q: Tensor | None,
    options: ParsedOptions,
    splits: int | None,
    plan: CachedPlan | None,
    invariant: bool,
) -> CachedCall:
    """The call, after all that may be refused of it but new tokens."""
    if not isinstance(cache, KVCache):
        raise ArgumentTypeError(f"cache: got {type(cache).__name__}, need a KVCache; see tw.KVCache.paged and .static")
    mask: Any = options["mask"]
    check_mask(mask, options["bias"])
    fields = {"splits": check_splits(splits, invariant), "partial": False, "invariant": invariant}
    pages = cache.pages.now()
    queries = _packed(q, pages, cu_seqlens_q)
    call = checked(CachedCall(queries, pages, options, fields))
    if plan is not None:
        check_plan(plan, call.pages, queries.cu, invariant)
    return call


def checked(call: CachedCall) -> CachedCall:
    """The call, where values may be looked at after that: lengths, packing and the pages that are seen."""
    queries, pages, options, _ = call
    if not readable(pages.lengths):
        return call
    mask: Any = options["mask"]
    check_lengths(pages)
    if len(queries.shape) == 3:
        check_packing(queries.cu, queries.q.shape[0])
    check_table(pages, queries.cu, mask)
    return call._replace(pages=pages._replace(lengths=pages.lengths.int().contiguous(), within=True))


def attended(
    call: CachedCall, plan: CachedPlan | None, attend: Attend, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """out (1, H, T, Dv) in q's dtype and lse (1, H, T); in parts, which `attend` sees one after the other and which are merged,
    by a backend that may serve the call under the name if it can, where a plan tells what sequences share. Sinks join at the
    end."""
    queries, pages, options, fields = call
    mask: Any = options["mask"]
    if plan is None or not plan.levels or options["bias"] is not None or not sees_all_before(mask) or not queries.q.shape[0]:
        return attend(call)
    own: ParsedOptions = {**options, "sinks": None}
    common: ParsedOptions = {**own, "mask": None}

    def part(q: Tensor, cu: Tensor, some: Pages, mine: bool) -> tuple[Tensor, Tensor]:
        return attend(CachedCall(Queries(q, cu, q.shape), some, own if mine else common, {**fields, "partial": True}))

    sinks = check_sinks(options["sinks"], queries.q, queries.q.shape[1])
    rows = queries.shape[1] if len(queries.shape) == 4 else 0
    join = partial(_joined, queries.q, sinks, backend)
    out, lse = attend_shared(plan, pages, (queries.q, queries.cu, rows), part, join)
    return out.to(queries.q.dtype), lse


def _joined(q: Tensor, sinks: Tensor | None, backend: str | None, parts: list[PagedPart]) -> tuple[Tensor, Tensor]:
    """All parts merged: by one kernel where a backend has it."""
    if backend is not None and not is_traced(q) and all(part.out.dtype == torch.float32 for part in parts):
        joiner = dispatch.parts_joiner(q.device.type, backend)
        try:
            if joiner is not None:
                return joiner.join_parts(q.transpose(0, 1)[None], parts, sinks)
        except KernelError as error:
            if backend != "auto":
                raise
            warnings.warn(f"{error}; torch merges the parts instead", RuntimeWarning, stacklevel=3)
    return join_parts(parts, sinks)


def _packed(q: Any, pages: Pages, cu: Tensor | None) -> Queries:
    """The queries as one row of tokens."""
    if not isinstance(q, Tensor):
        raise ArgumentTypeError(f"q: got {type(q).__name__}, need a torch.Tensor")
    if dtype_name(q) not in ITEMSIZE:
        raise ArgumentTypeError(f"q: dtype {q.dtype}, need float16, bfloat16, float32 or float64")
    plain("q", q)
    check_dense("q", q)
    _check_transforms()
    check_device("the cache", pages.k, q.device)
    if torch.is_grad_enabled() and q.requires_grad:
        raise ArgumentError("q: requires a gradient, which a cache does not have; use torch.no_grad() or q.detach()")
    if pages.k_scale is None and pages.k.dtype != autocast((q,))[0].dtype:
        raise ArgumentTypeError(f"q: dtype {q.dtype}, but the cache holds {pages.k.dtype}; convert with q.to({pages.k.dtype})")
    (q,), batch = autocast((q,)), pages.starts.shape[0]
    if q.ndim == 4 and cu is None:
        if q.shape[0] != batch:
            raise LayoutError(f"q: {q.shape[0]} sequences, but the cache has {batch}")
        return Queries(q.flatten(0, 1), even_steps(batch, q.shape[1], q.device), q.shape)
    if q.ndim != 3 or cu is None:
        raise LayoutError(
            f"q: shape {tuple(q.shape)}; need (batch, queries, heads, dim), or (tokens, heads, dim) with cu_seqlens_q"
        )
    if not isinstance(cu, Tensor) or dtype_name(cu) not in INTEGERS:
        raise ArgumentTypeError(f"cu_seqlens_q: got {getattr(cu, 'dtype', type(cu).__name__)}, need an integer tensor")
    check_device("cu_seqlens_q", cu, q.device)
    check_range("cu_seqlens_q", cu)
    if tuple(cu.shape) != (batch + 1,):
        raise LayoutError(f"cu_seqlens_q: shape {tuple(cu.shape)}, need ({batch + 1},) for the {batch} sequences of the cache")
    return Queries(q, cu.int(), q.shape)


def _check_transforms() -> None:
    """Raise inside transforms of torch.func: they wrap tensors, which have no memory of their own then."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise ArgumentError(
            "attention_cached: called inside a transform of torch.func (vmap, jvp, grad, functionalize), which a cache does not "
            "have; call it outside, with a batch of sequences in place of vmap"
        )


def _room(cu: Tensor, pages: Pages) -> Tensor:
    """Cumulative lengths of sequences that fill their pages."""
    return torch.cat([cu.new_zeros(1), (pages.counts * pages.page).cumsum(0, dtype=torch.int32)])


def attend(call: CachedCall, backend: str) -> tuple[Tensor, Tensor]:
    """out (1, H, T, Dv) in q's dtype and lse (1, H, T): pages as they are where a backend reads them, gathered elsewhere."""
    if is_traced(call.queries.q, *call.pages.tensors):
        from tilewise.api import cached_operators  # operators take a while to define, and a plain call needs none

        return cached_operators.attend(call, backend)
    call = _materialized(call)
    problem, inputs = problem_of(call)
    if is_empty(problem):
        return empty_forward(problem, inputs)
    key = ("pages", dispatch.registry_key(backend))
    if key not in problem.memory:
        problem.memory[key] = dispatch.pages_backend(problem, backend)
    reader: Backend | None = problem.memory[key]
    if reader is not None:
        try:
            with own_precision(problem.device):
                return reader.paged(problem, inputs, call.pages)
        except KernelError as error:
            if backend != "auto":
                raise
            problem.memory[key] = None
            warnings.warn(f"{error}; the tokens of the pages are gathered instead", RuntimeWarning, stacklevel=3)
    problem, inputs = gathered_problem(call)
    out, lse = forward(problem, inputs, backend)
    return out if problem.partial else out.to(call.queries.q.dtype), lse


def _materialized(call: CachedCall) -> CachedCall:
    """The call with all values in memory, where kernels read them."""
    pages = call.pages
    given = [call.queries.q, pages.k, pages.v, pages.k_scale, pages.v_scale]
    if not any(x is not None and (x.is_neg() or x._is_zerotensor()) for x in given):
        return call
    q, k, v, k_scale, v_scale = (None if x is None else materialized(x) for x in given)
    assert q is not None and k is not None and v is not None
    pages = pages._replace(k=k, v=v, k_scale=k_scale, v_scale=v_scale)
    return call._replace(queries=call.queries._replace(q=q), pages=pages)


def problem_of(call: CachedCall) -> tuple[Problem, Inputs]:
    """The problem of a call over pages, and its inputs: there are as many keys as the table has room for."""
    (q, cu, shape), pages, options, fields = call
    q = q.transpose(0, 1)[None]
    fields = {**fields, "rows": shape[1] if len(shape) == 4 else 0}
    count, page, heads, _ = pages.k.shape
    room = pages.room * page if count else 0
    mask, scale, sinks = options["mask"], options["scale"], options["sinks"]

    k, v = pages.k.transpose(1, 2), pages.v.transpose(1, 2)
    inputs, beside = Inputs(q, k, v, cu_q=cu), interleaved(k, v)
    stored = dtype_name(pages.k) if pages.k_scale is not None else ""
    fields = {**fields, "page": page, "stored": stored, "interleaved": beside}

    def make() -> tuple[Problem, Inputs]:
        def stand_in(x: Tensor) -> Tensor:
            row = x[0, 0] if count else x.new_zeros(x.shape[2:])
            return row[None, :, None].expand(1, heads, room, x.shape[3])

        likes = Inputs(q, stand_in(pages.k), stand_in(pages.v), cu_q=cu, cu_k=_room(cu, pages))
        problem, parsed = build_problem(likes, {**DEFAULTS, **options}, **fields)
        return problem, parsed._replace(k=k, v=v)

    numbers = (scale, options["softcap"])
    if is_traced(q, *pages.tensors):
        return make()
    if options["bias"] is not None or not isinstance(mask, (Mask, NoneType)) or (mask is not None and not mask.static):
        return make()
    if sinks is not None or any(type(x) not in (int, float, NoneType) for x in numbers):
        return make()
    shapes = (q.shape, q.dtype, q.device, pages.k.shape, pages.v.shape[3], pages.k.dtype, room, cu.shape, beside)
    more = (options["precision"], *(fields[name] for name in ("splits", "partial", "invariant", "rows")))
    key = ("pages", shapes, mask, numbers, tuple(map(type, numbers)), *more)
    return kept_problem(key, lambda: make()[0]), inputs


def gathered_problem(call: CachedCall) -> tuple[Problem, Inputs]:
    """The problem where nobody reads the pages: their tokens in packed rows, in a dtype that holds them as they are."""
    (packed, cu, shape), pages, options, fields = call
    q = packed.transpose(0, 1)[None]
    tokens = int(pages.seen.sum()) if readable(pages.lengths) else pages.entries.shape[0] * pages.page
    exact = pages.k_scale is None and not fields["partial"]
    wide = q.dtype if exact else torch.promote_types(torch.float32, q.dtype)
    k, v, cu_k = gathered(pages, tokens, wide)
    fields = {**fields, "rows": shape[1] if len(shape) == 4 else 0}
    return build_problem(Inputs(q.to(wide), k, v, cu_q=cu, cu_k=cu_k), {**DEFAULTS, **options}, **fields)
