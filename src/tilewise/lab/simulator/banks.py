"""Bank conflicts of a shared-memory layout.

Shared memory has 32 banks of 4 bytes. A warp's access is served in one go if no two threads want different words of the
same bank; otherwise it takes as many goes as the busiest bank has words. Threads wanting the same word share it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tilewise.errors import PlanError

BANKS, WORD = 32, 4
ACCESSES = ("row", "column", "matrix")


@dataclass(frozen=True)
class Layout:
    """Where element (row, byte) of a tile lies. `pad` bytes lengthen each row; a `swizzle` permutes a row's chunks.

    The swizzle XORs the number of a `chunk`-byte piece with the row's number modulo `period`: every row keeps its pieces,
    each row in another order.
    """

    name: str
    pad: int = 0
    chunk: int = 0
    period: int = 1

    def address(self, row: int, byte: int, row_bytes: int) -> int:
        if self.chunk:
            piece, rest = divmod(byte, self.chunk)
            byte = (piece ^ (row % self.period)) * self.chunk + rest
        return row * (row_bytes + self.pad) + byte


def layouts(access: str, row_bytes: int) -> dict[str, Layout]:
    """Plain, padded and swizzled, each fit for the access: scalars move words, matrix loads move 16-byte rows."""
    unit = 16 if access == "matrix" else WORD
    period = max(1, min(8 if access == "matrix" else BANKS, 1 << max(0, (row_bytes // unit).bit_length() - 1)))
    return {
        "plain": Layout("plain"),
        "padded": Layout("padded", pad=unit),
        "swizzled": Layout("swizzled", chunk=unit, period=period),
    }


@dataclass(frozen=True)
class Conflicts:
    """Of reading a whole tile: what it takes, what it would take without conflicts."""

    layout: str
    access: str
    transactions: int
    ideal: int
    degree: int
    """Goes of the worst single access."""

    @property
    def conflicts(self) -> int:
        return self.transactions - self.ideal


def transactions(addresses: list[int]) -> int:
    """Goes one access takes: the most distinct words any bank must give."""
    words: dict[int, set[int]] = defaultdict(set)
    for address in addresses:
        word = address // WORD
        words[word % BANKS].add(word)
    return max((len(wanted) for wanted in words.values()), default=0)


def tile_conflicts(rows: int, cols: int, itemsize: int, access: str, layout: Layout) -> Conflicts:
    """Reading a `rows` × `cols` tile once.

    `row`: 32 threads take consecutive words of a row. `column`: thread t takes a word of row t, as in a transposed read.
    `matrix`: groups of 8 threads take 16 bytes each of 8 consecutive rows, as the tensor cores' operand loads do.
    """
    if access not in ACCESSES:
        raise PlanError(f"access: got {access!r}, need one of {', '.join(ACCESSES)}")
    row_bytes = cols * itemsize
    if row_bytes % (16 if access == "matrix" else WORD):
        raise PlanError(f"cols: {cols} of {itemsize} bytes are no whole number of {access} accesses")
    total = ideal = degree = 0
    for group in accesses(rows, row_bytes, access):
        addresses = [layout.address(row, byte, row_bytes) for row, byte in group]
        goes = transactions(addresses)
        total, degree = total + goes, max(degree, goes)
        ideal += -(-len({address // WORD for address in addresses}) // BANKS)
    return Conflicts(layout.name, access, total, ideal, degree)


def accesses(rows: int, row_bytes: int, access: str) -> list[list[tuple[int, int]]]:
    """For each access of a warp, the (row, byte) of every word it takes."""
    words = range(0, row_bytes, WORD)
    if access == "row":
        flat = [(row, byte) for row in range(rows) for byte in words]
        return [flat[i : i + 32] for i in range(0, len(flat), 32)]
    if access == "column":
        return [[(row, byte) for row in range(r, min(r + 32, rows))] for byte in words for r in range(0, rows, 32)]
    return [
        [(row, byte + word) for row in range(r, min(r + 8, rows)) for word in range(0, 16, WORD)]
        for byte in range(0, row_bytes, 16)
        for r in range(0, rows, 8)
    ]
