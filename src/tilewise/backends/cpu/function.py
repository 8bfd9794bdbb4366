"""Functions of a kernel: methods that emit a body become methods that emit `name(args, frame, …)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from tilewise.backends.cpu.args import ArgBlock
from tilewise.backends.cpu.ir import PTR, VOID


def kernel_function(*kinds: Any, args: bool = True, result: Any = VOID) -> Callable[..., Any]:
    """Makes a method that emits the body of a function one that emits the function `name(args, frame, …)` and gives it back.

    The body finds `e.args` and `e.frame`; a function with `args=False` has the frame only. `tile`: the register tile of one
    for fewer rows than strips have.
    """

    def decorate(body: Callable[..., None]) -> Any:
        @wraps(body)
        def emit(self: Any, name: str = "", *, tile: Any = None, **options: Any) -> Any:
            name = name or body.__name__.removeprefix("emit_")
            e, values, function = self.unit.function(name, [PTR] * (1 + args) + list(kinds), result=result)
            e.tile = tile or e.tile
            if args:
                e.args = self.arg_block(e, values.pop(0))
            e.frame = ArgBlock(e, values.pop(0), self.fields, self.buffer_kinds)
            body(self, e, *values, **options)
            if result is VOID:
                e.ret()
            return function

        return emit

    return decorate
