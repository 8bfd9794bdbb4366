"""The oracle against torch's own attention and against loops, and where nothing or rubbish is to be seen."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.numerics.emulation import Case, make_case
from tilewise.masks import blocks, causal, dense, documents, key_padding, prefix, window
from tilewise.numerics.oracle import Gradients, oracle, oracle_gradients, pieces
from tilewise.numerics.philox import keep_tile

NAN, INF = float("nan"), float("inf")
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def by_loops(case: Case, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Every feature, one row at a time, from the definition."""
    problem = case.problem
    b, h, m, n = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    visible = visible.expand(b, h, m, n)
    out, lse = torch.zeros(b, h, m, problem.head_dim_v, dtype=torch.float64), torch.zeros(b, h, m, dtype=torch.float64)
    keep = torch.ones(b, h, m, n, dtype=torch.bool)
    if case.seed is not None:
        keep = keep_tile(case.seed, problem.dropout_p, range(b), range(h), range(m), range(n))
    for x in range(b):
        for y in range(h):
            keys, values = (t[x, y // problem.group].double() for t in (case.k, case.v))
            for i in range(m):
                s = problem.scale * keys @ case.q[x, y, i].double()
                if problem.softcap:
                    s = problem.softcap * torch.tanh(s / problem.softcap)
                if case.bias is not None:
                    s = s + case.bias.double().expand(b, h, m, n)[x, y, i]
                if case.alibi is not None:
                    s = s - case.alibi.double().expand(b, h)[x, y] * (i + n - m - torch.arange(n)).abs()
                terms = [math.exp(s[j]) if visible[x, y, i, j] else 0.0 for j in range(n)]
                l = sum(terms) + (math.exp(case.sinks[y]) if case.sinks is not None else 0.0)
                lse[x, y, i] = math.log(l) if l else -INF
                for j, term in enumerate(terms):
                    if term and keep[x, y, i, j]:
                        out[x, y, i] += term / l / (1 - problem.dropout_p) * values[j]
    return out, lse


FEATURES: dict[str, tuple[dict[str, Any], Tensor]] = {
    "plain": ({}, torch.ones(6, 9, dtype=torch.bool)),
    "causal": ({"mask": causal()}, torch.ones(6, 9, dtype=torch.bool).tril(3)),
    "top left": ({"mask": causal(align="top_left")}, torch.ones(6, 9, dtype=torch.bool).tril()),
    "window": ({"mask": window(2)}, torch.ones(6, 9, dtype=torch.bool).tril(3).triu(2)),
    "prefix": ({"mask": causal() | prefix(8)}, torch.ones(6, 9, dtype=torch.bool).tril(3) | (torch.arange(9) < 8)),
    "padding": (
        {"mask": key_padding([0, 4])},
        (torch.arange(9) < torch.tensor([0, 4])[:, None])[:, None, None, :],
    ),
    "documents": (
        {"mask": documents(torch.arange(9) // 3, torch.arange(6) // 2)},
        (torch.arange(6) // 2)[:, None] == torch.arange(9) // 3,
    ),
    "blocks": (
        {"mask": blocks(torch.eye(3, dtype=torch.bool), (2, 3))},
        torch.eye(3, dtype=torch.bool).kron(torch.ones(2, 3)),
    ),
    "dense": ({"mask": dense(torch.arange(24).view(4, 6, 1) % 5 > 1)}, torch.arange(24).view(4, 6, 1) % 5 > 1),
    "softcap, bias, sinks": (
        {"softcap": 2.0, "bias": (2, 1, 6, 9), "sinks": True, "scale": -0.7},
        torch.ones(6, 9, dtype=torch.bool),
    ),
    "alibi, dropout, causal": (
        {"alibi": True, "dropout_p": 0.4, "mask": causal()},
        torch.ones(6, 9, dtype=torch.bool).tril(3),
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_equals_the_definition(name: str) -> None:
    features, visible = FEATURES[name]
    case = make_case("float32", 6, 9, 8, head_dim_v=5, **features)
    for got, want in zip(oracle(case.problem, case), by_loops(case, visible.bool()), strict=True):
        torch.testing.assert_close(got, want, **TIGHT)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_equals_sdpa_in_float64_on_the_quantised_inputs(dtype: str) -> None:
    case = make_case(dtype, 17, 23, 16, head_dim_v=8)
    leaves = [x.double().requires_grad_() for x in (case.q, case.k, case.v)]
    want = scaled_dot_product_attention(*leaves, enable_gqa=True)
    want.backward(case.dout.double())
    torch.testing.assert_close(oracle(case.problem, case)[0], want.detach(), **TIGHT)
    grads = oracle_gradients(case.problem, case, case.dout)
    for got, leaf in zip(grads[:3], leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(got, leaf.grad, **TIGHT)
    assert grads.dbias is None and grads.dsinks is None


def test_gradcheck() -> None:
    features = {"softcap": 3.0, "bias": (1, 2, 1, 5), "sinks": True, "dropout_p": 0.3, "mask": causal(), "heads": 2}
    case = make_case("float64", 4, 5, 3, batch=1, kv_heads=1, **features)
    names = ("q", "k", "v", "bias", "sinks")

    def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return oracle(case.problem, case._replace(**dict(zip(names, leaves, strict=True))))

    assert torch.autograd.gradcheck(call, [getattr(case, name).requires_grad_() for name in names])


def packed(cases: list[Case], **features: Any) -> Case:
    """The same sequences, one behind the other."""
    first = cases[0]

    def pack(name: str) -> Tensor:
        return torch.cat([getattr(case, name) for case in cases], dim=2)

    def offsets(name: str) -> Tensor:
        lengths = [getattr(case, name).shape[2] for case in cases]
        return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)

    whole = make_case("float32", sum(c.q.shape[2] for c in cases), sum(c.k.shape[2] for c in cases), 8, varlen=True,
                      **{**features, "batch": len(cases)})  # fmt: skip
    tensors = {name: pack(name) for name in ("q", "k", "v", "dout", "dlse")}
    return whole._replace(**tensors, alibi=first.alibi, sinks=first.sinks, cu_q=offsets("q"), cu_k=offsets("k"))


def test_packed_sequences_are_independent() -> None:
    features = {"mask": causal() & window(3), "alibi": True, "sinks": True, "softcap": 4.0}
    lengths = [(3, 5), (0, 4), (6, 6), (2, 0), (5, 2)]
    cases = [make_case("float32", m, n, 8, batch=1, seed=i, **features) for i, (m, n) in enumerate(lengths)]
    cases = [case._replace(alibi=cases[0].alibi, sinks=cases[0].sinks) for case in cases]
    whole = packed(cases, **features)
    alone = [oracle(case.problem, case) for case in cases]
    for got, want in zip(oracle(whole.problem, whole), zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(got, torch.cat(want, dim=2), **TIGHT)
    grads = oracle_gradients(whole.problem, whole, whole.dout, whole.dlse)
    apart = [oracle_gradients(case.problem, case, case.dout, case.dlse) for case in cases]
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(grads, name), torch.cat([getattr(g, name) for g in apart], dim=2), **TIGHT)
    torch.testing.assert_close(grads.dsinks, torch.stack([g.dsinks for g in apart]).sum(0), **TIGHT)  # type: ignore[arg-type]


def test_packed_dropout_and_masks_count_within_the_sequence() -> None:
    """Sequence 1 of a packed batch draws what sequence 1 of a rectangular one draws."""
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 6, 6, 6]])
    square = make_case("float32", 6, 6, 8, dropout_p=0.5, mask=documents(ids) & key_padding([6, 4]))
    rows = [square._replace(q=square.q[b : b + 1], k=square.k[b : b + 1], v=square.v[b : b + 1],
                            dout=square.dout[b : b + 1], dlse=square.dlse[b : b + 1]) for b in range(2)]  # fmt: skip
    whole = packed(rows, dropout_p=0.5, mask=documents(ids.flatten()) & key_padding([6, 4]))
    out, lse = oracle(square.problem, square)
    got = oracle(whole.problem, whole._replace(seed=square.seed))
    torch.testing.assert_close(got[0], torch.cat([out[:1], out[1:]], dim=2), **TIGHT)
    torch.testing.assert_close(got[1], torch.cat([lse[:1], lse[1:]], dim=2), **TIGHT)


def all_finite(grads: Gradients) -> bool:
    return all(bool(grad.isfinite().all()) for grad in grads if grad is not None)


@pytest.mark.parametrize("sinks", [False, True])
def test_empty_rows(sinks: bool) -> None:
    case = make_case("float32", 6, 3, 8, mask=causal(), bias=(1, 1, 6, 3), sinks=sinks)
    assert case.bias is not None
    case.bias[0, 0, 4] = -INF
    out, lse = oracle(case.problem, case)
    empty = [0, 1, 2, 4]
    assert (out[:, :, empty] == 0).all() and (out[:, :, [3, 5]] != 0).all()
    expected = case.sinks.double()[:, None].expand(2, 4, 4) if case.sinks is not None else torch.full((2, 4, 4), -INF)
    torch.testing.assert_close(lse[:, :, empty], expected, check_dtype=False)
    grads = oracle_gradients(case.problem, case, case.dout, case.dlse)
    assert all_finite(grads)
    assert (grads.dq[:, :, empty] == 0).all() and grads.dbias is not None and (grads.dbias[0, 0, empty] == 0).all()


def test_bias_of_minus_infinity_is_a_mask() -> None:
    case = make_case("float32", 6, 9, 8, bias=(2, 4, 6, 9))
    hidden = torch.rand(2, 4, 6, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    assert case.bias is not None
    by_bias = case._replace(bias=case.bias.masked_fill(hidden, -INF))
    by_mask = make_case("float32", 6, 9, 8, bias=(2, 4, 6, 9), mask=dense(~hidden))
    for got, want in zip(oracle(case.problem, by_bias), oracle(by_mask.problem, by_mask), strict=True):
        torch.testing.assert_close(got, want, **TIGHT)
    grads = oracle_gradients(case.problem, by_bias, case.dout, case.dlse)
    assert all_finite(grads) and grads.dbias is not None and (grads.dbias[hidden] == 0).all()


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF])
def test_what_nobody_sees_never_arrives(rubbish: float) -> None:
    case = make_case("float32", 6, 9, 8, mask=key_padding([7, 5]))
    clean, grads = oracle(case.problem, case), oracle_gradients(case.problem, case, case.dout, case.dlse)
    for b, length in enumerate((7, 5)):
        case.k[b, :, length:], case.v[b, :, length:] = rubbish, rubbish
    for got, want in zip(oracle(case.problem, case), clean, strict=True):
        assert torch.equal(got, want)
    for got_grad, want_grad in zip(
        oracle_gradients(case.problem, case, case.dout, case.dlse)[:3], grads[:3], strict=True
    ):
        assert torch.equal(got_grad, want_grad)


@pytest.mark.parametrize("rubbish", [NAN, INF])
def test_rows_that_see_nothing_pass_nothing_on(rubbish: float) -> None:
    case = make_case("float32", 6, 3, 8, mask=causal())
    grads = oracle_gradients(case.problem, case, case.dout)
    case.q[:, :, :3], case.dout[:, :, :3] = rubbish, rubbish
    for got, want in zip(oracle_gradients(case.problem, case, case.dout)[:3], grads[:3], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("logit", [1e4, -1e4])
def test_huge_logits(logit: float) -> None:
    case = make_case("float64", 5, 7, 4, mask=causal(), bias=(1, 1, 1, 1))
    shifted = case._replace(bias=torch.full((1, 1, 1, 1), logit, dtype=torch.float64))
    plain = case._replace(bias=torch.zeros(1, 1, 1, 1, dtype=torch.float64))
    out, lse = oracle(case.problem, plain)
    got = oracle(case.problem, shifted)
    torch.testing.assert_close(got[0], out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got[1], lse + logit, rtol=1e-10, atol=0)
    assert all_finite(oracle_gradients(case.problem, shifted, case.dout, case.dlse))


@pytest.mark.parametrize(("batch", "m", "n"), [(2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 4, 4)])
def test_nothing_to_compute(batch: int, m: int, n: int) -> None:
    case = make_case("float32", m, n, 8, batch=batch, sinks=True)
    out, lse = oracle(case.problem, case)
    assert out.shape == (batch, 4, m, 8) and (out == 0).all() and lse.shape == (batch, 4, m)
    grads = oracle_gradients(case.problem, case, case.dout, case.dlse)
    assert grads.dq.shape == case.q.shape and grads.dk.shape == case.k.shape and all_finite(grads)


def test_heads_may_be_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("float32", 6, 9, 8, mask=causal(), alibi=True, sinks=True, bias=(1, 4, 1, 9), dropout_p=0.2)
    whole, grads = oracle(case.problem, case), oracle_gradients(case.problem, case, case.dout, case.dlse)
    monkeypatch.setattr(import_module("tilewise.numerics.oracle"), "PIECE_ELEMENTS", 1)
    assert len(list(pieces(case.problem, case))) == 4
    for got, want in zip(oracle(case.problem, case), whole, strict=True):
        torch.testing.assert_close(got, want, **TIGHT)
    for name in Gradients._fields:
        got = getattr(oracle_gradients(case.problem, case, case.dout, case.dlse), name)
        torch.testing.assert_close(got, getattr(grads, name), **TIGHT)
