"""Certificate: what recomputing some rows in float64 says about an output."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tilewise.display import Group, Panel, Shown, Table, Text

SURE = 0.99


@dataclass(frozen=True)
class RowFinding:
    """The worst element of one recomputed row; `used` is its error over its bound."""

    batch: int
    head: int
    row: int
    what: str  # "out" or "lse"
    column: int
    actual: float
    exact: float
    bound: float
    used: float

    def __str__(self) -> str:
        column = f", column {self.column}" if self.what == "out" else ""
        return (
            f"{self.what} of batch {self.batch}, head {self.head}, row {self.row}{column}: {self.actual:.9g}, "
            f"exactly {self.exact:.9g}; off by {abs(self.actual - self.exact):.2e}, bound {self.bound:.2e}"
        )


@dataclass(frozen=True)
class Certificate(Shown):
    """The verdict of `certify` and what it rests on."""

    ok: bool
    problem: str
    rows: int
    """Rows of the output: one for each query of each head."""
    checked: int
    """Rows recomputed in float64, chosen at random with equal chances."""
    undefined: int
    """Recomputed rows whose exact value is not finite: inputs hold NaN or inf there, and nothing can be said."""
    outside: int
    """Recomputed rows with an element outside its bound."""
    worst: tuple[RowFinding, ...]
    """The rows that use most of their bound, worst first."""
    error: float
    """The largest error in the recomputed rows."""
    stray: int | None
    """Elements anywhere in the output that no mean of the values can take; None if inputs are not finite."""
    elements: int
    sample_seed: int
    seconds: float

    @property
    def share(self) -> float:
        return self.checked / self.rows if self.rows else 1.0

    @property
    def used(self) -> float:
        """The largest share of its bound that any element used."""
        return self.worst[0].used if self.worst else 0.0

    def detection(self, corrupted: int = 1) -> float:
        """The probability that at least one of `corrupted` wrong rows, wherever they are, was among those recomputed.

        One wrong element makes a row wrong; it is seen for certain in a recomputed row if it is off by more than
        twice its bound, since the exact value is at most one bound away from the right one.
        """
        missed = self.rows - self.checked
        if corrupted <= 0 or self.rows == 0:
            return 0.0
        if corrupted > missed:
            return 1.0
        # without replacement: C(missed, corrupted) / C(rows, corrupted) of the placements escape
        escape = sum(math.log1p(-self.checked / (self.rows - i)) for i in range(min(corrupted, 10_000)))
        if corrupted > 10_000:
            escape += (corrupted - 10_000) * math.log1p(-self.share)
        return -math.expm1(escape)

    def resolution(self, probability: float = SURE) -> int:
        """The fewest wrong rows that are noticed with that probability."""
        low, high = 1, max(1, self.rows)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.detection(middle) >= probability else (middle + 1, high)
        return low

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "share": self.share,
            "used": self.used,
            "detection_of_one_row": self.detection(),
            "resolution_99": self.resolution(),
        }

    def lines(self) -> list[str]:
        """What it says, in sentences."""
        if not self.rows:
            return ["The output has no rows; there is nothing to check."]
        how = "all rows" if self.checked == self.rows else f"{self.checked:,} of {self.rows:,} rows, chosen at random,"
        most = f"uses {self.used:.1%} of its" if self.used <= 1 else f"is off by {self.used:,.4g} times its"
        lines = [f"{how[0].upper()}{how[1:]} recomputed in float64: the worst element {most} error bound."]
        if self.checked == self.rows:
            lines.append("A wrong element anywhere is noticed for certain (if off by more than twice its bound).")
        else:
            lines.append(
                f"One wrong row is noticed with probability {self.detection():.2%}; "
                f"{self.resolution():,} or more ({self.resolution() / self.rows:.2%} of them) with {SURE:.0%}."
            )
        if self.stray is None:
            lines.append("Inputs hold NaN or inf, so the other rows were not screened; see trace_nonfinite.")
        elif self.stray:
            lines.append(f"{self.stray:,} elements are larger than any mean of the values can be, or not finite.")
        else:
            lines.append(f"All {self.elements:,} elements are finite and no larger than a mean of the values can be.")
        if self.undefined:
            lines.append(f"{self.undefined:,} recomputed rows are not finite even exactly; see trace_nonfinite.")
        if self.outside:
            lines.append(f"{self.outside:,} recomputed rows are outside their bounds. Worst: {self.worst[0]}.")
        return lines

    def content(self) -> Shown:
        rows = []
        for f in self.worst:
            place = (f.what, f"{f.batch}", f"{f.head}", f"{f.row}")
            rows.append((*place, f"{f.actual:.6g}", f"{f.exact:.6g}", f"{f.bound:.1e}", f"{f.used:.1%}"))
        worst = Table("", ("worst rows", "batch", "head", "row", "value", "exactly", "bound", "used"), rows)
        note = Text((f"sample_seed={self.sample_seed}, {self.seconds:.2f} s", "dim"))
        title = f"{'✓ Certified' if self.ok else '✗ NOT certified'}: {self.problem}"
        body = Group(*map(Text, self.lines()), *([worst] if rows else []), note)
        return Panel(title, body, "green" if self.ok else "red")
