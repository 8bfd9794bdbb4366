"""One family of errors; every message says what it got, what it wants and how to fix it."""

from __future__ import annotations

from importlib import import_module


class TilewiseError(Exception):
    """Everything tilewise raises on purpose. Subclasses are ValueErrors, TypeErrors or RuntimeErrors too.

    >>> try:
    ...     tw.attention(q, k, v, backend="hopper")
    ... except tw.TilewiseError as error:
    ...     print(error)  # what it got, what it wants, how to fix it
    """


class ArgumentError(TilewiseError, ValueError):
    """An argument has the right type and a wrong value."""


class ArgumentTypeError(TilewiseError, TypeError):
    """An argument has a wrong type or dtype."""


class LayoutError(ArgumentError):
    """Ranks, shapes or strides that do not fit together."""


class MaskError(ArgumentError):
    """A mask that does not parse, does not fit the problem or cannot be lowered."""


class PlanError(ArgumentError):
    """A tile, plan or schedule that cannot run on the device."""


class DeviceError(ArgumentError):
    """An unknown device, or tensors on devices that do not match."""


class BackendError(TilewiseError, RuntimeError):
    """No backend serves the request; `verdicts` holds every backend's reasons by name."""

    def __init__(self, message: str, verdicts: dict[str, tuple[str, ...]] | None = None) -> None:
        super().__init__(message)
        self.verdicts = verdicts or {}


class KernelError(BackendError):
    """A kernel that should serve the request could not be compiled or launched."""


class DerivativeError(TilewiseError, RuntimeError):
    """A derivative that does not exist here."""


class CommunicationError(TilewiseError, RuntimeError):
    """A rank of a process group that did not answer; the message names it, and the stage."""


class MissingPackageError(TilewiseError, ImportError):
    """A package that is not installed, or too old; the message has the command that installs it."""


def require(extra: str, *packages: str) -> None:
    """Raise unless the packages of an extra can be imported."""
    for name in packages:
        try:
            import_module(name)
        except ImportError as error:
            raise MissingPackageError(
                f"{name}: not installed, and needed here; pip install 'tilewise[{extra}]'"
            ) from error
