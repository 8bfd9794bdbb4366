"""Derivatives through the public functions: torch's own checks in float64, for every conformance case at a tiny shape."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.autograd.gradcheck import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import tilewise as tw
from tests.conformance.cases import BY_NAME, CASES, Built, Case, build
from tilewise import dispatch

TINY = 5


LONGER = {"mask-left-padding": 12, "varlen-padding": 64}
"""Masks that count more tokens."""


def tiny(case: Case) -> Case:
    """The case in float64 with few tokens and at most 3 dims."""
    most = LONGER.get(case.name, TINY)
    lengths = case.lengths and tuple(tuple(min(n, most - 1) for n in side) for side in case.lengths)
    return replace(
        case,
        batch=min(case.batch, 2),
        seqlen=min(case.seqlen, most),
        kv_seqlen=None if case.kv_seqlen is None else min(case.kv_seqlen, most + 1),
        head_dim=min(case.head_dim, 3),
        head_dim_v=None if case.head_dim_v is None else min(case.head_dim_v, 2),
        lengths=lengths,
        dtype=torch.float64,
        precision="default",
        magnitude=1.0,
    )


def distinct() -> dict[str, Case]:
    """Every case that is still another one when it is tiny."""
    found: dict[Any, Case] = {}
    for case in map(tiny, CASES):
        if not {"empty", "attack"} & case.tags:
            found.setdefault(replace(case, name="", tags=frozenset()), case)
    return {case.name: case for case in found.values()}


CHECKED = distinct()
FEW = ("plain", "gqa", "softcap", "sinks", "everything", "varlen-everything")


def function(built: Built, backend: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The call as a function of its leaves, and of nothing else; sinks are float64 here, so that differences can be taken."""
    names = ["q", "k", "v", *(n for n in ("bias", "sinks") if isinstance(built.options.get(n), torch.Tensor))]

    def call(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(names, leaves, strict=True))
        tensors = {name: given.pop(name) for name in ("q", "k", "v")}
        return replace(built, **tensors, options={**built.options, **given}).call(backend)

    return call


def prepared(case: Case) -> tuple[Built, list[torch.Tensor]]:
    built = build(case)
    return built, [x.detach().double().requires_grad_() for x in built.leaves]


def rows_seen(out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """An LSE of -inf has no difference quotients; it is constant."""
    return out[0], torch.where(out[1].isinf(), 0.0, out[1])


@pytest.mark.parametrize("name", CHECKED)
def test_first_and_second_derivatives(name: str) -> None:
    built, leaves = prepared(CHECKED[name])
    call = function(built, "tiled")

    def checked(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rows_seen(call(*leaves))

    if not all(x.numel() for x in leaves):
        return
    assert gradcheck(checked, leaves, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(checked, leaves, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", ["sinks"])
def test_in_full_and_in_batches(name: str) -> None:
    """Every entry of the Jacobians; gradients and tangents in batches, as `is_grads_batched` passes them."""
    built, leaves = prepared(tiny(BY_NAME[name]))
    call = function(built, "tiled")
    assert gradcheck(lambda *x: call(*x)[0], leaves, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", CHECKED)
def test_other_backends(name: str, backend: str) -> None:
    if name not in FEW and not os.environ.get("TILEWISE_FUZZ"):
        pytest.skip("TILEWISE_FUZZ is not set")
    built, leaves = prepared(tiny(BY_NAME[name]))
    if not all(x.numel() for x in leaves):
        return
    if not all(dispatch.judge(backend, built.problem, derivative=d).ok for d in ("jvp", "double_backward")):
        pytest.skip(f"{backend} does not serve it")
    call = function(built, backend)
    assert gradcheck(lambda *x: rows_seen(call(*x)), leaves, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(lambda *x: rows_seen(call(*x)), leaves, check_fwd_over_rev=True, fast_mode=True)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V = (drawn(2, 2, 4, 3, seed=i) for i in range(3))
T = tuple(drawn(2, 2, 4, 3, seed=i) for i in range(3, 6))


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return tw.attention(q, k, v, scale=0.5)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT * 0.5, -1) @ v


def energy(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda q, k=K, v=V: attend(q, k, v).pow(2).sum()


def tangent(attend: Callable[..., torch.Tensor], q: torch.Tensor) -> torch.Tensor:
    return jvp(lambda x: attend(x, K, V), (q,), (T[0],))[1]


TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor]], Any]] = {
    "jvp": lambda f: jvp(f, (Q, K, V), T),
    "vjp": lambda f: vjp(f, Q, K, V)[1](T[0]),
    "grad": lambda f: grad(energy(f), (0, 1, 2))(Q, K, V),
    "jacfwd": lambda f: jacfwd(f, (0, 1, 2))(Q, K, V),
    "jacrev": lambda f: jacrev(f, (0, 1, 2))(Q, K, V),
    "hessian": lambda f: hessian(energy(f))(Q),
    "mixed hessian": lambda f: jacfwd(jacrev(energy(f), argnums=1), argnums=0)(Q, K, V),
    "jacrev of jacrev": lambda f: jacrev(jacrev(energy(f)))(Q),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(energy(f)))(Q),
    "grad of grad": lambda f: grad(lambda q: grad(energy(f))(q).pow(2).sum())(Q),
    "jvp of grad": lambda f: jvp(grad(energy(f)), (Q,), (T[0],)),
    "grad of jvp": lambda f: grad(lambda q: tangent(f, q).pow(2).sum())(Q),
    "vmap of grad": lambda f: vmap(grad(lambda q: f(q[None], K[:1], V[:1]).pow(2).sum()))(Q),
    "vmap of jvp": lambda f: vmap(lambda t: jvp(lambda q: f(q, K, V), (Q,), (t,))[1])(torch.stack(T)),
    "jvp of vmap": lambda f: jvp(vmap(lambda q: f(q, K, V)), (torch.stack(T),), (torch.stack(T),)),
    "vmap of vmap": lambda f: vmap(vmap(lambda q, k: f(q, k, V), (0, None)), (None, 0))(torch.stack(T), torch.stack(T)),
    "vmap of hessian": lambda f: vmap(hessian(lambda q: f(q, K, V).pow(2).sum()))(torch.stack(T[:2])),
    "linearize": lambda f: torch.func.linearize(lambda q: f(q, K, V), Q)[1](T[0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    found, expected = (TRANSFORMS[name](f) for f in (ours, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_vjp_after_its_transform_has_ended() -> None:
    with torch.no_grad():
        _, back = vjp(ours, Q, K, V)
    torch.testing.assert_close(back(T[0]), vjp(plain, Q, K, V)[1](T[0]))


def test_through_the_log_sum_exp() -> None:
    def attended(q: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, K, V, return_lse=True)[1].pow(2).sum()

    def exact(q: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(q @ K.mT / 3**0.5, -1).pow(2).sum()

    torch.testing.assert_close(hessian(attended)(Q), hessian(exact)(Q))


def test_a_graph_of_gradients_and_a_dual_level_together() -> None:
    q = Q.clone().requires_grad_()

    def derived(f: Callable[..., torch.Tensor]) -> torch.Tensor:
        with forward_ad.dual_level():
            out = f(forward_ad.make_dual(q, T[0]), K, V)
            moved = forward_ad.unpack_dual(out).tangent
            return torch.autograd.grad(moved.pow(2).sum(), q)[0]

    torch.testing.assert_close(derived(ours), grad(lambda q: tangent(plain, q).pow(2).sum())(Q))


@pytest.mark.parametrize("moving", [False, True], ids=["the upstream stays", "the upstream moves"])
def test_a_second_derivative_computes_nothing_twice(moving: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward, one backward; with a moving upstream gradient one JVP, which the double backward is told of."""
    server, calls = dispatch.get("cpu"), []
    for name in ("forward", "backward", "jvp", "double_backward"):
        method = getattr(server, name)

        def counted(*args: Any, name: str = name, method: Any = method, **options: Any) -> Any:
            calls.append(name)
            return method(*args, **options)

        monkeypatch.setattr(server, name, counted)
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    upstream = T[0].clone().requires_grad_(moving)
    first = torch.autograd.grad(tw.attention(*leaves, backend="cpu"), leaves, upstream, create_graph=True)
    torch.autograd.grad(first, [*leaves, *[upstream] * moving], T)
    inner = ["double_backward", "backward"]  # the double backward is a backward with a direction
    assert calls == ["forward", "backward", *["jvp"] * moving, *inner]


def loop(call: Callable[..., Any], dims: dict[str, int], tensors: dict[str, Any]) -> Any:
    """What vmap means."""
    count = next(tensors[name].shape[dim] for name, dim in dims.items())
    each = [call(**{**tensors, **{n: tensors[n].select(d, i) for n, d in dims.items()}}) for i in range(count)]
    return tuple(torch.stack(parts) for parts in zip(*each, strict=True))


def mapped(call: Callable[..., Any], dims: dict[str, int], tensors: dict[str, Any]) -> Any:
    names = list(tensors)
    by_place = vmap(lambda *x: call(**dict(zip(names, x, strict=True))), tuple(dims.get(n) for n in names))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return by_place(*tensors.values())


ARGUMENTS = ("q", "k", "v", "bias", "sinks", "slopes", "ids", "lengths", "dense")


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.sets(st.sampled_from(ARGUMENTS), min_size=1, max_size=4),
    st.sampled_from([(), ("bias",), ("slopes",)]),
    st.booleans(),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 1),
)
def test_vmap_is_a_loop(which: set[str], term: tuple[str, ...], sinks: bool, dropout_p: float, place: int) -> None:
    """Over any argument, values and gradients: folded into batch or heads, or one by one."""
    n, batch, heads, kv_heads, m, d = 3, 2, 4, 2, 5, 3
    g = torch.Generator().manual_seed(0)
    sizes: dict[str, tuple[int, ...]] = {
        "q": (batch, heads, m, d),
        "k": (batch, kv_heads, m, d),
        "v": (batch, kv_heads, m, 2),
        "bias": (1, heads, m, m),
        "sinks": (heads,),
        "slopes": (heads,),
        "ids": (batch, m),
        "lengths": (batch,),
        "dense": (1, heads, m, m),
    }
    used = {"q", "k", "v", "ids", *term, *(("sinks",) if sinks else ()), *({"lengths", "dense"} & which)}
    dims = {name: min(place, len(sizes[name])) for name in which & used} or {"q": 0}
    tensors: dict[str, Any] = {}
    for name in sorted(used):
        size = list(sizes[name])
        if name in dims:
            size.insert(dims[name], n)
        whole = {"ids": (0, 2), "lengths": (2, m + 1), "dense": (0, 2)}.get(name)
        x = torch.randn(size, generator=g, dtype=torch.float64)
        tensors[name] = x if whole is None else torch.randint(*whole, size, generator=g, dtype=torch.int32)

    def call(q: Any, k: Any, v: Any, ids: Any, lengths: Any = None, dense: Any = None, **terms: Any) -> Any:
        mask = tw.documents(ids)
        mask = mask if lengths is None else mask & tw.key_padding(lengths)
        mask = mask if dense is None else mask | tw.dense(dense > 0)
        slopes = terms.pop("slopes", None)
        options = terms if slopes is None else {**terms, "bias": tw.alibi(slopes.abs())}
        if dropout_p:
            options |= {"dropout_p": dropout_p, "seed": 7}
        return tw.attention(q, k, v, mask=mask, return_lse=True, backend="tiled", **options)

    def gradients(**x: Any) -> Any:
        names = [name for name in ("q", "k", "v", "bias", "sinks") if name in x]

        def scalar(*leaves: Any) -> Any:
            out, lse = call(**{**x, **dict(zip(names, leaves, strict=True))})
            return out.pow(2).sum() + torch.where(lse.isinf(), 0.0, lse).sum()

        return grad(scalar, tuple(range(len(names))))(*(x[name] for name in names))

    for function in (call, gradients):
        for found, expected in zip(mapped(function, dims, tensors), loop(function, dims, tensors), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_vmap_says_why_calls_run_one_by_one() -> None:
    with pytest.warns(RuntimeWarning, match="3 times, one by one: dropout's mask"):
        vmap(lambda q: tw.attention(q, K, V, dropout_p=0.5, seed=1))(torch.stack(T))
    cu = torch.tensor([0, 1, 4])
    packed = torch.stack([x[0].transpose(0, 1) for x in T])
    with pytest.warns(RuntimeWarning, match="packed"):
        found = vmap(lambda x: tw.attention_varlen(x, x, x, cu))(packed)
    assert torch.equal(found[1], tw.attention_varlen(packed[1], packed[1], packed[1], cu))
