"""docs/models.md: what came out for each model type, written and read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from tests.integrations.zoo.compare import Outcome

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
SECTIONS = {
    "equal": ("Served", "Equal to `eager`.", "checked"),
    "refused": ("Refused", "An error says why when the model is made, or at its first forward, before any result.", "reason"),
    "idle": (
        "Nothing to serve",
        "No attention is asked for: the type has none, or the model that was made is a part that keeps its own.",
        "checked",
    ),
    "unbuilt": ("Not tried", "No tiny model could be made from the names of the configuration's fields.", "reason"),
    "different": ("Different", "To be mended.", "difference"),
}
HEAD = """# transformers models

`attn_implementation="tilewise"` beside `eager` for every model type transformers {version} knows (torch {torch}). Written by
`python -m tests.integrations.zoo --write`; `make test-models` compares anew and checks this page.

Each type is made small with random weights that let tokens see each other, and run in float32 with `eager` and with tilewise, and
with `eager` in float64: tilewise's error may be four times that of `eager` plus one unit roundoff. *plain* is a batch without
padding; *padded* has padding on the left, then on the right; *causal*: the first token's output does not move when the last token
changes; *cached* continues a padded batch with a cache; *weights* are those of `output_attentions=True`.

{counts}
"""


def write(outcomes: Iterable[Outcome]) -> str:
    outcomes = sorted(outcomes)
    groups = {verdict: [o for o in outcomes if o.verdict == verdict] for verdict in SECTIONS}
    counts = ["| | types |", "|---|---|"]
    counts += [f"| {SECTIONS[v][0]} | {len(found)} |" for v, found in groups.items() if found]
    lines = [HEAD.format(version=transformers.__version__, torch=torch.__version__.split("+")[0], counts="\n".join(counts))]
    for verdict, found in groups.items():
        if found:
            title, meaning, last = SECTIONS[verdict]
            lines += [f"## {title}", "", meaning, "", f"| type | model | {last} |", "|---|---|---|"]
            lines += [f"| {o.model_type} | {o.model} | {o.detail.replace('|', '/')} |" for o in found]
            lines.append("")
    return "\n".join(lines)


def read(text: str) -> dict[str, Outcome]:
    """The outcomes on a page by type."""
    by_title = {title: verdict for verdict, (title, _, _) in SECTIONS.items()}
    found: dict[str, Outcome] = {}
    verdict = ""
    for line in text.splitlines():
        if line.startswith("## "):
            verdict = by_title[line[3:]]
        row = re.fullmatch(r"\| (\S+) \| (\S*) \| (.*) \|", line)
        if verdict and row and row[1] not in ("type", "---"):
            found[row[1]] = Outcome(row[1], row[2], verdict, row[3])
    return found


def stale(outcomes: Iterable[Outcome], page: dict[str, Outcome]) -> list[str]:
    """Where the page says something else. What could not be made there may be made here: packages differ."""
    wrong = []
    for now in outcomes:
        then = page.get(now.model_type)
        if then is None:
            wrong.append(f"{now.model_type}: not on the page")
        elif "unbuilt" not in (then.verdict, now.verdict) and (then.verdict, then.model) != (now.verdict, now.model):
            wrong.append(f"{now.model_type}: {then.verdict} on the page, {now.verdict} now ({now.detail})")
        elif then.verdict == "equal" and now.verdict == "unbuilt":
            wrong.append(f"{now.model_type}: compared on the page, not made now ({now.detail})")
    return wrong
