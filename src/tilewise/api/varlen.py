"""`attention_varlen`: sequences of different lengths packed one after another, (T, H, D), without padding."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from tilewise.api.call_cache import NAMES, More, lookup_more
from tilewise.api.execute import execute
from tilewise.api.keywords import check_keywords
from tilewise.api.options import PackedOptions, parameters, show_signature
from tilewise.api.statistics import Stats
from tilewise.errors import ArgumentTypeError
from tilewise.ops.run import FORWARD, profiled
from tilewise.problem import tile_request


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    return_lse: Literal[True], **options: Unpack[PackedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    return_lse: Literal[False] = False, **options: Unpack[PackedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    return_lse: bool, **options: Unpack[PackedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    return_lse: Literal[True], stats: Sequence[str], **options: Unpack[PackedOptions],
) -> tuple[Tensor, Tensor, Stats]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    return_lse: Literal[False] = False, stats: Sequence[str], **options: Unpack[PackedOptions],
) -> tuple[Tensor, Stats]: ...  # fmt: skip
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    return_lse: bool = False, stats: Sequence[str] | None = None, **options: Unpack[PackedOptions],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Stats] | tuple[Tensor, Tensor, Stats]:  # fmt: skip
    """Attention of each sequence of a packed batch with itself (or with its own keys, if `cu_seqlens_k` is given).

    Masks, bias positions and dropout count within the sequence; ids of `documents` are packed like the tokens. No maximum
    length is needed, and on a GPU nothing waits for the lengths.

    q: queries (Tq, Hq, D) of all sequences, one after another.
    k: keys (Tk, Hk, D); Hq is a multiple of Hk.
    v: values (Tk, Hk, Dv).
    cu_seqlens_q: integers (sequences + 1,), from 0 to Tq: sequence b owns the rows from cu_seqlens_q[b] up to
        cu_seqlens_q[b + 1].
    cu_seqlens_k: the same for keys and values; as for the queries if None.
    mask: as in `attention`, but no boolean tensor: it has no place for sequences of different lengths.
    scale: what scores are multiplied by; 1/√D if None.
    bias: a floating-point tensor (…, queries, keys) as long as the longest sequence, or alibi(slopes).
    softcap: scores become softcap · tanh(score / softcap); 0 for none.
    sinks: (Hq,), one more score for each head, which takes part in the softmax and has no value.
    dropout_p: the probability with which a weight is dropped, in [0, 1).
    seed: an int, or a tensor with one integer, that fixes what is dropped; None draws one.
    precision: "default", "tf32", "compensated" or "double", as in `attention`.
    deterministic: True for the same bits run after run; None follows torch.use_deterministic_algorithms.
    return_lse: also return the log-sum-exp.
    stats: also return statistics, as in `attention`; keys count within their sequence.
    backend: "auto", or one by name, which never falls back.
    tile: the tiles to run with, as in `attention`.

    Returns out (Tq, Hq, Dv); with `return_lse` also the log-sum-exp (Hq, Tq); with `stats` also a named tuple of `max_logit`
        and `entropy` (Hq, Tq), `key_mass` (Hq, Tk) and `top`, `weights` and `indices` (Hq, Tq, k).

    >>> cu = torch.tensor([0, 100, 350])                                  # sequences of 100 and 250 tokens
    >>> out = tw.attention_varlen(q, k, v, cu, mask=tw.causal())          # q, k, v (350, heads, dim)
    >>> out, lse = tw.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    """
    if not _KNOWN.issuperset(options):
        check_keywords("attention_varlen", options, _NAMES)
    if cu_seqlens_q is None:
        raise ArgumentTypeError("cu_seqlens_q: got NoneType, need an integer tensor of cumulative lengths")
    named: Any = {**_DEFAULTS, **options, "return_lse": return_lse}
    if stats is None and not _is_traced():
        if type(named["tile"]) is dict:  # it has no hash, and calls are kept by their options
            named["tile"] = tile_request(named["tile"])
        more = More(named["bias"], named["sinks"], cu_seqlens_q, cu_seqlens_k, named["seed"])
        launch = lookup_more(q, k, v, _in_order(named), more)
        if launch is not None:
            return profiled(FORWARD, launch, q, k, v)
    named |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "stats": stats}
    return execute(q, k, v, named, named.pop("backend"))  # type: ignore[no-any-return]


_is_traced = torch.compiler.is_dynamo_compiling
_DEFAULTS = {**{one.name: one.default for one in parameters(PackedOptions)}, "layout": "bhsd"}
_in_order = itemgetter(*NAMES)
show_signature(attention_varlen, parameters(PackedOptions))
_NAMES = tuple(inspect.signature(attention_varlen).parameters)
_KNOWN = frozenset(_NAMES)
