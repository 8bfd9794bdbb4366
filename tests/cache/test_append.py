"""New tokens: where they go, how they are turned and rounded, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.cache.caches import build
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError, TilewiseError

PAGE, HEADS, DIM = 4, 2, 8


def empty(lengths: list[int], dtype: torch.dtype = torch.float32, **scales: Any) -> tuple[tw.KVCache, torch.Tensor, torch.Tensor]:
    """A cache with room for 12 tokens of each sequence, and its pages."""
    batch = len(lengths)
    k, v = (torch.zeros(3 * batch, PAGE, HEADS, DIM).to(dtype) for _ in range(2))
    table = torch.arange(3 * batch).flip(0).reshape(batch, 3)
    return tw.KVCache.paged(k, v, table, torch.tensor(lengths), **scales), k, v


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((*shape, HEADS, DIM), generator=torch.Generator().manual_seed(seed))


def row(pages: torch.Tensor, batch: int, b: int, p: int) -> torch.Tensor:
    return pages[3 * batch - 1 - (3 * b + p // PAGE), p % PAGE]


def test_the_last_tokens_of_each_sequence_are_written() -> None:
    cache, k_pages, v_pages = empty([5, 9])
    k, v = tokens(2, 3), tokens(2, 3, seed=1)
    cache.append(k, v)
    for b, length in enumerate((5, 9)):
        for j in range(3):
            assert torch.equal(row(k_pages, 2, b, length - 3 + j), k[b, j])
            assert torch.equal(row(v_pages, 2, b, length - 3 + j), v[b, j])
    assert int((k_pages != 0).any(-1).any(-1).sum()) == 6


def test_packed_tokens_and_slots() -> None:
    cache, k_pages, _ = empty([5, 0, 9])
    k = tokens(6)
    cache.append(k, k, cu_seqlens=torch.tensor([0, 2, 2, 6]))
    assert torch.equal(row(k_pages, 3, 0, 3), k[0]) and torch.equal(row(k_pages, 3, 2, 8), k[5])
    k_pages.zero_()
    cache.append(k, k, slots=torch.tensor([7, -1, 0, 30, -1, 35]))
    written = (k_pages != 0).any(-1).any(-1).flatten().nonzero()[:, 0].tolist()
    assert written == [0, 7, 30, 35] and torch.equal(k_pages.flatten(0, 1)[30], k[3])
    cache.append(k[:2], k[:2], slots=torch.tensor([-1, -1]))  # nothing at all
    assert torch.equal(k_pages.flatten(0, 1)[0], k[2])


@pytest.mark.parametrize("sides", [(), (HEADS,)])
def test_a_scale_that_tokens_share_is_not_written(sides: tuple[int, ...]) -> None:
    """Also where a page has one token, so that a scale of each head has as many numbers as one of each token of a page."""
    scale, pages = torch.full(sides, 0.03), torch.zeros(4, 1, HEADS, DIM, dtype=torch.int8)
    cache = tw.KVCache.paged(pages, pages.clone(), torch.arange(4).int()[None], torch.tensor([2]), k_scale=scale, v_scale=scale)
    cache.append(tokens(1, 2), tokens(1, 2))
    assert torch.equal(scale, torch.full(sides, 0.03)) and pages[:2].any()


@pytest.mark.parametrize("kind", ["tensor", "head", "token"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_numbers_with_a_scale(dtype: torch.dtype, kind: str) -> None:
    """What is read back is off by half a step of the scale, or by half a unit in the last of four digits."""
    k = tokens(2, 3)
    size = {"tensor": (), "head": (HEADS,), "token": (6, PAGE, HEADS)}[kind]
    largest = 127.0 if dtype == torch.int8 else 448.0
    scale = torch.full(size, float(k.abs().max()) / largest)
    cache, k_pages, _ = empty([5, 9], dtype, k_scale=scale, v_scale=scale.clone())
    cache.append(k, k)
    pages = cache.pages
    assert pages.k_scale is not None
    for b, length in enumerate((5, 9)):
        for j in range(3):
            stored = row(k_pages, 2, b, length - 3 + j).double() * row(pages.k_scale, 2, b, length - 3 + j)[:, None].double()
            own = row(pages.k_scale, 2, b, length - 3 + j)[:, None].double()
            step = own * (0.5 if dtype == torch.int8 else 2.0**-10) + (0 if dtype == torch.int8 else k[b, j].abs().double() / 16)
            assert ((stored - k[b, j].double()).abs() <= step * 1.0001).all()


def test_new_tokens_are_written_before_anything_is_read() -> None:
    built = build([3, 1], [10, 20])
    k, v = (torch.randn(4, 2, 32) for _ in range(2))
    out = tw.attention_cached(built.q, built.cache, new=(k, v), cu_seqlens_q=built.cu)
    again = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu)
    assert torch.equal(out, again)
    pages = built.cache.pages
    slot = int(built.table[0, 0]) * 16 + 9
    assert torch.equal(pages.k.flatten(0, 1)[slot], k[2])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [32, 20])
def test_rotary(interleaved: bool, turned: int) -> None:
    """Queries and new keys are turned by their positions; what lies in the cache is not turned again."""
    g = torch.Generator().manual_seed(0)
    angles = torch.arange(64)[:, None] * torch.rand(turned // 2, generator=g)
    table = tw.rotary(angles.cos(), angles.sin(), interleaved=interleaved)
    length, rows = 12, 5
    q, k, v = (torch.randn(1, length, n, 32, generator=g) for n in (4, 2, 2))

    def turn(x: torch.Tensor) -> torch.Tensor:
        pairs = x[..., :turned].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        a, b = pairs.unbind(-1 if interleaved else -2)
        z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[None, :length, None]
        back = torch.stack([z.real, z.imag], -1 if interleaved else -2).flatten(-2)
        return torch.cat([back, x[..., turned:]], -1)

    want = tw.attention(turn(q), turn(k), v, mask=tw.causal(), layout="bshd")
    pages = [torch.full((4, 4, 2, 32), float("nan")) for _ in range(2)]
    lengths = torch.tensor([length - rows])
    cache = tw.KVCache.paged(*pages, torch.tensor([[2, 0, 3]]), lengths)
    first = tw.attention_cached(q[:, :-rows], cache, new=(k[:, :-rows], v[:, :-rows]), rotary=table)
    cache = tw.KVCache.paged(*pages, torch.tensor([[2, 0, 3]]), lengths + rows)
    second = tw.attention_cached(q[:, -rows:], cache, new=(k[:, -rows:], v[:, -rows:]), rotary=table)
    assert torch.allclose(torch.cat([first, second], 1), want, atol=1e-5)
    given = tw.rotary(angles.cos(), angles.sin(), interleaved=interleaved, positions=torch.arange(length - rows, length)[None])
    again = tw.attention_cached(q[:, -rows:], cache, new=(k[:, -rows:], v[:, -rows:]), rotary=given)
    assert torch.equal(again, second)


CACHE = {"lengths": [5, 9]}
REFUSED: dict[str, tuple[Any, type[TilewiseError], str]] = {
    "no tensor": (lambda c: c.append([1], [2]), ArgumentTypeError, "k: got list"),
    "integers": (lambda c: c.append(tokens(2, 1).long(), tokens(2, 1)), ArgumentTypeError, "k: got torch.int64"),
    "other heads": (lambda c: c.append(tokens(2, 1)[:, :, :1], tokens(2, 1)), LayoutError, "k: shape"),
    "other tokens": (lambda c: c.append(tokens(2, 1), tokens(2, 2)), LayoutError, "v: shape"),
    "other batch": (lambda c: c.append(tokens(3, 1), tokens(3, 1)), LayoutError, "3 sequences, but the cache has 2"),
    "packed without lengths": (lambda c: c.append(tokens(2), tokens(2)), ArgumentError, "cu_seqlens: packed tokens need it"),
    "lengths that fall": (
        lambda c: c.append(tokens(2), tokens(2), cu_seqlens=torch.tensor([0, 3, 2])), ArgumentError, "never falling",
    ),
    "more than lengths": (lambda c: c.append(tokens(2, 6), tokens(2, 6)), ArgumentError, "6 tokens for sequence 0"),
    "a place twice": (
        lambda c: c.append(tokens(2), tokens(2), slots=torch.tensor([3, 3])), ArgumentError, "3 is there twice",
    ),
    "a place beyond": (
        lambda c: c.append(tokens(2), tokens(2), slots=torch.tensor([3, 24])), ArgumentError, "24 is no place, need 0 to 23",
    ),
    "too few places": (lambda c: c.append(tokens(2), tokens(2), slots=torch.tensor([3])), LayoutError, "1 places for 2 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_appends_that_are_refused(name: str) -> None:
    call, kind, match = REFUSED[name]
    cache, k_pages, _ = empty(**CACHE)
    with pytest.raises(kind, match=match):
        call(cache)
    assert not k_pages.any()


def pages(**change: Any) -> dict[str, Any]:
    given = {
        "k_pages": torch.zeros(6, 4, 2, 8), "v_pages": torch.zeros(6, 4, 2, 8),
        "table": torch.arange(6).reshape(2, 3), "lengths": torch.tensor([5, 9]),
    }  # fmt: skip
    return {**given, **change}


CACHES: dict[str, tuple[dict[str, Any], type[TilewiseError], str]] = {
    "rank": ({"k_pages": torch.zeros(6, 4, 8)}, LayoutError, "k_pages: rank 3"),
    "no pages of values": ({"v_pages": None}, ArgumentError, "value_dim: got None"),
    "too many columns": ({"v_pages": None, "value_dim": 9}, ArgumentError, "need 1 to 8 columns"),
    "both values": ({"value_dim": 4}, ArgumentError, "pass v_pages=None"),
    "other heads": ({"v_pages": torch.zeros(6, 4, 1, 8)}, LayoutError, "must agree"),
    "dtype": ({"k_pages": torch.zeros(6, 4, 2, 8, dtype=torch.int16)}, ArgumentTypeError, "torch.int16"),
    "table of floats": ({"table": torch.zeros(2, 3)}, ArgumentTypeError, "table: got torch.float32"),
    "table of rank 1": ({"table": torch.arange(6)}, LayoutError, "table: shape"),
    "half a pair": ({"table": (torch.arange(3),)}, ArgumentError, "got 1 tensors"),
    "other batch": ({"lengths": torch.tensor([5])}, LayoutError, r"lengths: shape \(1,\), need \(2,\)"),
    "scale without need": ({"k_scale": torch.tensor(1.0)}, ArgumentError, "k_scale: pages of torch.float32 have none"),
    "no scale": (
        {"k_pages": torch.zeros(6, 4, 2, 8, dtype=torch.int8), "v_pages": torch.zeros(6, 4, 2, 8, dtype=torch.int8)},
        ArgumentError, "k_scale: torch.int8 pages need one",
    ),
    "gradient": ({"k_pages": torch.zeros(6, 4, 2, 8, requires_grad=True)}, ArgumentError, "requires a gradient"),
}  # fmt: skip


@pytest.mark.parametrize("name", CACHES)
def test_caches_that_are_refused(name: str) -> None:
    change, kind, match = CACHES[name]
    with pytest.raises(kind, match=match):
        tw.KVCache.paged(**pages(**change))


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "length beyond the table": ({"lengths": torch.tensor([5, 13])}, {}, r"lengths\[1\] is 13, need 0 to 12"),
    "negative length": ({"lengths": torch.tensor([-1, 3])}, {}, r"lengths\[0\] is -1"),
    "page beyond": ({"table": torch.tensor([[0, 1, 2], [3, 6, 5]])}, {}, "sequence 1 sees page 1 of its table, which is 6"),
    "indptr that falls": ({"table": (torch.tensor([0, 3, 2]), torch.arange(6))}, {}, "indptr must start with 0"),
    "documents": ({}, {"mask": tw.documents(torch.zeros(2, 1).int())}, "does not go with a cache"),
    "boolean": ({}, {"mask": torch.ones(1, 1, dtype=torch.bool)}, "mask: got Tensor"),
    "other dtype": ({}, {"q": torch.zeros(2, 1, 4, 8).half()}, "the cache holds torch.float32"),
    "gradient": ({}, {"q": torch.zeros(2, 1, 4, 8, requires_grad=True)}, "q: requires a gradient"),
    "batch": ({}, {"q": torch.zeros(3, 1, 4, 8)}, "q: 3 sequences, but the cache has 2"),
    "packed without cu": ({}, {"q": torch.zeros(2, 4, 8)}, "with cu_seqlens_q"),
    "cu ends early": ({}, {"q": torch.zeros(2, 4, 8), "cu_seqlens_q": torch.tensor([0, 1, 1])}, "need 0 to 2"),
    "heads": ({}, {"q": torch.zeros(2, 1, 3, 8)}, "multiple"),
    "unknown option": ({}, {"causal": True}, "causal"),
    "new is no pair": ({}, {"new": torch.zeros(1)}, "need the pair"),
    "rotary is none": ({}, {"rotary": torch.zeros(1)}, "need tw.rotary"),
    "rotary too short": ({}, {"rotary": tw.rotary(torch.zeros(4, 4), torch.zeros(4, 4))}, "position 8, but cos and sin have 4"),
    "rotary too wide": ({}, {"rotary": tw.rotary(torch.zeros(40, 5), torch.zeros(40, 5))}, "turns 10 features"),
    "out": ({}, {"out": torch.zeros(2, 1, 4, 7)}, "out: torch.float32"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_refused(name: str) -> None:
    change, options, match = CALLS[name]
    cache = tw.KVCache.paged(**pages(**change))
    q = options.get("q", torch.zeros(2, 1, 4, 8))
    with pytest.raises(TilewiseError, match=match):
        tw.attention_cached(q, cache, **{key: value for key, value in options.items() if key != "q"})


def test_no_cache() -> None:
    with pytest.raises(ArgumentTypeError, match=r"cache: got Tensor, need a KVCache; see tw.KVCache.paged"):
        tw.attention_cached(torch.zeros(1, 1, 1, 8), torch.zeros(1))  # type: ignore[arg-type]
