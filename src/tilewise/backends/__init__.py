"""Backends compute. The package is also the public function `tilewise.backends()`: importing it makes the module callable."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, device: str | None = None) -> Any:
        return import_module("tilewise.api.backends").backends(device)


sys.modules[__name__].__class__ = _CallableModule
