"""What the forward kernel is compiled for, and its tiles: for each pair of head dims what fits registers and shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

SHARED_BYTES = 227 * 1024
"""Shared memory one program may have on compute capability 9.0."""
REGISTERS = 512
"""Registers of a multiprocessor for each of a warpgroup's 128 threads, divided among all warpgroups."""
WIDTHS = (64, 128, 256)
"""Head dims of tiles; others are padded by the loads with zeros to the next."""


class Config(NamedTuple):
    """One constexpr: everything the kernel is compiled for. No length is among it."""

    WARPGROUPS: int  # consumers, 64 queries each
    BLOCK_N: int
    BLOCK_D: int  # of q and k, padded
    BLOCK_DV: int
    KV_STAGES: int
    REGISTERS: tuple[int, int]  # of a thread of a consumer, and of the producer
    PINGPONG: bool  # the two warpgroups issue their products in turns: one's softmax runs under the other's products
    Q_STAGES: int  # 2 where the queries of the next work tile fit too
    O_COLUMNS: int  # columns of the output that are stored at a time
    Q_IN_REGISTERS: int = 0  # columns of the queries; the others are read from shared memory for every key tile
    QK_COLUMNS: int = 0  # of q and k that are multiplied where the last of BLOCK_D are zeros; 0: all
    QK_UNIT: int = 0  # q and k lie in shared memory as matrices of so many columns, side by side: BLOCK_D is no power of two
    V_COLUMNS: int = 0  # of v, and so of the output, where the last of BLOCK_DV are zeros; 0: all
    RELEASE_Q_EARLY: bool = False  # when the last scores are there: one barrier more for every key tile
    LAZY_RESCALE: bool = True  # the output is rescaled under the next Q·Kᵀ, by warps that have to; else before, by all
    TERMS: int = 0  # of the mask
    BAND: bool = False  # may a row's keys end before the sequence does?
    LEFT: bool = False  # may they begin after key 0?
    TAIL: bool = False  # without a mask: is the last key tile cut short?
    UNSEEN_KEYS: bool = False  # may there be keys that no query sees?
    SCORES: str = "fold"  # "fold" the scale into exp2, "scale" first (it is not positive), "softcap", or
    # "cap": the same by `logistic`, where nothing is added to scores; they are less by the softcap then
    VARLEN: bool = False
    BOTTOM_RIGHT: bool = False  # bands of packed sequences count from the bottom right corner
    ORDERED: bool = False  # a packed batch whose order of work tiles the device writes
    LISTS: Any = None  # a ListLayout, where key tiles come from lists
    SINKS: bool = False
    DROPOUT: bool = False
    ALIBI: str = ""  # "past" where no key is ahead of its query, else "both"
    STATS: str = ""  # "max" of the scores, or "entropy" beside it
    LEFT_SKIP: bool = False  # does a warpgroup pass over key tiles left of all its rows?
    WORDS: bool = False  # are masks of bands words of bits?
    ALIBI_FIRST: bool = False  # do scores accumulate from ALiBi's part?
    BIAS_STAGES: int = 0  # of tiles of a bias in shared memory; 0: it is read straight into registers
    QUADS: bool = False  # keys in the order of `quads.py`
    QUICK: int = 0  # pieces of a step without a mask; it takes maxima only where its sums ask for them; 0: always
    QUICK_AHEAD: int = 0  # pairs of scores of a piece whose exp2 is begun before the sums of the one before it
    FOURS: bool = False  # are sums of weights those of a step with pieces? With statistics, where there would be pieces without
    DRAWERS: int = 0  # warpgroups that only make the bits of dropout; 0: who computes weights makes them
    DRAW_STAGES: int = 0  # of such bits
    DRAW_REGISTERS: int = 0  # of a thread of these warpgroups
    DRAW_AT_ONCE: int = 0  # fours of keys that a thread draws for at a time
    DRAW_EARLY: bool = False  # are weights dropped under P·V rather than after it? That takes copies of all words
    BIAS: str = ""  # its numbers, "x2" behind where two of adjacent keys are read as a word, "s" where keys are not adjacent

    @property
    def BLOCK_M(self) -> int:
        return 64 * self.WARPGROUPS

    @property
    def LISTED_BY_KEY(self) -> bool:
        """Are a list's rows key tiles?"""
        return False

    @property
    def tiles(self) -> dict[str, int]:
        """Bytes of the 16-bit tiles in shared memory, by tensor."""
        return {
            "Q": 2 * self.Q_STAGES * self.BLOCK_M * self.BLOCK_D,
            "K": 2 * self.KV_STAGES * self.BLOCK_N * self.BLOCK_D,
            "V": 2 * self.KV_STAGES * self.BLOCK_N * self.BLOCK_DV,
            "O": 2 * self.BLOCK_M * self.O_COLUMNS,
            **({"dropout": self.DRAW_STAGES * self.BLOCK_M * self.BLOCK_N // 8} if self.DRAWERS else {}),
            **({"bias": 2 * self.BIAS_STAGES * self.BLOCK_M * self.BLOCK_N} if self.BIAS_STAGES else {}),
        }

    @property
    def barriers(self) -> tuple[int, ...]:
        """How many each ring has: full and empty ones of Q, K and V."""
        queries = self.Q_STAGES * self.WARPGROUPS
        bias = 2 * (self.BIAS_STAGES * self.WARPGROUPS,) if self.BIAS_STAGES else ()
        return (queries, queries, *(4 * (self.KV_STAGES,)), *bias, *(2 * (self.DRAW_STAGES,) if self.DRAWERS else ()))


def _two_warpgroups(d: int, dv: int) -> Config:
    wide = max(d, dv) == 256
    widest = d == dv == 256
    return Config(
        WARPGROUPS=2,
        BLOCK_N=64 if wide else 128,  # 256 columns leave no shared memory or registers for 128 keys
        BLOCK_D=d,
        BLOCK_DV=dv,
        KV_STAGES=2,
        REGISTERS=(232, 40),
        PINGPONG=max(d, dv) == 128,  # gains nothing at 256; at 64 three warpgroups do better
        Q_STAGES=1 if d == 256 and dv >= 128 else 2,  # shared memory is full
        O_COLUMNS=128 if widest else dv,  # likewise
        Q_IN_REGISTERS=64 if widest else 0,  # read once for a work tile, not from shared memory for every key tile
    )


NARROW = _two_warpgroups(64, 64)
"""Head dim 64 with 128 queries, where 192 fit the length or the mask badly."""
TABLE = {(d, dv): _two_warpgroups(d, dv) for d in WIDTHS for dv in WIDTHS}
"""By padded head dims of keys and values. More on why: docs/hopper-notes.md."""
# three warpgroups hide the softmax where ping-pong between two does not
TABLE[64, 64] = NARROW._replace(WARPGROUPS=3, REGISTERS=(160, 32))


def padded(dim: int) -> int:
    """The tile's head dim."""
    return next(width for width in WIDTHS if dim <= width)


def used_columns(dim: int, width: int) -> int:
    """Columns of a tile so wide that products over them take: whole units of 64, which lie together in shared memory, and 16, 32
    or 64 of the last. 0 where that is all of the tile."""
    whole, rest = divmod(dim, 64)
    used = 64 * whole + (next(part for part in (16, 32, 64) if rest <= part) if rest else 0)
    return used if used < width else 0


def shortened(tile: Config) -> Config:
    """The tile with half the keys: it follows the edge of a mask more closely, in steps that cost more for each key."""
    return tile._replace(BLOCK_N=64, KV_STAGES=2 * tile.KV_STAGES, PINGPONG=False) if tile.BLOCK_N == 128 else tile


def tiles_for(head_dim: int, head_dim_v: int) -> tuple[Config, ...]:
    """All tiles for head dims up to 256: two warpgroups first, then half of their keys, then three warpgroups. Before them what
    fits 192 columns without padding."""
    d, dv = padded(head_dim), padded(head_dim_v)
    base = NARROW if (d, dv) == (64, 64) else TABLE[d, dv]
    units = (UNITS_192,) if 128 < head_dim <= 192 and dv == 128 else ()
    return tuple(dict.fromkeys((*units, base, shortened(base), TABLE[d, dv], *THREE_SHORT.get((d, dv), ()))))


THREE_SHORT = {
    (64, 64): (shortened(TABLE[64, 64]),),
    (128, 128): (shortened(TABLE[128, 128])._replace(WARPGROUPS=3, REGISTERS=(160, 32), Q_STAGES=1),),
}
"""Three warpgroups with 64 keys, for who asks for them."""
UNITS_192 = TABLE[128, 128]._replace(BLOCK_D=192, QK_UNIT=64, Q_STAGES=1, O_COLUMNS=64)
"""Three matrices of 64 columns side by side for queries and for keys: no column is padded, so 128 keys find shared memory."""
