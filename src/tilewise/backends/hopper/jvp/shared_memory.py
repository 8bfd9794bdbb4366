"""Shared memory of the JVP's kernel, byte for byte as the compiler lays it out: see hopper.shared_memory."""

from __future__ import annotations

from tilewise.backends.hopper.intervals import IntervalMask
from tilewise.backends.hopper.jvp.config import JvpConfig
from tilewise.backends.hopper.shared_memory import (
    DIVISOR,
    NUMBER,
    POINTER,
    ROWS,
    TILE,
    VECTOR,
    aligned,
    ring_bytes,
    terms_bytes,
)


def on_chip(config: JvpConfig, mask: IntervalMask) -> tuple[tuple[str, int], ...]:
    """Bytes by buffer of one program."""
    roles = 4 * config.WARPGROUPS
    around = aligned(views(config) + arguments(config, mask)) + ring_bytes(config.barriers) + roles
    return (*config.tiles.items(), ("barriers and arguments", around))


def views(config: JvpConfig) -> int:
    """Descriptors, tiles and barriers that roles are handed."""
    moving = config.Q_T + config.K_T + config.V_T
    return (5 + moving) * POINTER + (4 + moving) * TILE + 6 * VECTOR


def arguments(config: JvpConfig, mask: IntervalMask) -> int:
    """Numbers and addresses, as far as a role reads them."""
    ordered = (mask.uneven and not config.VARLEN) or config.ORDERED
    which = DIVISOR + NUMBER + (POINTER if ordered else NUMBER)  # blocks; programs; the order, or the number of tiles
    batch = 3 * POINTER + NUMBER if config.VARLEN else DIVISOR  # lengths, their number and whose tiles are, or heads
    numbers = 2 + 1 + 1 + 1 + 1  # of the group's divisor; queries, last query, last block, scale of logarithms
    numbers += config.TERMS == 0 or config.UNSEEN_KEYS  # keys
    numbers += config.Q_T or config.K_T  # scale
    packed = 2 * ROWS if config.VARLEN else 0
    return 2 * POINTER + NUMBER * numbers + packed + terms_bytes(mask, 4) + which + batch
