"""Shared memory of a kernel, byte for byte as the compiler lays it out (`tools/compile_kernels.py` compares).

Beside the tiles stand what the first warps hand over to the others when their roles begin (addresses of tiles and barriers, the
kernel's arguments as far as a role reads them), the barriers, and a byte for each warp that waits for its role. The compiler
places them by size: what is handed over, then the barriers of each ring at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilewise.backends.hopper.config import Config
from tilewise.backends.hopper.intervals import IntervalMask
from tilewise.backends.hopper.structs import Lists

POINTER, NUMBER, DIVISOR = 8, 4, 12
ROWS = 3 * POINTER + NUMBER  # of the output: an address, two strides and a width
PACKED_ROWS = POINTER + 3 * NUMBER  # of a gradient, likewise
TILE, VECTOR = (
    POINTER + 5 * NUMBER,
    POINTER + 2 * NUMBER,
)  # views of tiles [stages, 1, 1, rows, width] and of vectors or barriers
MATRIX = POINTER + 3 * NUMBER  # [stages, rows, width]
ALIGNMENT = 16


def on_chip(kernel: str, config: Any, mask: IntervalMask, lists: Lists | None = None) -> tuple[tuple[str, int], ...]:
    """Bytes by buffer of one program."""
    if kernel == "preprocess_kernel":  # sums stay in a warp
        return ()
    if kernel == "postprocess_kernel":
        return (("dQ", 2 * 64 * max(config.DQ_PARTS)),)
    roles = 4 * workers(config)
    if kernel == "split_kernel" and lists is not None:  # the first warps alone mask
        lists = lists._replace(terms=None, terms_stride=None, q_ids=None, k_ids=None, ids_strides=(None, None))
        lists = lists._replace(bits=None, bits_strides=None, bounds=None)
    handed, rings = handed_over(kernel, config, mask) + bytes_of(lists), config.barriers
    if config.LISTS is not None:  # a word of four bytes for each stage of what is streamed, and the view of them
        handed, rings = handed + VECTOR, (*rings, -(-streamed_stages(config) // 2))
    around = aligned(handed) + ring_bytes(rings) + roles
    return (*config.tiles.items(), ("barriers and arguments", around))


def bytes_of(arguments: Any) -> int:
    """Of addresses (types stand for them) and numbers."""
    if isinstance(arguments, tuple):
        return sum(map(bytes_of, arguments))
    return 0 if arguments is None else POINTER if isinstance(arguments, str) else NUMBER


def streamed_stages(config: Any) -> int:
    """Of the tiles that come from lists: of keys, or of queries where keys are held."""
    if isinstance(config, Config):
        return config.KV_STAGES
    return int(config.Q_STAGES if config.LISTED_BY_KEY else config.K_STAGES)


def workers(config: Any) -> int:
    """Warpgroups beside the first: the other consumers, the producer, and who draws for dropout."""
    return config.WARPGROUPS + config.DRAWERS if isinstance(config, Config) else 2


def warps_of(config: Any) -> int:
    """Of one program: the producer is one warp of a warpgroup that is held whole."""
    return 4 * (1 + workers(config))


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def ring_bytes(barriers: Iterable[int]) -> int:
    """Barriers of 8 bytes by ring, the largest ring first, each at a multiple of 16 bytes."""
    end = 0
    for count in sorted(barriers, reverse=True):
        end = aligned(end) + 8 * count
    return end


def handed_over(kernel: str, config: Any, mask: IntervalMask) -> int:
    """Bytes that the first warps leave for the others."""
    if kernel in ("forward_kernel", "biased_kernel"):
        return forward_views(config) + forward_arguments(config, mask)
    if kernel == "queries_kernel":
        return queries_views() + queries_arguments(config, mask)
    return keys_views(config) + keys_arguments(config, mask)


def terms_bytes(mask: IntervalMask, first: int) -> int:
    """A mask's terms: `first` numbers of the first one, where the keys end of the second, and the addresses both read."""
    numbers = first + 2 * (len(mask.terms) - 1)
    tensors = sum(x is not None for term in mask.terms for x in term[4:])
    return NUMBER * numbers + POINTER * tensors if mask.terms else 0


def tile_arguments(config: Any, mask: IntervalMask) -> int:
    """What every kernel over work tiles reads: which of them, and its place in the tensors."""
    ordered = (mask.uneven and not config.VARLEN) or config.ORDERED or config.LISTS is not None
    which = DIVISOR + NUMBER + (POINTER if ordered else NUMBER)  # blocks; programs; the order, or the number of tiles
    owners = POINTER if config.ORDERED else 0
    batch = 2 * POINTER + NUMBER + owners if config.VARLEN else DIVISOR  # lengths, their number, whose tiles are; or heads
    slope = NUMBER if config.SCORES in ("softcap", "cap") else 0
    split = getattr(config, "SPLIT", False)  # the first warps alone compute scores
    alibi = POINTER + NUMBER if config.ALIBI and not split else 0
    dropout = NUMBER if split else POINTER + 2 * NUMBER
    dropout = dropout if config.DROPOUT else 0
    bias = bias_arguments(config) if config.BIAS else 0
    return which + batch + slope + alibi + dropout + bias


def bias_arguments(config: Any) -> int:
    """What reads a bias, which of a split kernel the first warps do alone, and its flag."""
    if getattr(config, "BIAS_STAGES", 0):
        return 2 * NUMBER + POINTER + NUMBER
    numbers = 4 if config.BIAS.endswith("s") else 3
    read = 0 if getattr(config, "SPLIT", False) else 3 * POINTER + numbers * NUMBER
    return read + POINTER + NUMBER


def forward_views(config: Config) -> int:
    bias = POINTER + TILE + 2 * VECTOR if config.BIAS_STAGES else 0
    return 4 * POINTER + 4 * TILE + 6 * VECTOR + bias + (MATRIX + 2 * VECTOR if config.DRAWERS else 0)


def forward_arguments(config: Config, mask: IntervalMask) -> int:
    numbers = 2 + 1 + 1 + 1  # of the group's divisor; queries, last block, scale
    numbers += config.TERMS == 0 or config.UNSEEN_KEYS or (config.ALIBI != "" and not config.VARLEN)  # keys
    numbers += not config.VARLEN or (config.TERMS > 0 and config.Q_STAGES > 1)  # last query
    numbers += config.ALIBI_FIRST
    packed = ROWS if config.VARLEN else 0
    features = POINTER * (config.SINKS + {"": 0, "max": 1, "entropy": 3}[config.STATS])
    return POINTER + NUMBER * numbers + packed + features + terms_bytes(mask, 4) + tile_arguments(config, mask)


def queries_views() -> int:
    return 5 * POINTER + 4 * TILE + 8 * VECTOR


def queries_arguments(config: Any, mask: IntervalMask) -> int:
    numbers = 2 + 1 + 1 + 2  # of the group's divisor; keys; tiles of statistics; both scales
    numbers += not config.VARLEN  # queries
    packed = PACKED_ROWS if config.VARLEN else 0
    gradient = 3 * POINTER + (2 if config.DBIAS == "add keys" else 1) * NUMBER if config.DBIAS else 0
    return POINTER + NUMBER * numbers + packed + gradient + terms_bytes(mask, 4) + tile_arguments(config, mask)


def keys_views(config: Any) -> int:
    if config.SPLIT:  # the first warps alone store dV
        return 6 * POINTER + 4 * TILE + 10 * VECTOR + MATRIX + VECTOR
    buffers = 1 if config.BLOCK_D == config.BLOCK_DV else 2
    exchange = VECTOR + MATRIX if config.REDUCE_DQ else 0
    return 7 * POINTER + (4 + buffers) * TILE + 7 * VECTOR + exchange + VECTOR


def keys_arguments(config: Any, mask: IntervalMask) -> int:
    numbers = 1 + 1 + 1 + 1  # the group; keys, tiles of statistics, scale
    numbers += not config.VARLEN  # queries
    # tiles of statistics of all heads and the scale of logarithms; or where queries of a list are zeroed, what is past them
    numbers += config.LISTS is not None and config.EMPTY_ROWS if config.SPLIT else 2
    sums = POINTER if config.REDUCE_DQ else 0
    packed = (1 if config.SPLIT else 2) * PACKED_ROWS if config.VARLEN else 0
    # where keys end; the band's right; its left and where keys begin, which empty rows ask for too
    first = 1 + config.BAND + (2 if config.LEFT else config.EMPTY_ROWS)
    return NUMBER * numbers + sums + packed + terms_bytes(mask, first) + tile_arguments(config, mask)
