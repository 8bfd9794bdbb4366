"""The float64 oracle, the (out, lse) merge, compensated sums, Philox, and error bounds."""

from tilewise.numerics.merge import join_sink, merge, merge_many
from tilewise.numerics.oracle import oracle, oracle_gradients
from tilewise.numerics.philox import drop_threshold, keep_tile, philox
from tilewise.numerics.summation import Compensated, kahan_sum, two_product, two_sum

__all__ = [
    "Compensated",
    "drop_threshold",
    "join_sink",
    "kahan_sum",
    "keep_tile",
    "merge",
    "merge_many",
    "oracle",
    "oracle_gradients",
    "philox",
    "two_product",
    "two_sum",
]
