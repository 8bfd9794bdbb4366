"""The stopwatch: turns, percentiles and paired ratios, on a clock that the test holds in its hand."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tilewise.hardware.timers import median_seconds, wall_clock
from tilewise.lab.bench.timing import Effort, Spread, interleave, ratio


def test_spread_is_the_percentiles() -> None:
    assert Spread.of([float(x) for x in range(11)]) == Spread(2.0, 5.0, 8.0, 11)


def test_contenders_take_turns_and_each_starts_as_often() -> None:
    order: list[str] = []

    timers = {name: (lambda number, name=name: order.append(name) or 1.0) for name in "abc"}
    samples = interleave(timers, Effort(seconds=0.0, least=6, most=6))
    rounds = order[6:]  # after two warming calls each
    assert {name: len(values) for name, values in samples.items()} == {"a": 6, "b": 6, "c": 6}
    assert ["".join(rounds[i : i + 3]) for i in range(0, 18, 3)] == ["abc", "bca", "cab", "cba", "acb", "bac"]


def test_short_calls_are_repeated_within_a_sample() -> None:
    numbers: list[int] = []

    def timer(number):
        numbers.append(number)
        return 1e-4

    interleave({"a": timer}, Effort(seconds=0.0, least=1, most=1, sample=2e-3))
    assert numbers == [1, 1, 20, 20]


def test_samples_of_a_gpu_are_longer_however_slowly_the_first_call_begins() -> None:
    numbers: list[int] = []

    def timer(number):
        numbers.append(number)
        return 5e-4 + 1e-3 / number

    interleave({"a": timer}, Effort(seconds=0.0, least=1, most=1).on("cuda"))
    assert numbers[-1] * timer(numbers[-1]) >= 20e-3
    assert Effort().on("cpu") == Effort()


def test_progress_ends_at_one() -> None:
    shares: list[float] = []
    interleave({"a": partial(wall_clock, lambda: None)}, Effort(seconds=0.0, least=3, most=3), shares.append)
    assert shares[-1] == 1.0 and shares == sorted(shares)


def test_ratio_is_paired_by_round() -> None:
    slow, fast = [2.0, 20.0, 4.0], [1.0, 10.0, 2.0]  # a disturbance in the middle round hits both
    assert ratio(slow, fast) == Spread(2.0, 2.0, 2.0, 3)
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])


def test_the_median_is_of_calls_after_the_first() -> None:
    calls: list[int] = []
    seconds, rounds = median_seconds(lambda: calls.append(1), "cpu", rounds=3)
    assert seconds > 0 and rounds == 3 and len(calls) == 4
    assert median_seconds(lambda: time.sleep(0.01), "cpu", rounds=100, limit=0.005)[1] == 1
