"""Calls over a cache under torch.compile: operators, their mutations, and a generation loop in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tests.cache.caches import Built, build
from tilewise.api import cached_operators
from tilewise.errors import DerivativeError

ANGLES = torch.arange(64)[:, None] * torch.rand(16, generator=torch.Generator().manual_seed(1))
ROTARY = tw.rotary(ANGLES.cos(), ANGLES.sin())
PARENTS = torch.tensor([[-1, 0, 0, 1]])
CASES: dict[str, dict[str, Any]] = {
    "csr": {"csr": True, "page": 3, "order": "hnd"},
    "int8 of each token": {"stored": torch.int8},
    "int8 of one scale": {"stored": torch.int8, "scaled": "tensor", "page": 1},
    "float8": {"stored": torch.float8_e4m3fn, "dtype": torch.bfloat16},
    "int8 latent": {"latent": True, "dims": (32, 24), "heads": (4, 1), "stored": torch.int8},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"mask": None},
    "prefix of each": {"mask": tw.causal() & (tw.prefix(torch.tensor([3, 0, 5])) | tw.window(4))},
    "tree": {"mask": tw.causal() & tw.tree(PARENTS) & tw.window(9)},
    "alibi": {"bias": tw.alibi(torch.tensor([0.5, 0.25, 0.1, 0.0]))},
    "sinks and softcap": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "softcap": 3.0, "invariant": True},
    "tiled": {"backend": "tiled", "scale": 0.3, "precision": "double", "bias": torch.full((3, 1, 4, 44), 0.5)},
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compiled(function: Any) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def new_tokens(built: Built, n: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    heads, dims = built.cache.pages.k.shape[2], (built.pages[0].shape[3], built.pages[1].shape[3])
    k, v = (torch.randn(3, n, heads, dim, generator=g).to(built.q.dtype) for dim in dims)
    return k, v


def same(first: Built, second: Built, call: Callable[[Built], Any], fast: Callable[[Built], Any]) -> None:
    """A call and its compiled form give and write the same bits."""
    for a, b in zip(call(first), fast(second), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(_memory(first), _memory(second), strict=True):
        assert torch.equal(a, b)


def _memory(built: Built) -> list[Tensor]:
    pages = built.cache.pages
    given = [x for x in (pages.k, pages.v, pages.k_scale, pages.v_scale) if x is not None]
    return [x.contiguous().view(torch.uint8) for x in given]


@pytest.mark.parametrize("name", CASES)
def test_caches(name: str) -> None:
    """Rotated tokens are written, then attended to."""

    def call(built: Built) -> tuple[Tensor, Tensor]:
        q = built.q.view(3, 4, *built.q.shape[1:])
        return tw.attention_cached(q, built.cache, new=new_tokens(built, 4), rotary=ROTARY, return_lse=True)

    first, second = (build([4, 4, 4], [20, 9, 40], **CASES[name]) for _ in range(2))
    fast, _ = compiled(lambda q, cache, new: tw.attention_cached(q, cache, new=new, rotary=ROTARY, return_lse=True))
    same(first, second, call, lambda built: fast(built.q.view(3, 4, *built.q.shape[1:]), built.cache, new_tokens(built, 4)))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    """Packed queries, without new tokens; some masks put them before the first key."""
    options = OPTIONS[name]
    rows = [4, 0, 2] if name != "tree" else [4, 4, 4]
    built = build(rows, [20, 9, 40] if name == "tree" else [20, 9, 1])
    fast, _ = compiled(lambda q, cache, cu: tw.attention_cached(q, cache, cu_seqlens_q=cu, return_lse=True, **options))
    found = fast(built.q, built.cache, built.cu)
    want = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, return_lse=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("rows", [[1, 1, 1], [2, 0, 3]])
def test_shared_prefixes(rows: list[int]) -> None:
    built = build(rows, [40, 45, 20], page=8)
    built.table[1, :4] = built.table[0, :4]
    cache = tw.KVCache.paged(*built.pages, built.table, built.cache.lengths)
    plan = tw.plan_cached(cache, queries=3, least=8)
    assert plan.levels
    fast, _ = compiled(lambda q, cache, cu: tw.attention_cached(q, cache, cu_seqlens_q=cu, plan=plan))
    want = tw.attention_cached(built.q, cache, cu_seqlens_q=built.cu, plan=plan)
    assert torch.equal(fast(built.q, cache, built.cu), want)


def test_a_drafts_depth_turns_it() -> None:
    """The positions of a tree are computed within the graph."""
    mask = tw.causal() & tw.tree(PARENTS)
    made = [build([4, 4, 4], [20, 9, 40]) for _ in range(2)]

    def call(q: Tensor, cache: tw.KVCache, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return tw.attention_cached(q, cache, new=new, rotary=ROTARY, mask=mask, return_lse=True)

    fast, _ = compiled(call)
    same(
        *made,
        lambda built: call(built.q.view(3, 4, 4, 32), built.cache, new_tokens(built, 4)),
        lambda built: fast(built.q.view(3, 4, 4, 32), built.cache, new_tokens(built, 4)),
    )


class Model(torch.nn.Module):
    """One layer of attention that feeds itself, with the cache made inside of the graph."""

    def __init__(self, kv: Tensor, table: Tensor, lengths: Tensor) -> None:
        super().__init__()
        for name, x in (("kv", kv), ("table", table), ("lengths", lengths)):
            self.register_buffer(name, x)
        self.project = torch.nn.Linear(64, 128, bias=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.lengths.add_(1)
        cache = tw.KVCache.paged(self.kv[0], self.kv[1], self.table, self.lengths)  # both are views of one tensor
        q, k, v = self.project(x).split([64, 32, 32], dim=-1)
        new = (k.view(3, 1, 2, 16), v.view(3, 1, 2, 16))
        rotary = tw.rotary(ANGLES[:, :8].cos(), ANGLES[:, :8].sin())
        return tw.attention_cached(q.reshape(3, 1, 4, 16), cache, new=new, rotary=rotary).flatten(1)


def test_a_generation_loop_is_one_graph() -> None:
    """Twenty steps over growing lengths are compiled once, and give and write what steps outside of torch.compile do."""
    torch.manual_seed(0)
    kv, table = torch.randn(2, 24, 4, 2, 16), torch.randperm(24).int().view(3, 8)
    plain = Model(kv.clone(), table, torch.tensor([5, 9, 2], dtype=torch.int32))
    other = Model(kv.clone(), table, torch.tensor([5, 9, 2], dtype=torch.int32))
    other.project = plain.project
    fast, counter = compiled(other)
    x = y = torch.randn(3, 64)
    for _ in range(20):
        x, y = plain(x), fast(y)
        assert torch.equal(x, y)
    assert counter.frame_count == 1
    assert torch.equal(plain.kv, other.kv) and torch.equal(plain.lengths, other.lengths)
    assert not torch.equal(plain.kv, kv)


def test_places_in_a_graph() -> None:
    made = [build([1], [20], page=4) for _ in range(2)]
    k, v = torch.randn(2, 3, 2, 32)

    def call(cache: tw.KVCache, slots: Tensor) -> None:
        cache.append(k, v, slots)

    fast, _ = compiled(call)
    call(made[0].cache, torch.tensor([7, -1, 0]))
    fast(made[1].cache, torch.tensor([7, -1, 0]))
    for a, b in zip(_memory(made[0]), _memory(made[1]), strict=True):
        assert torch.equal(a, b)
    for bad in ([7, 7, 0], [10**6, 1, 2]):
        with pytest.raises(tw.TilewiseError, match="slots"):
            fast(made[1].cache, torch.tensor(bad))


def test_values_are_checked_in_a_graph() -> None:
    built = build([1, 1, 1], [20, 9, 40])
    fast, _ = compiled(lambda q, cache: tw.attention_cached(q, cache))
    q = built.q.view(3, 1, 4, 32)
    fast(q, built.cache)
    built.cache.lengths[0] = 10**6
    with pytest.raises(tw.TilewiseError, match=r"lengths\[0\] is 1000000"):
        fast(q, built.cache)
    built.cache.lengths[0] = 20
    built.cache.pages.table[1, 0] = -1
    with pytest.raises(tw.TilewiseError, match="table: sequence 1 sees page 0"):
        fast(q, built.cache)


class Calls(TorchDispatchMode):
    """Notes what the operators are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tilewise":
            self.noted[func.name()] = args
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["csr", "int8 of each token", "int8 of one scale", "int8 latent"])
def test_opcheck(name: str) -> None:
    """What the schemas promise is so: what is written, shapes, dtypes and strides; a dispatch mode sees the operators."""
    built = build([4, 4, 4], [20, 9, 40], **CASES[name])
    for pages in built.pages:
        pages.nan_to_num_()
    q = built.q.view(3, 4, *built.q.shape[1:])
    want = tw.attention_cached(q, built.cache, new=new_tokens(built, 4), rotary=ROTARY)
    with Calls() as calls:
        found = tw.attention_cached(q, built.cache, new=new_tokens(built, 4), rotary=ROTARY)
    assert torch.equal(found, want)
    assert sorted(calls.noted) == ["tilewise::attention_cached", "tilewise::cache_append"]
    for operator, args in calls.noted.items():
        torch.library.opcheck(getattr(torch.ops.tilewise, operator.removeprefix("tilewise::")).default, args)


def test_export() -> None:
    built = build([1, 1, 1], [20, 9, 40])

    class Step(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
            return tw.attention_cached(q, tw.KVCache.paged(k, v, table, lengths))  # type: ignore[return-value]

    args = (built.q.view(3, 1, 4, 32), *built.pages, built.table, built.cache.lengths)
    exported = torch.export.export(Step(), args)
    assert torch.equal(exported.module()(*args), Step()(*args))


def test_there_is_no_gradient() -> None:
    built = build([1, 1, 1], [20, 9, 40])
    q = built.q.view(3, 1, 4, 32).requires_grad_()
    fast, _ = compiled(lambda q, cache: tw.attention_cached(q, cache))
    with pytest.raises(Exception, match="requires a gradient, which a cache does not have"):
        fast(q, built.cache)
    with Calls() as calls:
        tw.attention_cached(q.detach(), built.cache)
    (args,) = calls.noted.values()
    place = len(cached_operators._read(built.cache.pages)) + 2
    out, _ = torch.ops.tilewise.attention_cached(*args[:place], q.flatten(0, 1), *args[place + 1 :])
    with pytest.raises(DerivativeError, match="has no gradient"):
        out.sum().backward()
