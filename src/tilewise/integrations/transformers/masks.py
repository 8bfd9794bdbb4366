"""From transformers' mask functions to tilewise masks, without building N × N.

transformers describes a mask as a Python function of (batch, head, q, k), put together by `and_masks` and `or_masks` from
functions of its own. Those are recognised by their code objects, and the numbers and tensors they close over are read from
their cells. A function that is known by name is tried on a few positions before it is trusted, so a release that changes a
meaning is noticed. What is not recognised (a user's own function) becomes the dense mask transformers itself would build.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, reduce
from operator import and_, or_
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.integrations.transformers.promise import PromisedMask
from tilewise.masks import UNBOUNDED, Mask, causal, dense, documents, full, key_padding, window


def reading_waits(device: torch.device) -> bool:
    """Whether reading a number off the device waits for all the work queued there."""
    return device.type != "cpu"


class Frame(NamedTuple):
    """The part of the mask that is wanted: queries from `q_offset` on, keys from `k_offset` on (ints, or scalar tensors)."""

    batch: int
    queries: int
    keys: int
    q_offset: Any
    k_offset: Any
    device: torch.device

    def diagonal(self, shift: int = 0) -> Any:
        """The key index that query 0 sits at, plus `shift`, for `offset=`; None where that is the bottom-right alignment."""
        offset = self.q_offset - self.k_offset + shift
        if isinstance(offset, Tensor):
            if reading_waits(offset.device):
                return offset.reshape(-1).expand(self.batch).to(torch.int32).contiguous()
            offset = int(offset)
        return None if offset == self.keys - self.queries else offset

    def q_index(self) -> Tensor:
        return torch.arange(self.queries, device=self.device).add(self.q_offset)

    def k_index(self) -> Tensor:
        return torch.arange(self.keys, device=self.device).add(self.k_offset)


def mask_function(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """What transformers calls to make the mask of a forward. Older releases give `cache_position` instead of `q_length`."""
    if cache_position is not None and q_length is None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    if mask_function is None:
        mask_function = _library().causal_mask_function
    if not torch.compiler.is_compiling():
        origin = attention_mask if attention_mask is not None else cache_position
        device = torch.device(kwargs.get("device") or "cpu") if origin is None else origin.device
        frame = Frame(batch_size, int(q_length or 0), kv_length, q_offset, kv_offset, device)
        description = describe_mask(mask_function, frame)
        if description is not None:
            if attention_mask is not None:
                description = description & describe_padding(attention_mask, frame)
            return PromisedMask(description, (batch_size, 1, frame.queries, kv_length), device)
        _warn_dense(_name(mask_function))
    if cache_position is not None:
        kwargs["cache_position"] = cache_position
    else:
        kwargs.update(q_length=q_length, q_offset=q_offset)
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    filled: Tensor = _library().sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    return filled


def describe_mask(function: Callable[..., Any], frame: Frame) -> Mask | None:
    """The tilewise mask of one of transformers' mask functions.

    function: of (batch, head, query, key), as transformers makes it.
    frame: the part of the mask that is wanted.

    Returns None if the function is not one of transformers' own.

    >>> describe_mask(transformers.masking_utils.causal_mask_function, Frame(1, 4, 6, 2, 0, torch.device("cpu")))
    """
    code, cells = getattr(function, "__code__", None), _cells(function)
    kind = _known().get(code) if isinstance(code, CodeType) else None
    if kind in _JOINS:
        parts = [describe_mask(part, frame) for part in cells["mask_functions"]]
        known = [part for part in parts if part is not None]
        return reduce(_JOINS[kind], known) if known and len(known) == len(parts) else None
    return _LEAVES[kind](cells, frame) if kind is not None else None


def describe_padding(attention_mask: Tensor, frame: Frame) -> Mask:
    """The 2-D padding mask (batch, keys seen so far), of any pattern.

    The first and last real token of each sequence bound the keys; only padding with holes needs the row itself. Whether there
    are holes is data: for one query the row is always added, since it costs nothing beside the keys, and a longer
    forward waits once for the answer, as it does for transformers' own masks.
    """
    missing = frame.keys + frame.k_offset - attention_mask.shape[-1]
    row = attention_mask.bool()
    if not isinstance(missing, Tensor) and missing > 0:
        row = torch.nn.functional.pad(row, (0, missing))
    row = row[:, frame.k_index()] if isinstance(frame.k_offset, Tensor) else row[:, frame.k_offset :][:, : frame.keys]
    count = row.sum(dim=-1, dtype=torch.int32)
    start = row.int().argmax(dim=-1).int() if frame.keys else count
    end = frame.keys - row.flip(-1).int().argmax(dim=-1).int() if frame.keys else count
    end = torch.where(count > 0, end, start)
    span = key_padding(end - start, start)
    holey = span & dense(row[:, None, None, :])
    if frame.queries == 1 and reading_waits(row.device):
        return holey
    everything, solid = torch.stack([(count == frame.keys).all(), (count == end - start).all()]).tolist()
    return full() if everything else span if solid else holey


def _window_before(cells: dict[str, Any], frame: Frame) -> Mask:
    keys = cells["sliding_window"]
    if keys < 1:  # some models make a mask of no width, and give it to no layer
        return ~causal(offset=frame.diagonal(-keys))
    return window(keys - 1, UNBOUNDED, offset=frame.diagonal())


def _window_around(cells: dict[str, Any], frame: Frame) -> Mask:
    return window(cells["sliding_window"], cells["sliding_window"], offset=frame.diagonal())


def _chunks(cells: dict[str, Any], frame: Frame) -> Mask:
    size, padding = cells["chunk_size"], cells["left_padding"].to(frame.device)[:, None]
    q_ids, k_ids = ((i - padding).div(size, rounding_mode="floor") for i in (frame.q_index(), frame.k_index()))
    return documents(k_ids, q_ids=q_ids)


def _packed(cells: dict[str, Any], frame: Frame) -> Mask:
    ids = cells["packed_sequence_mask"].to(frame.device)
    return documents(ids[:, frame.k_index()], q_ids=ids[:, frame.q_index()])


def _blockwise(cells: dict[str, Any], frame: Frame) -> Mask:
    ids = cells["block_sequence_ids"].to(frame.device)
    q_ids, k_ids = ids[:, frame.q_index()], ids[:, frame.k_index()]
    # a query in no block (below 0) sees none by this rule: its id becomes one that no key has
    return documents(k_ids.clamp(min=-1), q_ids=torch.where(q_ids < 0, -2, q_ids))


_JOINS: dict[str, Callable[[Any, Any], Any]] = {"and_masks": and_, "or_masks": or_}
_LEAVES: dict[str, Callable[[dict[str, Any], Frame], Mask]] = {
    "causal_mask_function": lambda cells, frame: causal(offset=frame.diagonal()),
    "bidirectional_mask_function": lambda cells, frame: full(),
    "sliding_window_overlay": _window_before,
    "sliding_window_bidirectional_overlay": _window_around,
    "chunked_overlay": _chunks,
    "packed_sequence_mask_function": _packed,
    "blockwise_overlay": _blockwise,
    "padding_mask_function": lambda cells, frame: describe_padding(cells["padding_mask"].to(frame.device), frame),
}


def _samples() -> dict[str, tuple[Any, ...]]:
    """Arguments with which each maker of a mask function is tried; the others are mask functions themselves."""
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 3], [-1, -1, 4, 4, -1, 5, 5, -1, -1]])
    return {
        "sliding_window_overlay": (3,),
        "sliding_window_bidirectional_overlay": (2,),
        "chunked_overlay": (3, torch.tensor([0, 1])),
        "packed_sequence_mask_function": (ids.abs(),),
        "blockwise_overlay": (ids,),
        "padding_mask_function": (ids > 0,),
    }


@cache
def _known() -> dict[CodeType, str]:
    """Code objects of the mask functions of the installed transformers whose meaning is as expected."""
    library, samples = _library(), _samples()
    known: dict[CodeType, str] = {}
    for name, join in _JOINS.items():
        maker = getattr(library, name, None)
        if maker is not None and (made := _joined(maker, join)) is not None:
            known[made.__code__] = name
    for name, describe in _LEAVES.items():
        function = getattr(library, name, None)
        if function is None:
            continue
        function = function(*samples[name]) if name in samples else function
        if _means(function, describe):
            known[function.__code__] = name
    return known


def _means(function: FunctionType, describe: Callable[[dict[str, Any], Frame], Mask]) -> bool:
    """Whether function and description agree on a small frame off the origin."""
    frame = Frame(2, 4, 6, 4, 2, torch.device("cpu"))
    try:
        promise = PromisedMask(describe(_cells(function), frame), (2, 1, 4, 6), frame.device)
    except KeyError:  # the function closes over other names than it used to
        return False
    index = torch.meshgrid(torch.arange(2), torch.arange(1), frame.q_index(), frame.k_index(), indexing="ij")
    return bool((function(*index) == promise.dense()).all())


def _joined(maker: Callable[..., Any], join: Callable[[Any, Any], Any]) -> FunctionType | None:
    """A function that `and_masks` or `or_masks` makes, if they still are what they are called."""
    truth = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    made: FunctionType = maker(lambda b, h, q, k: truth[0], lambda b, h, q, k: truth[1])
    index = torch.zeros(4, dtype=torch.int64)
    means = "mask_functions" in _cells(made) and bool((made(index, index, index, index) == join(*truth)).all())
    return made if means else None


def _cells(function: Any) -> dict[str, Any]:
    """What a function closes over, by name."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return {} if code is None else {n: c.cell_contents for n, c in zip(code.co_freevars, closure or (), strict=True)}


def _library() -> Any:
    from transformers.masking_utils import __name__ as name  # the package is a lazy module: torch 2.10 cannot trace it

    return sys.modules[name]


def _name(function: Any) -> str:
    """The function that was not recognised, looked for inside combinations."""
    for part in _cells(function).get("mask_functions", ()):
        if describe_mask(part, Frame(1, 1, 1, 0, 0, torch.device("cpu"))) is None:
            return _name(part)
    return getattr(function, "__qualname__", repr(function))


@cache
def _warn_dense(name: str) -> None:
    warnings.warn(
        f"tilewise does not know the mask function {name!r}: attention is exact, but over a dense mask, which takes memory "
        "quadratic in the length. Known are causal, bidirectional, sliding-window, chunked, packed, blockwise and padding "
        "masks of transformers and their combinations",
        stacklevel=3,
    )
