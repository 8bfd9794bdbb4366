"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw (SC 2011), over a tile of weights.

The weight of query q and key k has the counter (k // 4, q, head, batch) and the word k % 4 under the key (low half of
the seed, high half); it is dropped iff that word is below ⌊p·2³²⌋. How the weights are cut into tiles does not matter.

torch has no unsigned 32 × 32 → 64 multiplication, so words live in int64. With the multiplier m taken as m − 2³²,
which lies between −2³⁰ and 0, the product with any word fits, and ⌊w·m / 2³²⌋ = ⌊w·(m − 2³²) / 2³²⌋ + w exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def drop_threshold(p: float) -> int:
    """Words below it are dropped."""
    return int(p * 2**32)


def philox(counter: Words, seed: Tensor) -> Words:
    """Four random words for each counter (int64 that broadcast, values in [0, 2³²)); `seed` is an int64 scalar."""
    steps = torch.arange(ROUNDS, device=counter[0].device)
    seed = seed.reshape(())
    keys_lo = ((seed & WORD) + WEYL[0] * steps) & WORD  # [rounds]
    keys_hi = ((seed >> 32) + WEYL[1] * steps) & WORD
    c0, c1, c2, c3 = counter
    for key_lo, key_hi in zip(keys_lo.unbind(), keys_hi.unbind(), strict=True):
        hi0, lo0 = _multiply(c0, MULTIPLIERS[0])
        hi1, lo1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ key_lo, lo1, hi0 ^ c3 ^ key_hi, lo0
    return c0, c1, c2, c3


def keep_tile(
    seed: Tensor,
    p: float,
    batch: range | Tensor,
    heads: range | Tensor,
    queries: range | Tensor,
    keys: range,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which weights survive dropout: bool (B, H, M, N), True = kept.

    Sequences, query heads and queries are ranges, or vectors of ids. Never waits for the device.
    """
    device = torch.device(device) if device is not None else seed.device
    first, last = keys.start // 4, -(-keys.stop // 4)
    counter = (
        torch.arange(first, last, device=device),  # [N / 4]
        _ids(queries, device)[:, None],
        _ids(heads, device)[:, None, None],
        _ids(batch, device)[:, None, None, None],
    )
    threshold = drop_threshold(p)
    kept = torch.stack([word >= threshold for word in philox(counter, seed)], dim=-1)  # [B, H, M, N / 4, 4]
    return kept.flatten(-2)[..., keys.start - 4 * first : keys.stop - 4 * first]


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product."""
    product = word * (multiplier - 2**32)
    return (product >> 32) + word, product & WORD


def _ids(ids: range | Tensor, device: torch.device) -> Tensor:
    if isinstance(ids, range):
        return torch.arange(ids.start, ids.stop, ids.step, device=device)
    return ids.to(device=device, dtype=torch.int64)
