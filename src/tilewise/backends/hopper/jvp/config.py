"""What the JVP's kernel is compiled for, and its tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

WIDTHS = (64, 128)
"""Head dims of tiles; others are padded by the loads with zeros to the next."""


class JvpConfig(NamedTuple):
    """One constexpr: everything the kernel is compiled for. No length is among it. What it shares with the forward's `Config` has
    the same names, for functions that serve both."""

    BLOCK_N: int
    BLOCK_D: int  # of q, k and their tangents, padded
    BLOCK_DV: int
    KV_STAGES: int
    REGISTERS: tuple[int, int]  # of a thread of a consumer, and of the producer
    Q_T: bool = True  # which inputs have a tangent
    K_T: bool = True
    V_T: bool = True
    QK_COLUMNS: int = 0  # of q and k that are multiplied where the last of BLOCK_D are zeros; 0: all
    V_COLUMNS: int = 0  # of v, and so of the output, where the last of BLOCK_DV are zeros; 0: all
    TERMS: int = 0  # of the mask
    BAND: bool = False  # may a row's keys end before the sequence does?
    LEFT: bool = False  # may they begin after key 0?
    TAIL: bool = False  # without a mask: is the last key tile cut short?
    UNSEEN_KEYS: bool = False  # may there be keys that no query sees?
    SCORES: str = "fold"  # "fold" the scale into exp2, or "scale" first (it is not positive)
    VARLEN: bool = False
    BOTTOM_RIGHT: bool = False  # bands of packed sequences count from the bottom right corner
    ORDERED: bool = False  # a packed batch whose order of work tiles the device writes
    # functions of the forward ask for these
    WARPGROUPS: int = 2
    LISTS: Any = None
    WORDS: bool = True
    QUADS: bool = False

    @property
    def BLOCK_M(self) -> int:
        return 64 * self.WARPGROUPS

    @property
    def tiles(self) -> dict[str, int]:
        """Bytes of the 16-bit tiles in shared memory, by tensor."""
        keys = 2 * self.KV_STAGES * self.BLOCK_N
        q, k, v = 2 * self.BLOCK_M * self.BLOCK_D, keys * self.BLOCK_D, keys * self.BLOCK_DV
        found = {"Q": q, "Q_t": q * self.Q_T, "K": k, "K_t": k * self.K_T, "V": v, "V_t": v * self.V_T}
        return {name: size for name, size in found.items() if size} | {"O": 2 * self.BLOCK_M * self.BLOCK_DV}

    @property
    def barriers(self) -> tuple[int, ...]:
        """How many each ring has: full and empty ones of Q, K and V, each with its tangent."""
        return (*(2 * (self.WARPGROUPS,)), *(4 * (self.KV_STAGES,)))


def padded(dim: int) -> int:
    """The tile's head dim."""
    return next(width for width in WIDTHS if dim <= width)


def tile_for(head_dim: int, head_dim_v: int) -> JvpConfig:
    """Two accumulators and two tiles of scores are held at a time: 64 keys where one of them is 128 columns wide."""
    d, dv = padded(head_dim), padded(head_dim_v)
    keys = 64 if max(d, dv) > 64 else 128
    return JvpConfig(BLOCK_N=keys, BLOCK_D=d, BLOCK_DV=dv, KV_STAGES=2, REGISTERS=(240, 24))
