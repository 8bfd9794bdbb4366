"""The options that describe a problem, declared once for the commands that take one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from tilewise.problem import Problem

Device = Annotated[str | None, typer.Option(help="A catalogued machine such as h200; default: this one.")]
Pass = Annotated[str, typer.Option("--pass", help="auto, forward, decode, backward, backward_dkdv, backward_dq, ….")]
Tile = Annotated[str | None, typer.Option(help="Your own tile of that pass, such as 128x64, beside ours.")]
Backend = Annotated[str, typer.Option(help="auto, or one by name.")]

_PROBLEM: dict[str, tuple[Any, Any, str]] = {
    "seqlen": (int, 4096, "Queries (and keys, unless --kv-seqlen)."),
    "heads": (int, 16, "Query heads."),
    "head_dim": (int, 128, "Head dimension."),
    "batch": (int, 1, "Sequences."),
    "kv_heads": (int | None, None, "Key and value heads, if fewer."),
    "kv_seqlen": (int | None, None, "Keys, if not as many as queries."),
    "dtype": (str, "bf16", "fp16, bf16, fp32 or fp64."),
    "mask": (str | None, None, "For example 'causal & window(4096)'."),
}
"""Type, default and help of each option."""


def takes_problem(without: str = "", **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command's first parameter, `problem`, becomes the options of a problem, all but `without`, with these defaults."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=defaults.get(name, default),
                annotation=Annotated[kind, typer.Option(help=help)],
            )
            for name, (kind, default, help) in _PROBLEM.items()
            if name != without
        ]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            command(make_problem(**{option.name: given.pop(option.name) for option in options}), **given)

        hints = get_type_hints(command, localns={"Problem": object}, include_extras=True)
        own = [
            p.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
            for name, p in inspect.signature(command).parameters.items()
            if name != "problem"
        ]
        signature = inspect.Signature([*options, *own])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        return run

    return decorate


def make_problem(mask: str | None = None, **shape: Any) -> Problem:
    from tilewise.masks import parse
    from tilewise.problem import Problem

    return Problem.of(mask=parse(mask) if mask else None, **shape)


def parse_tile(text: str | None) -> tuple[int, int] | None:
    """`128x64` as (128, 64)."""
    from tilewise.errors import PlanError

    if text is None:
        return None
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise PlanError(f"tile: got {text!r}, need rows and keys such as 128x64")
    m, n = (int(part) for part in parts)
    return m, n
