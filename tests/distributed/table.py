"""The table of docs/experiments/context-parallel.md: how much of the derived error bounds each case uses on 2, 3 and 4 ranks.

    python -m tests.distributed.table            prints it
    python -m tests.distributed.table --write    puts it into both pages
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from tests.distributed.cases import BY_NAME
from tests.distributed.conformance import Verdict, check_cases
from tests.distributed.ranks import run_ranks

SIZES = [2, 3, 4]
PAGES = [Path(__file__).parents[2] / "docs/experiments" / f"context-parallel{end}.md" for end in ("", ".zh")]
TABLE = re.compile(r"(\| [^|\n]+ \| 2 [^\n]+ \|\n\|---\|---\|---\|---\|\n)(?:\| `[^\n]+\n)*")
FORWARD = ("out", "lse")


def verdicts() -> dict[tuple[str, int], Verdict]:
    """Of the rank that judged each case."""
    with tempfile.TemporaryDirectory() as place:
        answers = run_ranks(max(SIZES), check_cases, list(BY_NAME), SIZES, store=Path(place) / "store", timeout=240.0)
    if failed := [answer for answer in answers if isinstance(answer, str)]:
        raise SystemExit("\n".join(failed))
    every = [(key, verdict) for answer in answers for key, verdict in answer.items()]
    if wrong := [f"{key}: {verdict.wrong}" for key, verdict in every if verdict.wrong]:
        raise SystemExit("\n".join(wrong))
    return {key: verdict for key, verdict in every if verdict.shares}


def rows(found: dict[tuple[str, int], Verdict]) -> list[str]:
    """Markdown: of each case the largest share of a bound, forward and of any gradient."""
    lines = []
    for name in BY_NAME:
        cells = []
        for size in SIZES:
            verdict = found.get((name, size))
            if verdict is None:
                cells.append("")
                continue
            forward = max((share for key, share in verdict.shares.items() if key in FORWARD), default=0.0)
            back = max((share for key, share in verdict.shares.items() if key not in FORWARD), default=0.0)
            cells.append(f"{forward:.2f} / {back:.2f}")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def written(page: str, lines: list[str]) -> str:
    """A page with the rows in the place of those it has."""
    found, count = TABLE.subn(lambda table: table[1] + "".join(f"{line}\n" for line in lines), page)
    assert count == 1, f"{count} tables of cases"
    return found


def main() -> None:
    lines = rows(verdicts())
    print("\n".join(lines))
    if "--write" in sys.argv:
        for path in PAGES:
            path.write_text(written(path.read_text(), lines))


if __name__ == "__main__":
    main()
