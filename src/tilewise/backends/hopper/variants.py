"""Contenders of the kernels, side by side in one process: TILEWISE_HOPPER names those that are on, with commas between them.

    order     backward under a band: heads side by side as many as leave the programs even
    left      forward: a warpgroup passes over key tiles left of all its rows
    words     forward: band masks as words of bits
    tall      forward: 192 queries and 64 keys under windows
    deep      forward: twice the stages of keys and values with 192 queries and 64 keys
    three     forward: three warpgroups with dropout at head dim 64, with quads
    alibi     forward: scores accumulate from ALiBi's part
    bias      forward: a bias by TMA through shared memory
    fast_exp  forward with a bias: one multiply-add before exp2
    fp64      with quads: half of the upper halves of products by the units of fp64
    quads     forward: keys in the order in which a thread has all four of a call of Philox
"""

from __future__ import annotations

import os


def current() -> str:
    """What is on, as part of the keys of everything that is kept."""
    return os.environ.get("TILEWISE_HOPPER", "")


def wanted(name: str) -> bool:
    return name in current().split(",")
