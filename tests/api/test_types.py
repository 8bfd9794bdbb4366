"""What type checkers and completion see: overloads for every return_lse, words that may be said, public names only."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from typing import Any, Literal, get_args

import pytest
from torch import Tensor

import tilewise as tw
from tilewise import dispatch
from tilewise.api import names
from tilewise.api.call_cache import NAMES
from tilewise.api.options import BatchOptions, CallOptions, PackedOptions, parameters
from tilewise.api.parse import LAYOUTS
from tilewise.api.statistics import Stats
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
    returns = {(hints["return_lse"], "stats" in hints): hints["return"] for hints in found}
    assert returns == {
        (Literal[True], False): tuple[Tensor, Tensor],
        (Literal[False], False): Tensor,
        (bool, False): BOTH,
        (Literal[True], True): tuple[Tensor, Tensor, Stats],
        (Literal[False], True): tuple[Tensor, Stats],
    }


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
    assert before == after == " ".join(sorted([*tw.__all__, "distributed", "nn"]))


def helped() -> list[Any]:
    """Every public name and the methods that make up their use."""
    from tilewise.api.backends import backends

    names = [getattr(tw, name) for name in tw.__all__ if name not in ("__version__", "backends")]
    return [*names, backends, tw.Problem.of, tw.Mask.to_dense, tw.Mask.to, *(getattr(tw.nn, n) for n in tw.nn.__all__)]


@pytest.mark.parametrize("thing", helped(), ids=lambda thing: thing.__name__)
def test_help_explains_every_parameter_and_shows_an_example(thing: Any) -> None:
    doc = inspect.getdoc(thing) or ""
    assert ">>>" in doc, f"{thing.__name__} has no example"
    taken = inspect.signature(thing.__init__ if inspect.isclass(thing) else thing).parameters
    for name in set(taken) - {"self", "cls", "args", "kwargs"}:
        assert f"{name}:" in doc or f"`{name}`" in doc, f"{thing.__name__}: {name} is not explained"


def test_attention_has_five_examples_and_says_what_it_returns() -> None:
    doc = inspect.getdoc(tw.attention) or ""
    assert doc.count(">>>") >= 5 and "Returns out (B, Hq, Sq, Dv)" in doc


def test_signatures_are_the_declaration() -> None:
    """`attention` writes its options out, in the order in which the call cache takes them; all else is derived."""
    shown = dict(list(inspect.signature(tw.attention).parameters.items())[3:])
    assert [name for name in shown if name not in ("seed", "stats")] == list(NAMES)
    beside = [one for one in parameters(CallOptions) if one.name in ("return_lse", "stats")]
    for one in [*parameters(BatchOptions), *beside]:
        assert shown.pop(one.name).default == one.default
    assert not shown
    hints = typing.get_type_hints(inspect.unwrap(tw.attention))
    assert {one.name: one.annotation for one in parameters(BatchOptions)}.items() <= hints.items()
    packed = inspect.signature(tw.attention_varlen).parameters
    assert all(packed[one.name] == one for one in parameters(PackedOptions))
