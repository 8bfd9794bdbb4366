"""`attention`: exact attention over a batch, the same meaning on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import profiler

from tilewise.api.bias import Alibi
from tilewise.api.call_cache import NAMES, More, has_more, lookup, lookup_more, lookup_statistics
from tilewise.api.execute import execute
from tilewise.api.keywords import check_keywords
from tilewise.api.names import BackendName, Layout, Precision, Tile
from tilewise.api.options import BatchOptions, show_signature
from tilewise.api.statistics import Stats
from tilewise.masks import Mask
from tilewise.ops.run import FORWARD, profiled
from tilewise.problem import tile_request

_is_traced = torch.compiler.is_dynamo_compiling


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[BatchOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[BatchOptions]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[BatchOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], stats: Sequence[str], **options: Unpack[BatchOptions]
) -> tuple[Tensor, Tensor, Stats]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, stats: Sequence[str],
    **options: Unpack[BatchOptions],
) -> tuple[Tensor, Stats]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | Alibi | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    precision: Precision = "default",
    deterministic: bool | None = None,
    backend: BackendName = "auto",
    tile: Tile | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    stats: Sequence[str] | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Stats] | tuple[Tensor, Tensor, Stats]:
    """softmax(scale·QKᵀ, masked)·V, exactly and in O(N) memory.

    Scores are scaled, capped, biased and masked in this order; sinks join each row's denominator; dropout comes last. A row
    that sees no key gives 0, and −inf as its log-sum-exp.

    q: queries (B, Hq, Sq, D) in float16, bfloat16, float32 or float64.
    k: keys (B, Hk, Sk, D); Hq is a multiple of Hk, and each key head serves Hq / Hk query heads.
    v: values (B, Hk, Sk, Dv).
    mask: which keys a query sees: causal(), window(n), prefix(n), documents(ids), key_padding(lengths), blocks(table, size),
        dense(m), joined by &, | and ~; or a boolean tensor that broadcasts to (B, Hq, Sq, Sk), True = attend. None: all keys.
    scale: what scores are multiplied by; 1/√D if None.
    bias: added to the scores: a floating-point tensor that broadcasts to (B, Hq, Sq, Sk), which may require a gradient, or
        alibi(slopes), which is never stored. −inf hides a key.
    softcap: scores become softcap · tanh(score / softcap); 0 for none.
    sinks: (Hq,), one more score for each head, which takes part in the softmax and has no value.
    dropout_p: the probability with which a weight is dropped, in [0, 1).
    seed: an int, or a tensor with one integer, that fixes what is dropped, the same on every backend; None draws one.
    layout: "bhsd" as above, or "bshd" with the sequence before the heads, in q, k, v and the output.
    precision: "default"; "tf32", which lets float32 products be rounded where that is faster; "compensated", whose sums carry
        what each addition rounds away; "double", which computes in float64 whatever the inputs' dtype. The last two are
        served on CPUs.
    deterministic: True for the same bits run after run; None follows torch.use_deterministic_algorithms.
    return_lse: also return the log-sum-exp.
    stats: also return what the rows saw, a tuple of "max_logit", "entropy", "key_mass" and top(k), last and as a named tuple:
        the largest visible logit of each row, without the sink; the entropy of its weights, which is differentiable; the
        weight that each key got; the k largest weights of each row and their keys. See docs/statistics.md.
    backend: "auto", or one by name, which never falls back; `backends()` says which are usable here.
    tile: (block_q, block_k), the queries and keys of the forward's tiles, or such a pair for each pass that a dict names:
        "forward", "decode", "backward", "backward_dkdv", "backward_dq". Served as it is or refused with the tiles there are;
        with backend="auto" by the first backend that has it. None leaves it to the backend: see `explain`.

    Returns out (B, Hq, Sq, Dv); with `return_lse` also the log-sum-exp (B, Hq, Sq), natural, differentiable, in float32;
        in float64 for float64 inputs and with precision="double". With `stats` also a named tuple of `max_logit` and
        `entropy` (B, Hq, Sq), `key_mass` (B, Hq, Sk) and `top`, `weights` and `indices` (B, Hq, Sq, k); None if not asked for.

    >>> out = tw.attention(q, k, v)                                                # every query sees every key
    >>> out = tw.attention(q, k, v, mask=tw.causal() & tw.window(4096))            # the last 4096 keys
    >>> out = tw.attention(q, k, v, mask=tw.causal() & tw.documents(ids))          # ids (B, S): packed documents
    >>> out = tw.attention(q, k, v, mask=padding[:, None, None, :])                # booleans (B, Sk), True = attend
    >>> out, lse = tw.attention(q, k, v, bias=tw.alibi(slopes), return_lse=True)   # slopes (Hq,)
    >>> out = tw.attention(q, k, v, mask=tw.causal(), layout="bshd", dropout_p=0.1, seed=7)
    >>> out, stats = tw.attention(q, k, v, stats=("max_logit", "entropy", tw.top(8)))
    """
    if unknown:
        check_keywords("attention", unknown, (*NAMES, "seed", "stats"))
    # a dict has no hash, and calls are kept by their options
    asked = tile if tile is None or type(tile) is tuple else tile_request(tile)
    options = (
        mask, scale, bias, softcap, sinks, dropout_p, precision, deterministic, backend, asked, layout, return_lse,
    )  # fmt: skip
    launch = None
    if _is_traced():
        pass
    elif stats is not None:
        launch = lookup_statistics(q, k, v, options, stats)
    else:
        more = has_more(mask, bias, sinks, dropout_p)
        launch = lookup_more(q, k, v, options, More(bias, sinks, None, None, seed)) if more else lookup(q, k, v, options)
    if launch is None:
        named: Any = dict(zip(NAMES, options, strict=True), seed=seed, stats=stats)
        return execute(q, k, v, named, named.pop("backend"))  # type: ignore[no-any-return]
    if profiler._is_profiler_enabled and stats is None:  # a launch with statistics tells the profiler itself
        return profiled(FORWARD, launch, q, k, v)
    return launch(q, k, v)


show_signature(attention)
