"""Attention over a cache against the float64 oracle: every backend, pages of any size and order, any mixture of queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.cache.caches import Built, build, worst
from tilewise import dispatch

BACKENDS = ["auto", "cpu", "tiled", "reference"]
MIXED = ([1, 7, 0, 1, 40], [33, 50, 9, 1, 40])
CASES: dict[str, dict[str, Any]] = {
    "decode": {"rows": [1] * 4, "lengths": [1, 17, 130, 64]},
    "decode, one head a key head": {"rows": [1] * 3, "lengths": [5, 300, 31], "heads": (2, 2)},
    "decode, eight heads a key head": {"rows": [1] * 2, "lengths": [70, 300], "heads": (8, 1), "dims": (64, 64)},
    "prefill": {"rows": [40, 5], "lengths": [40, 5]},
    "chunks": {"rows": [40, 5], "lengths": [100, 37]},
    "mixed": {"rows": MIXED[0], "lengths": MIXED[1]},
    "pages of one": {"rows": MIXED[0], "lengths": MIXED[1], "page": 1},
    "pages of three": {"rows": MIXED[0], "lengths": MIXED[1], "page": 3},
    "one page": {"rows": MIXED[0], "lengths": MIXED[1], "page": 64},
    "csr": {"rows": MIXED[0], "lengths": MIXED[1], "csr": True},
    "heads before places": {"rows": MIXED[0], "lengths": MIXED[1], "order": "hnd"},
    "heads before places, decode": {"rows": [1] * 3, "lengths": [5, 300, 31], "order": "hnd"},
    "heads before places, decode, one head": {"rows": [1] * 3, "lengths": [5, 300, 31], "order": "hnd", "heads": (2, 2)},
    "heads before places, decode, small pages": {
        "rows": [1] * 3, "lengths": [5, 300, 31], "order": "hnd", "page": 3, "heads": (12, 3), "dtype": torch.bfloat16,
    },
    "columns apart": {"rows": MIXED[0], "lengths": MIXED[1], "order": "columns"},
    "columns apart, decode": {"rows": [1, 1], "lengths": [40, 9], "order": "columns"},
    "other value dims": {"rows": MIXED[0], "lengths": MIXED[1], "dims": (24, 40)},
    "latent": {"rows": MIXED[0], "lengths": MIXED[1], "dims": (48, 32), "latent": True, "heads": (8, 1)},
    "empty sequences": {"rows": [1, 1, 3], "lengths": [0, 4, 0]},
    "more rows than keys": {"rows": [5, 2], "lengths": [3, 7]},
    "float64": {"rows": MIXED[0], "lengths": MIXED[1], "dtype": torch.float64},
    "bfloat16": {"rows": MIXED[0], "lengths": MIXED[1], "dtype": torch.bfloat16},
    "float16 decode": {"rows": [1] * 3, "lengths": [5, 300, 31], "dtype": torch.float16},
    "int8": {"rows": MIXED[0], "lengths": MIXED[1], "stored": torch.int8},
    "int8, a scale a head": {"rows": MIXED[0], "lengths": MIXED[1], "stored": torch.int8, "scaled": "head"},
    "int8 of bfloat16": {
        "rows": MIXED[0], "lengths": MIXED[1], "stored": torch.int8, "scaled": "tensor", "dtype": torch.bfloat16,
    },
    "int8 decode, one head": {"rows": [1] * 3, "lengths": [5, 301, 31], "heads": (2, 2), "stored": torch.int8},
    "int8 latent": {
        "rows": MIXED[0], "lengths": MIXED[1], "dims": (48, 32), "latent": True, "stored": torch.int8, "heads": (8, 1),
    },
    "int8 decode, vectors of four": {
        "rows": [1] * 3, "lengths": [5, 301, 31], "heads": (8, 2), "stored": torch.int8, "dims": (68, 68),
    },
    "int8 decode, vectors of four, one head": {
        "rows": [1] * 3, "lengths": [5, 301, 31], "heads": (2, 2), "stored": torch.int8, "dims": (68, 132),
    },
    "int8 decode, pages of three": {
        "rows": [1] * 3, "lengths": [5, 301, 31], "heads": (4, 2), "stored": torch.int8, "page": 3, "order": "hnd",
    },
    "float8": {"rows": MIXED[0], "lengths": MIXED[1], "stored": torch.float8_e4m3fn},
    "float8 decode": {"rows": [1] * 3, "lengths": [5, 301, 31], "stored": torch.float8_e4m3fn, "heads": (8, 2)},
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"mask": None},
    "window": {"mask": tw.causal() & tw.window(9)},
    "prefix or window": {"mask": tw.causal() & (tw.prefix(3) | tw.window(9))},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "softcap": {"softcap": 2.0},
    "alibi": {"bias": tw.alibi(torch.tensor([0.5, 0.25, 0.1, 0.0]))},
    "alibi of each sequence": {"bias": tw.alibi(torch.rand(5, 4))},
    "bias": {"bias": torch.randn(1, 4, 1, 64)},
    "bias of each sequence": {"bias": torch.randn(5, 1, 40, 64)},
    "scale": {"scale": 0.3},
    "double": {"precision": "double"},
}


def attend(built: Built, backend: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = tw.attention_cached(
        built.q, built.cache, cu_seqlens_q=built.cu, return_lse=True, backend=backend, **options
    )
    return out, lse


def conform(built: Built, backend: str, **options: Any) -> None:
    try:
        out, lse = attend(built, backend, **options)
    except tw.TilewiseError as error:
        assert backend == "reference" and "precision" in options, error
        pytest.skip(str(error))
    assert out.dtype == built.q.dtype and not out.isnan().any()
    assert worst(built, out, lse, **options) <= 1.0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_conformance(backend: str, name: str) -> None:
    conform(build(**CASES[name]), backend)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_options(backend: str, name: str) -> None:
    options = dict(OPTIONS[name])
    rows, lengths = MIXED
    if name == "full":  # rows before position 0 would see nothing
        rows = [min(m, n) for m, n in zip(rows, lengths, strict=True)]
    conform(build(rows, lengths), backend, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_conformance_on_gpu(name: str) -> None:
    case = {"dtype": torch.bfloat16, **CASES[name]}
    conform(build(**case, device="cuda"), "auto")


def test_the_cpu_kernels_read_pages_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is copied."""
    from tilewise.api import cached_call

    monkeypatch.delattr(cached_call, "gathered")
    for name, case in CASES.items():
        if case.get("lengths") != [0, 4, 0]:
            built = build(**case)
            out, lse = attend(built, "auto")
            assert worst(built, out, lse) <= 1.0, name


def test_pages_and_rows_of_memory_give_the_same_bits() -> None:
    """Decoding over pages reads the same numbers in the same order as decoding without."""
    for heads in ((2, 2), (8, 2)):
        built = build([1, 1], [200, 200], heads=heads, dims=(64, 64))
        k, v = (torch.stack(x).float() for x in (built.k, built.v))
        out = attend(built, "cpu")[0]
        plain = tw.attention(built.q[:, None], k, v, layout="bshd", mask=tw.causal(), backend="cpu")[:, 0]
        assert torch.equal(out, plain)
        static = tw.KVCache.static(k, v, torch.tensor([200, 200]))
        assert torch.equal(tw.attention_cached(built.q[:, None], static, backend="cpu")[:, 0], plain)


def test_before_the_first_position_nothing_is_seen() -> None:
    built = build([5, 2], [3, 7])
    out, lse = attend(built, "auto", mask=None)
    assert (out[:2] == 0).all() and (lse[:, :2] == float("-inf")).all()
    assert (out[2:] != 0).all() and lse[:, 2:].isfinite().all()


def test_layouts_of_the_result() -> None:
    built = build([3, 3], [10, 20])
    packed, packed_lse = attend(built, "auto")
    batched, lse = tw.attention_cached(built.q.unflatten(0, (2, 3)), built.cache, return_lse=True)
    assert batched.shape == (2, 3, 4, 32) and lse.shape == (2, 4, 3)
    assert torch.equal(batched.flatten(0, 1), packed)
    assert torch.equal(lse.transpose(0, 1).flatten(1), packed_lse)
    out = torch.empty_like(packed)
    assert tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, out=out) is out and torch.equal(out, packed)


def test_evicted_pages_are_not_read() -> None:
    """Entries of −1 before a window's first key are legal; inside what is seen they are an error."""
    built = build([1, 4], [100, 90], page=8)
    mask = tw.causal() & tw.window(16)
    want = attend(built, "cpu", mask=mask)[0]
    table = built.table.clone()
    table[0, : (100 - 16) // 8] = -1
    table[1, : (90 - 4 - 15) // 8] = -1
    k_pages, v_pages = built.pages
    evicted = tw.KVCache.paged(k_pages, v_pages, table, built.cache.lengths)
    for backend in ("cpu", "tiled"):
        got = tw.attention_cached(built.q, evicted, cu_seqlens_q=built.cu, mask=mask, backend=backend)
        assert torch.allclose(got, want, atol=1e-6), backend
    table[1, (90 - 4 - 15) // 8] = -1
    gone = tw.KVCache.paged(k_pages, v_pages, table, built.cache.lengths)
    with pytest.raises(tw.TilewiseError, match="sequence 1 sees page 8 of its table, which is -1"):
        tw.attention_cached(built.q, gone, cu_seqlens_q=built.cu, mask=mask)


def test_every_backend_is_asked_by_name() -> None:
    built = build([1], [5])
    with pytest.raises(tw.TilewiseError, match="backend"):
        attend(built, "nobody")
    assert dispatch.get("cpu").reads_pages


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("csr", [False, True])
def test_tables_and_lengths_may_change_between_calls(dtype: torch.dtype, csr: bool) -> None:
    """A cache is a view: it sees what its tensors hold now, whatever their dtype and strides."""
    built = build([1, 1], [40, 25], page=8)
    k_pages, v_pages = built.pages
    lengths = torch.tensor([40, 25], dtype=dtype)
    wide = torch.stack([built.table.to(dtype)] * 2, dim=-1)
    indptr = torch.tensor([0, 5, 9], dtype=dtype)
    flat = torch.cat([built.table[0, :5], built.table[1, :4]]).to(dtype)
    table: Any = (indptr, flat) if csr else wide[..., 0]
    cache = tw.KVCache.paged(k_pages, v_pages, table, lengths)
    q = built.q[:, None]
    first = tw.attention_cached(q, cache)
    assert torch.equal(first[:, 0], attend(built, "auto")[0])
    lengths -= 24
    (flat if csr else wide[0, :, 0])[:1] = built.table[0, 1].to(dtype)
    second = tw.attention_cached(q, cache)
    assert torch.equal(second[1], tw.attention_cached(q[1:], tw.KVCache.paged(
        k_pages, v_pages, built.table[1:], torch.tensor([1])))[0])  # fmt: skip
    moved = built.table[0:1].clone()
    moved[0, 0] = moved[0, 1]
    want = tw.KVCache.paged(k_pages, v_pages, moved, torch.tensor([16]))
    assert torch.equal(second[0], tw.attention_cached(q[:1], want)[0])
