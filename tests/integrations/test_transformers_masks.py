"""Descriptions of transformers' mask functions against the masks transformers itself fills in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.errors import ArgumentError
from tilewise.integrations.transformers import PromisedMask, masks
from tilewise.integrations.transformers.masks import mask_function

library = pytest.importorskip("transformers.masking_utils")

BATCH, SEEN = 3, 24
IDS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 10, [0] * 24, [0, 1, 2, 3] * 6])
BLOCKS = torch.where(IDS % 2 == 1, IDS, -1)
LEFT = torch.tensor([0, 2, 5])

PATTERNS: dict[str, Callable[..., Any]] = {
    "causal": library.causal_mask_function,
    "bidirectional": library.bidirectional_mask_function,
    "window": library.sliding_window_causal_mask_function(3),
    "window of one": library.sliding_window_causal_mask_function(1),
    "window of none": library.sliding_window_causal_mask_function(0),
    "window around": library.sliding_window_bidirectional_mask_function(2),
    "chunks": library.chunked_causal_mask_function(4, LEFT),
    "packed": library.and_masks(library.causal_mask_function, library.packed_sequence_mask_function(IDS)),
    "blockwise": library.or_masks(library.causal_mask_function, library.blockwise_overlay(BLOCKS)),
    "window or blocks": library.or_masks(
        library.sliding_window_causal_mask_function(2), library.blockwise_overlay(BLOCKS)
    ),
}
FRAMES = {  # queries, keys, where the queries and where the keys start
    "square": (7, 7, 0, 0),
    "decode": (1, 12, 11, 0),
    "continued": (4, 12, 8, 0),
    "static cache, empty": (5, 16, 0, 0),
    "static cache, half full": (3, 16, 6, 0),
    "rolling cache": (2, 6, 10, 6),
    "offset on the device": (3, 16, torch.tensor(6), 0),
}


def rows(kind: str, length: int) -> Tensor | None:
    """A 2-D padding mask over the first `length` tokens."""
    row = torch.ones(BATCH, length, dtype=torch.bool)
    if kind == "left":
        row[0, :3], row[2, :1] = False, False
    elif kind == "right":
        row[0, length // 2 :], row[1, 1:] = False, False
    elif kind == "holes":
        row[0, 1::2], row[1, 2:4] = False, False
    elif kind == "nothing":
        row[1] = False
    return None if kind == "none" else row


def filled(pattern: str, frame: tuple[Any, ...], row: Tensor | None) -> Tensor:
    queries, keys, q_offset, k_offset = frame
    answer: Tensor = library.sdpa_mask(
        batch_size=BATCH,
        q_length=queries,
        kv_length=keys,
        q_offset=q_offset,
        kv_offset=k_offset,
        mask_function=PATTERNS[pattern],
        attention_mask=row,
        allow_is_causal_skip=False,
    )
    return answer


@pytest.mark.parametrize("waits", [False, True], ids=["cpu", "as on a GPU"])
@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_description_is_the_mask(
    pattern: str, frame: tuple[Any, ...], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "reading_waits", lambda device: waits)
    for padding in ("none", "ones", "left", "right", "holes", "nothing"):
        assert_described(pattern, frame, padding)


def assert_described(pattern: str, frame: tuple[Any, ...], padding: str) -> None:
    queries, keys, q_offset, k_offset = frame
    row = rows(padding, int(q_offset) + queries)  # what has been seen; a static cache is longer
    promise = mask_function(
        batch_size=BATCH,
        q_length=queries,
        kv_length=keys,
        q_offset=q_offset,
        kv_offset=k_offset,
        mask_function=PATTERNS[pattern],
        attention_mask=row,
    )
    assert isinstance(promise, PromisedMask)
    assert torch.equal(promise.dense(), filled(pattern, frame, row))


def test_descriptions_hold_no_square_tensor() -> None:
    """What is carried grows with the length, not with its square."""
    n = 512
    for pattern in ("causal", "window", "window around"):
        for padding in ("none", "left", "holes"):
            promise = mask_function(BATCH, n, n, mask_function=PATTERNS[pattern], attention_mask=rows(padding, n))
            assert isinstance(promise, PromisedMask)
            program = promise.description.lower(
                tw.masks.Binding(tw.masks.MaskShape(BATCH, 1, n, n), asarray=torch.as_tensor)
            )
            assert all(t.numel() <= BATCH * n for t in program.tensors)


def test_solid_padding_is_a_range_and_no_padding_is_nothing() -> None:
    """So that kernels skip padded tiles, and a batch without padding runs as one without a mask."""

    def structure(padding: str) -> str:
        promise = mask_function(BATCH, 8, 8, attention_mask=rows(padding, 8))
        assert isinstance(promise, PromisedMask)
        shape = tw.masks.MaskShape(BATCH, 1, 8, 8)
        return promise.description.lower(tw.masks.Binding(shape, asarray=torch.as_tensor)).structure

    assert [structure(p) for p in ("none", "ones", "left", "right", "holes")] == ["b", "b", "bk", "bk", "bke"]


def test_older_releases_pass_cache_positions() -> None:
    promise = mask_function(BATCH, kv_length=12, cache_position=torch.arange(8, 12), mask_function=PATTERNS["causal"])
    assert isinstance(promise, PromisedMask)
    assert torch.equal(promise.dense(), filled("causal", FRAMES["continued"], None))


def test_a_function_whose_meaning_changed_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release in which a window of w keeps w + 1 keys: the mask is built by transformers then."""

    def sliding_window_overlay(sliding_window: int) -> Callable[..., Any]:
        def inner(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return kv_idx >= q_idx - sliding_window

        return inner

    monkeypatch.setattr(library, "sliding_window_overlay", sliding_window_overlay)
    masks._known.cache_clear()
    try:
        frame = masks.Frame(1, 4, 4, 0, 0, torch.device("cpu"))
        assert masks.describe_mask(sliding_window_overlay(2), frame) is None
        assert masks.describe_mask(library.causal_mask_function, frame) is not None
    finally:
        masks._known.cache_clear()


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda m: m[:, :, 2:, :3],
    "not": lambda m: ~m,
    "float": lambda m: m.float(),
    "added": lambda m: torch.zeros(4, 6).masked_fill(~m, -1e9),
    "expand": lambda m: m.expand(-1, 5, -1, -1),
    "and": lambda m: torch.ones(4, 6, dtype=torch.bool) & m,
    "any": lambda m: m.any(-1),
    "cat": lambda m: torch.cat([m, m], dim=-1),
    "index": lambda m: m[torch.tensor([1, 0])],
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_promise_is_the_tensor_it_stands_for(operation: Callable[[Tensor], Any]) -> None:
    """Whatever a model does to its mask."""
    mask = tw.causal() & tw.key_padding(torch.tensor([6, 3]))
    promise = PromisedMask(mask, (2, 1, 4, 6), torch.device("cpu"))
    got, want = operation(promise), operation(promise.dense())
    assert getattr(got, "description", None) is not mask
    assert torch.equal(got, want)


ARITHMETIC: dict[str, Callable[[Tensor], Any]] = {
    "added to scores": lambda m: torch.zeros(2, 3, 4, 6) + m,
    "added in place": lambda m: torch.zeros(2, 3, 4, 6).add_(m),
    "a part of it": lambda m: torch.zeros(2, 3, 4, 5) + m[:, :, :, :5],
    "the whole as a slice": lambda m: m[:, :, :, :6] + torch.zeros(2, 3, 4, 6),
    "joined with a bias": lambda m: torch.cat([m, torch.zeros(2, 1, 4, 2).to(m.dtype)], dim=-1),
    "padded": lambda m: torch.nn.functional.pad(m, (0, 2), value=0.0),
    "turned into a bias": lambda m: (1.0 - m) * -1e9,
    "negated and expanded": lambda m: torch.zeros(2, 3, 4, 6) + (~m).expand(-1, 3, -1, -1),
}


@pytest.mark.parametrize("operation", ARITHMETIC.values(), ids=ARITHMETIC)
def test_a_promise_is_not_calculated_with(operation: Callable[[Tensor], Any]) -> None:
    """Taken for a mask of floats, a boolean shows what it should hide, or hides what it should show."""
    promise = PromisedMask(tw.causal(), (2, 1, 4, 6), torch.device("cpu"))
    with pytest.raises(ArgumentError, match="as if it were one of floats"):
        operation(promise)


def test_what_leaves_a_promise_as_it_is_keeps_it() -> None:
    promise = PromisedMask(tw.causal(), (2, 1, 4, 6), torch.device("cpu"))
    for same in (promise.clone(), promise.detach(), promise.to("cpu"), promise.to(torch.bool), promise.contiguous()):
        assert isinstance(same, PromisedMask)
        assert same.description is promise.description
    moved = promise.to("meta")
    assert isinstance(moved, PromisedMask)
    assert moved.device.type == "meta"
    assert promise.shape == (2, 1, 4, 6)
    assert promise.dtype == torch.bool
    assert "causal" in repr(promise) or "Band" in repr(promise)
