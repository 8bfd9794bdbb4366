"""What the backward's kernels are compiled for, and their tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.hopper.config import WIDTHS, padded


class KeysConfig(NamedTuple):
    """One constexpr: everything a kernel that holds keys and streams queries is compiled for. No length is among it."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int  # of q and k, padded
    BLOCK_DV: int
    SPLIT: bool = False  # the two warpgroups share 64 keys, one for dV and one for dK; else each has 64 keys of its own
    ACC_FROM_STATS: bool = False  # S and dP accumulate from -lse and -delta, which are then not subtracted
    Q_STAGES: int = 2  # of q, dout and statistics
    K_STAGES: int = 2
    V_STAGES: int = 1
    REGISTERS: tuple[int, int] = (240, 24)  # of a thread of a consumer, and of the producer
    REDUCE_DQ: bool = True  # dQ is added up in memory; else it is left to the kernel that holds queries
    OVERLAP_SCORES: bool = False  # if left: the next scores are issued before the last gradients are done
    TERMS: int = 0  # of the mask
    BAND: bool = False  # may a row's keys end before the sequence does?
    LEFT: bool = False  # may they begin after key 0?
    SCORES: str = "fold"
    VARLEN: bool = False
    BOTTOM_RIGHT: bool = False  # bands of packed sequences count from the bottom right corner
    GROUPED: bool = False  # query heads that share a key head take turns at each query tile, see Sweep
    EMPTY_ROWS: bool = False  # may a query see no key?
    ORDERED: bool = False  # a packed batch whose order of work tiles the device writes
    LISTS: Any = None  # a ListLayout, where query tiles come from lists
    UNSEEN_KEYS: bool = False  # with lists: may there be keys that no query sees?
    DROPOUT: bool = False
    ALIBI: str = ""  # "past" where no key is ahead of its query, else "both"
    BIAS: str = ""  # see Config
    QK_COLUMNS: int = 0  # see Config
    V_COLUMNS: int = 0  # the same of v and dout
    DQ_PARTS: tuple[int, int] = (64, 64)  # columns of dQ by warpgroup
    HELD: tuple[int, int] = (0, 0)  # columns of K and of V that are operands from registers

    @property
    def LISTED_BY_KEY(self) -> bool:
        return True

    @property
    def tiles(self) -> dict[str, int]:
        """Bytes of tiles and statistics in shared memory, by tensor."""
        m, n, d, dv = self.BLOCK_M, self.BLOCK_N, self.BLOCK_D, self.BLOCK_DV
        sizes = {
            "K": 2 * self.K_STAGES * n * d,
            "V": 2 * self.V_STAGES * n * dv,
            "Q": 2 * self.Q_STAGES * m * d,
            "dO": 2 * self.Q_STAGES * m * dv,
            "LSE": 4 * self.Q_STAGES * m,
            "delta": 4 * self.Q_STAGES * m,
        }
        if self.SPLIT:  # the gradients leave through the memory of K and V
            return {**sizes, "P": 4 * m * n}
        if self.REDUCE_DQ:
            sizes["dS"] = 2 * 2 * m * n
        return {**sizes, "dK": 2 * n * d, **({} if d == dv else {"dV": 2 * n * dv})}  # of equal width they take turns

    @property
    def barriers(self) -> tuple[int, ...]:
        """How many each ring has. Where warpgroups have keys of their own, dO and dS are free when Q is."""
        q, k, v = self.Q_STAGES, self.K_STAGES, self.V_STAGES
        if self.SPLIT:
            return (q, q, q, q, k, k, v, v, 1, 1)
        return (q, q, q, k, k, v, v, *((2,) if self.REDUCE_DQ else ()))


class QueriesConfig(NamedTuple):
    """The same for the kernel that holds queries and streams keys, for dQ without additions in memory."""

    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    V_STAGES: int
    REGISTERS: tuple[int, int]
    K_STAGES: int = 2
    STAT_ROWS: int = 64  # queries in a tile of statistics
    TERMS: int = 0
    BAND: bool = False
    LEFT: bool = False
    SCORES: str = "fold"
    VARLEN: bool = False
    BOTTOM_RIGHT: bool = False
    EMPTY_ROWS: bool = False
    ORDERED: bool = False
    LISTS: Any = None
    UNSEEN_KEYS: bool = False
    DROPOUT: bool = False
    ALIBI: str = ""
    BIAS: str = ""
    QK_COLUMNS: int = 0
    V_COLUMNS: int = 0
    HELD: tuple[int, int] = (0, 0)  # columns of Q and of dO that are operands from registers too
    DBIAS: str = ""  # the bias's gradient: "store", or "add" up in memory where it is broadcast; "add keys" where all keys share

    @property
    def BLOCK_M(self) -> int:
        return 128

    @property
    def LISTED_BY_KEY(self) -> bool:
        return False

    @property
    def tiles(self) -> dict[str, int]:
        """Bytes of the 16-bit tiles in shared memory, by tensor; dQ leaves through the memory of Q."""
        return {
            "Q": 2 * 128 * self.BLOCK_D,
            "dO": 2 * 128 * self.BLOCK_DV,
            "K": 2 * self.K_STAGES * self.BLOCK_N * self.BLOCK_D,
            "V": 2 * self.V_STAGES * self.BLOCK_N * self.BLOCK_DV,
        }

    @property
    def barriers(self) -> tuple[int, ...]:
        """How many each ring has."""
        return (2, 2, 2, 2, self.K_STAGES, self.K_STAGES, self.V_STAGES, self.V_STAGES)


def _split_config(d: int, dv: int) -> KeysConfig:
    return KeysConfig(BLOCK_M=64, BLOCK_N=64, BLOCK_D=d, BLOCK_DV=dv, SPLIT=True, K_STAGES=1, REDUCE_DQ=False)


def _keys_config(d: int, dv: int) -> KeysConfig:
    if max(d, dv) == 256:  # a gradient of 64 keys fills a warpgroup's registers
        return _split_config(d, dv)
    if d == 128:
        return KeysConfig(BLOCK_M=64, BLOCK_N=128, BLOCK_D=d, BLOCK_DV=dv)
    # 128 queries, whose statistics find no registers of their own
    return KeysConfig(BLOCK_M=128, BLOCK_N=128, BLOCK_D=d, BLOCK_DV=dv, ACC_FROM_STATS=True, V_STAGES=2)


def _queries_config(d: int, dv: int) -> QueriesConfig:
    if max(d, dv) == 256:  # dQ or an operand of dP leaves room for 64 keys, and 256 values for one stage of them
        return QueriesConfig(BLOCK_N=64, BLOCK_D=d, BLOCK_DV=dv, V_STAGES=1 if dv == 256 else 2, REGISTERS=(240, 24))
    return QueriesConfig(BLOCK_N=128, BLOCK_D=d, BLOCK_DV=dv, V_STAGES=2, REGISTERS=(232, 40))


def widths(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The tiles' head dims: 64 of keys only where values have no more."""
    d, dv = padded(head_dim), padded(head_dim_v)
    return (max(d, 128), dv) if dv > 64 else (d, dv)


_WIDTHS = sorted({widths(d, dv) for d in WIDTHS for dv in WIDTHS})
KEYS = {dims: _keys_config(*dims) for dims in _WIDTHS}
"""By padded head dims of keys and values; more on why: docs/hopper-backward-notes.md."""
KEYS_SHORT = {**KEYS, (64, 64): KEYS[64, 64]._replace(BLOCK_M=64, ACC_FROM_STATS=False)}
"""The same with 64 queries at a time at 64 columns too, which leaves registers for features."""
SEPARATE_DQ = {dims: tile._replace(REDUCE_DQ=False) for dims, tile in KEYS.items()}
"""The same where dQ has a kernel of its own, which reads plain statistics."""
SEPARATE_DQ[64, 64] = KEYS[64, 64]._replace(REDUCE_DQ=False, ACC_FROM_STATS=False, Q_STAGES=3, OVERLAP_SCORES=True)
SEPARATE_DQ_SOFTCAP = {**SEPARATE_DQ, (64, 64): SEPARATE_DQ[64, 64]._replace(BLOCK_M=64)}
"""The same under a softcap, whose tanh finds no registers beside 128 queries."""
SEPARATE_DQ_UNMASKED = {**SEPARATE_DQ, (128, 128): SEPARATE_DQ[128, 128]._replace(V_STAGES=2, OVERLAP_SCORES=True)}
"""The same where every query sees every key: only there overlapping scores pays at 128."""
LISTED_SEPARATE_DQ = {
    **SEPARATE_DQ,
    (64, 64): SEPARATE_DQ[64, 64]._replace(BLOCK_M=64, Q_STAGES=2, V_STAGES=1, OVERLAP_SCORES=False),
}
"""The same for tile lists."""
SPLIT = {dims: _split_config(*dims) for dims in _WIDTHS}
"""64 keys at a time, a gradient for each warpgroup: for 256 columns, and for who asks for it."""
QUERIES = {dims: _queries_config(*dims) for dims in _WIDTHS}
QUERIES_SHORT = {
    dims: tile._replace(BLOCK_N=64, K_STAGES=2 * tile.K_STAGES, V_STAGES=2 * tile.V_STAGES)
    for dims, tile in QUERIES.items()
    if tile.BLOCK_N == 128
}
"""The same with half the keys a step, for who asks for it: products of 64 columns read more shared memory."""
