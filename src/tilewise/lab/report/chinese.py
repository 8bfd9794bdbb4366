"""Sentences that other parts of the library write in English (sources, reasons, schedules), as the Chinese page shows them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

JOINTS = (("; ", "；"), (" and ", "，"))
"""Where a sentence without a pattern of its own is taken apart, and how the parts are joined in Chinese."""


@cache
def patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    """English with gaps, and its Chinese; those with more words of their own are tried first."""
    table = tomllib.loads((Path(__file__).parent / "phrases.toml").read_text(encoding="utf-8"))["phrases"]
    ordered = sorted(table, key=lambda pair: -len(re.sub(r"\{\w+\}", "", pair[0])))
    return tuple((_compiled(english), chinese) for english, chinese in ordered)


def _compiled(english: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", english)
    found = (re.escape(part) if i % 2 == 0 else f"(?P<{part}>{_gap(part)})" for i, part in enumerate(parts))
    return re.compile("".join(found))


def _gap(name: str) -> str:
    """A tile or a number (its name is a letter) is one word, a reason anything, all else a part of a sentence."""
    return r"[^ ;]+" if name == "tile" or name in "dhmnstw" else r".+?" if name == "why" else r"[^;]+?"


@cache
def translate(text: str) -> str | None:
    """The Chinese of a sentence; None if there is none. What fills a gap is translated too, if it has Chinese."""
    for pattern, chinese in patterns():
        if found := pattern.fullmatch(text):
            return chinese.format(**{gap: translate(value) or value for gap, value in found.groupdict().items()})
    for joint, ours in JOINTS:
        for found in re.finditer(re.escape(joint), text):
            first, rest = translate(text[: found.start()]), translate(text[found.end() :])
            if first and rest:
                return first + ours + rest
    return None


def case_words(text: str) -> str:
    """A bench case, the longest phrases first: sizes, dtypes and layouts stay."""
    words, told = text.split(" "), []
    while words:
        spans = ((" ".join(words[:count]), count) for count in range(len(words), 0, -1))
        phrase, count = next(((found, count) for span, count in spans if (found := translate(span))), (words[0], 1))
        told.append(phrase)
        words = words[count:]
    return " ".join(told)


def sentences(data: dict[str, Any]) -> Iterator[str]:
    """Everything on the page that is a sentence and stands in no table of texts."""
    for found in data["results"].values():
        yield from found["reasons"]
    for device in data["devices"].values():
        yield from (figure["source"] for figure in device["figures"])
        yield device["peakSource"]
    for backend in data["run"]["explanation"]["backends"].values():
        yield from backend["reasons"]
    for shown in data["parallel"]["masks"].values():
        yield from (row["note"] for row in shown["schedules"])
    for record in data["records"]["traffic"]:
        for kernel in record["kernels"]:
            yield from (level["level"] for level in kernel["levels"])
            yield kernel["case"]["mask"]


def phrases(data: dict[str, Any]) -> dict[str, str]:
    """English to Chinese, for what the page shows."""
    table = {text: translate(text) for text in sentences(data) if text}
    bench = data["records"]["bench"]
    cases = [case for record in bench for case in record["cases"]]
    words = {record["suite"] for record in bench} | {case["words"] for case in cases}
    words |= {name for case in cases for name in case["times"]}
    return {**{text: chinese for text, chinese in table.items() if chinese}, **{text: case_words(text) for text in words}}
