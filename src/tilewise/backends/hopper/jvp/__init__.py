"""The JVP on Hopper: the forward with tangents of q, k and v, in one pass over the keys (docs/derivatives.md has the formulas).

The roles are those of the forward: one warp loads, two warpgroups compute 64 rows each, with two accumulators and two tiles of
scores. `choose` says what is served and with which tile, `arguments` makes a launch of that, `launch` runs it.
"""
