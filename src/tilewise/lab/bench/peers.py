"""Who is measured: tilewise, torch's SDPA and FlexAttention, standard attention, and what else is installed.

A contender binds a case and its tensors to a function (q, k, v) -> out in the contender's own layout; over a cache, to a function
of the number of one, for several take turns. Masks are built while binding, outside the clock; whatever a user of the contender
would pay on every call happens inside the function.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.api.names import Layout
from tilewise.backends.base import Verdict
from tilewise.errors import ArgumentError
from tilewise.lab.bench import cache_peers as over
from tilewise.lab.bench.caches import call_over
from tilewise.lab.bench.cases import DATA, OURS, Case, Tensors, long_tailed
from tilewise.lab.bench.child import Attention, tilewise_call
from tilewise.masks import UNBOUNDED, allowed

MASK_ROWS = 64
Band = tuple[int, int]


@dataclass(frozen=True)
class Contender:
    """`layout` None: it takes the case's own. `copies`: it gets tensors that are contiguous in its layout. `differs`: features
    that make its numbers others than ours, by design: there it is timed, and not judged. `form`: the case over a cache as it
    reads it, which it is judged by."""

    name: str
    supports: Callable[[Case], Verdict]
    bind: Callable[[Case, Any], Callable[..., Tensor]]
    layout: Layout | None = None
    copies: bool = False
    differs: tuple[str, ...] = ()
    form: Callable[[Case], Case] = lambda case: case

    def is_judged(self, case: Case) -> bool:
        return not set(self.differs) & set(case.features)


def boolean_mask(case: Case) -> Tensor | None:
    """The case's mask as one boolean tensor, for contenders without a mask algebra; None if all is allowed."""
    problem = case.problem()
    if not problem.program.structure:
        return None
    arange = partial(torch.arange, device=case.device)
    if problem.program.tensors:
        return allowed(problem.program, problem.shape, (0, problem.seqlen_q), (0, problem.seqlen_k), arange)  # type: ignore[no-any-return]
    mask = torch.empty((problem.seqlen_q, problem.seqlen_k), dtype=torch.bool, device=case.device)
    for start in range(0, problem.seqlen_q, MASK_ROWS):  # by rows: its making must not need more memory than the mask
        rows = (start, min(start + MASK_ROWS, problem.seqlen_q))
        mask[slice(*rows)] = allowed(problem.program, problem.shape, rows, (0, problem.seqlen_k), arange)[0, 0]
    return mask


def additive(case: Case, tensors: Tensors) -> Tensor | None:
    """Mask, bias and ALiBi as SDPA takes them: booleans, or numbers to be added."""
    mask, bias = boolean_mask(case), tensors.bias
    if tensors.slopes is not None:
        q, k = (torch.arange(n, device=case.device) for n in case.shape[2:])
        distance = (q[:, None] + len(k) - len(q) - k[None, :]).abs()
        bias = (-tensors.slopes[:, None, None] * distance).to(tensors.q.dtype)
    if bias is None:
        return mask
    return bias if mask is None else torch.where(mask, bias, -torch.inf)


def band(case: Case) -> Band | None:
    """lo <= k - q - (Sk - Sq) <= hi where that is all the mask says; no limits where there is no mask."""
    kinds, ints = case.problem().program.kinds, case.problem().program.ints
    if not kinds:
        return -UNBOUNDED, UNBOUNDED
    return (ints[0], ints[1]) if len(kinds) == 1 and kinds[0].is_bottom_right else None


def is_causal(case: Case) -> bool:
    """Causal and nothing else, aligned bottom-right."""
    return band(case) == (-UNBOUNDED, 0)


def is_square_causal(case: Case) -> bool:
    """Causal where both alignments mean the same."""
    return is_causal(case) and case.shape.seqlen_q == case.shape.seqlen_k


def bind_sdpa(case: Case, tensors: Tensors, upcast: bool = False) -> Attention:
    """SDPA as a user would call it: its causal flag where that means the same, a mask or bias otherwise."""
    causal = is_square_causal(case) and set(case.features) <= {"dropout"}
    mask = None if causal else additive(case, tensors)
    gqa = case.problem().group > 1

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dtype = q.dtype
        if upcast:
            q, k, v = q.float(), k.float(), v.float()
        options: dict[str, Any] = {"attn_mask": mask, "dropout_p": case.dropout_p, "is_causal": causal, "enable_gqa": gqa}
        return F.scaled_dot_product_attention(q, k, v, **options).to(dtype)

    return run


def bind_sdpa_with(kernel: str, case: Case, tensors: Tensors) -> Attention:
    """SDPA held to one of its kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    wanted, run = getattr(SDPBackend, kernel), bind_sdpa(case, tensors)

    def held(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(wanted):
            return run(q, k, v)

    return held


def bind_flex(case: Case, tensors: Tensors) -> Attention:
    """FlexAttention, compiled: a mask function for bands and documents, a score function for softcap and ALiBi."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    problem, looked_up = case.problem(), table_of(case)
    terms, shift = replace(case, data="").problem().program.intervals(problem.shape), problem.seqlen_k - problem.seqlen_q

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = (q < 0) & (k < 0)
        for lo, hi, start, end in terms:
            inside = inside | ((k - q >= lo) & (k - q <= hi) & (k >= start) & (k < end))
        return inside if looked_up is None else inside & looked_up(b, q, k)

    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if case.softcap:
            score = case.softcap * torch.tanh(score / case.softcap)
        return score if tensors.slopes is None else score - tensors.slopes[h] * (q + shift - k).abs()

    masked = bool(problem.program.structure)
    shape = (problem.batch if looked_up is not None else None, None, problem.seqlen_q, problem.seqlen_k)
    blocks = create_block_mask(seen, *shape, device=case.device) if masked else None
    options: dict[str, Any] = {"block_mask": blocks, "enable_gqa": problem.group > 1}
    options |= {"score_mod": changed} if case.softcap or tensors.slopes is not None else {}
    torch.compiler.reset()  # after a few masks in one process torch would compile no more, and run the mask element by element
    return partial(torch.compile(flex_attention, dynamic=False), **options)


def table_of(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The data of a mask as a function of sequence, query and key; None where there are none."""
    data = case.data_mask()
    if data is None:
        return None
    name, (first, *sizes) = data
    if name == "documents":
        return lambda b, q, k: first[b, q] == first[b, k]
    if name == "dense":
        return lambda b, q, k: first[0, 0, q, k]
    if name == "selected":  # as a table of blocks
        count = -(-case.shape.seqlen_k // sizes[0])
        table = torch.zeros((*first.shape[2:3], count), dtype=torch.bool, device=first.device)
        table.scatter_(1, first[0, 0].long(), True)
    else:
        table, sizes = first[0, 0], [sizes[0], sizes[0]]
    return lambda b, q, k: table[q // sizes[1], k // sizes[0]]


def bind_fa4_packed(case: Case, tensors: Tensors) -> Attention:
    """FlashAttention-4's packed call: of a packed batch, or of one sequence's documents."""
    from flash_attn.cute import flash_attn_varlen_func

    lengths = case.lengths or long_tailed(case.shape.seqlen_q)
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=case.device)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [x if case.lengths else x[0] for x in (q, k, v)]
        out = flash_attn_varlen_func(*rows, **options, causal=case.mask == "causal")
        out = out[0] if isinstance(out, tuple) else out
        return out if case.lengths else out[None]  # type: ignore[no-any-return]

    return run


def bind_own(case: Case, tensors: Any, backend: str = "") -> Callable[..., Tensor]:
    case = replace(case, backend=backend or case.backend)
    return call_over(case, tensors) if case.cache else tilewise_call(case.options(tensors))


def bind_plain(case: Case, tensors: Any) -> Callable[..., Tensor]:
    """Tilewise without the features of the case: what they cost."""
    if case.cache:
        return bind_own(case, tensors)
    plain = replace(case, bias=None, alibi=False, sinks=False, softcap=0.0, dropout_p=0.0)
    return tilewise_call(plain.options(tensors._replace(bias=None, slopes=None, sinks=None)))


def bind_standard(case: Case, tensors: Tensors) -> Attention:
    """Attention as the formula has it: all scores at once, three passes over them."""
    problem, mask = case.problem(), additive(case, tensors)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if problem.group > 1:
            k, v = k.repeat_interleave(problem.group, 1), v.repeat_interleave(problem.group, 1)
        s = q @ k.transpose(-1, -2) * problem.scale  # (B, H, M, N)
        if case.softcap:
            s = case.softcap * torch.tanh(s / case.softcap)
        if mask is not None:
            s = s.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else s + mask
        if tensors.sinks is None:
            return s.softmax(-1) @ v
        sink = tensors.sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)
        return torch.cat([s, sink], -1).softmax(-1)[..., :-1] @ v

    return run


def bind_flash_attn(case: Case, tensors: Tensors) -> Attention:
    from flash_attn import flash_attn_func

    return partial(flash_attn_func, causal=is_causal(case))


def bind_flash_attn_4(case: Case, tensors: Tensors) -> Attention:
    from flash_attn.cute import flash_attn_func

    lo, hi = band(case) or (0, 0)
    sides = tuple(None if abs(side) == UNBOUNDED else abs(side) for side in (lo, hi))
    options: dict[str, Any] = {"causal": is_causal(case)} if lo == -UNBOUNDED else {"window_size": sides}
    options |= {"softcap": case.softcap} if case.softcap else {}
    options |= {"learnable_sink": tensors.sinks} if case.sinks else {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return run


def bind_xformers(case: Case, tensors: Tensors) -> Attention:
    from xformers import ops

    bias = ops.LowerTriangularMask() if is_square_causal(case) else None
    return lambda q, k, v: ops.memory_efficient_attention(q, k, v, attn_bias=bias)


def installed(module: str, case: Case) -> str | None:
    """A reason against, or None."""
    with suppress(ModuleNotFoundError):  # of the package it lies in
        if importlib.util.find_spec(module):
            return None
    return f"{module} is not installed"


def on_gpu(case: Case) -> str | None:
    return None if case.device.startswith("cuda") else f"runs on CUDA devices only, the case is on {case.device}"


def half_precision(case: Case) -> str | None:
    return None if case.problem().itemsize == 2 else f"needs float16 or bfloat16, the case has {case.dtype}"


def ungrouped(case: Case) -> str | None:
    return "takes grouped heads in another layout" if case.problem().group > 1 else None


def masks_only(holds: Callable[[Case], bool], case: Case) -> str | None:
    said = not case.problem().program.structure or holds(case)
    return None if said else f"its masks do not say {case.mask} at these lengths"


def banded(case: Case) -> bool:
    """A band, beside documents or alone."""
    return band(replace(case, data="")) is not None


def united(case: Case) -> bool:
    """Bands and ranges, beside data or alone."""
    kinds = replace(case, data="").problem().program.kinds
    return not any(kind.tensors for kind in kinds) and case.data not in ("padding", "offsets")


def packed(case: Case) -> str | None:
    """A packed batch, or one sequence of documents, and causal or no mask beside."""
    whole = bool(case.lengths) != (case.data == "packing" and case.batch == 1)
    return None if whole and case.mask in ("causal", "full") else "takes packed batches under causal or no mask"


def without(known: tuple[str, ...], case: Case) -> str | None:
    """Features beyond the known ones."""
    others = [name for name in case.features if name not in known]
    return f"takes no {', '.join(others)} as the case has it" if others else None


def needs(*checks: Callable[[Case], str | None]) -> Callable[[Case], Verdict]:
    return lambda case: Verdict.of(*(check(case) for check in checks))


PLAIN = partial(without, ())
CAPPED = partial(without, ("sinks", "softcap"))
BIASED = partial(without, ("bias", "ALiBi", "dropout", "documents", "padding", "blocks", "dense"))
MODIFIED = partial(without, ("ALiBi", "softcap", *DATA))
PACKED = partial(without, ("packed sequences", "packing"))
SCORED = partial(without, ("bias", "ALiBi", "softcap", "sinks", "documents", "padding", "blocks", "dense"))
CAUSAL, SQUARE, BANDED, UNITED = (
    partial(masks_only, holds) for holds in (is_causal, is_square_causal, banded, united)
)
FEATURES = ("bias", "ALiBi", "sinks", "softcap", "dropout")
DRAWN = ("dropout",)
"""SDPA draws its own random numbers."""
HELD = {"sdpa-flash": "FLASH_ATTENTION", "sdpa-efficient": "EFFICIENT_ATTENTION", "sdpa-cudnn": "CUDNN_ATTENTION"}
FA2, FA4, XFORMERS, CUDNN = (
    partial(installed, name) for name in ("flash_attn.flash_attn_interface", "flash_attn.cute", "xformers", "cudnn")
)
bind_cudnn_rows = partial(over.bind_rows, kernel=HELD["sdpa-cudnn"])
OVER_CACHES = (
    Contender("contiguous", needs(over.reads_caches), bind_own, form=over.contiguous),
    Contender("unshared", needs(over.shares), bind_own, form=over.unshared),
    Contender("as called", needs(over.in_graph), bind_own, form=over.as_called),
    Contender("cache-sdpa", needs(over.reads_caches, over.decodes_evenly), over.bind_rows, form=over.rows),
    Contender("cache-cudnn", needs(on_gpu, over.reads_caches, over.decodes_evenly), bind_cudnn_rows, form=over.rows),
    Contender(
        "cudnn-paged", needs(on_gpu, CUDNN, half_precision, over.has_pages), over.bind_cudnn_paged, form=over.head_pages
    ),
    Contender(
        "varlen_attn", needs(on_gpu, half_precision, over.has_pages, over.takes_tables), over.bind_varlen, form=over.whole_pages
    ),
)
"""`contiguous`, `unshared` and `as called` are other forms of our own call; `cache-sdpa` and `cache-cudnn` read rows."""

PEERS = {
    peer.name: peer
    for peer in (
        Contender("plain", needs(), bind_plain, differs=FEATURES, form=over.plain),
        Contender("sdpa", needs(BIASED), bind_sdpa, "bhsd", differs=DRAWN),
        Contender("sdpa-upcast", needs(half_precision, BIASED), partial(bind_sdpa, upcast=True), "bhsd", differs=DRAWN),
        *(
            Contender(name, needs(on_gpu, BIASED), partial(bind_sdpa_with, kernel), "bhsd", differs=DRAWN)
            for name, kernel in HELD.items()
        ),
        Contender("standard", needs(SCORED), bind_standard, "bhsd"),
        Contender("flex", needs(on_gpu, UNITED, MODIFIED), bind_flex, "bhsd"),
        Contender("flash_attn", needs(FA2, on_gpu, half_precision, CAUSAL, PLAIN), bind_flash_attn, "bshd"),
        Contender("fa4", needs(FA4, on_gpu, half_precision, BANDED, CAPPED), bind_flash_attn_4, "bshd", copies=True),
        Contender("fa4-packed", needs(FA4, on_gpu, half_precision, packed, PACKED), bind_fa4_packed),
        Contender("xformers", needs(XFORMERS, on_gpu, ungrouped, SQUARE, PLAIN), bind_xformers, "bshd"),
        *OVER_CACHES,
    )
}
"""By name; `fa4` is FlashAttention-4, `flash_attn.cute`, and `plain` tilewise without the case's features."""
COMPILED = ("flex", "fa4", "fa4-packed")
"""They compile kernels at their first call."""
ASKED_FOR = ("plain", "standard", "sdpa-upcast", *HELD, *COMPILED, *(peer.name for peer in OVER_CACHES))
"""Measured only where a case or the user names them: other forms of SDPA or of a cache, N² memory, or long compilation."""


def contender(name: str) -> Contender:
    """By name: a peer, `tilewise`, or `tilewise:<backend>`."""
    if name in PEERS:
        return PEERS[name]
    head, _, backend = name.partition(":")
    if head != OURS:
        raise ArgumentError(f"peer: got {name!r}, need one of tilewise, tilewise:<backend>, {', '.join(PEERS)}")
    return Contender(name, needs(), partial(bind_own, backend=backend))


def default_peers(case: Case) -> list[str]:
    """Whom to measure when nobody says: every installed peer that can, and is not in `ASKED_FOR`."""
    return [name for name, peer in PEERS.items() if name not in ASKED_FOR and peer.supports(case).ok]
