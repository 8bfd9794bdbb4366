"""`certify` judges attention over a cache."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.cache.caches import build


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_certificates(dtype: torch.dtype) -> None:
    built = build([1, 7, 0, 1, 40], [33, 50, 9, 1, 40], dtype=dtype)
    mask = tw.causal() & tw.window(9)
    out, lse = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, mask=mask, return_lse=True)
    found = tw.certify(built.q, built.cache, None, out, lse=lse, rows="all", mask=mask, cu_seqlens_q=built.cu)
    assert found.ok and found.checked == found.rows
    wrong = out.clone()
    wrong[3, 1] += 0.5
    assert not tw.certify(built.q, built.cache, None, wrong, rows="all", mask=mask, cu_seqlens_q=built.cu).ok
    assert not tw.certify(built.q, built.cache, None, out, rows="all", mask=tw.causal(), cu_seqlens_q=built.cu).ok


def test_batches_and_refusals() -> None:
    built = build([3, 3], [10, 20])
    q = built.q.unflatten(0, (2, 3))
    out, lse = tw.attention_cached(q, built.cache, return_lse=True)
    assert tw.certify(q, built.cache, None, out, lse=lse, rows="all", mask=tw.causal()).ok
    eight = build([1], [9], stored=torch.int8)
    with pytest.raises(tw.TilewiseError, match="hold numbers that are rounded"):
        tw.certify(eight.q, eight.cache, None, eight.q, cu_seqlens_q=eight.cu)
    with pytest.raises(tw.TilewiseError, match="goes with a KVCache"):
        tw.certify(q, q, None, q)
