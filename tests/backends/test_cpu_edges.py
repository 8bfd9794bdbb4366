"""Where tiles end: keys past a block, rows past the last query, rows and keys that see nothing, with every kind of kernel.

A block of the backward begins where its rows' keys do, not at a multiple of a panel, and a strip is padded past the last query.
What stands there is real memory, or the next block's: it must take no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

import tests.backends.plain_tiles  # noqa: F401 - the unit "plain"
import tilewise as tw
from tests.backends.test_cpu_memory import forget, pretend
from tests.conformance.cases import Built, inside
from tests.conformance.harness import excesses
from tilewise.backends.cpu import plan
from tilewise.masks import Mask
from tilewise.numerics.oracle import pieces

MASKS: dict[str, Callable[[int, int], Mask]] = {
    "window": lambda m, n: tw.window(1),
    "not-window": lambda m, n: ~tw.window(3, 2) & tw.prefix(n - 1),
    "not-causal": lambda m, n: ~tw.causal(offset=n // 2),
    "padding-start": lambda m, n: tw.key_padding(torch.tensor([n - 5]), torch.tensor([3])),
    "offsets": lambda m, n: tw.window(9, 3, offset=torch.tensor([n // 2 - 3])),
    "causal-or-range": lambda m, n: tw.causal(offset=5) | ~tw.prefix(n // 2 + 2),
    "blocks": lambda m, n: tw.blocks((torch.arange(-(-n // 24)) % 2 == 1).repeat(-(-m // 24), 1), 24),
    "documents": lambda m, n: tw.documents(torch.arange(n) // 12, q_ids=torch.arange(m) // 5 + 2),
}
LENGTHS = [(1, 30), (7, 129), (7, 131)]
KINDS = [(name, "host") for name in MASKS]
KINDS += [(name, kind) for name in ("offsets", "causal-or-range") for kind in ("avx512", "matrix")]
kinds = pytest.mark.parametrize(("name", "kind"), KINDS)


def prepare(monkeypatch: pytest.MonkeyPatch, kind: str) -> torch.dtype:
    """Plan for another processor, or for matrix tiles; the dtype that its kernels are made for."""
    if kind in ("avx2", "avx512"):
        pretend(monkeypatch, kind)
    if kind == "matrix":
        forget(monkeypatch)
        monkeypatch.setattr(plan, "matrix_unit", lambda problem, kind, spec: "plain" if kind in plan.MATRIX_KINDS else "")
    return torch.bfloat16 if kind == "matrix" else torch.float32


def draw(lengths: tuple[int, int], dtype: torch.dtype, far: float = 0.0, **options: Any) -> Built:
    """A call whose scores are all near -far."""
    g = torch.Generator().manual_seed(0)
    along = torch.ones(16) / 4 * (far * 4) ** 0.5
    q, k, v = (torch.randn(1, heads, n, 16, generator=g) for heads, n in ((2, lengths[0]), (1, lengths[1]), (1, lengths[1])))
    if far:
        q, k = 0.05 * q + along, 0.05 * k - along
    return made(*(x.to(dtype) for x in (q, k, v)), **options)


def made(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Built:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return Built(*leaves, None, options, *inside(*leaves, None, options))


def spoiled(built: Built, garbage: float) -> Built:
    """`garbage` in keys nobody sees and in rows that see nothing."""
    unseen = torch.ones_like(built.k[..., :1], dtype=torch.bool)
    blind = torch.ones_like(built.q[..., :1], dtype=torch.bool)
    for piece in pieces(built.problem, built.inputs):
        unseen[piece.cols] = ~piece.seen.unflatten(0, (-1, built.problem.group)).any(1).any(1)[..., None]
        blind[piece.rows] = ~piece.seen.any(-1, keepdim=True)
    assert unseen.any() or blind.any()
    k, v = (x.masked_fill(unseen, garbage) for x in (built.k, built.v))
    return made(built.q.masked_fill(blind, garbage), k, v, **built.options)


@kinds
def test_keys_past_a_block_take_no_part(monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    """In dBias, and where the log-sum-exp is near -90 and a weight of zero scores would be infinite, in dQ."""
    dtype = prepare(monkeypatch, kind)
    for lengths in LENGTHS:
        mask = MASKS[name](*lengths)
        bias = torch.randn(1, 2, *lengths, generator=torch.Generator().manual_seed(1)).requires_grad_()
        assert excesses(draw(lengths, dtype, mask=mask, bias=bias), "cpu") == [], lengths
        assert excesses(draw(lengths, dtype, far=90.0, mask=mask), "cpu") == [], lengths


@kinds
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_what_nobody_sees_reaches_nothing(monkeypatch: pytest.MonkeyPatch, name: str, kind: str, biased: bool) -> None:
    """Nor what rows hold that see nothing, though a sink gives them a log-sum-exp."""
    dtype = prepare(monkeypatch, kind)
    for garbage, lengths in zip((math.nan, math.inf, -math.inf), LENGTHS, strict=True):
        options: dict[str, Any] = {"mask": MASKS[name](*lengths), "sinks": torch.randn(2).requires_grad_()}
        if biased:
            bias = torch.randn(1, 2, *lengths, generator=torch.Generator().manual_seed(1))
            bias[..., ::3] = -math.inf
            options["bias"] = bias.requires_grad_()
        assert excesses(spoiled(draw(lengths, dtype, **options), garbage), "cpu", lse_gradient=True) == [], lengths


@pytest.mark.parametrize("sinks", [False, True])
def test_bands_side_by_side_see_nothing(sinks: bool) -> None:
    """Each alone sees keys, and their hull is not empty; no row sees a key of both."""
    near, far = tw.window(2, align="top_left"), tw.window(2, offset=torch.tensor([9]))
    for mask in (near & far, near & tw.window(2)):
        options: dict[str, Any] = {"sinks": torch.zeros(2).requires_grad_()} if sinks else {}
        built = spoiled(draw((32, 40), torch.float32, mask=mask, **options), math.nan)
        assert excesses(built, "cpu", lse_gradient=sinks) == []


@pytest.mark.parametrize("kind", ["host", "matrix"])
@pytest.mark.parametrize("magnitude", [1e6, 1e10, 1e18])
def test_gradients_of_scores_far_from_zero(monkeypatch: pytest.MonkeyPatch, magnitude: float, kind: str) -> None:
    """The log-sum-exp is off by many units there. A weight is never above 1 all the same, and no gradient is NaN."""
    built = draw((40, 70), prepare(monkeypatch, kind), mask=tw.causal())
    q, k, v = made(magnitude * built.q, built.k, built.v).leaves
    out = tw.attention(q, k, v, mask=tw.causal(), backend="cpu")
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert dq.isfinite().all() and dk.isfinite().all()
    assert (dv >= 0).all() and (dv <= 2 * 40 * 1.01).all(), "two heads of 40 rows, weights from 0 to 1"
