"""`attention_cached`: attention over keys and values of earlier tokens: prefill, decode and everything between in one call."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.api.bias import Alibi
from tilewise.api.cache import KVCache
from tilewise.api.cached_call import CachedCall, Queries, attended, gathered_problem, parse_cached, problem_of
from tilewise.api.cached_checks import sees_ahead, some_before, token_positions
from tilewise.api.cached_plan import CachedPlan
from tilewise.api.keywords import check_keywords
from tilewise.api.lengths import readable
from tilewise.api.names import BackendName, Precision
from tilewise.api.options import ParsedOptions, show_signature
from tilewise.api.rotary import RotaryTable
from tilewise.backends.base import Backend
from tilewise.backends.pages import WRITTEN, NewTokens, Turning, positions_of
from tilewise.errors import ArgumentTypeError, KernelError, LayoutError
from tilewise.masks import Mask, causal
from tilewise.masks.algebra import Tree
from tilewise.ops.run import empty_forward, forward, is_empty, own_precision

_CAUSAL = causal()
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
    # all that may be refused comes before the first write
    dispatch.check_name(backend, "auto")
    options: ParsedOptions = {
        "mask": mask, "scale": scale, "bias": bias, "softcap": softcap, "sinks": sinks, "precision": precision,
        "return_lse": True,
    }  # fmt: skip
    call = parse_cached(q, cache, cu_seqlens_q, options, splits, plan, invariant)
    queries, pages = call.queries, call.pages
    if new is not None or rotary is not None:
        queries = _with_new(queries, cache, (new, rotary, cu_seqlens_q), mask, backend)
    found, lse = attended(call._replace(queries=queries), plan, partial(_attend, backend=backend))
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


def _attend(call: CachedCall, backend: str) -> tuple[Tensor, Tensor]:
    """out (1, H, T, Dv) in q's dtype and lse (1, H, T): pages as they are where a backend reads them, gathered elsewhere."""
    problem, inputs = problem_of(call)
    pages = call.pages
    if is_empty(problem):
        return empty_forward(problem, inputs)
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
    problem, inputs = gathered_problem(call)
    out, lse = forward(problem, inputs, backend)
    return out if problem.partial else out.to(call.queries.q.dtype), lse
