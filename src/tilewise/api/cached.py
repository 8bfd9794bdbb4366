"""`attention_cached`: attention over keys and values of earlier tokens: prefill, decode and everything between in one call."""

from __future__ import annotations

import warnings
from types import NoneType
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.api.bias import Alibi
from tilewise.api.cache import KVCache
from tilewise.api.cached_checks import (
    check_mask,
    check_splits,
    check_values,
    sees_ahead,
    sees_all_before,
    some_before,
    token_positions,
)
from tilewise.api.cached_plan import CachedPlan, attend_shared, check_plan
from tilewise.api.call_cache import kept_problem
from tilewise.api.keywords import check_keywords
from tilewise.api.lengths import readable
from tilewise.api.names import BackendName, Precision
from tilewise.api.options import DEFAULTS, ParsedOptions, show_signature
from tilewise.api.parse import autocast, build_problem, check_dense, check_device, check_range, check_sinks
from tilewise.api.rotary import RotaryTable
from tilewise.backends.base import Backend, Inputs
from tilewise.backends.pages import WRITTEN, NewTokens, Pages, Turning, gathered, positions_of
from tilewise.errors import ArgumentError, ArgumentTypeError, KernelError, LayoutError
from tilewise.masks import Mask, causal
from tilewise.masks.algebra import Tree
from tilewise.masks.arrays import INTEGERS
from tilewise.ops.run import forward, is_empty, own_precision
from tilewise.ops.tensors import dtype_name, interleaved
from tilewise.problem import ITEMSIZE, Problem

_CAUSAL = causal()
KEPT_STEPS = 64
_kept_steps: dict[tuple[int, int, torch.device], Tensor] = {}


class CachedOptions(TypedDict, total=False):
    """What `attention_cached` takes beside `return_lse`, which its overloads tell apart."""

    new: tuple[Tensor, Tensor] | None
    rotary: RotaryTable | None
    cu_seqlens_q: Tensor | None
    mask: Mask | None
    scale: float | None
    bias: Tensor | Alibi | None
    softcap: float
    sinks: Tensor | None
    splits: int | None
    plan: CachedPlan | None
    invariant: bool
    precision: Precision
    out: Tensor | None
    backend: BackendName


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


@overload
def attention_cached(
    q: Tensor, cache: KVCache, *, return_lse: Literal[True], **options: Unpack[CachedOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_cached(
    q: Tensor, cache: KVCache, *, return_lse: Literal[False] = False, **options: Unpack[CachedOptions]
) -> Tensor: ...
@overload
def attention_cached(
    q: Tensor, cache: KVCache, *, return_lse: bool, **options: Unpack[CachedOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_cached(
    q: Tensor,
    cache: KVCache,
    *,
    new: tuple[Tensor, Tensor] | None = None,
    rotary: RotaryTable | None = None,
    cu_seqlens_q: Tensor | None = None,
    mask: Mask | None = _CAUSAL,
    scale: float | None = None,
    bias: Tensor | Alibi | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    splits: int | None = None,
    plan: CachedPlan | None = None,
    invariant: bool = False,
    precision: Precision = "default",
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: BackendName = "auto",
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of queries to a cache: prefill, decode, chunks of a prompt and mixtures of them are one call.

    The queries of a sequence are its last tokens: row i of n stands at position lengths − n + i. A row before position 0
    sees nothing. No gradient: a tensor that requires one is refused.

    q: queries, sequence first: (B, Sq, Hq, D), or packed (T, Hq, D) with `cu_seqlens_q`.
    cache: a KVCache of B sequences. Its `lengths` count the new tokens.
    new: (k, v) of new tokens, written into the cache before anything is read: (B, n, Hk, D), or packed like q. They are the
        last n of each sequence.
    rotary: `tw.rotary(cos, sin)`, applied to q and to the new keys; what the cache holds is never turned again.
    cu_seqlens_q: (B + 1,) where the queries of each sequence begin in a packed q; a sequence may have none.
    mask: which keys a query sees, with positions counted in the sequence: causal(), window(n), prefix(n) and their like,
        joined by &, | and ~; tree(parents) for drafts. None: all of them.
    scale: what scores are multiplied by; 1/√D if None.
    bias: added to the scores: alibi(slopes), or a tensor that broadcasts to (B, Hq, longest Sq, longest Sk).
    softcap: scores become softcap · tanh(score / softcap); 0 for none.
    sinks: (Hq,), one more score for each head, which takes part in the softmax and has no value.
    splits: the parts that keys are split into, for several threads or cores to share a sequence; fewer where there is no room
        for their sums, and 1 where a backend has no splits. None: as many as there is work for.
    plan: what `tw.plan_cached(cache)` has found: pages that sequences share are read once for all of them.
    invariant: on one backend and device the bits of a row follow from the row and the keys it sees alone: not from the batch
        around it, the page size, the chunks of a prompt, nor from whether it came as prefill or decode. Not with `splits`.
    precision: as in `attention`.
    out: where the result goes; a new tensor if None.
    return_lse: also return the log-sum-exp.
    backend: "auto", or one by name, which never falls back.

    Returns out, (B, Sq, Hq, Dv) or (T, Hq, Dv) like q; with `return_lse` also the log-sum-exp, natural, (B, Hq, Sq) or (Hq, T).

    >>> lengths += 1                                                             # one token more in each sequence
    >>> out = tw.attention_cached(q, cache, new=(k, v))                          # q (B, 1, Hq, D), k and v (B, 1, Hk, D)
    >>> out = tw.attention_cached(q, cache, cu_seqlens_q=cu)                     # prompts and single tokens side by side
    >>> out = tw.attention_cached(q, cache, mask=tw.causal() & tw.window(4096))  # the last 4096 keys
    """
    if unknown:
        check_keywords("attention_cached", unknown, (*CachedOptions.__annotations__, "return_lse"))
    if not isinstance(cache, KVCache):
        raise ArgumentTypeError(f"cache: got {type(cache).__name__}, need a KVCache; see tw.KVCache.paged and .static")
    # all that may be refused comes before the first write
    dispatch.check_name(backend, "auto")
    check_mask(mask, bias)
    fields = {"splits": check_splits(splits, invariant), "partial": False, "invariant": invariant}
    pages = cache.pages.now()
    queries = _packed(q, pages, cu_seqlens_q)
    if readable(pages.lengths):
        cache.check()
        check_values(pages, queries.cu, queries.q.shape[0], mask)
    if plan is not None:
        check_plan(plan, pages, queries.cu, invariant)
    if new is not None or rotary is not None:
        queries = _with_new(queries, cache, (new, rotary, cu_seqlens_q), mask, backend)
    options: ParsedOptions = {
        "mask": mask, "scale": scale, "bias": bias, "softcap": softcap, "sinks": sinks, "precision": precision,
        "return_lse": True,
    }  # fmt: skip
    if plan is not None and plan.levels and bias is None and sees_all_before(mask) and queries.q.shape[0]:
        found, lse = _attend_shared(queries, pages, options, {**fields, "partial": True}, plan, backend)
    else:
        found, lse = _attend(queries, pages, options, fields, backend)
    if sees_ahead(mask) and some_before(pages, queries.cu):
        _, position = positions_of(queries.cu, pages.seen, queries.q.shape[0])
        found = torch.where((position < 0)[:, None], 0.0, found)
        empty = lse.new_tensor(float("-inf")) if sinks is None else sinks.to(lse.dtype)[:, None]
        lse = torch.where(position < 0, empty, lse)
    found, lse = queries.restored(found, lse)
    if out is not None:
        if out.shape != found.shape or out.dtype != found.dtype or out.device != found.device:
            raise LayoutError(
                f"out: {out.dtype} {tuple(out.shape)} on {out.device}, need {found.dtype} {tuple(found.shape)} on {found.device}"
            )
        found = out.copy_(found)
    return (found, lse) if return_lse else found


show_signature(attention_cached)


def _packed(q: Any, pages: Pages, cu: Tensor | None) -> Queries:
    """The queries as one row of tokens."""
    if not isinstance(q, Tensor):
        raise ArgumentTypeError(f"q: got {type(q).__name__}, need a torch.Tensor")
    if dtype_name(q) not in ITEMSIZE:
        raise ArgumentTypeError(f"q: dtype {q.dtype}, need float16, bfloat16, float32 or float64")
    check_dense("q", q)
    check_device("the cache", pages.k, q.device)
    if torch.is_grad_enabled() and q.requires_grad:
        raise ArgumentError("q: requires a gradient, which a cache does not have; use torch.no_grad() or q.detach()")
    if pages.k_scale is None and pages.k.dtype != autocast((q,))[0].dtype:
        raise ArgumentTypeError(f"q: dtype {q.dtype}, but the cache holds {pages.k.dtype}; convert with q.to({pages.k.dtype})")
    (q,), batch = autocast((q,)), pages.starts.shape[0]
    if q.ndim == 4 and cu is None:
        if q.shape[0] != batch:
            raise LayoutError(f"q: {q.shape[0]} sequences, but the cache has {batch}")
        return Queries(q.flatten(0, 1), _steps(batch, q.shape[1], q.device), q.shape)
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


def _steps(batch: int, rows: int, device: torch.device) -> Tensor:
    """Where sequences of `rows` tokens begin. On a GPU that is two launches, so it is kept; what a graph captures is its own."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.arange(batch + 1, dtype=torch.int32, device=device) * rows
    kept = _kept_steps.get((batch, rows, device))
    if kept is None:
        kept = torch.arange(batch + 1, dtype=torch.int32, device=device) * rows
        if not torch.cuda.is_current_stream_capturing():
            if len(_kept_steps) >= KEPT_STEPS:
                _kept_steps.clear()
            _kept_steps[batch, rows, device] = kept
    return kept


def _with_new(
    queries: Queries,
    cache: KVCache,
    given_new: tuple[Any, RotaryTable | None, Tensor | None],
    mask: Mask | None,
    backend: str,
) -> Queries:
    """The queries, turned; the new keys, turned, and values are in the cache."""
    new, rotary, cu_seqlens_q = given_new
    if rotary is not None and not isinstance(rotary, RotaryTable):
        raise ArgumentTypeError(f"rotary: got {type(rotary).__name__}, need tw.rotary(cos, sin)")
    q, cu, shape = queries
    lengths, given = cache.pages.lengths, None if rotary is None else rotary.positions
    if given is not None and given.numel() != q.shape[0]:
        raise LayoutError(f"positions: shape {tuple(given.shape)}, need one for each of the {q.shape[0]} queries")
    k = v = cu_new = None
    writer = None if _by_depth(mask, rotary) else dispatch.pages_writer(q.device.type, backend)
    if new is not None:
        if not isinstance(new, (tuple, list)) or len(new) != 2:
            raise ArgumentTypeError(f"new: got {type(new).__name__}, need the pair (k, v)")
        packed = isinstance(new[0], Tensor) and new[0].ndim == 3
        k, v, cu_new = cache._new_tokens(new[0], new[1], cu_seqlens_q if packed else None, need_cu=True)
        if given is not None and k.shape[0] != q.shape[0]:
            raise LayoutError(f"positions: they are q's {q.shape[0]}, and there are {k.shape[0]} new keys; need as many")
    if writer is not None and all(x is None or x.dtype in WRITTEN for x in (q, k, v)):
        rows = 0 if new is None or new[0].ndim == 3 else new[0].shape[1]
        tokens = NewTokens(q, k, v, cu, 0 if len(shape) == 3 else shape[1], rows)
        return Queries(_written(writer, cache, tokens, cu_new, rotary), cu, shape)
    if rotary is not None:
        at = token_positions(cu, lengths, q.shape[0], mask) if given is None else given.reshape(-1)
        q = rotary.apply(q, at, q.dtype)
    if k is None or v is None or cu_new is None:
        return Queries(q, cu, shape)
    if rotary is not None:
        at = token_positions(cu_new, lengths, k.shape[0], mask) if given is None else given.reshape(-1)
        quantized = cache.pages.k_scale is not None
        k = rotary.apply(k, at, torch.float32 if quantized else cache.pages.k.dtype)
    cache.append(k, v, cu_seqlens=cu_new)
    return Queries(q, cu, shape)


def _by_depth(mask: Mask | None, rotary: RotaryTable | None) -> bool:
    """Are tokens turned by their depths in a tree?"""
    return mask is not None and rotary is not None and any(isinstance(leaf, Tree) for leaf in mask.leaves())


def _written(
    writer: Backend, cache: KVCache, tokens: NewTokens, cu_new: Tensor | None, rotary: RotaryTable | None
) -> Tensor:
    """The queries of a call whose new tokens a backend writes, all of them turned by it."""
    pages = cache.pages.now()
    if rotary is not None:
        given = None if rotary.positions is None else rotary.positions.reshape(-1).long().contiguous()
        at = pages.lengths - 1 if given is None and readable(pages.lengths) else given  # the last positions are the largest
        for x in (tokens.q, tokens.k):
            if x is not None:
                rotary.check(x, at)
        tokens = tokens._replace(turning=Turning(rotary.cos, rotary.sin, rotary.interleaved, given))
    if cu_new is not None and readable(pages.lengths):
        cache.check(cu_new)
    q = writer.append(pages, tokens)
    assert q is not None
    return q


def _attend_shared(
    queries: Queries, pages: Pages, options: ParsedOptions, fields: dict[str, Any], plan: CachedPlan, backend: str
) -> tuple[Tensor, Tensor]:
    """out (1, H, T, Dv) in q's dtype and lse (1, H, T) where sequences share pages: sinks join once, at the end."""
    own: ParsedOptions = {**options, "sinks": None}
    common: ParsedOptions = {**own, "mask": None}

    def attend(q: Tensor, cu: Tensor, some: Pages, mine: bool) -> tuple[Tensor, Tensor]:
        return _attend(Queries(q, cu, q.shape), some, own if mine else common, fields, backend)

    sinks = check_sinks(options["sinks"], queries.q, queries.q.shape[1])
    out, lse = attend_shared(plan, pages, (queries.q, queries.cu), sinks, attend)
    return out.to(queries.q.dtype), lse


def _attend(
    queries: Queries, pages: Pages, options: ParsedOptions, fields: dict[str, Any], backend: str
) -> tuple[Tensor, Tensor]:
    """out (1, H, T, Dv) in q's dtype and lse (1, H, T): pages as they are where a backend reads them, gathered elsewhere."""
    q = queries.q.transpose(0, 1)[None]
    fields = {**fields, "rows": queries.shape[1] if len(queries.shape) == 4 else 0}
    problem, inputs = _problem(q, queries.cu, pages, options, fields)
    if is_empty(problem):
        return forward(problem, inputs._replace(cu_k=_room(queries.cu, pages)), backend)
    key = ("pages", dispatch.registry_key(backend))
    if key not in problem.memory:
        problem.memory[key] = dispatch.pages_backend(problem, backend)
    reader: Backend | None = problem.memory[key]
    if reader is not None:
        try:
            with own_precision(problem.device):
                return reader.paged(problem, inputs, pages)
        except KernelError as error:
            if backend != "auto":
                raise
            problem.memory[key] = None
            warnings.warn(f"{error}; the tokens of the pages are gathered instead", RuntimeWarning, stacklevel=3)
    tokens = int(pages.seen.sum()) if readable(pages.lengths) else pages.entries.shape[0] * pages.page
    exact = pages.k_scale is None and not fields["partial"]
    wide = q.dtype if exact else torch.promote_types(torch.float32, q.dtype)
    k, v, cu_k = gathered(pages, tokens, wide)
    inputs = Inputs(q.to(wide), k, v, cu_q=queries.cu, cu_k=cu_k)
    out, lse = forward(*build_problem(inputs, {**DEFAULTS, **options}, **fields), backend)
    return out if fields["partial"] else out.to(q.dtype), lse


def _room(cu: Tensor, pages: Pages) -> Tensor:
    """Cumulative lengths of sequences that fill their pages."""
    return torch.cat([cu.new_zeros(1), (pages.counts * pages.page).cumsum(0, dtype=torch.int32)])


def _problem(q: Tensor, cu: Tensor, pages: Pages, options: ParsedOptions, fields: dict[str, Any]) -> tuple[Problem, Inputs]:
    """The problem of a call over pages: there are as many keys as the table has room for."""
    count, page, heads, _ = pages.k.shape
    room = pages.entries.shape[0] * page if count else 0
    mask, scale, sinks = options["mask"], options["scale"], options["sinks"]

    def stand_in(x: Tensor) -> Tensor:
        row = x[0, 0] if count else x.new_zeros(x.shape[2:])
        return row[None, :, None].expand(1, heads, room, x.shape[3])

    inputs = Inputs(q, stand_in(pages.k), stand_in(pages.v), cu_q=cu)
    beside = interleaved(pages.k.transpose(1, 2), pages.v.transpose(1, 2))
    stored = dtype_name(pages.k) if pages.k_scale is not None else ""
    fields = {**fields, "page": page, "stored": stored, "interleaved": beside}

    def make() -> tuple[Problem, Inputs]:
        return build_problem(inputs._replace(cu_k=_room(cu, pages)), {**DEFAULTS, **options}, **fields)

    numbers = (scale, options["softcap"])
    if options["bias"] is not None or not isinstance(mask, (Mask, NoneType)) or (mask is not None and not mask.static):
        return make()
    if sinks is not None or any(type(x) not in (int, float, NoneType) for x in numbers):
        return make()
    shapes = (q.shape, q.dtype, q.device, pages.k.shape, pages.v.shape[3], pages.k.dtype, room, cu.shape, beside)
    more = (options["precision"], fields["splits"], fields["invariant"], fields["rows"])
    key = ("pages", shapes, mask, numbers, tuple(map(type, numbers)), *more)
    return kept_problem(key, lambda: make()[0]), inputs
