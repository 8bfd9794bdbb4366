"""Numbers at the ends of their ranges: biases and sinks as large as they can be, offsets beyond every length, tiny values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.conformance.cases import Built, inside
from tests.conformance.harness import excesses
from tests.numerics import checks
from tilewise.masks import Mask

backends = pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
INF = math.inf


@pytest.fixture(autouse=True)
def cpu_kernels(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params.get("backend") == "cpu":
        pytest.importorskip("llvmlite")


def draw(dtype: torch.dtype, queries: int, keys: int, **options: Any) -> Built:
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 2, n, 16, generator=g).to(dtype).requires_grad_() for n in (queries, keys, keys)]
    return Built(*leaves, None, options, *inside(*leaves, None, options))


@backends
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_bias_as_far_as_can_be(backend: str, dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    """Models write masks with the least number there is. Over a whole row it hides nothing: the row is a mean."""
    info = torch.finfo(bias_dtype)
    bias = torch.randn(37, 70, generator=torch.Generator().manual_seed(1)).to(bias_dtype)
    bias[:, 3:6] = info.min  # a mask
    bias[1], bias[2] = info.min, info.max
    bias[4], bias[4, ::2] = -INF, info.min  # the least of what is left
    bias[5], bias[5, 7] = info.min, info.max
    bias[6], bias[6, 40:] = info.min, info.min / 8
    built = draw(dtype, 37, 70, bias=bias.requires_grad_())
    if bias_dtype != torch.float64:  # bounds are float64 themselves
        assert excesses(built, backend) == []
    out, lse = built.call(backend)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), built.leaves))
    v = built.v.double()
    for row, seen in ((1, slice(None)), (2, slice(None)), (4, slice(None, None, 2)), (5, slice(7, 8)), (6, slice(40, None))):
        if row == 6 and torch.finfo(bias_dtype).max > torch.finfo(dtype).max:
            continue  # both are the least number of the arithmetic
        torch.testing.assert_close(out[:, :, row].double(), v[:, :, seen].mean(2), rtol=1e-2, atol=1e-2)
    assert lse.isfinite().all()


@backends
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("sink", [INF, 3e38, 2.4e38, -3e38, -INF], ids=str)
def test_a_sink_as_far_as_can_be(backend: str, sink: float, queries: int) -> None:
    """A sink above every score takes all weight and is the log-sum-exp; one far below takes none, but of rows without keys."""
    sinks = torch.tensor([sink, 0.5]).requires_grad_()
    mask = tw.causal(offset=-3) if queries > 1 else tw.full()  # the first rows see nothing
    built = draw(torch.float32, queries, 30, sinks=sinks, mask=mask)
    assert excesses(built, backend) == []
    out, lse = built.call(backend)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    assert all(x.isfinite().all() for x in torch.autograd.grad([out, lse], built.leaves, [dout, dlse]))
    if sink > 0:
        assert (out[:, 0] == 0).all() and (lse[:, 0] == sinks.detach()[0]).all()
    elif queries > 1:
        assert (lse[:, 0, :3] == sinks.detach()[0]).all()


@backends
@pytest.mark.parametrize("offset", [2**30 - 1, 2**30, 2**31 - 1, -(2**30) + 1, -(2**31)])
def test_offsets_beyond_every_length(backend: str, offset: int) -> None:
    """An open side of a band stays open: all keys are seen, or none."""
    offsets = torch.tensor([offset])
    for mask, sees_all in (
        (tw.causal(offset=offsets), offset > 0),
        (~tw.causal(offset=offsets), offset < 0),
        (tw.window(2**30, 0, offset=offsets), offset > 0),
    ):
        out, lse = draw(torch.float32, 9, 30, mask=mask).call(backend)
        want = draw(torch.float32, 9, 30, mask=tw.full() if sees_all else ~tw.full()).call(backend)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


@pytest.mark.parametrize("mask", [None, tw.causal()], ids=["full", "causal"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-20), (torch.float32, 1e-30), (torch.float64, 1e-290)])
def test_tiny_values_keep_their_digits(dtype: torch.dtype, size: float, mask: Mask | None) -> None:
    """Scores near -27, where the bound |q| |k| is 27: weights relative to it are 2**-78. One tiny column is enough."""
    pytest.importorskip("llvmlite")
    g = torch.Generator().manual_seed(0)
    along = torch.ones(16) / 4 * (27 * 4) ** 0.5
    q, k, v = (torch.randn(1, 2, n, 16, generator=g) for n in (40, 70, 70))
    q, k, v = (x.to(dtype) for x in (0.05 * q + along, 0.05 * k - along, v))
    v[..., 3:5] *= size
    v[..., 7] = 0.0
    options = {} if mask is None else {"mask": mask}
    out, lse = tw.attention(q, k, v, backend="cpu", return_lse=True, **options)  # type: ignore[arg-type]
    problem, inputs = inside(q, k, v, None, options)
    assert checks.check_forward(problem, inputs, out, lse) == []
    assert tw.certify(q, k, v, out, **options).ok  # type: ignore[arg-type]
