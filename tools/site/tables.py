"""What tables of speed are written with: rows, the line that names a record, ranges and spreads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tools.site.records import shown

Words = Callable[[str, str], str]
"""Picks the page's language of (English, Chinese)."""


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["", "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(row) + " |" for row in rows), ""]


def source_line(name: str, record: dict[str, Any], device: str) -> str:
    versions = {**record.get("versions", {}), **record.get("machine", {}), **record}
    said = [f"{key} {versions[key]}" for key in ("torch", "triton") if key in versions and (key == "torch" or "H200" in device)]
    if "cudnn" in versions:
        said.append(f"cuDNN {versions['cudnn'] // 10000}.{versions['cudnn'] // 100 % 100}")
    if "fa4" in versions:
        said.append(f"FlashAttention-4 {versions['fa4'].split()[-1]}")
    date = (record.get("date") or record["machine"]["date"])[:10]
    return f"{device} · {date} · {', '.join(said)} · `benchmarks/results/{name}.json`"


def range_of(values: Iterable[float], digits: int = 2) -> str:
    found = [shown(value, digits) for value in sorted(values)]
    return found[0] if found[0] == found[-1] else f"{found[0]}–{found[-1]}"


def cell_text(text: str) -> str:
    """Text whose bars do not end a cell."""
    return text.replace("|", r"\|")


def spread_of(one: dict[str, float], digits: int = 2, unit: float = 1.0) -> str:
    p20, p50, p80 = (f"{one[key] * unit:.{digits}f}" for key in ("p20", "p50", "p80"))
    return f"{p50} ({p20}–{p80})"
