"""Who is measured over caches beside our call: other forms of it, torch's kernels and cuDNN's.

A form is the case as a contender reads it. A contender binds it to a function of the number of a cache; views and tables are made
while binding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.lab.bench.caches import CacheTensors, cache_of
from tilewise.lab.bench.cases import Case

Call = Callable[[int], Tensor]
"""What a contender computes over one of the caches, (B, Sq, Hq, Dv)."""
WHOLE_PAGE = 256
"""FlashAttention-2, which is behind torch's `varlen_attn`, takes pages of multiples of it."""
ALONE: dict[str, Any] = {"stored": "", "plan": False, "new": False, "invariant": False}


def formed(case: Case, **changes: Any) -> Case:
    return replace(case, cache=replace(cache_of(case), **changes)) if case.cache else case


def plain(case: Case) -> Case:
    """The same pages, and nothing asked for beyond attention; numbers as the case's dtype has them."""
    return formed(case, **ALONE)


def contiguous(case: Case) -> Case:
    """A row of memory for each sequence."""
    return formed(case, page=0, stored="", shared=0, plan=False)


def unshared(case: Case) -> Case:
    """Every sequence has pages of its own."""
    return formed(case, shared=0, plan=False)


def as_called(case: Case) -> Case:
    """From Python, one call after the other."""
    return formed(case, graph=False)


def rows(case: Case) -> Case:
    """Contiguous, head after head."""
    return formed(case, page=0, heads_first=True, shared=0, **ALONE)


def head_pages(case: Case) -> Case:
    """Pages in which the tokens of a head follow each other."""
    return formed(case, heads_first=True, **ALONE)


def whole_pages(case: Case) -> Case:
    return formed(case, page=WHOLE_PAGE, **ALONE)


def reads_caches(case: Case) -> str | None:
    """A reason against, or None."""
    return None if case.cache else "reads caches only"


def has_pages(case: Case) -> str | None:
    return None if case.cache and case.cache.page else "reads pages, and the case has none"


def shares(case: Case) -> str | None:
    return None if case.cache and case.cache.shared else "sequences of the case share nothing"


def in_graph(case: Case) -> str | None:
    captured = case.cache and case.cache.graph and case.device.startswith("cuda")
    return None if captured else "the case is in no CUDA graph"


def decodes_evenly(case: Case) -> str | None:
    """SDPA has no lengths, and its causal flag counts from the first query."""
    even = case.seqlen == 1 and case.cache and not case.cache.mixed
    return None if even else "takes one query for each sequence, and sequences of one length"


def takes_tables(case: Case) -> str | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn"
    if "block_table" in inspect.signature(varlen_attn).parameters:
        return None
    return f"the varlen_attn of torch {torch.__version__} takes no block_table"


def bind_rows(case: Case, given: CacheTensors, kernel: str | None = None) -> Call:
    """SDPA over contiguous keys and values; held to one of its kernels by name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    caches = [cache.pages for cache in given.caches(case)]
    kv = [(pages.k.transpose(1, 2), pages.v.transpose(1, 2)) for pages in caches]
    q, gqa = given.q.transpose(1, 2), case.problem().group > 1

    def call(copy: int) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, kernel)) if kernel else nullcontext():
            out = F.scaled_dot_product_attention(q, *kv[copy], scale=case.scale, enable_gqa=gqa)
        return out.transpose(1, 2)

    return call


def bind_varlen(case: Case, given: CacheTensors) -> Call:
    """torch's `varlen_attn` with a table of pages."""
    from torch.nn.attention.varlen import varlen_attn

    caches = [cache.pages for cache in given.caches(case)]
    q, most = given.q.flatten(0, 1), case.problem().seqlen_k
    cu_q, cu_k = (torch.arange(case.batch + 1, dtype=torch.int32, device=q.device) * n for n in (case.seqlen, most))
    options: dict[str, Any] = {"scale": case.scale, "seqused_k": given.lengths, "enable_gqa": case.problem().group > 1}
    options |= {"window_size": (-1, 0)} if case.seqlen > 1 else {}
    known = inspect.signature(varlen_attn).parameters
    options = {name: value for name, value in options.items() if name in known}

    def call(copy: int) -> Tensor:
        pages = caches[copy]
        out = varlen_attn(q, pages.k, pages.v, cu_q, cu_k, case.seqlen, most, block_table=pages.table, **options)
        return out.view(*given.q.shape[:3], -1)  # type: ignore[union-attr]

    return call


@lru_cache(maxsize=1)
def _handle() -> Any:
    import cudnn

    return cudnn.create_handle()


def cudnn_graph(case: Case, q: Tensor, k: Tensor, table: Tensor, **more: Any) -> Any:
    """cuDNN's attention over pages as a graph, yet to be built. Its tensors have numbers: q 1, k 2, v 3, tables 4 and 5, lengths
    of queries 6 and of keys 7, out 8. `k` is (pages, Hk, page, D), `table` (B, 1, most, 1)."""
    import cudnn

    kinds, problem = cudnn.data_type, case.problem()
    own = getattr(kinds, {"bfloat16": "BFLOAT16", "float16": "HALF"}[problem.dtype])
    graph = cudnn.pygraph(io_data_type=own, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, **more)

    def tensor(uid: int, shape: Any, stride: Any, kind: Any) -> Any:
        return graph.tensor(uid=uid, dim=list(shape), stride=list(stride), data_type=kind)

    ones = ((case.batch, 1, 1, 1), (1, 1, 1, 1), kinds.INT32)
    options: dict[str, Any] = {"q": tensor(1, q.shape, q.stride(), own)}
    options |= {name: tensor(uid, k.shape, k.stride(), own) for uid, name in ((2, "k"), (3, "v"))}
    tables = {uid: tensor(uid, table.shape, table.stride(), kinds.INT32) for uid in (4, 5)}
    options |= {"paged_attention_k_table": tables[4], "paged_attention_v_table": tables[5]}
    options |= {"seq_len_q": tensor(6, *ones), "seq_len_kv": tensor(7, *ones), "use_padding_mask": True}
    if case.seqlen > 1:
        options |= {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT, "diagonal_band_right_bound": 0}
    options |= {"attn_scale": problem.scale, "paged_attention_max_seq_len_kv": problem.seqlen_k}
    out, _ = graph.sdpa(name="paged", generate_stats=False, **options)
    out.set_output(True).set_dim(list(q.shape)).set_stride(list(q.stride())).set_data_type(own).set_uid(8)
    return graph


def bind_cudnn_paged(case: Case, given: CacheTensors) -> Call:
    """cuDNN's attention over pages, by cudnn-frontend: one graph of its own, and for each cache what it reads and writes."""
    import cudnn

    handle = _handle()
    q = given.q.transpose(1, 2)
    caches = [cache.pages for cache in given.caches(case)]
    tables = [pages.table[:, None, :, None] for pages in caches]
    k, v = (x.transpose(1, 2) for x in (caches[0].k, caches[0].v))
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = cudnn_graph(case, q, k, tables[0], handle=handle)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)
    queries = torch.full((case.batch, 1, 1, 1), case.seqlen, dtype=torch.int32, device=q.device)
    keys = given.lengths.view(-1, 1, 1, 1)
    first, others = (torch.empty_like(given.q).transpose(1, 2) for _ in range(2))  # what the first computed is judged
    outs = [first, *[others] * (len(tables) - 1)]
    shared = {1: q, 2: k, 3: v, 6: queries, 7: keys}
    packs = [{**shared, 4: table, 5: table, 8: out} for table, out in zip(tables, outs, strict=True)]

    def call(copy: int) -> Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(packs[copy], workspace, handle=handle)
        return outs[copy].transpose(1, 2)

    return call
