"""Packed batches that do not fit together: cumulative lengths wrong in each way, tables and biases too short for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise import dispatch
from tilewise.errors import ArgumentError, ArgumentTypeError, DeviceError, LayoutError, MaskError


def good() -> dict[str, Any]:
    """Sequences of 4 and 6 queries and of 5 and 7 keys."""
    return {
        "q": torch.zeros(10, 4, 8),
        "k": torch.zeros(12, 2, 8),
        "v": torch.zeros(12, 2, 8),
        "cu_seqlens_q": torch.tensor([0, 4, 10]),
        "cu_seqlens_k": torch.tensor([0, 5, 12]),
    }


def cu(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


# name, what replaces the good arguments, the error, words of its message
BAD: list[tuple[str, dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ("rank 4", {"q": torch.zeros(1, 4, 10, 8)}, LayoutError, ("q:", "rank 4", "rank 3", "(tokens, heads, dim)")),
    ("list", {"cu_seqlens_q": [0, 4, 10]}, ArgumentTypeError, ("cu_seqlens_q:", "list", "integer tensor")),
    ("None", {"cu_seqlens_q": None}, ArgumentTypeError, ("cu_seqlens_q:", "NoneType", "integer tensor")),
    ("float", {"cu_seqlens_k": cu(0, 5, 12).float()}, ArgumentTypeError, ("cu_seqlens_k:", "float32", "integer")),
    ("bool", {"cu_seqlens_k": cu(0, 5, 12).bool()}, ArgumentTypeError, ("cu_seqlens_k:", "bool", "integer")),
    ("rank 2", {"cu_seqlens_q": cu(0, 4, 10)[None]}, LayoutError, ("cu_seqlens_q:", "(1, 3)", "(sequences + 1,)")),
    ("rank 0", {"cu_seqlens_q": torch.tensor(0)}, LayoutError, ("cu_seqlens_q:", "()", "(sequences + 1,)")),
    ("empty", {"cu_seqlens_q": cu()}, LayoutError, ("cu_seqlens_q:", "(0,)", "(sequences + 1,)")),
    ("count", {"cu_seqlens_k": cu(0, 5, 6, 12)}, LayoutError, ("cu_seqlens_k:", "3 sequences", "2")),
    ("start", {"cu_seqlens_q": cu(1, 4, 10)}, ArgumentError, ("cu_seqlens_q:", "starts with 1", "need 0")),
    ("negative", {"cu_seqlens_q": cu(0, -4, 10)}, ArgumentError, ("cu_seqlens_q:", "from 0 to -4", "position 1")),
    (
        "falling",
        {"cu_seqlens_q": cu(0, 8, 4, 10), "cu_seqlens_k": cu(0, 1, 2, 12)},
        ArgumentError,
        ("cu_seqlens_q:", "from 8 to 4", "position 2"),
    ),
    ("too short", {"cu_seqlens_q": cu(0, 4, 9)}, ArgumentError, ("cu_seqlens_q:", "ends with 9", "10 tokens")),
    ("too long", {"cu_seqlens_k": cu(0, 4, 13)}, ArgumentError, ("cu_seqlens_k:", "ends with 13", "12 tokens")),
    ("keys missing", {"cu_seqlens_k": None}, ArgumentError, ("cu_seqlens_k:", "ends with 10", "12 tokens")),
    ("wrapping", {"cu_seqlens_q": cu(0, 4, 2**32 + 10)}, ArgumentError, ("cu_seqlens_q:", str(2**32 + 10), "32 bits")),
    ("device", {"cu_seqlens_q": cu(0, 4, 10).to("meta")}, DeviceError, ("cu_seqlens_q:", "meta", "cpu")),
    ("no tokens", {"q": torch.zeros(0, 4, 8)}, ArgumentError, ("cu_seqlens_q:", "ends with 10", "0 tokens")),
    ("dense mask", {"mask": torch.ones(10, 12, dtype=torch.bool)}, MaskError, ("dense", "packed", "documents")),
    ("short table", {"mask": tw.blocks(torch.ones(2, 4), 2)}, MaskError, ("blocks", "2 blocks of 2", "has 6", "least 3")),
    ("narrow table", {"mask": tw.blocks(torch.ones(3, 3), 2)}, MaskError, ("blocks", "3 blocks of 2", "has 7", "least 4")),
    ("short bias", {"bias": torch.zeros(5, 7)}, LayoutError, ("bias:", "5 along queries", "has 6")),
    ("narrow bias", {"bias": torch.zeros(6, 6)}, LayoutError, ("bias:", "6 along keys", "has 7")),
    ("bias batch", {"bias": torch.zeros(3, 1, 6, 7)}, LayoutError, ("bias:", "3 along batch", "2")),
    ("ids of a batch", {"mask": tw.documents(torch.zeros(2, 12).int(), torch.zeros(2, 10).int())}, MaskError, ("ids", "(12,)")),
    ("padding long", {"mask": tw.key_padding([5, 8])}, MaskError, ("key_padding: lengths[1] is 8", "0 to 7", "sequence 1")),
    ("padding negative", {"mask": tw.key_padding(cu(-1, 3))}, MaskError, ("key_padding: lengths[0] is -1", "0 to 5")),
    ("padding of all", {"mask": tw.key_padding(cu(6))}, MaskError, ("key_padding: lengths[0] is 6", "0 to 5", "sequence 0")),
    ("padding count", {"mask": tw.key_padding([1, 2, 3])}, MaskError, ("lengths", "(3,)", "2 sequences")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "error", "words"), BAD, ids=[bad[0] for bad in BAD])
def test_packed_attention_refuses(
    name: str,
    arguments: dict[str, Any],
    error: type[Exception],
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*args: Any) -> None:
        raise AssertionError("a backend was run on bad input")

    for backend in dispatch.REGISTRY:
        if dispatch.usable(backend, "cpu").ok:
            monkeypatch.setattr(dispatch.get(backend), "forward", run)
    with pytest.raises(error) as caught:
        tw.attention_varlen(**{**good(), **arguments})
    assert isinstance(caught.value, tw.TilewiseError) and isinstance(caught.value, (ValueError, TypeError))
    for word in words:
        assert word in str(caught.value)


def test_the_good_arguments_are_good() -> None:
    assert tw.attention_varlen(**good()).shape == (10, 4, 8)
    assert tw.attention_varlen(**good(), mask=tw.key_padding([5, 7]) & tw.prefix([99, 6])).shape == (10, 4, 8)
    longer = {"mask": tw.blocks(torch.ones(5, 5), 2), "bias": torch.zeros(9, 1)}
    assert tw.attention_varlen(**good(), **longer).shape == (10, 4, 8)


@pytest.mark.parametrize("function", ["attention_varlen", "explain", "trace_nonfinite", "certify"])
def test_every_function_that_takes_a_call_checks_its_lengths(function: str) -> None:
    call = {**good(), "cu_seqlens_k": torch.tensor([0, 5, 8, 12])}
    out = {"out": torch.zeros(10, 4, 8)} if function == "certify" else {}
    with pytest.raises(LayoutError, match="cu_seqlens_k: 3 sequences, but cu_seqlens_q has 2"):
        getattr(tw, function)(**call, **out)
