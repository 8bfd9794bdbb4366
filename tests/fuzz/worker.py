"""A process that runs cases and says so, line by line: what it begins before it begins, so that a crash has a number.

A line is JSON: {"begin": [number, backend]}, {"end": [number, backend, failures, refused]}, {"case": number} after all backends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.fuzz.draw import PROFILES, draw, number_of


def numbers(profile: str, family: int, step: int, after: int) -> Iterator[int]:
    """The cases of every `step`-th family from the given one on, those up to `after` left out."""
    size = PROFILES[profile].family
    while True:
        for serial in range(family * size, (family + 1) * size):
            number = number_of(profile, serial)
            if number > after:
                yield number
        family += step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--backends", required=True)
    for name in ("family", "step", "after", "cases"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what kernels and libraries print is no report

    def say(**line: Any) -> None:
        report.write(json.dumps(line) + "\n")
        report.flush()

    from tests.fuzz.judge import judge  # only now: a worker that dies while it imports has begun nothing

    end, lost = time.monotonic() + given.seconds, False
    for done, number in enumerate(numbers(given.profile, given.family, given.step, given.after)):
        if time.monotonic() > end or done >= given.cases:
            break
        say(begin=[number, "oracle"])
        case = draw(number)
        for backend in given.backends.split(","):
            say(begin=[number, backend])
            verdict = judge(case, backend, given.device)
            say(end=[number, backend, verdict.failures, verdict.refused])
            lost = lost or any("CUDA error" in words or "AcceleratorError" in words for words in verdict.failures)
        say(case=number)
        if lost:
            break  # the device answers this process no more; another one goes on


if __name__ == "__main__":
    sys.exit(main())
