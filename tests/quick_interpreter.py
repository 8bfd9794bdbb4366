"""Runs a module in Triton's interpreter, without looking through the whole language at every call of a function by another.

    python -m tests.quick_interpreter tests.backends.interpreted 0 4
"""

from __future__ import annotations

import os
import runpy
import sys
from functools import cache
from typing import Any


def quicken() -> None:
    """The interpreter puts its own functions in the place of the language's while a function runs, for each function anew: for
    one that is called by another it looks at 500 names to find all of them replaced. Here it looks once, and knows the numbers
    of a dtype again. Versions of triton that do this otherwise are left as they are.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    scope_of = getattr(interpreter, "_LangPatchScope", None)
    if scope_of is None:
        return
    patch, replaced = interpreter._patch_lang, set[str]()

    @cache
    def languages(fn: Any) -> frozenset[str]:
        seen = {id(value) for value in fn.__globals__.values()}
        return frozenset(module.__name__ for module in (tl, tl.core) if id(module) in seen)

    class Scope(scope_of):  # type: ignore[misc, valid-type]
        """Of the languages that are replaced with it."""

        def __init__(self, names: frozenset[str], changes: Any) -> None:
            super().__init__()
            self._changes, self.names = changes, names

        def restore(self) -> None:
            super().restore()
            replaced.difference_update(self.names)

    def quick_patch(fn: Any) -> Any:
        more = languages(fn) - replaced
        if not more:
            return scope_of()
        scope = Scope(more, patch(fn)._changes)
        replaced.update(more)
        return scope

    interpreter._patch_lang = quick_patch

    kind_of, kinds = interpreter._get_np_dtype, dict[str, Any]()

    def quick_kind(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in kinds:
            kinds[name] = kind_of(dtype)
        return kinds[name]

    interpreter._get_np_dtype = quick_kind


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    quicken()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
