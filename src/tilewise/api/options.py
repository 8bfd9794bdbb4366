"""The options of `attention`, declared once: name, type and, as the annotation's metadata, default.

Keyword checks, the signatures that `help` shows and the parsing of every call are derived from these classes. They are typed
dictionaries, so that type checkers and editors know the keywords of every function that takes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypedDict, get_type_hints

from torch import Tensor

from tilewise.api.bias import Alibi
from tilewise.api.names import BackendName, Layout, Precision, Tile
from tilewise.masks import Mask


class Options(TypedDict, total=False):
    """What every function takes."""

    mask: Annotated[Mask | Tensor | None, None]
    scale: Annotated[float | None, None]
    bias: Annotated[Tensor | Alibi | None, None]
    softcap: Annotated[float, 0.0]
    sinks: Annotated[Tensor | None, None]
    dropout_p: Annotated[float, 0.0]
    seed: Annotated[int | Tensor | None, None]
    precision: Annotated[Precision, "default"]
    deterministic: Annotated[bool | None, None]


class PackedOptions(Options, total=False):
    """What `attention_varlen` takes beside `return_lse` and `stats`, which its overloads tell apart."""

    backend: Annotated[BackendName, "auto"]
    tile: Annotated[Tile | None, None]


class BatchOptions(PackedOptions, total=False):
    """What `attention` takes beside `return_lse` and `stats`."""

    layout: Annotated[Layout, "bhsd"]


class CallOptions(Options, total=False):
    """One call as it is parsed; with `cu_seqlens_q` it is one of `attention_varlen`."""

    layout: Annotated[Layout, "bhsd"]
    return_lse: Annotated[bool, False]
    stats: Annotated[Sequence[str] | None, None]
    cu_seqlens_q: Annotated[Tensor | None, None]
    cu_seqlens_k: Annotated[Tensor | None, None]


class ParsedOptions(CallOptions, total=False):
    """The same of a call that is run: diagnostics have a `tile` of their own."""

    tile: Annotated[Tile | None, None]


def parameters(options: Any) -> list[inspect.Parameter]:
    """The options of one of these classes as keyword parameters with their types and defaults."""
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=hint.__metadata__[0], annotation=hint.__origin__
        )
        for name, hint in get_type_hints(options, include_extras=True).items()
    ]


DEFAULTS: ParsedOptions = {one.name: one.default for one in parameters(ParsedOptions)}  # type: ignore[assignment]


def show_signature(function: Callable[..., Any], options: Sequence[inspect.Parameter] = ()) -> None:
    """Let `help` show the options in place of the parameters that catch all others."""
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
