"""Bad input to what builds masks and biases: the error names the argument, what it got and what it wants."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.api.test_bad_input import Bad, refused, zeros
from tilewise.errors import ArgumentTypeError, LayoutError, MaskError

CONSTRUCTORS = [
    *(
        Bad(f"window {n}", {"make": lambda n=n: tw.window(n)}, MaskError, ("window", str(n), need))
        for n, need in ((-1, "at least 1"), (0, "at least 1"), (2**40, "at most"))
    ),
    *(
        Bad(f"window {n!r}", {"make": lambda n=n: tw.window(n)}, ArgumentTypeError, ("window", repr(n), "integer"))
        for n in (1.5, "4", None, True, torch.tensor(3))
    ),
    Bad("window left", {"make": lambda: tw.window(-1, 3)}, MaskError, ("window: left", "-1", "at least 0")),
    Bad("window right", {"make": lambda: tw.window(3, -1)}, MaskError, ("window: right", "-1", "at least 0")),
    Bad("prefix -1", {"make": lambda: tw.prefix(-1)}, MaskError, ("prefix: n", "-1", "at least 0")),
    Bad("prefix 1.5", {"make": lambda: tw.prefix(1.5)}, ArgumentTypeError, ("prefix: n", "1.5", "integer")),
    Bad(
        "prefix floats",
        {"make": lambda: tw.prefix(torch.ones(2))},
        ArgumentTypeError,
        ("prefix: n", "float32", ".int()"),
    ),
    Bad(
        "align typo",
        {"make": lambda: tw.causal("top_right")},
        MaskError,
        ("causal: align", "'top_right'", "'top_left'"),
    ),
    Bad("align list", {"make": lambda: tw.window(3, align=[])}, MaskError, ("window: align", "[]", "'top_left'")),
    Bad(
        "offset word", {"make": lambda: tw.causal(offset="3")}, ArgumentTypeError, ("causal: offset", "'3'", "integer")
    ),
    Bad(
        "offset 1.5",
        {"make": lambda: tw.window(3, offset=1.5)},
        ArgumentTypeError,
        ("window: offset", "1.5", "integer"),
    ),
    Bad(
        "offset 2**40", {"make": lambda: tw.causal(offset=2**40)}, MaskError, ("causal: offset", str(2**40), "at most")
    ),
    Bad(
        "lengths None",
        {"make": lambda: tw.key_padding(None)},
        ArgumentTypeError,
        ("key_padding: lengths", "None", "integer"),
    ),
    Bad(
        "lengths 2**70",
        {"make": lambda: tw.key_padding([2**70])},
        MaskError,
        ("key_padding: lengths", str(2**70), "32 bits"),
    ),
    Bad(
        "lengths 7",
        {"make": lambda: tw.key_padding(7)},
        ArgumentTypeError,
        ("key_padding: lengths is 7 (int)", "one integer for each sequence", "prefix(7)"),
    ),
    Bad(
        "start 7",
        {"make": lambda: tw.key_padding([7], 7)},
        ArgumentTypeError,
        ("key_padding: start is 7 (int)", "one integer for each sequence"),
    ),
    Bad(
        "ids 7",
        {"make": lambda: tw.documents(7)},
        ArgumentTypeError,
        ("documents: ids is 7 (int)", "one integer for each position"),
    ),
    *(
        Bad(
            f"boolean {kind.__name__}",
            {"make": lambda kind=kind: tw.key_padding(kind([[True, False]]))},
            ArgumentTypeError,
            ("key_padding: lengths", "bool", "mask[:, None, None, :]", "True = attend"),
        )
        for kind in (torch.tensor, np.array)
    ),
    Bad(
        "lengths float",
        {"make": lambda: tw.key_padding([1.0])},
        ArgumentTypeError,
        ("key_padding: lengths", "1.0", "integers"),
    ),
    Bad(
        "start float",
        {"make": lambda: tw.key_padding([1], zeros(1))},
        ArgumentTypeError,
        ("key_padding: start", "float32"),
    ),
    Bad(
        "ids float",
        {"make": lambda: tw.documents(zeros(7))},
        ArgumentTypeError,
        ("documents: ids", "float32", ".int()"),
    ),
    Bad("table list", {"make": lambda: tw.blocks([[True]], 2)}, ArgumentTypeError, ("blocks: table", "list", "tensor")),
    Bad("size 0", {"make": lambda: tw.blocks(zeros(3, 3), 0)}, MaskError, ("blocks: size", "0", "at least 1")),
    Bad(
        "size 1.5", {"make": lambda: tw.blocks(zeros(3, 3), 1.5)}, ArgumentTypeError, ("blocks: size", "1.5", "integer")
    ),
    Bad(
        "three sizes",
        {"make": lambda: tw.blocks(zeros(3, 3), (1, 2, 3))},
        MaskError,
        ("blocks: size", "(1, 2, 3)", "pair"),
    ),
    Bad("dense list", {"make": lambda: tw.dense([[True]])}, ArgumentTypeError, ("dense", "list", "boolean")),
    Bad("dense True", {"make": lambda: tw.dense(True)}, ArgumentTypeError, ("dense", "bool", "boolean tensor")),
    Bad("dense float", {"make": lambda: tw.dense(zeros(6, 7))}, ArgumentTypeError, ("dense", "float32", "bias=")),
    Bad("and", {"make": lambda: tw.causal() and tw.window(3)}, MaskError, ("truth value", "&")),
    Bad("& tensor", {"make": lambda: tw.causal() & zeros(6, 7).bool()}, ArgumentTypeError, ("Tensor", "dense(...)")),
    Bad("tensor &", {"make": lambda: zeros(6, 7).bool() & tw.causal()}, ArgumentTypeError, ("Tensor", "dense(...)")),
    Bad("| None", {"make": lambda: tw.causal() | None}, ArgumentTypeError, ("NoneType", "masks")),
    Bad(
        "slopes list", {"make": lambda: tw.alibi([0.5])}, ArgumentTypeError, ("alibi: slopes", "list", "floating-point")
    ),
    Bad(
        "slopes int",
        {"make": lambda: tw.alibi(zeros(4).int())},
        ArgumentTypeError,
        ("alibi: slopes", "int32", "floating-point"),
    ),
    Bad(
        "slopes rank 3",
        {"make": lambda: tw.alibi(zeros(1, 2, 4))},
        LayoutError,
        ("alibi: slopes", "(1, 2, 4)", "(heads,)"),
    ),
    Bad(
        "slopes with gradient",
        {"make": lambda: tw.alibi(torch.ones(4, requires_grad=True))},
        ArgumentTypeError,
        ("alibi: slopes", "gradient", "slopes.detach()"),
    ),
]


@pytest.mark.parametrize("bad", CONSTRUCTORS, ids=lambda bad: bad.name)
def test_constructors_refuse(bad: Bad) -> None:
    refused(bad.arguments["make"], bad.error, bad.words)
