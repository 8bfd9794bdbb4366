"""Compiled kernels, each made and loaded once. One that cannot be made ends in an error, and is not tried again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from tilewise.errors import KernelError


class Kernels:
    """The compiled kernels of a backend, by all they depend on."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._kernels: dict[Hashable, Any] = {}

    def get(self, key: Hashable, name: str, make: Callable[[], Any]) -> Any:
        """The kernel of a key, which `make` compiles; `name` is for messages."""
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._try(name, make)
        if isinstance(kernel, KernelError):
            raise KernelError(str(kernel)) from kernel
        if isinstance(kernel, Exception):
            raise kernel
        return kernel

    def _try(self, name: str, make: Callable[[], Any]) -> Any:
        import triton
        from triton.runtime.errors import OutOfResources

        try:
            kernel = make()
            _ = getattr(kernel, "run", None)  # loads it; raises where it does not fit the device
            return kernel
        except MemoryError:
            raise
        except KernelError as error:
            return error
        except OutOfResources as error:
            return KernelError(
                f"backend {self.backend!r}: {name} does not fit this GPU ({_first_line(error)}); tile= may choose a smaller tile,"
                " and backend='tiled' has no such limit"
            )
        except Exception as error:  # Triton's, LLVM's or the assembler's
            problem = KernelError(
                f"backend {self.backend!r} could not compile {name} with triton {triton.__version__} "
                f"({type(error).__name__}: {_first_line(error)}); another version of triton may, and backend='tiled' needs none"
            )
            problem.__cause__ = error
            return problem


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
