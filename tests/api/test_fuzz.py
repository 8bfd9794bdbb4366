"""The whole argument space, drawn at random and held to the fp64 oracle: forward, log-sum-exp and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.conformance.cases import Built, inside
from tests.conformance.harness import BACKENDS, excesses, serves
from tests.masks.expressions import CALLED, Batch, expressions
from tilewise.backends.tiled import plan as tiled
from tilewise.errors import MaskError

Draw = Callable[[st.SearchStrategy[Any]], Any]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]
LENGTHS = st.one_of(st.integers(0, 5), st.integers(1, 80), st.sampled_from([31, 32, 33, 63, 64, 65]))


def _tensor(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, factor: float = 1.0) -> torch.Tensor:
    """Random numbers in memory of a random order, sometimes the middle of something larger."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    order = draw(st.permutations(range(len(shape))))
    margin = draw(st.sampled_from([0, 0, 1]))
    memory = torch.randn([shape[axis] + 2 * margin for axis in order], generator=g) * factor
    view = memory.to(dtype).permute([order.index(axis) for axis in range(len(shape))])
    for axis in range(len(shape)):
        view = view.narrow(axis, margin, shape[axis])
    return view.requires_grad_()


def _bias(draw: Draw, batch: Batch, dtype: torch.dtype) -> Any:
    sizes = (len(batch.lengths), batch.heads, *batch.longest)
    kind = draw(st.sampled_from(["none", "none", "tensor", "holes", "alibi"]))
    if kind == "alibi":
        rank = draw(st.sampled_from([1, 2]))
        return tw.alibi(torch.rand(sizes[2 - rank : 2], generator=torch.Generator().manual_seed(0)))
    if kind == "none":
        return None
    sides = tuple(draw(st.sampled_from([1, size])) for size in sizes)
    while len(sides) > 1 and sides[0] == 1 and draw(st.booleans()):
        sides = sides[1:]
    bias = _tensor(draw, sides, draw(st.sampled_from([torch.float32, dtype])))
    if kind == "holes":
        with torch.no_grad():
            bias[torch.rand(bias.shape, generator=torch.Generator().manual_seed(1)) < 0.2] = float("-inf")
    return bias


@st.composite
def calls(draw: Draw) -> tuple[Built, bool]:
    """A call with everything in it that may be, and whether the log-sum-exp gets a gradient."""
    packed = draw(st.booleans())
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    count = draw(st.integers(1, 3))
    square = draw(st.booleans())
    pairs = [(n, n if square else draw(LENGTHS)) for n in (draw(LENGTHS) for _ in range(count))]
    batch = Batch(kv_heads * group, tuple(pairs if packed else pairs[:1] * count), packed)
    dtype = draw(st.sampled_from(DTYPES))
    dim, dim_v = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    layout = draw(st.sampled_from(["bhsd", "bshd"]))
    _, heads, total_q, total_k = batch.shape

    def shape(h: int, s: int, d: int) -> tuple[int, ...]:
        if packed:
            return s, h, d
        return (count, s, h, d) if layout == "bshd" else (count, h, s, d)

    q = _tensor(draw, shape(heads, total_q, dim), dtype, draw(st.sampled_from([0.1, 1.0, 1.0, 30.0])))
    k = _tensor(draw, shape(kv_heads, total_k, dim), dtype)
    v = _tensor(draw, shape(kv_heads, total_k, dim_v), dtype)
    options: dict[str, Any] = {
        "scale": draw(st.sampled_from([None, None, 0.5, -0.3, 0.0, 2])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0, 30.0])),
        "precision": draw(st.sampled_from(["default", "default", "default", "tf32", "compensated", "double"])),
        "deterministic": draw(st.sampled_from([None, True, False])),
        "bias": _bias(draw, batch, dtype),
    }
    if draw(st.booleans()):
        drawn = draw(expressions(batch, depth=2, leaves=CALLED))
        options["mask"] = drawn.mask
        note(f"mask {drawn}")
    if draw(st.sampled_from([False, False, True])):
        options["sinks"] = _tensor(draw, (heads,), draw(st.sampled_from([torch.float32, dtype])))
    if draw(st.sampled_from([False, False, True])):
        options |= {"dropout_p": draw(st.sampled_from([0.1, 0.5, 0.9])), "seed": draw(st.integers(-(2**63), 2**63 - 1))}
    if layout == "bshd" and not packed:
        options["layout"] = layout
    starts = None
    if packed:
        starts = tuple(torch.tensor([0, *side]).cumsum(0) for side in zip(*batch.lengths, strict=True))
    problem, inputs = inside(q, k, v, starts, options)
    return Built(q, k, v, starts, options, problem, inputs), draw(st.booleans())


COMPILED = {"cpu"}
"""Backends that compile a kernel for each kind of call: fewer examples take as long."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_call_is_exact(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(
        max_examples=25 if backend in COMPILED else 70,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
    )
    @given(data=st.data())
    def hold(data: st.DataObject) -> None:
        monkeypatch.setattr(tiled, "TILE_BYTES", data.draw(st.sampled_from([1, 1 << 20])))
        try:
            built, lse_gradient = data.draw(calls())
        except MaskError as error:
            assert "alternatives" in str(error)
            return
        if not serves(built, backend):
            assert excesses(built, backend, lse_gradient=lse_gradient) == []

    hold()
