"""Philox4x32-10 in numpy's 64-bit integers, from its paper (Salmon, Moraes, Dror, Shaw, SC 2011): dropout's second opinion."""

from __future__ import annotations

from typing import Any

import numpy as np

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLY_0, MULTIPLY_2 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
RAISE_0, RAISE_1 = 0x9E3779B9, 0xBB67AE85


def kept(seed: int, p: float, batch: int, shape: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    """Which weights of a sequence survive: bool (heads, M, N). Key (seed), counter (k // 4, q, head, batch), word k % 4."""
    heads, m, n = shape
    h, q, k = (np.arange(size, dtype=np.uint64) for size in shape)
    words = _philox(k[None, None, :] // 4, q[None, :, None], h[:, None, None], np.uint64(batch), seed % 2**64)
    word = np.empty((heads, m, n), np.uint64)
    for w in range(4):
        word[..., w::4] = np.broadcast_to(words[w], (heads, m, n))[..., w::4]
    return word >= np.uint64(int(p * 2**32))


def _philox(c0: Any, c1: Any, c2: Any, c3: Any, key: int) -> tuple[Any, ...]:
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        product_0, product_2 = MULTIPLY_0 * c0, MULTIPLY_2 * c2
        c0, c1, c2, c3 = (
            (product_2 >> HALF) ^ c1 ^ np.uint64(k0),
            product_2 & LOW,
            (product_0 >> HALF) ^ c3 ^ np.uint64(k1),
            product_0 & LOW,
        )
        k0, k1 = (k0 + RAISE_0) & 0xFFFFFFFF, (k1 + RAISE_1) & 0xFFFFFFFF
    return c0, c1, c2, c3
