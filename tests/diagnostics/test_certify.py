"""certify: right outputs pass whatever the call holds, wrong ones are caught, and the stated probability is the true one."""

from __future__ import annotations

import json
import math

import pytest
import torch

import tilewise as tw
from tests.conformance.cases import BY_NAME, CASES, Case, build
from tilewise.diagnostics.certify import certify
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError
from tilewise.numerics import rows
from tilewise.numerics.rows import Rows, exact_rows

CALLS = [case for case in CASES if not case.name.startswith(("edge", "head-dim", "cross", "more-queries", "mask-not"))]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_right_outputs_are_certified(case: Case) -> None:
    built = build(case)
    out, lse = built.call("tiled")
    packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), built.packed or (), strict=False))
    found = certify(built.q, built.k, built.v, out, lse=lse, rows=40, sample_seed=1, **built.options, **packed)
    assert found.ok, str(found)
    assert found.checked == min(40, found.rows)
    assert found.outside == found.undefined == found.stray == 0
    assert found.used < 1


def example(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 96, 32, generator=g).to(dtype) for _ in range(3))
    out = tw.attention(q, k, v, mask=tw.causal(), backend="tiled")
    assert isinstance(out, torch.Tensor)
    return q, k, v, out


def bound_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, h: int, row: int, column: int) -> float:
    from tilewise.api.parse import parse_call

    problem, inputs = parse_call(q, k, v, {"mask": tw.causal()})
    return float(exact_rows(problem, inputs, Rows(0, h, torch.tensor([row]))).out_bound[0, column])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("h", "row", "column"), [(0, 0, 0), (1, 50, 31), (1, 95, 7)])
def test_one_element_off_by_twice_its_bound_is_caught(dtype: torch.dtype, h: int, row: int, column: int) -> None:
    q, k, v, out = example(dtype)
    assert certify(q, k, v, out, mask=tw.causal(), rows="all").ok
    # a little more than twice, so that rounding the corrupted element to its dtype does not bring it back
    moved = 2.05 * bound_of(q, k, v, h, row, column) + 2 * torch.finfo(dtype).eps * float(out[0, h, row, column].abs())
    out[0, h, row, column] += moved
    found = certify(q, k, v, out, mask=tw.causal(), rows="all")
    assert not found.ok and found.outside == 1
    worst = found.worst[0]
    assert (worst.batch, worst.head, worst.row, worst.column) == (0, h, row, column)


def test_two_swapped_rows_are_caught() -> None:
    q, k, v, out = example(torch.bfloat16)
    out[0, 1, [40, 41]] = out[0, 1, [41, 40]]
    found = certify(q, k, v, out, mask=tw.causal(), rows="all")
    assert not found.ok and found.outside == 2
    assert {(f.head, f.row) for f in found.worst[:2]} == {(1, 40), (1, 41)}


def test_the_wrong_mask_is_caught_in_a_sample() -> None:
    q, k, v, out = example()
    assert not certify(q, k, v, out, mask=tw.causal() & tw.window(20), rows=10).ok
    assert not certify(q, k, v, out, mask=tw.causal(), softcap=1.0, rows=10).ok


def test_what_no_mean_can_be_is_caught_outside_the_sample() -> None:
    q, k, v, out = example()
    for value in (float("nan"), float("inf"), 100.0):
        bad = out.clone()
        bad[0, 0, 50, 3] = value
        found = certify(q, k, v, bad, mask=tw.causal(), rows=1, sample_seed=0)
        assert found.stray == 1 and not found.ok


def test_inputs_that_are_not_finite_are_not_held_against_the_output() -> None:
    q, k, v, _ = example()
    for value in (float("nan"), float("inf"), float("-inf")):
        spoiled = v.clone()
        spoiled[0, 1, 90] = value  # rows from 90 on of head 1 have no finite output
        out = tw.attention(q, k, spoiled, mask=tw.causal(), backend="reference")
        found = certify(q, k, spoiled, out, mask=tw.causal(), rows="all")  # type: ignore[arg-type]
        assert found.stray is None and found.undefined >= 6
    bias = torch.zeros(96, 96)
    bias[:, 5] = float("-inf")  # masks, and is no fault
    out = tw.attention(q, k, v, bias=bias, backend="tiled")
    assert certify(q, k, v, out, bias=bias, rows=20).stray == 0  # type: ignore[arg-type]


def test_the_stated_probability_is_how_often_it_happens() -> None:
    q, k, v, out = example()
    out[0, 0, 60] += 0.01  # three wrong rows, too little for the screen
    out[0, 1, 20] += 0.01
    out[0, 1, 21] -= 0.01
    trials = 120
    found = [certify(q, k, v, out, mask=tw.causal(), rows=48, sample_seed=seed) for seed in range(trials)]
    stated = found[0].detection(3)
    total, checked = 192, 48
    assert stated == pytest.approx(1 - math.comb(total - 3, checked) / math.comb(total, checked))
    caught = sum(not certificate.ok for certificate in found) / trials
    assert abs(caught - stated) < 4 * math.sqrt(stated * (1 - stated) / trials)


def test_resolution_is_the_fewest_rows_noticed() -> None:
    q, k, v, out = example()
    found = certify(q, k, v, out, mask=tw.causal(), rows=0.25)
    assert found.checked == 48
    least = found.resolution(0.99)
    assert found.detection(least) >= 0.99 > found.detection(least - 1)


def test_a_seed_repeats_the_sample_and_none_draws_afresh() -> None:
    q, k, v, out = example()
    once, again = (certify(q, k, v, out, mask=tw.causal(), rows=3, sample_seed=5) for _ in range(2))
    assert once.worst == again.worst
    seeds = {certify(q, k, v, out, mask=tw.causal(), rows=1).sample_seed for _ in range(3)}
    assert len(seeds) == 3


def test_extra_memory_does_not_grow_with_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor made for the rows holds one chunk of keys, however many keys there are."""
    largest: list[int] = []
    whole = rows._pieces

    def watched(*given: object):  # type: ignore[no-untyped-def]
        for piece in whole(*given):  # type: ignore[arg-type]
            largest.append(max(x.numel() for x in (piece.k, piece.v, piece.seen)))
            yield piece

    monkeypatch.setattr(rows, "_pieces", watched)
    peaks = {}
    for n in (2048, 8192):
        g = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 1, n, 8, generator=g) for _ in range(3))
        out = tw.attention(q, k, v, backend="tiled")
        largest.clear()
        assert certify(q, k, v, out, rows=8, sample_seed=0).ok  # type: ignore[arg-type]
        peaks[n] = max(largest)
    assert peaks[2048] == peaks[8192]


def test_it_speaks() -> None:
    q, k, v, out = example()
    for rows_ in (5, "all"):
        found = certify(q, k, v, out, mask=tw.causal(), rows=rows_)  # type: ignore[arg-type]
        json.dumps(found.to_dict(), allow_nan=False)
        assert "<table" in found._repr_html_() and "✓" in found._repr_html_()
        assert "✓ Certified: " in str(found)
    out[0, 0, 3, 0] = 7.0
    assert "✗ NOT certified: " in str(certify(q, k, v, out, mask=tw.causal(), rows="all"))


def test_wrong_arguments_are_refused() -> None:
    q, k, v, out = example()
    with pytest.raises(LayoutError, match="out: shape"):
        certify(q, k, v, out[:, :1])
    with pytest.raises(ArgumentError, match="rows"):
        certify(q, k, v, out, rows=0)
    with pytest.raises(ArgumentError, match="seed"):
        certify(q, k, v, out, dropout_p=0.1)
    with pytest.raises(ArgumentTypeError, match="windw"):
        certify(q, k, v, out, windw=3)  # type: ignore[call-arg]


def test_empty_rows_and_no_rows() -> None:
    built = build(BY_NAME["sinks-empty-rows"])
    out, _ = built.call("tiled")
    assert certify(built.q, built.k, built.v, out, rows="all", **built.options).ok
    none = torch.zeros(1, 2, 0, 8)
    assert certify(none, none, none, none).ok
