"""Who is measured: tilewise, torch's SDPA, standard attention, and what else is installed.

A contender binds a case to a function (q, k, v) -> out in the case's layout. Masks are built while binding, outside the
clock; whatever a user of the contender would pay on every call happens inside the function.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.api.attention import attention
from tilewise.api.names import BackendName
from tilewise.backends.base import Verdict
from tilewise.errors import ArgumentError
from tilewise.lab.bench.cases import Case
from tilewise.masks import UNBOUNDED, allowed

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

MASK_ROWS = 64


@dataclass(frozen=True)
class Contender:
    name: str
    says: str
    supports: Callable[[Case], Verdict]
    bind: Callable[[Case], Attention]


def always(case: Case) -> Verdict:
    return Verdict(True)


def boolean_mask(case: Case) -> Tensor | None:
    """The case's mask as one boolean tensor, for contenders without a mask algebra; None if all is allowed."""
    problem = case.problem()
    if not problem.program.structure:
        return None
    arange = partial(torch.arange, device=case.device)
    mask = torch.empty((problem.seqlen_q, problem.seqlen_k), dtype=torch.bool, device=case.device)
    for start in range(0, problem.seqlen_q, MASK_ROWS):  # by rows: its making must not need more memory than the mask
        rows = (start, min(start + MASK_ROWS, problem.seqlen_q))
        mask[slice(*rows)] = allowed(problem.program, problem.shape, rows, (0, problem.seqlen_k), arange)[0, 0]
    return mask


def is_causal(case: Case) -> bool:
    """Causal and nothing else, aligned bottom-right."""
    program = case.problem().program
    return program.structure == "b" and program.ints == (-UNBOUNDED, 0)


def is_square_causal(case: Case) -> bool:
    """Causal where both alignments mean the same."""
    problem = case.problem()
    return is_causal(case) and problem.seqlen_q == problem.seqlen_k


def tilewise(backend: str = "auto") -> Contender:
    def bind(case: Case) -> Attention:
        mask, wanted = case.problem().mask, cast(BackendName, case.backend if backend == "auto" else backend)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, mask=mask, layout=case.layout, backend=wanted)

        return run

    name = "tilewise" if backend == "auto" else f"tilewise:{backend}"
    return Contender(name, f"tilewise.attention, backend {backend}", always, bind)


def bind_sdpa(case: Case, upcast: bool = False) -> Attention:
    """SDPA as a user would call it: its causal flag where that means the same, a boolean mask otherwise."""
    causal = is_square_causal(case)
    mask = None if causal else boolean_mask(case)
    gqa = case.problem().group > 1

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.layout == "bshd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        dtype = q.dtype
        if upcast:
            q, k, v = q.float(), k.float(), v.float()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa).to(dtype)
        return out.transpose(1, 2) if case.layout == "bshd" else out

    return run


def bind_sdpa_with(kernel: str, case: Case) -> Attention:
    """SDPA held to one of its kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    wanted, run = getattr(SDPBackend, kernel), bind_sdpa(case)

    def held(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(wanted):
            return run(q, k, v)

    return held


def supports_gpu(case: Case) -> Verdict:
    return Verdict.of(on_gpu(case))


def supports_upcast(case: Case) -> Verdict:
    return Verdict.of(half_precision(case))


def bind_standard(case: Case) -> Attention:
    """Attention as the formula has it: all scores at once, three passes over them."""
    problem, mask = case.problem(), boolean_mask(case)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.layout == "bshd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if problem.group > 1:
            k, v = k.repeat_interleave(problem.group, 1), v.repeat_interleave(problem.group, 1)
        s = q @ k.transpose(-1, -2) * problem.scale  # (B, H, M, N)
        if mask is not None:
            s = s.masked_fill(~mask, -torch.inf)
        out = s.softmax(-1) @ v
        return out.transpose(1, 2) if case.layout == "bshd" else out

    return run


def installed(module: str) -> str | None:
    """A reason against, or None."""
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


def on_gpu(case: Case) -> str | None:
    return None if case.device.startswith("cuda") else f"runs on CUDA devices only, the case is on {case.device}"


def half_precision(case: Case) -> str | None:
    return None if case.problem().itemsize == 2 else f"needs float16 or bfloat16, the case has {case.dtype}"


def full_or(causal: bool, case: Case) -> str | None:
    plain = causal or not case.problem().program.structure
    return None if plain else f"its full and causal masks do not say {case.mask} at these lengths"


def supports_flash_attn(case: Case) -> Verdict:
    return Verdict.of(installed("flash_attn"), on_gpu(case), half_precision(case), full_or(is_causal(case), case))


def bind_flash_attn(case: Case) -> Attention:
    from flash_attn import flash_attn_func

    causal = is_causal(case)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.layout == "bshd":
            return flash_attn_func(q, k, v, causal=causal)  # type: ignore[no-any-return]
        out = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
        return out.transpose(1, 2)  # type: ignore[no-any-return]

    return run


def supports_xformers(case: Case) -> Verdict:
    grouped = "takes grouped heads in another layout" if case.problem().group > 1 else None
    return Verdict.of(installed("xformers"), on_gpu(case), grouped, full_or(is_square_causal(case), case))


def bind_xformers(case: Case) -> Attention:
    from xformers import ops

    bias = ops.LowerTriangularMask() if is_square_causal(case) else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.layout == "bshd":
            return ops.memory_efficient_attention(q, k, v, attn_bias=bias)  # type: ignore[no-any-return]
        out = ops.memory_efficient_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_bias=bias)
        return out.transpose(1, 2)  # type: ignore[no-any-return]

    return run


PEERS = {
    peer.name: peer
    for peer in (
        Contender("sdpa", "torch scaled_dot_product_attention", always, bind_sdpa),
        Contender("sdpa-upcast", "SDPA on inputs cast to float32", supports_upcast, partial(bind_sdpa, upcast=True)),
        Contender("sdpa-flash", "SDPA's FlashAttention-2", supports_gpu, partial(bind_sdpa_with, "FLASH_ATTENTION")),
        Contender("sdpa-efficient", "SDPA's CUTLASS", supports_gpu, partial(bind_sdpa_with, "EFFICIENT_ATTENTION")),
        Contender("sdpa-cudnn", "SDPA's cuDNN", supports_gpu, partial(bind_sdpa_with, "CUDNN_ATTENTION")),
        Contender("standard", "softmax(QKᵀ)V with all scores in memory", always, bind_standard),
        Contender("flash_attn", "the flash-attn package", supports_flash_attn, bind_flash_attn),
        Contender("xformers", "xformers memory_efficient_attention", supports_xformers, bind_xformers),
    )
}


def contender(name: str) -> Contender:
    """By name: a peer, `tilewise`, or `tilewise:<backend>`."""
    if name in PEERS:
        return PEERS[name]
    head, _, backend = name.partition(":")
    if head == "tilewise":
        return tilewise(backend or "auto")
    raise ArgumentError(f"peer: got {name!r}, need one of tilewise, tilewise:<backend>, {', '.join(PEERS)}")


def default_peers(case: Case) -> list[str]:
    """Whom to measure when nobody says: every installed peer that can; SDPA as it comes, and nothing of N² memory."""
    apart = {"standard", *(name for name in PEERS if name.startswith("sdpa-"))}
    return [name for name, peer in PEERS.items() if name not in apart and peer.supports(case).ok]
