"""trace_nonfinite: a planted NaN or overflow is found in its tile and step; what nobody sees does not count."""

from __future__ import annotations

import json

import pytest
import torch

import tilewise as tw
from tests.conformance.cases import BY_NAME, build
from tilewise.backends import sequence
from tilewise.diagnostics import trace
from tilewise.diagnostics.trace import MEANING, trace_nonfinite

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True, params=[(32, 32), sequence.BLOCKS], ids=["small-tiles", "large-tiles"])
def rough_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, rough walk must not change what is found."""
    monkeypatch.setattr(sequence, "BLOCKS", request.param)


def tensors(dtype: torch.dtype = torch.float32, heads: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, 100, 16, generator=g).to(dtype)
    k, v = (torch.randn(2, 2, 100, 16, generator=g).to(dtype) for _ in range(2))
    return q, k, v


def found(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object):  # type: ignore[no-untyped-def]
    trace = trace_nonfinite(q, k, v, tile=(16, 16), **options)  # type: ignore[arg-type]
    json.dumps(trace.to_dict())
    assert trace._repr_html_() and str(trace)
    return trace.first


def test_finite_inputs_are_clean() -> None:
    trace = trace_nonfinite(*tensors(), mask=tw.causal(), softcap=3.0, sinks=torch.zeros(4))
    assert trace.clean and "finite" in str(trace)


@pytest.mark.parametrize("name", ["everything", "varlen-everything", "mask-blocks-heads", "alibi", "sinks-empty-rows"])
def test_right_calls_are_clean_by_the_walk_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs are known to be harmless without walking; here they are walked all the same."""
    monkeypatch.setattr(trace, "_harmless", lambda head: False)
    built = build(BY_NAME[name])
    packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), built.packed or (), strict=False))
    assert found(built.q, built.k, built.v, **built.options, **packed) is None


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_planted_in_q(value: float) -> None:
    q, k, v = tensors()
    q[1, 2, 50, 3] = value
    hit = found(q, k, v, mask=tw.causal())
    assert (hit.batch, hit.head, hit.query_tile, hit.key_tile, hit.step) == (1, 2, 3, 0, "q load")
    assert hit.row == 50


@pytest.mark.parametrize(("name", "step"), [("k", "k load"), ("v", "v load")])
def test_planted_in_a_key_or_a_value(name: str, step: str) -> None:
    q, k, v = tensors()
    (k if name == "k" else v)[1, 1, 70, 0] = NAN
    hit = found(q, k, v, mask=tw.causal())
    # key head 1 serves query heads 2 and 3; the first row that sees key 70 is 70, in query tile 4
    assert (hit.batch, hit.head, hit.query_tile, hit.key_tile, hit.step) == (1, 2, 4, 4, step)
    assert (hit.row, hit.key) == (70, 70)


def test_keys_nobody_sees_do_not_count() -> None:
    q, k, v = tensors()
    k[:, :, 80:], v[:, :, 80:] = NAN, INF
    q[:, :, 90:] = NAN
    padding = tw.key_padding(torch.tensor([80, 80]))
    assert found(q[:, :, :90], k, v, mask=padding) is None
    assert found(q, k, v, mask=padding).step == "q load"


def test_overflow_of_the_scores() -> None:
    q, k, v = tensors()
    q[0, 1, 33], k[0, 0, 20] = 1e30, 1e30  # each can be multiplied by what the others hold, not by one another
    hit = found(q, k, v)
    assert (hit.head, hit.query_tile, hit.key_tile, hit.step) == (1, 2, 1, "score")
    assert (hit.row, hit.key, hit.value) == (33, 20, INF)
    assert found(q, k, v, softcap=10.0) == hit
    assert found(q, k, v, mask=tw.window(5, 5)) is None


def test_the_bias() -> None:
    q, k, v = tensors()
    bias = torch.zeros(1, 4, 100, 100)
    bias[0, 3, 5, 40] = -INF  # masks
    assert found(q, k, v, bias=bias) is None
    bias[0, 3, 17, 40] = INF
    hit = found(q, k, v, bias=bias)
    assert (hit.batch, hit.head, hit.query_tile, hit.key_tile, hit.step, hit.key) == (0, 3, 1, 2, "bias", 40)


def test_overflow_of_the_product_and_of_the_output() -> None:
    q, k, v = tensors()
    v[0, 0, 10:14, 2] = 3e38
    q[0, 0], k[0, 0] = 0.0, 0.0  # equal weights: four of them sum to more than fp32 holds
    hit = found(q, k, v)
    assert (hit.head, hit.query_tile, hit.key_tile, hit.step) == (0, 0, 0, "product")
    q, k, v = tensors(torch.float16)
    sinks = torch.tensor([0.0, 0.0, INF, 0.0])
    hit = found(q, k, v, sinks=sinks)
    assert (hit.head, hit.step, hit.key_tile) == (2, "sink", None)


def test_packed_batches_name_the_sequence() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(90, 2, 8, generator=g) for _ in range(3))
    k[61, 1, 0] = NAN  # position 11 of the second sequence
    cu = torch.tensor([0, 50, 50, 90])
    hit = found(q, k, v, cu_seqlens_q=cu, mask=tw.causal())
    assert (hit.batch, hit.head, hit.key, hit.query_tile, hit.key_tile) == (2, 1, 11, 0, 0)


def test_the_earliest_head_is_named_first() -> None:
    q, k, v = tensors()
    v[1, 0, 0, 0] = NAN
    q[0, 3, 99, 0] = NAN
    hit = found(q, k, v)
    assert (hit.batch, hit.head, hit.step) == (0, 3, "q load")
    assert next(iter(MEANING)) == "q load"
