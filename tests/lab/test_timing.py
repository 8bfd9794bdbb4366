"""The stopwatch: turns, percentiles and paired ratios, on a clock that the test holds in its hand."""

from __future__ import annotations

import pytest

from tilewise.lab.bench.timing import Effort, Spread, interleave, ratio, wall_clock


def test_spread_is_the_percentiles() -> None:
    assert Spread.of([float(x) for x in range(11)]) == Spread(2.0, 5.0, 8.0, 11)


def test_contenders_take_turns_and_each_starts_as_often() -> None:
    order: list[str] = []

    def clock(run, number):
        run()
        return 1.0

    runs = {name: (lambda name=name: order.append(name)) for name in "abc"}
    samples = interleave(runs, Effort(seconds=0.0, least=6, most=6), clock)
    rounds = order[6:]  # after two warming calls each
    assert {name: len(values) for name, values in samples.items()} == {"a": 6, "b": 6, "c": 6}
    assert [rounds[i : i + 3] for i in range(0, 18, 3)] == [list("abc"), list("bca"), list("cab")] * 2


def test_short_calls_are_repeated_within_a_sample() -> None:
    numbers: list[int] = []

    def clock(run, number):
        numbers.append(number)
        return 1e-4

    interleave({"a": lambda: None}, Effort(seconds=0.0, least=1, most=1, sample=2e-3), clock)
    assert numbers == [1, 1, 20]


def test_progress_ends_at_one() -> None:
    shares: list[float] = []
    interleave({"a": lambda: None}, Effort(seconds=0.0, least=3, most=3), wall_clock, shares.append)
    assert shares[-1] == 1.0 and shares == sorted(shares)


def test_ratio_is_paired_by_round() -> None:
    slow, fast = [2.0, 20.0, 4.0], [1.0, 10.0, 2.0]  # a disturbance in the middle round hits both
    assert ratio(slow, fast) == Spread(2.0, 2.0, 2.0, 3)
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])
