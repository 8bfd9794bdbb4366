"""`invariant=True`: a row has the same bits in every batch, with every page size, in every chunk, as prefill and as decode."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cache.caches import build, worst
from tests.cache.test_cached import CASES, OPTIONS

BATCHES = int(os.environ.get("TILEWISE_INVARIANT_BATCHES", "1000"))
"""Of all cases of the kernels together."""
PAGES = (1, 7, 16, 64)
HEADS = (4, 2)


@dataclass
class Sequences:
    """Some sequences in pages of every size, and what one prefill of each alone gives."""

    q: list[Tensor]
    caches: dict[int, tuple[Tensor, Tensor, list[Tensor]]]  # by page size: K, V and each sequence's pages
    results: list[tuple[Tensor, Tensor]]


def sequences(lengths: list[int], dim: int, dtype: torch.dtype, options: dict[str, Any]) -> Sequences:
    g = torch.Generator().manual_seed(0)
    tokens = [[torch.randn((n, heads, dim), generator=g).to(dtype) for heads in (4, 2, 2)] for n in lengths]
    caches = {}
    for page in PAGES:
        counts = [-(-n // page) for n in lengths]
        order = torch.randperm(sum(counts), generator=g).int()
        tables = list(order.split(counts))
        k_pages, v_pages = (torch.full((sum(counts), page, 2, dim), float("nan"), dtype=dtype) for _ in range(2))
        for table, (_, k, v) in zip(tables, tokens, strict=True):
            at = torch.arange(len(k))
            for pages, x in ((k_pages, k), (v_pages, v)):
                pages[table[at // page].long(), at % page] = x
        caches[page] = (k_pages, v_pages, tables)
    made = Sequences([q for q, _, _ in tokens], caches, [])
    for n, length in enumerate(lengths):
        made.results.append(attend(made, 16, [n], [length], [length], options))
    return made


def attend(
    made: Sequences, page: int, which: list[int], rows: list[int], lengths: list[int], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Rows [length − rows, length) of some of the sequences in one call."""
    k_pages, v_pages, tables = made.caches[page]
    indptr = torch.tensor([0, *(len(tables[n]) for n in which)]).cumsum(0).int()
    cache = tw.KVCache.paged(
        k_pages, v_pages, (indptr, torch.cat([tables[n] for n in which])), torch.tensor(lengths, dtype=torch.int32)
    )
    q = torch.cat([made.q[n][length - m : length] for n, m, length in zip(which, rows, lengths, strict=True)])
    cu = torch.tensor([0, *rows]).cumsum(0).int()
    out, lse = tw.attention_cached(q, cache, cu_seqlens_q=cu, invariant=True, return_lse=True, **options)
    return out, lse


def same_bits(made: Sequences, seed: int, options: dict[str, Any]) -> None:
    """One random batch: every row has the bits that it has in a prefill of its sequence alone."""
    rng = random.Random(seed)
    which = [rng.randrange(len(made.q)) for _ in range(rng.choice((1, 1, 2, 3, 6)))]
    lengths = [rng.randint(1, len(made.q[n])) for n in which]
    most = rng.choice((1, 1, 3, 20, 1000))
    rows = [rng.randint(0 if len(which) > 1 else 1, min(most, n)) for n in lengths]
    page = rng.choice(PAGES)
    out, lse = attend(made, page, which, rows, lengths, options)
    first = 0
    for n, m, length in zip(which, rows, lengths, strict=True):
        want, want_lse = made.results[n]
        own = slice(length - m, length)
        assert torch.equal(out[first : first + m], want[own]), (seed, page, rows, lengths)
        assert torch.equal(lse[:, first : first + m], want_lse[:, own]), (seed, page, rows, lengths)
        first += m


OF_ROWS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"mask": tw.causal() & tw.window(70)},
    "prefix or window": {"mask": tw.causal() & (tw.prefix(9) | tw.window(40))},
    "softcap and sinks": {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "alibi": {"bias": tw.alibi(torch.tensor([0.5, 0.25, 0.1, 0.0]))},
}
KINDS = {"bfloat16": (torch.bfloat16, 32), "odd head dim": (torch.float32, 20)}


@pytest.mark.parametrize("name", OF_ROWS)
def test_the_bits_of_a_row_are_its_own(name: str) -> None:
    options = {**OF_ROWS[name], "backend": "cpu"}
    made = sequences([5, 130, 300, 410], 64, torch.float32, options)
    for seed in range(BATCHES * 3 // 20):
        same_bits(made, seed, options)


@pytest.mark.parametrize("kind", ["bfloat16", "odd head dim"])
def test_of_every_kind(kind: str) -> None:
    dtype, dim = KINDS[kind]
    made = sequences([5, 130, 300, 410], dim, dtype, {"backend": "cpu"})
    for seed in range(BATCHES // 10):
        same_bits(made, seed, {"backend": "cpu"})


@pytest.mark.parametrize("threads", [1, 2])
def test_parts_of_long_sequences_are_merged_in_order(threads: int) -> None:
    """The keys of a sequence are more than a part; with several threads, each has parts of its own."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        made = sequences([6000, 2049], 64, torch.float32, {"backend": "cpu"})
        torch.set_num_threads(3 - threads)
        for seed in range(BATCHES // 40):
            same_bits(made, seed, {"backend": "cpu"})
    finally:
        torch.set_num_threads(before)


def test_splits_share_a_long_sequence() -> None:
    """The parts of one decoded row are tasks of their own, and the result is that of one task."""
    from tilewise.backends.cpu import plan
    from tilewise.hardware.probe import probe_cpu

    problem = tw.Problem.of(
        heads=4, kv_heads=2, seqlen=1, kv_seqlen=6000, head_dim=64, dtype="float32", page=16, invariant=True, varlen=True
    )

    tiles = [plan.tiles(problem, probe_cpu(threads), longest=1)["forward"] for threads in (1, 2)]
    assert tiles[0].splits == 1 and tiles[1].splits == 3
    assert tiles[0].block_k == tiles[1].block_k


def test_of_plain_torch() -> None:
    options = {"backend": "tiled"}
    made = sequences([5, 40, 150], 8, torch.float32, options)
    for seed in range(BATCHES // 50):
        same_bits(made, seed, options)


@pytest.mark.parametrize("name", ["mixed", "bfloat16", "int8", "latent", "columns apart", "empty sequences", "float64"])
@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_invariant_results_conform(backend: str, name: str) -> None:
    built = build(**CASES[name])
    out, lse = tw.attention_cached(
        built.q, built.cache, cu_seqlens_q=built.cu, return_lse=True, backend=backend, invariant=True
    )  # fmt: skip
    assert worst(built, out, lse) <= 1.0


@pytest.mark.parametrize("name", ["window", "prefix or window", "sinks", "softcap", "alibi", "bias of each sequence", "double"])
def test_invariant_options_conform(name: str) -> None:
    built = build([1, 7, 0, 1, 40], [33, 50, 9, 1, 40])
    out, lse = tw.attention_cached(
        built.q, built.cache, cu_seqlens_q=built.cu, return_lse=True, backend="cpu", invariant=True, **OPTIONS[name]
    )
    assert worst(built, out, lse, **OPTIONS[name]) <= 1.0


GROUPED: dict[str, dict[str, Any]] = {
    "four heads": {"heads": (8, 2)},
    "eight heads, bfloat16": {"heads": (8, 1), "dtype": torch.bfloat16, "dims": (24, 40)},
    "three heads, int8": {"heads": (6, 2), "stored": torch.int8, "page": 3},
    "latent": {"heads": (8, 1), "dims": (48, 32), "latent": True},
}


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_heads_that_are_rows_keep_their_bits(name: str, options: dict[str, Any]) -> None:
    """Decoded, the heads of a group share a strip; in a prompt each has strips of its own."""
    lengths = [300, 5, 131]
    built = build(lengths, lengths, **GROUPED[name])
    given: dict[str, Any] = {"invariant": True, "return_lse": True, "backend": "cpu", **options}
    want, want_lse = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, **given)
    assert worst(built, want, want_lse, **options) <= 1.0
    last = built.cu[1:].long() - 1
    batched, lse = tw.attention_cached(built.q[last][:, None], built.cache, **given)
    assert torch.equal(batched[:, 0], want[last]) and torch.equal(lse[:, :, 0].T, want_lse[:, last])
    some = torch.tensor([0, 1, 1, 2], dtype=torch.int32)  # the second sequence has no query
    out, lse = tw.attention_cached(built.q[last[[0, 2]]], built.cache, cu_seqlens_q=some, **given)
    assert torch.equal(out, want[last[[0, 2]]]) and torch.equal(lse, want_lse[:, last[[0, 2]]])


def test_which_heads_are_rows() -> None:
    """Those of single queries that see all keys, where no head differs from another; `explain` says it."""
    built = build([1, 1], [300, 40], heads=(8, 2))
    each: dict[str, tuple[bool, dict[str, Any]]] = {
        "causal": (True, {}),
        "full": (True, {"mask": None}),
        "window": (False, {"mask": tw.causal() & tw.window(9)}),
        "sinks": (False, {"sinks": torch.zeros(8)}),
        "alibi": (False, {"bias": tw.alibi(torch.full((8,), 0.5))}),
        "bias": (False, {"bias": torch.zeros(1, 8, 1, 300)}),
    }
    for name, (rows, options) in each.items():
        shown = tw.explain(built.q, built.cache, cu_seqlens_q=built.cu, invariant=True, **options)
        assert (shown.plan.problem.heads == 2) == rows, name
        assert any("rows of their key head" in why for why in shown.plan.tile.reasons) == rows, name
    shown = tw.explain(built.q, built.cache, cu_seqlens_q=built.cu)
    assert shown.plan.problem.heads == 8


def test_evicted_pages_are_not_read() -> None:
    """A block that begins before the window's first key reads nothing of the pages that are gone."""
    for mask in (tw.causal() & tw.window(16), tw.causal() & (tw.window(16) | tw.window(12)) & ~tw.window(2)):
        built = build([1, 4], [300, 290], page=8)
        options: dict[str, Any] = {"cu_seqlens_q": built.cu, "mask": mask, "backend": "cpu"}
        for invariant in (True, False):
            want = tw.attention_cached(built.q, built.cache, invariant=invariant, **options)
            table = built.table.clone()
            table[0, : (300 - 16) // 8] = -(1 << 20)
            table[1, : (290 - 4 - 15) // 8] = -(1 << 20)
            evicted = tw.KVCache.paged(*built.pages, table, built.cache.lengths)
            got = tw.attention_cached(built.q, evicted, invariant=invariant, **options)
            assert torch.equal(got, want)


def test_splits() -> None:
    """Any number of parts gives the same attention; with `invariant` they are fixed."""
    built = build([1, 9, 1], [200, 90, 3], dims=(32, 32))
    for splits in (1, 2, 3, 64, 1000):
        out, lse = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, return_lse=True, splits=splits)
        assert worst(built, out, lse) <= 1.0, splits
    for bad in (0, -1, 2000, 1.5, True, "4"):
        with pytest.raises(tw.TilewiseError, match="splits"):
            tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, splits=bad)  # type: ignore[arg-type]
    with pytest.raises(tw.TilewiseError, match="splits: with invariant=True keys are split at fixed positions"):
        tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, splits=2, invariant=True)
    with pytest.raises(tw.TilewiseError, match="invariant: got 1"):
        tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, invariant=1)  # type: ignore[call-overload]


def test_who_cannot_says_so() -> None:
    built = build([1], [5])
    with pytest.raises(tw.TilewiseError, match="has no invariant=True"):
        tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, invariant=True, backend="reference")
