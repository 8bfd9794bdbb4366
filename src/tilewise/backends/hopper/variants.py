"""Contenders of the kernels, side by side in one process: TILEWISE_HOPPER names those that are on, with commas between them.

What was expected before any was timed (H200, bf16, device time in µs):

    order     backward: heads side by side as many as leave the programs even. 64/8 heads, d 64, 8k causal: the longest program
              from 1.237 to 1.007 of the mean, 3184 to 2670
    left      forward: a warpgroup passes over key tiles left of all its rows. Window 128, 64/8 heads, d 64: three steps in place
              of four, 160 to 138
    words     forward: band masks as words of bits, a masked step 472 to 383 instructions. With `left` 130
    tall      forward: 192 queries and 64 keys under windows, twelve warps in place of eight to hide what waits. With both 105
    deep      twice the stages of keys and values with `tall`: 100
    alibi     forward: scores accumulate from ALiBi's part, a step 603 to 543 instructions (468 without ALiBi). d 128, 8k causal:
              1008 to 900
    bias      forward: a bias by TMA through shared memory, three stages ahead; memory takes 128. d 64, 4k: 407 to 190
    fast_exp  forward with a bias: one multiply-add before exp2, a step 650 to 590 instructions: 180
    quads     forward: keys in the order in which a thread has all four of a call of Philox, a step 1446 to 1222 instructions at
              d 128, 18 to 16.6 wide products a call. d 64 420, d 128 1157 to 560
    fp64      with `quads`: half of the upper halves of products by the units of fp64. A quarter less if a multiprocessor makes 16
              wide products a clock, more if it makes 32
    three     with `quads` at head dim 64: three warpgroups and 64 keys. 5 % less, if latency is what is left
"""

from __future__ import annotations

import os


def current() -> str:
    """What is on, as part of the keys of everything that is kept."""
    return os.environ.get("TILEWISE_HOPPER", "")


def wanted(name: str) -> bool:
    return name in current().split(",")
