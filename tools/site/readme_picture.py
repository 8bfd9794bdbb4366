"""The picture of the README, one for each language, as files that stand alone: docs/readme.svg and docs/readme.zh.svg.

`python -m tools.site.readme_picture` writes them; a test holds them to what is drawn here. A file that is shown as an image has
no page around it, so its colours come with it, for light and for dark.
"""

from __future__ import annotations

import re
from pathlib import Path

from tools.site.mask_pictures import Shown, tiles_of
from tools.site.pictures import flow_parts
from tools.site.svg import drawing, rect, text

from tilewise import masks

ROOT = Path(__file__).resolve().parents[2]
FILES = {"en": ROOT / "docs/readme.svg", "zh": ROOT / "docs/readme.zh.svg"}
EXAMPLE = Shown(
    lambda: masks.causal() & masks.window(512) | masks.prefix(16), "causal() & window(512) | prefix(16)", 2048, 2048, 128
)
"""The mask of the README's first example."""


def style() -> str:
    """The rules of docs/site.css for pictures, without the page around them."""
    css = (ROOT / "docs/site.css").read_text(encoding="utf-8")
    light = re.search(r":root \{(.*?)\}", css, re.S)
    dark = re.search(r'\[data-md-color-scheme="slate"\] \{(.*?)\}', css, re.S)
    assert light and dark
    rules = re.findall(r"^figure\.tw-picture svg ((?:text|\.)[^{]*\{.*?\})", css, re.M)
    colours = [" ".join(found[1].split()) for found in (light, dark)]
    media = f"@media (prefers-color-scheme: dark) {{ svg {{ {colours[1]} }} }}"
    return f"<style>svg {{ {colours[0]} }} {media} {' '.join(rules)}</style>"


def draw(language: str) -> str:
    def say(english: str, chinese: str) -> str:
        return chinese if language == "zh" else english

    side, left, top = 15, 14, 50
    squares, counts = tiles_of(EXAMPLE, side, left, top)
    visited = counts[1] + counts[2]
    total = sum(counts)
    share = f"{visited / total:.0%}"
    words = say(f"{visited} of {total} tiles are computed ({share})", f"{total} 个分块只算 {visited} 个（{share}）")
    bottom = top + 16 * side
    legend = []
    for i, (kind, name) in enumerate((("empty", "EMPTY"), ("partial", "PARTIAL"), ("full", "FULL"))):
        legend.append(rect(left + 82 * i, bottom + 34, 12, 12, kind, round_=0))
        legend.append(text(left + 18 + 82 * i, bottom + 45, name, anchor="start", kind="small"))
    title = say(
        "Tiles of a mask, and one fused kernel: tiles that a mask leaves empty are never loaded, scores never leave the chip",
        "掩码的分块，与一个融合内核：掩码留空的分块从不载入，分数从不离开芯片",
    )
    moved = f'<g transform="translate(278 24) scale(.78)">{"".join(flow_parts(say))}</g>'
    sizes = say("2,048 queries × 2,048 keys, tiles of 128", "2,048 个查询 × 2,048 个键，分块 128")
    heads = [
        text(left, 24, EXAMPLE.words, anchor="start"),
        text(left, 42, sizes, anchor="start", kind="small"),
        text(left, bottom + 20, words, anchor="start", kind="small"),
    ]
    paper = '<rect width="770" height="350" style="fill: var(--tw-paper)"/>'
    return drawing(770, 350, title, style(), paper, *squares, *heads, *legend, moved) + "\n"


def main() -> None:
    for language, path in FILES.items():
        path.write_text(draw(language), encoding="utf-8")
        print(path.relative_to(ROOT), path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
