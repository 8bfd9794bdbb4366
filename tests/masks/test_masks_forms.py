"""A mask in other forms: as a person would write it, and as the boolean array it stands for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.masks.expressions import batches, expressions
from tilewise.errors import ArgumentTypeError, MaskError
from tilewise.masks import Mask

NAMES: dict[str, Any] = {
    name: getattr(tw, name) for name in ("full", "causal", "window", "prefix", "documents", "blocks", "key_padding", "dense")
}
WRITTEN = [
    "full()",
    "causal()",
    "causal(align='top_left')",
    "causal(offset=5)",
    "causal(offset=-3)",
    "window(512)",
    "window(3, 2)",
    "window(0, 4)",
    "window(2**30, 3)",
    "window(3, 2**30)",
    "window(7, align='top_left')",
    "window(3, 2, align='top_left')",
    "window(4, offset=9)",
    "window(4, offset=-9)",
    "window(0, 2**30, offset=6)",
    "prefix(16)",
    "prefix([1, 2])",
    "causal(offset=[4, 7])",
    "window(3, offset=[4, 7])",
    "window(3, 1, offset=[4, 7])",
    "key_padding([3, 0])",
    "key_padding([3, 0], start=[1, 2])",
    "documents([0, 0, 1])",
    "documents([0, 0, 1], q_ids=[0, 1])",
    "causal() & window(512) | prefix(16)",
    "(causal() | prefix(16)) & window(512)",
    "causal() & (window(512) & prefix(4))",
    "causal() | window(2) | prefix(4)",
    "causal() | (window(2) | prefix(4))",
    "~causal()",
    "~(causal() & window(3)) | prefix(2)",
    "~prefix(2) & causal()",
]


@pytest.mark.parametrize("text", WRITTEN)
def test_a_mask_reads_as_it_was_written(text: str) -> None:
    assert repr(eval(text, dict(NAMES))) == text


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine is no fault of the drawing
@given(st.data())
def test_what_is_written_means_the_same(data: st.DataObject) -> None:
    """Without tensors the text gives an equal value."""
    n = st.integers(0, 9)
    anchor = st.one_of(
        st.just({}),
        st.sampled_from(["top_left", "bottom_right"]).map(lambda a: {"align": a}),
        st.integers(-9, 9).map(lambda o: {"offset": o}),
    )
    leaf = st.one_of(
        st.just(tw.full()),
        anchor.map(lambda a: tw.causal(**a)),
        st.builds(lambda w, a: tw.window(w + 1, **a), n, anchor),
        st.builds(lambda left, right, a: tw.window(left, right, **a), n, n | st.just(2**30), anchor),
        n.map(tw.prefix),
    )
    mask = data.draw(
        st.recursive(
            leaf,
            lambda part: st.one_of(
                st.builds(lambda a, b: a & b, part, part), st.builds(lambda a, b: a | b, part, part), part.map(lambda a: ~a)
            ),
            max_leaves=6,
        )
    )
    assert eval(repr(mask), dict(NAMES)) == mask


def test_tensors_are_written_by_their_form_unless_they_are_few_integers() -> None:
    assert repr(tw.key_padding(torch.tensor([3, 5]))) == "key_padding(tensor([3, 5]))"
    assert repr(tw.key_padding(np.array([3, 5]))) == "key_padding(array([3, 5]))"
    assert repr(tw.documents(torch.zeros(2, 4096, dtype=torch.int32))) == "documents(<int32 tensor (2, 4096)>)"
    assert repr(tw.dense(np.ones((8, 8), dtype=bool))) == "dense(<bool array (8, 8)>)"
    assert repr(tw.blocks(torch.ones(4, 4, dtype=torch.bool), 32)) == "blocks(<bool tensor (4, 4)>, 32)"
    assert repr(tw.blocks(torch.ones(4, 4, dtype=torch.bool), (32, 64))) == "blocks(<bool tensor (4, 4)>, (32, 64))"
    meta = torch.zeros(2, dtype=torch.int64, device="meta")
    assert repr(tw.causal() & tw.key_padding(meta)) == "causal() & key_padding(<int64 tensor (2,) on meta>)"


@given(st.data())
def test_dense_is_what_the_mask_means(data: st.DataObject) -> None:
    batch = data.draw(batches())
    found = data.draw(expressions(batch))
    sq, sk = batch.lengths[0]
    dense = found.mask.to_dense(sq, sk)
    assert isinstance(dense, np.ndarray) and dense.dtype == np.bool_ and dense.flags.writeable
    assert dense.shape[0] in (1, len(batch.lengths)) and dense.shape[1] in (1, batch.heads)
    assert dense.shape[2:] == (sq, sk)
    want = np.stack(found.meaning) if found.meaning else np.zeros((0, batch.heads, sq, sk), dtype=bool)
    assert np.array_equal(np.broadcast_to(dense, want.shape), want)


def test_static_masks_are_numpy() -> None:
    dense = (tw.causal() & tw.window(2)).to_dense(2, 4)
    assert isinstance(dense, np.ndarray)
    assert dense.tolist() == [[[[False, True, True, False], [False, False, True, True]]]]
    assert tw.full().to_dense(2, 3).tolist() == [[[[True] * 3] * 2]]
    assert not (~tw.full()).to_dense(2, 3).any()
    assert tw.causal().to_dense(0, 3).shape == (1, 1, 0, 3)
    assert tw.causal().to_dense(np.int64(3)).shape == (1, 1, 3, 3)


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (tw.causal() & tw.key_padding(torch.tensor([3, 0])), (2, 1)),
        (tw.documents(torch.tensor([[0, 0, 1, 1]] * 3)), (3, 1)),
        (tw.documents(torch.tensor([0, 0, 1, 1])) | tw.key_padding([1, 2]), (2, 1)),
        (tw.blocks(torch.ones(5, 2, 2, dtype=torch.bool), 2), (1, 5)),
        (~tw.dense(torch.ones(2, 1, 1, 4, dtype=torch.bool)), (2, 1)),
        (tw.causal(offset=torch.tensor([0, 1, 2])), (3, 1)),
        (tw.key_padding(torch.tensor(2)), (1, 1)),
    ],
    ids=repr,
)
def test_tensors_stay_tensors(mask: Mask, shape: tuple[int, int]) -> None:
    dense = mask.to_dense(4, 4)
    assert isinstance(dense, torch.Tensor) and dense.dtype == torch.bool and dense.device.type == "cpu"
    assert dense.shape == (*shape, 4, 4) and dense.is_contiguous()
    q, k, v = torch.randn(3, shape[0], shape[1], 4, 8).unbind()
    assert torch.equal(tw.attention(q, k, v, mask=mask), tw.attention(q, k, v, mask=mask.to(q.device)))
    want = tw.attention(q, k, v, mask=dense, backend="reference")
    assert torch.allclose(tw.attention(q, k, v, mask=mask, backend="reference"), want)


def test_the_device_of_the_tensors_is_kept_under_a_default_device() -> None:
    with torch.device("meta"):
        assert (tw.key_padding([1]) & tw.dense(torch.ones(2, 2, dtype=torch.bool))).to_dense(2, 2).device.type == "meta"
    mask = tw.causal() & tw.key_padding(torch.tensor([1, 2]))
    with torch.device("meta"):
        assert mask.to_dense(2, 2).tolist() == [[[[True, False], [True, False]]], [[[True, False], [True, True]]]]


def test_a_dense_copy_is_a_copy() -> None:
    given = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    tw.dense(given).to_dense(2, 2).fill_(False)
    assert given.all()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: tw.causal().to_dense(1.5, 2), ArgumentTypeError, "Sq.*1.5.*integer"),
        (lambda: tw.causal().to_dense(2, -1), MaskError, "Sk.*-1.*at least 0"),
        (lambda: tw.documents([0, 1]).to_dense(2, 3), MaskError, "queries.*keys differ"),
        (lambda: (tw.key_padding([1, 2]) & tw.key_padding([1, 2, 3])).to_dense(4, 4), MaskError, r"lengths.*\(2,\).*3"),
    ],
)
def test_what_cannot_be_dense(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


NUMPY = [np.int32(3), np.int64(3), np.uint8(3)]


@pytest.mark.parametrize("n", NUMPY, ids=repr)
def test_numpy_integers_are_integers(n: Any) -> None:
    table = np.ones((2, 2), dtype=bool)
    assert tw.window(n) == tw.window(3) and tw.window(n, n) == tw.window(3, 3)
    assert tw.prefix(n) == tw.prefix(3) and hash(tw.prefix(n)) == hash(tw.prefix(3))
    assert tw.causal(offset=n) == tw.causal(offset=3)
    assert repr(tw.blocks(table, (n, n))) == repr(tw.blocks(table, 3)) == "blocks(<bool array (2, 2)>, 3)"
    assert repr(tw.key_padding([n, 1])) == "key_padding([3, 1])"
    q = torch.randn(1, 1, 8, 8)
    assert torch.equal(tw.attention(q, q, q, mask=tw.window(n)), tw.attention(q, q, q, mask=tw.window(3)))
    problem = tw.Problem.of(heads=n, head_dim=n, seqlen=n)
    assert problem == tw.Problem.of(heads=3, head_dim=3, seqlen=3) and problem.scale == 1 / math.sqrt(3)


@pytest.mark.parametrize("bad", [np.float32(3), np.bool_(True), np.int64(-1)], ids=repr)
def test_other_numpy_scalars_are_refused(bad: Any) -> None:
    for make in (tw.window, tw.prefix):
        with pytest.raises((ArgumentTypeError, MaskError)):
            make(bad)
