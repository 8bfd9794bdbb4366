"""What the backward's kernels are compiled for, and the table of tiles."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.backends.hopper.config import BARRIER_BYTES, padded


class KeysConfig(NamedTuple):
    """One constexpr: everything a kernel that holds keys and streams queries is compiled for. No length is among it."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int  # of q and k, padded
    BLOCK_DV: int
    SPLIT: bool  # the warpgroups share 64 keys, one for dV and one for dK; else each has 64 keys of its own
    SEEDED: bool  # products start at -lse and -delta instead of having them subtracted
    Q_STAGES: int
    DO_STAGES: int
    K_STAGES: int
    V_STAGES: int
    STAGED: bool  # dK and dV leave through memory of their own, not through that of K and V
    PIECE: int  # columns of dQ that a warpgroup computes at a time
    REGISTERS: tuple[int, int]  # of a thread that computes, and of one that loads
    REDUCE: bool = True  # dQ is added up in memory; else it is left to the kernel that holds queries
    EARLY: bool = False  # if left: the next scores are issued before the last gradients are done
    TERMS: int = 0  # of the mask
    BAND: bool = False  # may a row's keys end before the sequence does?
    LEFT: bool = False  # may they begin after key 0?
    SCORES: str = "fold"
    VARLEN: bool = False
    BOTTOM: bool = False  # bands of packed sequences count from the bottom right corner
    BLIND: bool = False  # may a query see no key?

    @property
    def shared_bytes(self) -> int:
        """Of tiles, statistics and barriers."""
        keys = self.BLOCK_N * (self.K_STAGES * self.BLOCK_D + self.V_STAGES * self.BLOCK_DV)
        queries = self.BLOCK_M * (self.Q_STAGES * self.BLOCK_D + self.DO_STAGES * self.BLOCK_DV)
        scores = (2 if self.REDUCE else 0) * self.BLOCK_M * self.BLOCK_N
        exchanged = 4 * self.BLOCK_M * self.BLOCK_N if self.SPLIT else 0
        widths = self.BLOCK_D if self.BLOCK_D == self.BLOCK_DV else self.BLOCK_D + self.BLOCK_DV
        staged = self.BLOCK_N * widths if self.STAGED else 0
        statistics = 4 * 2 * self.BLOCK_M * self.Q_STAGES
        return 2 * (keys + queries + scores + staged) + exchanged + statistics + BARRIER_BYTES

    @property
    def registers(self) -> int:
        return 2 * self.REGISTERS[0] + self.REGISTERS[1]

    @property
    def accumulators(self) -> int:
        """Registers a computing thread holds for its gradients and its tiles of scores."""
        gradients = max(self.BLOCK_D, self.BLOCK_DV) if self.SPLIT else self.BLOCK_D + self.BLOCK_DV
        return gradients // 2 + (self.BLOCK_M // 2 if self.SPLIT else self.BLOCK_M)


class QueriesConfig(NamedTuple):
    """The same for the kernel that holds queries and streams keys, for dQ without additions in memory."""

    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    K_STAGES: int
    V_STAGES: int
    REGISTERS: tuple[int, int] = (232, 40)
    STAT_ROWS: int = 64  # queries in a tile of statistics
    TERMS: int = 0
    BAND: bool = False
    LEFT: bool = False
    SCORES: str = "fold"
    VARLEN: bool = False
    BOTTOM: bool = False
    BLIND: bool = False

    @property
    def BLOCK_M(self) -> int:
        return 128

    @property
    def shared_bytes(self) -> int:
        queries = 128 * (self.BLOCK_D + self.BLOCK_DV)
        keys = self.BLOCK_N * (self.K_STAGES * self.BLOCK_D + self.V_STAGES * self.BLOCK_DV)
        return 2 * (queries + keys) + BARRIER_BYTES

    @property
    def registers(self) -> int:
        return 2 * self.REGISTERS[0] + self.REGISTERS[1]

    @property
    def accumulators(self) -> int:
        return self.BLOCK_D // 2 + self.BLOCK_N


KEYS: dict[tuple[int, int], KeysConfig] = {
    (64, 64): KeysConfig(128, 128, 64, 64, False, True, 2, 2, 2, 2, True, 64, (240, 24)),
    (128, 64): KeysConfig(64, 128, 128, 64, False, False, 2, 2, 2, 1, True, 64, (240, 24)),
    (128, 128): KeysConfig(64, 128, 128, 128, False, False, 2, 2, 2, 1, True, 64, (240, 24)),
    (128, 256): KeysConfig(64, 64, 128, 256, True, False, 2, 2, 1, 1, False, 64, (240, 24), False),
    (256, 64): KeysConfig(64, 64, 256, 64, True, False, 2, 2, 1, 1, False, 64, (240, 24), False),
    (256, 128): KeysConfig(64, 64, 256, 128, True, False, 2, 2, 1, 1, False, 64, (240, 24), False),
    (256, 256): KeysConfig(64, 64, 256, 256, True, False, 2, 2, 1, 1, False, 64, (240, 24), False),
}
"""By padded head dims of keys and values; why each: docs/hopper-backward-notes.md."""
APART = {dims: tile._replace(REDUCE=False) for dims, tile in KEYS.items()}
"""The same where dQ has a kernel of its own, which reads plain statistics."""
APART[64, 64] = KeysConfig(128, 128, 64, 64, False, False, 3, 3, 2, 2, True, 64, (240, 24), False, True)
CAPPED = {**APART, (64, 64): APART[64, 64]._replace(BLOCK_M=64)}
"""The same under a softcap, whose tanh finds no registers beside 128 queries."""
UNMASKED = {**APART, (128, 128): APART[128, 128]._replace(V_STAGES=2, EARLY=True)}
"""The same where every query sees every key: only there early scores pay at 128."""
QUERIES: dict[tuple[int, int], QueriesConfig] = {
    (64, 64): QueriesConfig(128, 64, 64, 2, 2),
    (128, 64): QueriesConfig(128, 128, 64, 2, 2),
    (128, 128): QueriesConfig(128, 128, 128, 2, 2),
    (128, 256): QueriesConfig(64, 128, 256, 2, 1, (240, 24)),
    (256, 64): QueriesConfig(64, 256, 64, 2, 2, (240, 24)),
    (256, 128): QueriesConfig(64, 256, 128, 2, 2, (240, 24)),
    (256, 256): QueriesConfig(64, 256, 256, 2, 1, (240, 24)),
}


def widths(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The tiles' head dims: 64 only for both, since the warpgroups halve dQ's columns, which come in groups of 64."""
    d, dv = padded(head_dim), padded(head_dim_v)
    return (max(d, 128), dv) if dv > 64 else (d, dv)
