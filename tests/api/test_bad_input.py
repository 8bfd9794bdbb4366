"""Bad input: every case raises an error of ours that names the argument, what it got and what it wants; nothing runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise import dispatch
from tilewise.errors import ArgumentError, ArgumentTypeError, BackendError, DeviceError, LayoutError, MaskError


class Bad(NamedTuple):
    """Arguments put in the place of good ones, the error they give, and words of its message."""

    name: str
    arguments: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


def good() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, 6, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 5)}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def every(dtype: torch.dtype) -> dict[str, Any]:
    return {name: x.to(dtype) for name, x in good().items()}


META = {"device": "meta"}
Q, K, V = good().values()

TENSORS = [
    Bad("q None", {"q": None}, ArgumentTypeError, ("q:", "NoneType", "torch.Tensor")),
    Bad("k None", {"k": None}, ArgumentTypeError, ("k:", "NoneType", "torch.Tensor")),
    Bad("v list", {"v": V.tolist()}, ArgumentTypeError, ("v:", "list", "torch.Tensor")),
    Bad("k numpy", {"k": K.numpy()}, ArgumentTypeError, ("k:", "ndarray", "torch.Tensor")),
    Bad("q rank 3", {"q": Q[0]}, LayoutError, ("q:", "(4, 6, 8)", "rank 4")),
    Bad("v rank 5", {"v": V[None]}, LayoutError, ("v:", "rank 5", "rank 4")),
    Bad("batch", {"k": K[:1], "v": V[:1]}, LayoutError, ("batch", "2", "1", "agree")),
    Bad("heads of v", {"v": V[:, :1]}, LayoutError, ("heads", "k has 2", "v 1")),
    Bad("heads no multiple", {"q": Q[:, :3]}, LayoutError, ("heads", "3", "2", "multiple")),
    Bad("fewer query heads", {"q": Q[:, :1]}, LayoutError, ("heads", "1", "2", "multiple")),
    Bad("no key heads", {"k": K[:, :0], "v": V[:, :0]}, LayoutError, ("heads", "4", "0", "multiple")),
    Bad("positions of v", {"v": V[:, :, :6]}, LayoutError, ("keys", "7", "6", "agree")),
    Bad("head dim of k", {"k": K[..., :7]}, LayoutError, ("head dim", "8", "7", "agree")),
    Bad("head dim 0", {"q": Q[..., :0], "k": K[..., :0]}, ArgumentError, ("head_dim:", "0", "1 to 512")),
    Bad(
        "head dim 513", {"q": zeros(2, 2, 1, 513), "k": zeros(2, 2, 7, 513)}, ArgumentError, ("head_dim:", "513", "512")
    ),
    Bad("value dim 0", {"v": V[..., :0]}, ArgumentError, ("head_dim_v:", "0", "1 to 512")),
    Bad("value dim 513", {"v": zeros(2, 2, 7, 513)}, ArgumentError, ("head_dim_v:", "513", "512")),
    Bad(
        "2**30 queries",
        {"q": zeros(2, 2, 1, 8).expand(2, 2, 2**30, 8)},
        ArgumentError,
        ("seqlen_q", str(2**30), str(2**30 - 1)),
    ),
    Bad("dtype of k", {"k": K.half()}, ArgumentTypeError, ("k:", "float16", "float32", "k.to(q.dtype)")),
    Bad("dtype of v", {"v": V.double()}, ArgumentTypeError, ("v:", "float64", "float32")),
    *(
        Bad(str(dtype), every(dtype), ArgumentTypeError, ("q:", str(dtype), "float16, bfloat16, float32 or float64"))
        for dtype in (torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    ),
    Bad("device of k", {"k": K.to("meta")}, DeviceError, ("k:", "meta", "cpu", "k.to(q.device)")),
    Bad("device of v", {"v": V.to("meta")}, DeviceError, ("v:", "meta", "cpu")),
    Bad("sparse", {"k": K.to_sparse()}, LayoutError, ("k:", "sparse", "dense")),
    Bad("all sparse", {n: x.to_sparse() for n, x in good().items()}, LayoutError, ("q:", "sparse", "to_dense()")),
]
SETTINGS = [
    Bad("layout typo", {"layout": "bsdh"}, LayoutError, ("layout:", "'bsdh'", "'bhsd'", "'bshd'")),
    Bad("layout None", {"layout": None}, LayoutError, ("layout:", "None", "'bhsd'")),
    Bad("layout list", {"layout": ["bhsd"]}, LayoutError, ("layout:", "['bhsd']", "'bhsd'")),
    *(
        Bad(f"{name} {value}", {name: value}, ArgumentError, (f"{name}:", str(value), "finite"))
        for name in ("scale", "softcap", "dropout_p")
        for value in (math.nan, math.inf, -math.inf)
    ),
    *(
        Bad(f"{name} {value!r}", {name: value}, ArgumentTypeError, (f"{name}:", repr(value), "number"))
        for name in ("scale", "softcap", "dropout_p")
        for value in ("1.0", True, False, [1.0], 1j, np.ones(1), np.True_)
    ),
    Bad("scale tensor", {"scale": torch.tensor(0.5)}, ArgumentTypeError, ("scale:", "tensor(0.5", "number")),
    Bad("scale 10**400", {"scale": 10**400}, ArgumentError, ("scale:", "finite")),
    Bad("softcap None", {"softcap": None}, ArgumentTypeError, ("softcap:", "None", "number")),
    Bad("softcap negative", {"softcap": -1.0}, ArgumentError, ("softcap:", "-1.0", "positive")),
    Bad("dropout None", {"dropout_p": None}, ArgumentTypeError, ("dropout_p:", "None", "number")),
    *(
        Bad(f"dropout {p}", {"dropout_p": p}, ArgumentError, ("dropout_p:", str(p), "[0, 1)"))
        for p in (1.0, -0.1, 1, 7)
    ),
    Bad("precision typo", {"precision": "high"}, ArgumentError, ("precision:", "'high'", "compensated")),
    Bad("precision None", {"precision": None}, ArgumentError, ("precision:", "None", "default")),
    Bad("precision list", {"precision": []}, ArgumentError, ("precision:", "[]", "default")),
    Bad("deterministic word", {"deterministic": "no"}, ArgumentTypeError, ("deterministic:", "'no'", "True")),
    Bad("deterministic list", {"deterministic": []}, ArgumentTypeError, ("deterministic:", "[]", "True")),
    Bad("backend typo", {"backend": "tyled"}, ArgumentError, ("backend", "'tyled'", "tiled", "reference")),
    Bad("backend None", {"backend": None}, ArgumentError, ("backend", "None", "'auto'")),
    Bad("backend list", {"backend": ["tiled"]}, ArgumentError, ("backend", "['tiled']", "'auto'")),
    *(
        Bad(f"seed {seed!r}", {"dropout_p": 0.1, "seed": seed}, ArgumentTypeError, ("seed:", "integer"))
        for seed in ("1", 1.5, True, torch.tensor(1.5), torch.tensor([1, 2]), torch.tensor(True), torch.tensor(1j))
    ),
    Bad("seed sparse", {"dropout_p": 0.1, "seed": zeros(1).int().to_sparse()}, LayoutError, ("seed:", "sparse")),
    Bad("seed 2**64", {"dropout_p": 0.1, "seed": 2**64}, ArgumentError, ("seed:", str(2**64), "64 bits")),
    Bad(
        "seed meta",
        {"dropout_p": 0.1, "seed": torch.zeros((), dtype=torch.int64, **META)},
        DeviceError,
        ("seed:", "meta"),
    ),
]
BIASES = [
    Bad("bias bool", {"bias": zeros(6, 7).bool()}, ArgumentTypeError, ("bias:", "bool", "floating-point", "mask=")),
    Bad("bias int", {"bias": zeros(6, 7).int()}, ArgumentTypeError, ("bias:", "int32", "floating-point")),
    Bad("bias complex", {"bias": zeros(6, 7).cfloat()}, ArgumentTypeError, ("bias:", "complex64", "floating-point")),
    *(
        Bad(f"{name} {dtype}", {name: zeros(*shape).to(dtype)}, ArgumentTypeError, (f"{name}:", str(dtype), "float16"))
        for name, shape in (("bias", (6, 7)), ("sinks", (4,)))
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu)
    ),
    Bad("alibi float8", {"bias": tw.alibi(torch.ones(4).to(torch.float8_e5m2))}, ArgumentTypeError, ("bias:", "float8_e5m2")),
    Bad("bias sparse", {"bias": zeros(6, 7).to_sparse()}, LayoutError, ("bias:", "sparse", "dense")),
    Bad("sinks sparse", {"sinks": zeros(4).to_sparse()}, LayoutError, ("sinks:", "sparse", "dense")),
    Bad("bias list", {"bias": [0.0]}, ArgumentTypeError, ("bias:", "list", "floating-point")),
    Bad("bias queries", {"bias": zeros(5, 7)}, LayoutError, ("bias:", "5 along queries", "6")),
    Bad("bias keys", {"bias": zeros(6)}, LayoutError, ("bias:", "6 along keys", "7")),
    Bad("bias heads", {"bias": zeros(2, 6, 7)}, LayoutError, ("bias:", "2 along heads", "4")),
    Bad("bias batch", {"bias": zeros(3, 4, 6, 7)}, LayoutError, ("bias:", "3 along batch", "2")),
    Bad("bias empty", {"bias": zeros(0, 7)}, LayoutError, ("bias:", "0 along queries", "6")),
    Bad("bias rank 5", {"bias": zeros(1, 1, 1, 6, 7)}, LayoutError, ("bias:", "rank 5", "at most 4")),
    Bad("bias device", {"bias": zeros(6, 7, **META)}, DeviceError, ("bias:", "meta", "cpu")),
    Bad("alibi heads", {"bias": tw.alibi(torch.ones(3))}, LayoutError, ("alibi", "(3,)", "(4,)", "(2, 4)")),
    Bad("alibi batch", {"bias": tw.alibi(torch.ones(3, 4))}, LayoutError, ("alibi", "(3, 4)", "(2, 4)")),
    Bad("alibi device", {"bias": tw.alibi(torch.ones(4, **META))}, DeviceError, ("bias:", "meta", "cpu")),
    Bad("sinks list", {"sinks": [0.0] * 4}, ArgumentTypeError, ("sinks:", "list", "floating-point")),
    Bad("sinks int", {"sinks": zeros(4).int()}, ArgumentTypeError, ("sinks:", "int32", "floating-point")),
    Bad("sinks of key heads", {"sinks": zeros(2)}, LayoutError, ("sinks:", "(2,)", "query head", "(4,)")),
    Bad("sinks scalar", {"sinks": torch.tensor(0.0)}, LayoutError, ("sinks:", "()", "(4,)")),
    Bad("sinks device", {"sinks": zeros(4, **META)}, DeviceError, ("sinks:", "meta", "cpu")),
]
MASKS = [
    Bad("mask float", {"mask": zeros(6, 7)}, ArgumentTypeError, ("mask:", "float32", "boolean", "bias=")),
    *(
        Bad(
            f"mask {type(mask).__name__}", {"mask": mask}, ArgumentTypeError, ("mask:", type(mask).__name__, "causal()")
        )
        for mask in ([[True]], "causal", True, tw.causal)
    ),
    Bad("mask sparse", {"mask": zeros(6, 7).bool().to_sparse()}, LayoutError, ("mask:", "sparse", "dense")),
    Bad("mask rank 1", {"mask": zeros(7).bool()}, MaskError, ("dense", "rank 1", "2")),
    Bad("mask keys", {"mask": zeros(6, 8).bool()}, MaskError, ("dense", "8 keys", "7")),
    Bad("mask key heads", {"mask": zeros(2, 6, 7).bool()}, MaskError, ("dense", "2 along heads", "4")),
    Bad("mask device", {"mask": zeros(6, 7, **META).bool()}, DeviceError, ("mask:", "meta", "cpu")),
    Bad(
        "padding device", {"mask": tw.causal() & tw.key_padding(zeros(2, **META).int())}, DeviceError, ("mask:", "meta")
    ),
    Bad(
        "padding count",
        {"mask": tw.key_padding(torch.tensor([1, 2, 3]))},
        MaskError,
        ("lengths", "(3,)", "2 sequences"),
    ),
    Bad(
        "padding 2**40",
        {"mask": tw.key_padding(torch.tensor([2**40, 1]))},
        ArgumentError,
        ("mask", str(2**40), "32 bits"),
    ),
    *(
        Bad(f"lengths {list(lengths)}", {"mask": tw.causal() & tw.key_padding(kind(lengths))}, MaskError, words)
        for lengths, words in {
            (8, 1): ("key_padding: lengths[0] is 8", "0 to 7", "7 keys"),
            (7, -1): ("key_padding: lengths[1] is -1", "0 to 7"),
            (9,): ("key_padding: lengths[0] is 9", "0 to 7"),
        }.items()
        for kind in (list, torch.tensor, np.array)
    ),
    Bad(
        "start and length",
        {"mask": ~tw.key_padding([3, 4], start=torch.tensor([2, 4]))},
        MaskError,
        ("key_padding: start[1] + lengths[1] is 8", "7 keys"),
    ),
    Bad("start -1", {"mask": tw.key_padding([3], start=[-1])}, MaskError, ("key_padding: start[0] is -1", "0 to 7")),
    Bad("prefix -1", {"mask": tw.prefix(torch.tensor([3, -1]))}, MaskError, ("prefix: n[1] is -1", "at least 0")),
    Bad(
        "padding (B, S)",
        {"mask": torch.ones(2, 7, dtype=torch.bool)},
        MaskError,
        ("dense", "2 queries", "(batch, keys)", "mask[:, None, None, :]"),
    ),
    Bad(
        "mask (B, Sq, Sk)",
        {"mask": torch.ones(2, 6, 7, dtype=torch.bool)},
        MaskError,
        ("dense", "2 along heads", "(batch, queries, keys)", "mask[:, None]"),
    ),
    Bad(
        "offset 2**40",
        {"mask": tw.causal(offset=torch.tensor([2**40, 1]))},
        ArgumentError,
        ("mask", str(2**40), "32 bits"),
    ),
    Bad(
        "offset count",
        {"mask": tw.causal(offset=torch.tensor([1, 2, 3]))},
        MaskError,
        ("offset", "(3,)", "2 sequences"),
    ),
    Bad(
        "ids 2**32",
        {"mask": tw.documents(torch.arange(7) << 32, torch.arange(6) << 32)},
        ArgumentError,
        ("mask", str(6 << 32), "32 bits"),
    ),
    Bad(
        "ids length",
        {"mask": tw.documents(torch.arange(6), torch.arange(6))},
        MaskError,
        ("documents", "ids", "6", "(7,)"),
    ),
    Bad("ids of queries", {"mask": tw.documents(torch.arange(7))}, MaskError, ("documents", "6", "7", "q_ids")),
    Bad("table too small", {"mask": tw.blocks(zeros(3, 3).bool(), 2)}, MaskError, ("blocks", "(3, 3)", "(3, 4)")),
    Bad("table rank 1", {"mask": tw.blocks(zeros(3).bool(), 2)}, MaskError, ("blocks", "rank 1", "2")),
    Bad("table heads", {"mask": tw.blocks(zeros(3, 3, 4).bool(), 2)}, MaskError, ("blocks", "3 along heads", "4")),
    Bad("lists rank 1", {"mask": tw.selected(zeros(2).int())}, MaskError, ("selected: indices has rank 1", "(2,)")),
    Bad("lists", {"mask": tw.selected(zeros(2, 2).int())}, MaskError, ("selected: indices has 2 lists", "6 queries", "are 1")),
    Bad("lists by heads", {"mask": tw.selected(zeros(3, 1, 2).int())}, MaskError, ("3 along heads", "4 query heads", "1 or 2")),
    Bad("lists by batch", {"mask": tw.selected(zeros(3, 1, 1, 2).int())}, MaskError, ("selected", "3 along batch", "use 1 or 2")),
    Bad("lists elsewhere", {"mask": tw.selected(zeros(1, 2, **META).int())}, DeviceError, ("mask", "meta", "cpu")),
    Bad(
        "a block past the last",
        {"mask": tw.selected(torch.tensor([[0, 2]]), block=4)},
        MaskError,
        ("selected: indices[0, 1] is 2", "0 to 1, or -1", "7 keys, 2 blocks of 4"),
    ),
    Bad(
        "a block before the first",
        {"mask": tw.causal() & ~tw.selected(torch.tensor([[[0, 1]], [[-2, 0]], [[0, 0]], [[0, 0]]]), block=4)},
        MaskError,
        ("selected: indices[1, 0, 0] is -2",),
    ),
    Bad(
        "too many terms",
        {
            "mask": ~(
                tw.window(1, 1)
                | tw.window(2, 2)
                | tw.window(3, 3)
                | tw.window(4, 4)
                | tw.window(5, 5)
                | tw.window(6, 6)
            )
        },
        MaskError,
        ("64 alternatives", "32", "blocks"),
    ),
]


def refused(call: Callable[[], Any], error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, tw.TilewiseError)
    assert isinstance(caught.value, (ValueError, TypeError, BackendError))
    for word in words:
        assert word in str(caught.value)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call like the good one has been seen; from here on a backend that is run is a failure."""
    tw.attention(**good())

    def run(*args: Any) -> None:
        raise AssertionError("a backend was run on bad input")

    for name in dispatch.REGISTRY:
        if dispatch.usable(name, "cpu").ok:
            monkeypatch.setattr(dispatch.get(name), "forward", run)


@pytest.mark.parametrize("bad", [*TENSORS, *SETTINGS, *BIASES, *MASKS], ids=lambda bad: bad.name)
def test_attention_refuses(bad: Bad) -> None:
    arguments = {**good(), **bad.arguments}
    refused(lambda: tw.attention(**arguments), bad.error, bad.words)


def test_a_device_nobody_runs_on() -> None:
    problem = tw.Problem.of(heads=1, head_dim=8, seqlen=4, dtype="float32", device="tpu")
    with pytest.raises(BackendError) as caught:
        dispatch.select(problem)
    assert set(caught.value.verdicts) == set(dispatch.REGISTRY)
    assert all("tpu" in " ".join(reasons) for reasons in caught.value.verdicts.values())


def test_an_explicit_backend_that_cannot() -> None:
    with pytest.raises(BackendError, match=r"reference.*compensated.*tiled") as caught:
        tw.attention(**every(torch.float64), backend="reference", precision="compensated")
    assert list(caught.value.verdicts) == ["reference"]


@pytest.mark.gpu
def test_lengths_on_a_gpu_are_read_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # here a backend runs
    q = torch.randn(2, 1, 7, 16, device="cuda")
    mask = tw.key_padding(torch.tensor([9, 3], device="cuda"))
    want = tw.attention(q, q, q, mask=tw.key_padding([7, 3]))
    assert torch.equal(tw.attention(q, q, q, mask=mask), want)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    refused(lambda: tw.attention(q, q, q, mask=mask), MaskError, ("key_padding: lengths[0] is 9", "0 to 7"))
