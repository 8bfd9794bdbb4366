"""docs/models.md and models.zh.md: what came out for each model type, written and read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from tests.integrations.zoo.compare import Outcome

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {"en": DOCS / "models.md", "zh": DOCS / "models.zh.md"}
PAGE = PAGES["en"]
SECTIONS = {
    "en": {
        "equal": ("Served", "Equal to `eager`.", "checked"),
        "refused": ("Refused", "An error says why when the model is made, or at its first forward, before any result.", "reason"),
        "idle": (
            "Nothing to serve",
            "No attention is asked for: the type has none, or the model that was made is a part that keeps its own.",
            "checked",
        ),
        "unbuilt": ("Not tried", "No tiny model could be made from the names of the configuration's fields.", "reason"),
        "different": ("Different", "To be mended.", "difference"),
    },
    "zh": {
        "equal": ("支持", "与 `eager` 相等。", "核对过"),
        "refused": ("拒绝", "建立模型时，或第一次前向、还没有任何结果之前，报错并说明理由。", "理由"),
        "idle": ("没有要做的", "没有请求注意力：这种类型没有注意力，或者建立的模型是保留自己注意力的那一部分。", "核对过"),
        "unbuilt": ("没有试", "凭配置的字段名建不出极小的模型。", "理由"),
        "different": ("不同", "有待修正。", "差别"),
    },
}
HEADS = {
    "en": """# transformers models

`attn_implementation="tilewise"` beside `eager` for every model type transformers {version} knows (torch {torch}). Written by
`python -m tests.integrations.zoo --write`; `make test-models` compares anew and checks this page.

Each type is made small with random weights that let tokens see each other, and run in float32 with `eager` and with tilewise, and
with `eager` in float64: tilewise's error may be four times that of `eager` plus one unit roundoff. *plain* is a batch without
padding; *padded* has padding on the left, then on the right; *causal*: the first token's output does not move when the last token
changes; *cached* continues a padded batch with a cache; *weights* are those of `output_attentions=True`.

{counts}
""",
    "zh": """# transformers 模型

transformers {version} 知道的每种模型类型，`attn_implementation="tilewise"` 与 `eager` 对照（torch {torch}）。本页由
`python -m tests.integrations.zoo --write` 写出；`make test-models` 重新比较，并核对本页。

每种类型建一个极小的模型，用能让 token 互相看到的随机权重，以 float32 分别用 `eager` 与 tilewise 运行，再以 float64 用
`eager` 运行：tilewise 的误差可以是 `eager` 的四倍加一个单位舍入。*plain* 是无填充的批；*padded* 先在左边填充，再在右边；*causal*
指最后一个 token 变了，第一个 token 的输出不动；*cached* 用缓存接着处理有填充的批；*weights* 是
`output_attentions=True` 给出的权重。核对的名称与错误信息照原文列出。

{counts}
""",
}
_COUNTED = {"en": "types", "zh": "类型数"}
_COLUMNS = {"en": "type | model", "zh": "类型 | 模型"}


def installed() -> tuple[str, str]:
    """The versions of transformers and torch."""
    return transformers.__version__, torch.__version__.split("+")[0]


def versions(text: str) -> tuple[str, str]:
    """The versions that the page in English was written with."""
    found = re.search(r"transformers (\S+) knows \(torch (\S+)\)", text)
    assert found
    return found[1], found[2]


def write(outcomes: Iterable[Outcome], language: str = "en", of: tuple[str, str] | None = None) -> str:
    """The page in a language, for these versions: those installed if none are given."""
    outcomes = sorted(outcomes)
    sections = SECTIONS[language]
    groups = {verdict: [o for o in outcomes if o.verdict == verdict] for verdict in sections}
    counts = [f"| | {_COUNTED[language]} |", "|---|---|"]
    counts += [f"| {sections[v][0]} | {len(found)} |" for v, found in groups.items() if found]
    version, torch_version = of or installed()
    lines = [HEADS[language].format(version=version, torch=torch_version, counts="\n".join(counts))]
    for verdict, found in groups.items():
        if found:
            title, meaning, last = sections[verdict]
            lines += [f"## {title}", "", meaning, "", f"| {_COLUMNS[language]} | {last} |", "|---|---|---|"]
            lines += [f"| {o.model_type} | {o.model} | {o.detail.replace('|', '/')} |" for o in found]
            lines.append("")
    return "\n".join(lines)


def save(outcomes: Iterable[Outcome]) -> None:
    """Write the pages of both languages."""
    outcomes = list(outcomes)
    for language, path in PAGES.items():
        path.write_text(write(outcomes, language), encoding="utf-8")


def read(text: str) -> dict[str, Outcome]:
    """The outcomes on a page, in either language, by type."""
    by_title = {title: verdict for sections in SECTIONS.values() for verdict, (title, _, _) in sections.items()}
    found: dict[str, Outcome] = {}
    verdict = ""
    for line in text.splitlines():
        if line.startswith("## "):
            verdict = by_title[line[3:]]
        row = re.fullmatch(r"\| (\S+) \| (\S*) \| (.*) \|", line)
        if verdict and row and row[1] not in ("type", "类型", "---"):
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
