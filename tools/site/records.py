"""The records of measurements in benchmarks/results, as the tables of the site read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return record


@dataclass(frozen=True)
class Cell:
    """One cell of the Hopper grid: TFLOP/s, the median with p20 and p80, of each contender."""

    head_dim: int
    mask: str
    tokens: int
    extra: str
    speeds: dict[str, tuple[float, float, float]]

    @property
    def rival(self) -> float:
        """The better of the two peers that the grid is held to."""
        return max(self.speeds[name][1] for name in ("cudnn", "fa4") if name in self.speeds)

    @property
    def ratio(self) -> float:
        return self.speeds["tilewise"][1] / self.rival


_CELL = re.compile(r"d(\d+) (?:(full|causal) (\d+)|window (\d+) of (\d+))(?: gqa (\S+))?")


def hopper_cells(record: dict[str, Any]) -> list[Cell]:
    """The plain grid and what was timed beside it, by head dim, mask and length."""
    cells = []
    for name, one in ((name, one) for part in record["time"].values() for name, one in part.items()):
        found = _CELL.fullmatch(name)
        if found is None:
            continue
        d, mask, tokens, window, length, group = found.groups()
        speeds = {who: (one["p20, p80"][who][0], p50, one["p20, p80"][who][1]) for who, p50 in one["tflops"].items()}
        extra = f"GQA {group}" if group else f"window({window})" if window else ""
        cells.append(Cell(int(d), mask or "causal", int(tokens or length), extra, speeds))
    return sorted(cells, key=lambda cell: (cell.head_dim, cell.extra, cell.mask != "full", cell.tokens))


def plain(cells: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in cells if not cell.extra]


def mean(ratios: Iterable[float]) -> float:
    """Geometric."""
    logs = [log(ratio) for ratio in ratios]
    return exp(sum(logs) / len(logs))


def seconds(row: dict[str, Any], contender: str) -> dict[str, float]:
    found: dict[str, float] = next(one["seconds"] for one in row["results"] if one["contender"] == contender)
    return found


def ratios(record: dict[str, Any], pattern: str, dtype: str = "", mask: str = "") -> list[float]:
    """Ratios of the rows of a suite whose name begins like the pattern."""
    return [
        row["ratio"]["p50"]
        for row in record["records"]
        if re.match(pattern, row["case"]["name"])
        and dtype in ("", row["case"]["dtype"])
        and mask in ("", row["case"]["mask"])
    ]


def length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def shown(value: float, digits: int = 2) -> str:
    """A ratio just under 1 does not read as 1."""
    text = f"{value:.{digits}f}"
    return f"{value:.{digits + 1}f}" if value < 1 <= float(text) else text
