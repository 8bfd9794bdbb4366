"""Philox4x32-10 against published answers and against plain integers; dropout tiles fit together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilewise.numerics.philox import drop_threshold, keep_tile, philox

# Counter, key, answer: the known-answer vectors of the Random123 distribution for philox4x32 with 10 rounds.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def signed_seed(lo: int, hi: int) -> Tensor:
    """The int64 whose halves are `lo` and `hi`."""
    value = hi << 32 | lo
    return torch.tensor(value - 2**64 if value >= 2**63 else value)


def philox_of_integers(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    assert [int(word) for word in philox((c0, c1, c2, c3), signed_seed(*key))] == answer
    assert philox_of_integers(counter, key) == answer


words = st.integers(0, 2**32 - 1)


@given(st.tuples(words, words, words, words), words, words)
@settings(max_examples=50, deadline=None)
def test_equals_integer_arithmetic(counter: tuple[int, int, int, int], lo: int, hi: int) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert [int(word) for word in philox((c0, c1, c2, c3), signed_seed(lo, hi))] == philox_of_integers(
        list(counter), [lo, hi]
    )


@pytest.mark.parametrize("q0", [0, 2**32 - 4])
def test_counter_and_word_of_a_weight(q0: int) -> None:
    seed, p = signed_seed(0xDEADBEEF, 0xCAFEF00D), 0.4
    kept = keep_tile(seed, p, range(1, 3), torch.tensor([5, 0]), range(q0, q0 + 3), range(6, 19))
    assert kept.shape == (2, 2, 3, 13) and kept.dtype == torch.bool
    for b, batch in enumerate((1, 2)):
        for h, head in enumerate((5, 0)):
            for i in range(3):
                for j, k in enumerate(range(6, 19)):
                    word = philox_of_integers([k // 4, q0 + i, head, batch], [0xDEADBEEF, 0xCAFEF00D])[k % 4]
                    assert bool(kept[b, h, i, j]) == (word >= drop_threshold(p))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_tiles_fit_together(data: st.DataObject) -> None:
    m, n = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 40))
    seed = torch.tensor(data.draw(st.integers(-(2**63), 2**63 - 1)))
    whole = keep_tile(seed, 0.5, range(2), range(3), range(m), range(n))
    q0, q1 = sorted(data.draw(st.tuples(st.integers(0, m), st.integers(0, m))))
    k0, k1 = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    tile = keep_tile(seed, 0.5, range(1, 2), range(1, 3), range(q0, q1), range(k0, k1))
    assert torch.equal(tile, whole[1:2, 1:3, q0:q1, k0:k1])


def test_rate_and_seeds() -> None:
    """200 000 draws: 5 standard deviations about p; another seed gives another mask; the ends are exact."""
    ids = range(2), range(10), range(100), range(100)
    one, other = (keep_tile(torch.tensor(seed), 0.1, *ids) for seed in (1, 1 + 2**32))
    for kept in (one, other):
        assert abs(float((~kept).double().mean()) - 0.1) < 5 * (0.1 * 0.9 / 200_000) ** 0.5
    assert 0.7 < float((one == other).double().mean()) < 0.9
    assert bool(keep_tile(torch.tensor(1), 0.0, *ids).all())
    assert drop_threshold(0.25) == 2**30 and drop_threshold(0.0) == 0


@pytest.mark.gpu
def test_device_agrees_and_is_not_waited_for() -> None:
    seed = torch.tensor(-(2**62) + 12345)
    ids = range(2), range(3), range(5, 50), range(7, 90)
    host = keep_tile(seed, 0.3, *ids)
    on_device = seed.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tiles = [keep_tile(s, 0.3, *ids, device="cuda") for s in (on_device, seed)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(tile.cpu(), host) for tile in tiles)
