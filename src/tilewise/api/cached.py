"""`attention_cached`: attention over keys and values of earlier tokens: prefill, decode and everything between in one call."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.api.bias import Alibi
from tilewise.api.cache import KVCache
from tilewise.api.cached_call import Queries, attend, attended, parse_cached
from tilewise.api.cached_checks import sees_ahead, some_before, token_positions
from tilewise.api.cached_plan import CachedPlan
from tilewise.api.cached_repeat import Settings, keep_repeated, repeated
from tilewise.api.cached_write import write
from tilewise.api.keywords import check_keywords
from tilewise.api.names import BackendName, Precision
from tilewise.api.options import ParsedOptions, show_signature
from tilewise.api.rotary import RotaryTable
from tilewise.backends.pages import NewTokens, Pages, Turning, positions_of
from tilewise.errors import ArgumentTypeError, LayoutError
from tilewise.masks import Mask, causal
from tilewise.masks.algebra import Tree

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
    settings, writes = None, new is not None or rotary is not None
    if cu_seqlens_q is None and bias is None and sinks is None and plan is None and out is None:
        settings = Settings(mask, scale, softcap, splits, invariant, precision, backend)
        again = None if writes else repeated(q, cache, settings, return_lse)
        if again is not None:
            return again
    # all that may be refused comes before the first write
    dispatch.check_name(backend, "auto")
    options: ParsedOptions = {
        "mask": mask, "scale": scale, "bias": bias, "softcap": softcap, "sinks": sinks, "precision": precision,
        "return_lse": True,
    }  # fmt: skip
    call = parse_cached(q, cache, cu_seqlens_q, options, splits, plan, invariant)
    if writes:
        call = call._replace(queries=_with_new(call.queries, cache, (new, rotary, cu_seqlens_q), mask, backend))
        if settings is not None:
            q = call.queries.q.reshape(q.shape)
            again = repeated(q, cache, settings, return_lse)
            if again is not None:
                return again
    queries, pages = call.queries, call.pages
    found, lse = attended(call, plan, partial(attend, backend=backend), backend)
    if sees_ahead(mask) and some_before(pages, queries.cu):
        found, lse = _nothing_before_0(found, lse, queries, pages, sinks)
    found, lse = queries.restored(found, lse)
    if settings is not None:
        keep_repeated(call, q, cache, settings)
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
    given = None if rotary is None or rotary.positions is None else rotary.positions.reshape(-1).long().contiguous()
    if given is not None and given.numel() != q.shape[0]:
        raise LayoutError(f"positions: shape {tuple(given.shape)}, need one for each of the {q.shape[0]} queries")
    k = v = None
    rows = 0
    if new is not None:
        if not isinstance(new, (tuple, list)) or len(new) != 2:
            raise ArgumentTypeError(f"new: got {type(new).__name__}, need the pair (k, v)")
        packed = isinstance(new[0], Tensor) and new[0].ndim == 3
        k, v, cu_new = cache._new_tokens(new[0], new[1], cu_seqlens_q if packed else None, need_cu=True)
        rows = 0 if packed else new[0].shape[1]
        if given is not None and k.shape[0] != q.shape[0]:
            raise LayoutError(f"positions: they are q's {q.shape[0]}, and there are {k.shape[0]} new keys; need as many")
        if not k.shape[0]:
            k = v = None
    pages, turning = cache.pages.now(), None
    if rotary is not None and given is None and _has_tree(mask):  # turned by depth
        q = rotary.apply(q, token_positions(cu, pages.lengths, q.shape[0], mask), q.dtype)
        if k is not None and cu_new is not None:
            stored = torch.float32 if pages.k_scale is not None else pages.k.dtype
            k = rotary.apply(k, token_positions(cu_new, pages.lengths, k.shape[0], mask), stored)
    elif rotary is not None:
        turning = Turning(rotary.cos, rotary.sin, rotary.interleaved, given)
    turned = write(pages, NewTokens(q, k, v, cu, 0 if len(shape) == 3 else shape[1], rows, turning), backend)
    return Queries(q if turned is None else turned, cu, shape)


def _nothing_before_0(out: Tensor, lse: Tensor, queries: Queries, pages: Pages, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The results, but for rows before position 0, which see nothing."""
    _, position = positions_of(queries.cu, pages.seen, queries.q.shape[0])
    empty = lse.new_tensor(float("-inf")) if sinks is None else sinks.to(lse.dtype)[:, None]
    return torch.where((position < 0)[:, None], 0.0, out), torch.where(position < 0, empty, lse)


def _has_tree(mask: Mask | None) -> bool:
    return mask is not None and any(isinstance(leaf, Tree) for leaf in mask.leaves())
