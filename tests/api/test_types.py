"""What type checkers and completion see: overloads for every return_lse, words that may be said, public names only."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
import typing
from typing import Any, Literal, get_args

import pytest
from torch import Tensor

import tilewise as tw
from tilewise import dispatch
from tilewise.api import names
from tilewise.api.parse import LAYOUTS
from tilewise.problem import PRECISIONS

BOTH = Tensor | tuple[Tensor, Tensor]
FUNCTIONS = [tw.attention, tw.attention_varlen]


def test_the_words_are_those_that_are_checked() -> None:
    assert get_args(names.BackendName) == ("auto", *dispatch.REGISTRY)
    assert get_args(names.Layout) == tuple(LAYOUTS)
    assert get_args(names.Precision) == PRECISIONS


@pytest.mark.parametrize("function", FUNCTIONS)
def test_overloads_for_every_return_lse(function: Any) -> None:
    found = [typing.get_type_hints(one) for one in typing.get_overloads(function)]
    returns = {hints["return_lse"]: hints["return"] for hints in found}
    assert returns == {Literal[True]: tuple[Tensor, Tensor], Literal[False]: Tensor, bool: BOTH}


@pytest.mark.parametrize("function", [*FUNCTIONS, tw.explain, tw.sdpa])
def test_words_are_literals(function: Any) -> None:
    hints = typing.get_type_hints(function)
    for name, want in (("backend", names.BackendName), ("layout", names.Layout), ("precision", names.Precision)):
        assert hints.get(name, want) == want


def test_dir_shows_the_public_names_only() -> None:
    code = "import tilewise; print(*dir(tilewise)); tilewise.attention; tilewise.nn; print(*dir(tilewise))"
    before, after = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert before == after == " ".join(sorted([*tw.__all__, "nn"]))


PUBLIC = [
    getattr(tw, name)
    for name in tw.__all__
    if name not in ("__version__", "backends") and callable(getattr(tw, name)) and not inspect.isclass(getattr(tw, name))
]
METHODS = [tw.Problem.of, tw.Mask.to_dense, tw.Mask.to]


def helped() -> list[Any]:
    from tilewise.api.backends import backends

    return [*PUBLIC, *METHODS, backends, tw.replace_sdpa, tw.nn.Attention]


@pytest.mark.parametrize("thing", helped(), ids=lambda thing: thing.__name__)
def test_help_says_what_every_parameter_is(thing: Any) -> None:
    doc = inspect.getdoc(thing) or ""
    hidden = {"self", "cls", "features", "options"}
    for name in inspect.signature(thing).parameters:
        assert name in hidden or f"{name}:" in doc or f"`{name}`" in doc, f"{thing.__name__}: {name} is not explained"
    if isinstance(thing, types.FunctionType):
        assert ">>>" in doc, f"{thing.__name__} has no example"
