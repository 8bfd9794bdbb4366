"""`selected`: what its lists mean, and lists that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.errors import ArgumentTypeError, MaskError
from tilewise.masks import TileMap


def test_the_picture_of_the_docstring() -> None:
    lists = np.array([[0, -1], [0, 1], [2, 1]])
    table = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=bool)
    seen, want = tw.selected(lists, 16, 16).to_dense(48), tw.blocks(table, 16).to_dense(48)
    assert np.array_equal(seen, want)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.zeros(1, 2),), ArgumentTypeError, "selected: indices: dtype torch.float32, need integers"),
        ((torch.zeros(1, 2, dtype=torch.bool),), ArgumentTypeError, "selected: indices: dtype torch.bool, need integers"),
        (([[0]],), ArgumentTypeError, "selected: indices is a list, need an integer tensor"),
        ((np.zeros((1, 2), np.int32), 0), MaskError, "selected: block is 0, need at least 1"),
        ((np.zeros((1, 2), np.int32), 64, 8), MaskError, "selected: per is 8, need at least 16"),
        ((np.zeros((1, 2), np.int32), 64.0), ArgumentTypeError, r"selected: block is 64.0 \(float\), need an integer"),
    ],
)
def test_constructor_refuses(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        tw.selected(*arguments)


def _packed(lengths: list[int], *, heads: int = 2) -> tuple[torch.Tensor, ...]:
    total, cu = sum(lengths), torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return (*torch.randn(3, total, heads, 16, generator=torch.Generator().manual_seed(0)), cu, cu)


def test_packed_lists_count_within_their_sequence() -> None:
    """A list of a sequence's own names its blocks; a shared one may name blocks that only the longest has."""
    calls = _packed([40, 20])
    own = torch.tensor([[[[0, 2], [1, -1], [2, 2]]], [[[1, 0], [0, 0], [99, 99]]]])  # the last list has no queries
    assert torch.isfinite(tw.attention_varlen(*calls, mask=tw.selected(own, 16, 16))).all()
    own[1, 0, 0, 0] = 2
    with pytest.raises(MaskError, match=r"selected: indices\[1, 0, 0, 0\] is 2, need 0 to 1.*sequence 1 has 20 keys"):
        tw.attention_varlen(*calls, mask=tw.selected(own, 16, 16))
    shared = torch.tensor([[0, 2], [1, 2], [2, 2]])
    out = tw.attention_varlen(*calls, mask=tw.selected(shared, 16, 16))
    alone = [x[40:] for x in calls[:3]]
    there = tw.selected(shared[:2].where(shared[:2] < 2, -1), 16, 16)
    assert torch.equal(out[40:], tw.attention_varlen(*alone, *[torch.tensor([0, 20])] * 2, mask=there))
    with pytest.raises(MaskError, match=r"selected: indices covers 2 blocks of 16 queries, but the longest sequence has 40"):
        tw.attention_varlen(*calls, mask=tw.selected(shared[:2], 16, 16))


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_what_is_out_of_range_is_unseen_where_nobody_looks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose values are not read."""
    monkeypatch.setattr("tilewise.api.lengths.checks_values", lambda device: False)
    monkeypatch.setattr("tilewise.api.parse.check_range", lambda name, x: None)
    lists = torch.tensor([[0, 9], [-7, 2**31 - 1], [-(2**31), 3], [2**31, -(2**40)]])
    q, k, v = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0)).unbind()
    for change in (lambda mask: mask, lambda mask: ~mask, lambda mask: mask & tw.causal()):
        masks = (change(tw.selected(x, 16, 16)) for x in (lists, torch.tensor([[0, -1], [-1, -1], [-1, 3], [-1, -1]])))
        out, want = (tw.attention(q, k, v, mask=mask, backend=backend) for mask in masks)
        assert torch.equal(out, want)


def test_lists_are_classified_without_a_table() -> None:
    """Blocks of one key and 2**20 keys: a table would take 64 GiB."""
    n = 2**20
    lists = np.arange(n // 16 * 4, dtype=np.int32).reshape(-1, 4) * 4
    problem = tw.Problem.of(heads=1, head_dim=64, seqlen=n, mask=tw.selected(lists, 1, 16))
    tiles = TileMap(problem.program, problem.shape, 1024, 2**14)
    assert tiles.key_blocks(5) == [(0, 1)]
    assert np.flatnonzero(tiles.col(2)).tolist() == list(range(32, 48))
