"""The last tiles of queries in pieces: where they do not fill a round of the programs, their keys are shared out.

All tiles are equally long here. In whole rounds programs take a tile each. Of the tiles that are left a program gets a piece: so
many tiles of keys of one tile of queries, or several such pieces. Results of pieces go to memory of their own and are merged by a
second kernel (`merge.py`). Shares and the order of merging are fixed, so results are the same in every launch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

EXTRA_STEPS = 2.5
"""What a piece costs beside its keys, in tiles of keys."""
LEAST_STEPS = 4
"""Tiles of keys that are worth a piece."""


class Pieces(NamedTuple):
    order: np.ndarray  # int32 [rounds + 1, programs]: tiles and, counted from the number of tiles on, pieces; negative for none
    table: np.ndarray  # int32 [pieces, 4]: a tile of queries; of its tiles of keys one past the last, how many down from it; 0
    cuts: np.ndarray  # int32 [tiles cut, 4]: a tile of queries, its first piece, how many; 0
    saved: int  # tiles of keys by which the longest program gets shorter


class Piece(NamedTuple):
    tile: int
    last: int
    count: int
    program: int
    turn: int  # which of the program's pieces


def share_out(tiles: int, steps: int, programs: int) -> Pieces | None:
    """Pieces of the last of so many tiles of queries with `steps` tiles of keys each; None if there is nothing to gain.

    As many programs as may be take pieces that begin at the same keys: they read them at the same time, which costs the L2 cache
    little. What is left of each tile, at its beginning, is for the others.
    """
    rounds, left = divmod(tiles, programs)
    if rounds == 0 or left == 0:
        return None
    groups = programs // left
    others = programs - groups * left
    for length in range(-(-left * steps // programs), steps):
        zone = max(0, steps - groups * length)
        shares = zone_shares(left, zone, others, length)
        if shares is not None:
            break
    else:
        return None
    pieces = [
        Piece(t, steps - g * length, min(length, steps - g * length), g * left + t, 0) for g in range(groups) for t in range(left)
    ]
    for n, mine in enumerate(shares):
        pieces += [Piece(t, zone - before, count, groups * left + n, i) for i, (t, before, count) in enumerate(mine)]
    pieces = sorted((p for p in pieces if p.count > 0), key=lambda p: (p.tile, -p.last))
    return tabulate(pieces, tiles, programs, steps - length)


def zone_shares(tiles: int, zone: int, programs: int, length: int) -> list[list[tuple[int, int, int]]] | None:
    """The first `zone` tiles of keys of all tiles, one after another, cut into shares: of each program (tile, tiles of keys
    before, how many), at most `length` with what pieces cost. None: it is too short for that."""
    found: list[list[tuple[int, int, int]]] = []
    tile = done = 0
    for _ in range(programs):
        mine: list[tuple[int, int, int]] = []
        room = float(length)
        while zone and tile < tiles:
            left = zone - done
            take = min(left, int(room - EXTRA_STEPS))
            if 0 < left - take < LEAST_STEPS:
                take = left - LEAST_STEPS
            if take < min(LEAST_STEPS, left):
                break
            mine.append((tile, done, take))
            room -= take + EXTRA_STEPS
            done += take
            if done == zone:
                tile, done = tile + 1, 0
        found.append(mine)
    return found if zone == 0 or tile == tiles else None


def tabulate(pieces: list[Piece], tiles: int, programs: int, saved: int) -> Pieces:
    """The tables of pieces that stand by tile; their tiles count from the first that is cut."""
    rounds, left = divmod(tiles, programs)
    first = rounds * programs
    order = np.full((rounds + 2 + max(p.turn for p in pieces), programs), -1, dtype=np.int32)
    whole = np.arange(first).reshape(rounds, programs)
    whole[1::2] = whole[1::2, ::-1].copy()  # as tiles are taken without an order
    order[:rounds] = whole
    for n, p in enumerate(pieces):
        order[rounds + p.turn, p.program] = tiles + n
    table = np.array([(first + p.tile, p.last, p.count, 0) for p in pieces], np.int32)
    counts = np.bincount([p.tile for p in pieces], minlength=left)
    starts = np.cumsum(counts) - counts
    cuts = np.stack([first + np.arange(left), starts, counts, 0 * counts], 1).astype(np.int32)
    return Pieces(order, table, cuts, saved)
