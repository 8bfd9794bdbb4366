"""What mkdocstrings asks of griffe: docstrings in the style of this package, see `sections`."""

from __future__ import annotations

from typing import Any

import griffe
from tools.site.sections import sections


class HouseStyle(griffe.Extension):
    """Rewrites docstrings when griffe has read them."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring:
            names = {parameter.name.lstrip("*") for parameter in func.parameters}
            func.docstring.value = sections(func.docstring.value, names)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring:
            cls.docstring.value = sections(cls.docstring.value, set(cls.members), "Attributes")
