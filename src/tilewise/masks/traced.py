"""`~mask` inside a compiled function.

torch's compiler traces `&` and `|` of objects, but not yet `~`. It looks the rule of an operator up by name, `call_invert`;
where it has none, it is given one that knows masks. Nothing is imported for that, and nothing done before the compiler is
there: the constructors of masks ask, and the compiler runs the question for real while it traces them.
"""

from __future__ import annotations

import sys
from typing import Any

from tilewise.masks.algebra import Mask

_COMPILER = "torch._dynamo.variables.builtin"
_loaded = sys.modules
_met: list[object] = []


def meet_compiler() -> None:
    """Teach `~` to a compiler that is loaded and does not know it."""
    if _COMPILER in _loaded and not _met:
        _teach()


meet_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


def _teach() -> None:
    builtin = getattr(_loaded[_COMPILER], "BuiltinVariable", None)
    if builtin is not None:  # None while it is being imported
        _met.append(builtin)
        if not hasattr(builtin, "call_invert"):
            builtin.call_invert = _call_invert


def _call_invert(self: Any, tx: Any, value: Any) -> Any:
    """What stands for `~value` in the trace; None leaves it to the other rules."""
    try:
        known = issubclass(value.python_type(), Mask)
    except (NotImplementedError, TypeError):
        return None
    return value.call_method(tx, "__invert__", [], {}) if known else None
