"""The examples of the two pages run and print what they say."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["io-model.md", "tiling.md"])
def test_examples(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    text = (DOCS / page).read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert examples
    for example in examples:
        exec(compile(example, page, "exec"), names)
    printed = capsys.readouterr().out
    for said in (
        ("258.1", "85.5", "33.0", "2.02", "206", "128×128 tensor cores") if page == "io-model.md" else ("1.538 2.538",)
    ):
        assert said in printed, said


def test_the_documented_precision_is_what_the_experiment_finds() -> None:
    """The rising fp32 row of docs/tiling.md, to the printed digits' order: the findings are about these numbers.

    They were found on an Arm. Other processors add up matrix products in fp32 otherwise, most of them more exactly.
    """
    from tilewise.lab.simulator.precision import experiment

    found = {(r.path, r.data, r.width): r for r in experiment(widths=(8, 1024))}
    assert round(found["fp32", "rising", 8].rescalings) == 112
    for path, data, width, figure in (
        ("fp32", "rising", 8, 9.0e-7),
        ("fp32", "rising", 1024, 9.1e-7),
        ("bf16", "rising", 8, 1.2e-3),
        ("fp16 throughout", "random", 8, 2.4e-3),
        ("fp16 throughout", "random", 1024, 6.3e-4),
    ):
        error = found[path, data, width].relative
        least = 2.0**-24 if path == "fp32" and platform.machine() not in ("aarch64", "arm64") else 0.85 * figure
        assert least < error < 1.15 * figure, (path, data, width, error)
