"""The float64 oracle, the (out, lse) merge, compensated sums, Philox, and error bounds, each in the module of its name."""
