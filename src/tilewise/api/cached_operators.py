"""The operators of calls over a cache: `tilewise::attention_cached` reads pages, `tilewise::cache_append` writes them.

What torch.compile, torch.export and dispatch modes see. Pages and scales that a token writes are declared as mutated, so that no
read is moved before a write. Inside they are the calls that run without them, values looked at included where they may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.api.bias import Alibi
from tilewise.api.cached_call import CachedCall, Queries, checked, problem_of
from tilewise.api.cached_call import attend as attend_now
from tilewise.api.cached_write import write as write_now
from tilewise.api.options import ParsedOptions
from tilewise.backends.base import empty_lse, empty_out
from tilewise.backends.pages import NewTokens, Pages, Turning
from tilewise.errors import DerivativeError
from tilewise.masks import Lowered, MaskProgram
from tilewise.numerics.merge import merge_many
from tilewise.ops.tensors import plain

_TABLE = "Tensor entries, Tensor starts, Tensor counts, Tensor lengths, SymInt most, bool csr"
_SCALES = "Tensor? k_scale, Tensor? v_scale"
_READ = f"Tensor k_pages, Tensor? v_pages, SymInt value_dim, {_TABLE}, {_SCALES}"
_WRITTEN = (
    f"Tensor(a!) k_pages, Tensor(b!)? v_pages, SymInt value_dim, {_TABLE}, {_SCALES}, "
    "Tensor(c!)? k_token_scale, Tensor(d!)? v_token_scale"
)
_CALL = (
    "Tensor q, Tensor cu_q, SymInt rows, Tensor? bias, Tensor? alibi, Tensor? sinks, "
    "str structure, SymInt[] ints, Tensor[] tensors, "
    "float scale, float softcap, str precision, int splits, bool partial, bool invariant, str backend"
)
_NEW = (
    "Tensor? q, Tensor? k, Tensor? v, Tensor? cu, SymInt q_rows, SymInt rows, "
    "Tensor? cos, Tensor? sin, bool interleaved, Tensor? positions, Tensor? slots, str backend"
)
_PAGES, _SCALED = 11, 13
"""Arguments of pages that are read, and of those that are written."""
_LIBRARY = torch.library.Library("tilewise", "FRAGMENT")
for _schema in (
    f"attention_cached({_READ}, {_CALL}) -> (Tensor, Tensor)",
    f"cache_append({_WRITTEN}, {_NEW}) -> Tensor",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def attend(call: CachedCall, backend: str) -> tuple[Tensor, Tensor]:
    """out (1, H, T, Dv) and lse (1, H, T) through the operator."""
    problem, inputs = problem_of(call)
    (q, cu, shape), pages, _, fields = call
    program, k_scale, v_scale = problem.program, _shared(pages.k_scale), _shared(pages.v_scale)
    scales = (k_scale if k_scale is not None else pages.k_scale, v_scale if v_scale is not None else pages.v_scale)
    out, lse = torch.ops.tilewise.attention_cached(
        *(*_read(pages), *scales),
        *(q, cu, shape[1] if len(shape) == 4 else 0, inputs.bias, inputs.alibi, inputs.sinks),
        *(program.structure, list(program.ints), list(program.tensors)),
        *(problem.scale, problem.softcap, problem.precision),
        *(fields["splits"], fields["partial"], fields["invariant"], backend),
    )
    return out.transpose(0, 1)[None], lse[None]


def write(pages: Pages, new: NewTokens, backend: str) -> Tensor | None:
    """Write tokens through the operator; the queries, turned."""
    own = [x if x is not None and any(x.stride()[:2]) else None for x in (pages.k_scale, pages.v_scale)]
    if pages.latent:
        own[1] = None
    cos, sin, interleaved, positions = (None, None, False, None) if new.turning is None else new.turning
    turns = new.turning is not None and new.q is not None
    turned = torch.ops.tilewise.cache_append(
        *(*_read(pages), _shared(pages.k_scale), _shared(pages.v_scale), *own),
        *(new.q if turns else None, new.k, new.v, new.cu, new.q_rows, new.rows),
        *(cos, sin, interleaved, positions, new.slots, backend),
    )
    return turned if turns else new.q


def _read(pages: Pages) -> tuple[Any, ...]:
    latent, table = pages.latent, (pages.entries, pages.starts, pages.counts, pages.lengths)
    return pages.k, None if latent else pages.v, pages.v.shape[3], *table, pages.most, pages.indptr is not None


def _shared(scale: Tensor | None) -> Tensor | None:
    """A scale that tokens share, of each head; None where each token has its own, or there is none."""
    if scale is None or any(scale.stride()[:2]):
        return None
    return scale.as_strided(scale.shape[2:], scale.stride()[2:])


def _pages(args: Sequence[Any]) -> Pages:
    """Pages from the arguments of an operator."""
    k, v, value_dim, entries, starts, counts, lengths, most, csr, *scales = args
    latent = v is None
    v = k[..., :value_dim] if v is None else v
    indptr = torch.cat([starts, (starts + counts)[-1:]]) if csr and len(starts) else starts if csr else None
    k_scale, v_scale = (_of_tokens(x, k) for x in scales)
    return Pages(k, v, entries, indptr, lengths, entries, starts, counts, most, k_scale, v_scale, latent)


def _of_tokens(scale: Tensor | None, k: Tensor) -> Tensor | None:
    """A scale as (pages, page, Hk): strides of 0 say that tokens share it."""
    return scale if scale is None or scale.ndim == 3 else scale.as_strided(k.shape[:3], (0, 0, scale.stride(0)))


def _call(args: Sequence[Any]) -> tuple[CachedCall, str]:
    q, cu, rows, bias, alibi, sinks, structure, ints, tensors, scale, softcap, precision, splits, partial, invariant, backend = (
        args[_PAGES:]
    )
    options: ParsedOptions = {
        "mask": Lowered(MaskProgram(structure, tuple(ints), tuple(tensors))),
        "scale": scale,
        "bias": bias if alibi is None else Alibi(alibi),
        "softcap": softcap,
        "sinks": sinks,
        "precision": precision,
        "return_lse": True,
    }
    shape = torch.Size((cu.shape[0] - 1, rows, *q.shape[1:])) if rows else q.shape
    fields = {"splits": splits, "partial": partial, "invariant": invariant}
    return CachedCall(Queries(q, cu, shape), _pages(args[:_PAGES]), options, fields), backend


def _plain(name: str, args: Sequence[Any]) -> list[Any]:
    """The arguments of an operator, its tensors plain ones; raises on one whose memory may mean anything."""
    names = [one.name for one in getattr(torch.ops.tilewise, name).default._schema.arguments]
    found = [plain(name, x) if isinstance(x, Tensor) else x for name, x in zip(names, args, strict=True)]
    return [[plain("mask", y) for y in x] if name == "tensors" else x for name, x in zip(names, found, strict=True)]


def _attention_cached(*args: Any) -> tuple[Tensor, Tensor]:
    call, backend = _call(_plain("attention_cached", args))
    out, lse = attend_now(checked(call), backend)
    if out.shape[0] > 1:  # parts of a result that is partial
        out, lse = (x[None] for x in merge_many(out, lse))
    return out[0].transpose(0, 1).contiguous(), lse[0].contiguous()


def _attention_cached_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call, _ = _call(args)
    q = call.queries.q.transpose(0, 1)[None]
    out, lse = empty_out(q, call.pages.v.shape[3]), empty_lse(q, call.options["precision"])
    dtype = lse.dtype if call.fields["partial"] else out.dtype
    return out.new_empty((q.shape[2], q.shape[1], out.shape[3]), dtype=dtype), lse[0].contiguous()


def _cache_append(*args: Any) -> Tensor:
    args = tuple(_plain("cache_append", args))
    read, own, new = args[:_PAGES], args[_PAGES:_SCALED], args[_SCALED:]
    k_scale, v_scale = (x if mine is None else mine for x, mine in zip(read[-2:], own, strict=True))
    q, k, v, cu, q_rows, rows, cos, sin, interleaved, positions, slots, backend = new
    if read[1] is None:  # the values of a latent are its keys'
        v_scale = k_scale
    pages = _pages((*read[:-2], k_scale, v_scale))
    turning = None if cos is None else Turning(cos, sin, interleaved, positions)
    turned = write_now(pages, NewTokens(q, k, v, cu, q_rows, rows, turning, slots), backend)
    return pages.k.new_empty(0) if q is None or turned is None else turned.contiguous()


def _cache_append_fake(*args: Any) -> Tensor:
    q = args[_SCALED]
    return args[0].new_empty(0) if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise DerivativeError("attention over a cache has no gradient; use attention or attention_varlen")


for _name, _run, _fake in (
    ("attention_cached", _attention_cached, _attention_cached_fake),
    ("cache_append", _cache_append, _cache_append_fake),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("tilewise::attention_cached", _refuse, lib=_LIBRARY)
