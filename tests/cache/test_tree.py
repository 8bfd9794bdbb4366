"""Trees of drafts: every path from a root is a sequence of its own, whatever its tokens' slots are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tests.cache.caches import build, worst
from tilewise import masks

PARENTS = torch.tensor([[-1, 0, 0, 1, -2], [-1, -1, 0, 1, 2], [-1, 0, 1, 2, 3]], dtype=torch.int32)
MASKS = {
    "causal": tw.causal(),
    "full": tw.full(),
    "window": tw.causal() & tw.window(4),
    "prefix or window": tw.causal() & (tw.prefix(2) | tw.window(3)),
    "not the nearest": tw.causal() & ~tw.window(2),
}


def path_to(parents: list[int], token: int) -> list[int]:
    """The tokens from a root to one of a tree."""
    path = [token]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_a_path_is_a_sequence(backend: str, name: str) -> None:
    """A row of a tree sees what it sees as the last token of its path; so the window counts depths, and so does rotary."""
    context, (sequences, size), dim = 20, PARENTS.shape, 16
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((sequences, context + size, heads, dim), generator=g) for heads in (4, 2, 2))
    angles = torch.arange(64)[:, None] * 100.0 ** (-torch.arange(0, dim, 2) / dim)
    rotary = tw.rotary(angles.cos(), angles.sin())

    def attend(at: Tensor, rows: int, mask: tw.Mask) -> Tensor:
        """The last rows of a sequence that consists of some tokens, (1, n)."""
        sequence = torch.arange(len(at))[:, None]
        cache = tw.KVCache.static(*(torch.zeros(len(at), 64, 2, dim) for _ in range(2)), torch.full((len(at),), at.shape[1]))
        new = k[sequence, at], v[sequence, at]
        first = torch.full((len(at),), at.shape[1] - rows)
        with torch.no_grad():
            early = tw.KVCache.static(cache.pages.k, cache.pages.v, first)
            own = tuple(x[:, : at.shape[1] - rows] for x in new)
            tw.attention_cached(q[sequence, at[:, :-rows]], early, new=own, rotary=rotary, backend=backend)
        late = tuple(x[:, at.shape[1] - rows :] for x in new)
        return tw.attention_cached(q[sequence, at[:, -rows:]], cache, new=late, rotary=rotary, mask=mask, backend=backend)

    everything = torch.arange(context + size).expand(sequences, -1)
    out = attend(everything, size, MASKS[name] & tw.tree(PARENTS))
    for b in range(sequences):
        parents = PARENTS[b].tolist()
        for token in range(size):
            if parents[token] == -2:
                assert (out[b, token] == 0).all()
                continue
            path = torch.tensor([context + n for n in path_to(parents, token)])
            at = torch.cat([torch.arange(context), path])[None].expand(sequences, -1)
            alone = attend(at, len(path), MASKS[name] if name != "full" else tw.causal())
            assert torch.allclose(out[b, token], alone[b, -1], atol=2e-6), (b, token)


@pytest.mark.parametrize("rows", [[5, 5, 5], [7, 5, 40], [3, 0, 5]])
@pytest.mark.parametrize("name", MASKS)
def test_conformance(name: str, rows: list[int]) -> None:
    """Rows before the tree, and only some of its rows, with sinks and softcap; on every backend."""
    built = build(rows, [30, 12, 90])
    options: dict[str, Any] = {"mask": MASKS[name] & tw.tree(PARENTS), "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}
    for backend in ("cpu", "tiled", "reference"):
        out, lse = tw.attention_cached(
            built.q, built.cache, cu_seqlens_q=built.cu, return_lse=True, backend=backend, softcap=4.0, **options
        )
        assert worst(built, out, lse, softcap=4.0, **options) <= 1.0, backend


@st.composite
def drawn_trees(draw: Any) -> list[list[int]]:
    size, batch = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    trees = []
    for _ in range(batch):
        parents: list[int] = []
        for n in range(size):
            there = [-1, *(m for m in range(n) if parents[m] != -2)]
            parents.append(draw(st.sampled_from([*there, -2])))
        trees.append(parents)
    return trees


@settings(max_examples=40, deadline=None)
@given(trees=drawn_trees(), width=st.integers(1, 6), before=st.integers(0, 7), earlier=st.integers(0, 3))
def test_what_a_token_sees(trees: list[list[int]], width: int, before: int, earlier: int) -> None:
    """Position by position, by walking from each token to its root; in a plain batch, and packed."""
    size = len(trees[0])
    queries, keys = size + min(earlier, before), before + size
    want = np.zeros((len(trees), 1, queries, keys), dtype=bool)
    for b, parents in enumerate(trees):
        for row in range(queries):
            token = row - (queries - size)
            path = [] if token < 0 or parents[token] == -2 else path_to(parents, token)
            position = before + token if token < 0 else before + len(path) - 1
            if token < 0 or path:
                want[b, 0, row, max(0, position - width + 1) : min(position + 1, before)] = True
            for depth, other in enumerate(path):
                want[b, 0, row, before + other] = len(path) - depth <= width
    mask = tw.causal() & tw.window(width) & tw.tree(np.asarray(trees))
    assert (mask.to_dense(queries, keys) == want).all()
    shape = masks.MaskShape(len(trees), 1, queries, keys)
    program = mask.lower(masks.Binding(shape, varlen=True))
    packed = masks.allowed(program, shape, (0, queries), (0, keys), np.arange)
    assert (np.broadcast_to(packed, want.shape) == want).all()


def test_trees_in_plain_and_packed_calls() -> None:
    """Elsewhere a tree is a mask like the others."""
    q, k, v = torch.randn(3, 2, 5, 8), torch.randn(3, 2, 12, 8), torch.randn(3, 2, 12, 8)
    mask = tw.causal() & tw.tree(PARENTS)
    out = tw.attention(q, k, v, mask=mask)
    assert torch.allclose(out, tw.attention(q, k, v, mask=mask.to_dense(5, 12)), atol=1e-6)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    cu_q, cu_k = (torch.arange(4, dtype=torch.int32) * n for n in (5, 12))
    again = tw.attention_varlen(*packed, cu_q, cu_k, mask=mask)
    assert torch.allclose(again.reshape(3, 5, 2, 8).transpose(1, 2), out, atol=1e-6)
    assert str(mask).startswith("causal() & tree(")


def test_evicted_pages_before_a_window() -> None:
    built = build([5, 5, 5], [100, 90, 80], page=8)
    mask = tw.causal() & tw.window(16) & tw.tree(PARENTS)
    want = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, mask=mask)
    table = built.table.clone()
    for b, length in enumerate((100, 90, 80)):
        table[b, : (length - 5 - 15 - 5) // 8] = -1
    evicted = tw.KVCache.paged(*built.pages, table, built.cache.lengths)
    for backend in ("cpu", "tiled"):
        got = tw.attention_cached(built.q, evicted, cu_seqlens_q=built.cu, mask=mask, backend=backend)
        assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[-1, 1]], "parent of token 1 of sequence 0 is 1, need"),
        ([[-1, 0, -3]], "parent of token 2 of sequence 0 is -3"),
        ([[-1, -2, 1]], "parent of token 2 of sequence 0 is 1, where there is no token"),
        ([[]], "need integers"),
        ([[0.5]], "need integers"),
        (7, "need an integer tensor"),
        (torch.tensor([[-1.0]]), "dtype"),
    ],
)
def test_bad_trees(parents: Any, message: str) -> None:
    with pytest.raises(tw.TilewiseError, match=message):
        tw.tree(parents)


def test_bad_trees_of_tensors() -> None:
    built = build([3, 3], [9, 9])
    options: dict[str, Any] = {"cu_seqlens_q": built.cu}
    good = tw.tree(torch.tensor([[-1, 0, 1], [-1, 0, 0]]))
    cases: list[tuple[tw.Mask, str]] = [
        (tw.tree(torch.tensor([[-1, 2, 0], [-1, 0, 0]])), "parent of token 1 of sequence 0 is 2"),
        (tw.tree(torch.zeros((3, 3), dtype=torch.int32) - 1), r"shape \(3, 3\), need"),
        (tw.causal() | good, "joined by &"),
        (good & tw.tree([-1]), "a mask has one"),
        (~good, "is no mask of drafts"),
        (tw.causal(align="top_left") & good, "without align or offset"),
    ]
    for mask, message in cases:
        with pytest.raises(tw.TilewiseError, match=message):
            tw.attention_cached(built.q, built.cache, mask=mask, **options)
    with pytest.raises(tw.TilewiseError, match="alibi counts slots"):
        tw.attention_cached(built.q, built.cache, mask=good, bias=tw.alibi(torch.rand(4)), **options)
