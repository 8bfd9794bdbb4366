"""Compiled kernels, each made once. One that cannot be made ends in a KernelError, and is not tried again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from tilewise.errors import KernelError


class Kernels:
    """The compiled kernels of a backend, by all they depend on."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, name: str, make: Callable[[], Any]) -> Any:
        """The kernel of a key, which `make` compiles; `name` is for messages."""
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._try(name, make)
        if isinstance(found, KernelError):
            raise KernelError(str(found)) from found
        return found

    def _try(self, name: str, make: Callable[[], Any]) -> Any:
        import triton
        from triton.runtime.errors import OutOfResources

        try:
            return make()
        except (OutOfResources, MemoryError):  # for these a smaller tile is the remedy, or more memory
            raise
        except KernelError as error:
            return error
        except Exception as error:  # Triton's, LLVM's or the assembler's
            problem = KernelError(
                f"backend {self.backend!r} could not compile {name} with triton {triton.__version__} "
                f"({type(error).__name__}: {_first_line(error)}); another version of triton may, and backend='tiled' needs none"
            )
            problem.__cause__ = error
            return problem


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
