"""Docstrings as this package writes them, with the sections that the reference shows.

A parameter is a line `name: what it is`, indented where it goes on; an example begins with `>>>`. After the first parameter
names that the signature has only as `**options` count, too.
"""

from __future__ import annotations

import re

_PARAMETER = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)$")


def sections(text: str, names: set[str], kind: str = "Args") -> str:
    """The same text with `Args:` (or `Attributes:`) before its parameters and `Examples:` before its examples."""
    out: list[str] = []
    part = ""
    for line in text.splitlines():
        found = _PARAMETER.match(line)
        if found and (part == kind or {name.lstrip("*") for name in found[1].split(", ")} <= names):
            if part != kind:
                out += ["", f"{kind}:"]
                part = kind
            out.append(f"    {found[1]}: {found[2]}")
        elif line.startswith(">>>") and part != "Examples":
            out += ["", "Examples:", f"    {line}"]
            part = "Examples"
        elif (part == kind and line.startswith("    ")) or (part == "Examples" and line.strip()):
            out.append(f"    {line}")
        elif part == kind and not line.strip():
            out.append("")
        else:
            part = ""
            out.append(line)
    return "\n".join(out)
