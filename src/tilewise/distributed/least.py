"""How few bytes a plan could send with the shards that it has: two lower bounds to compare it with."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.distributed.coverage import Coverage
from tilewise.distributed.routes import Routes, routes
from tilewise.distributed.rows import least_of_rows
from tilewise.distributed.schedule import RowBytes


class LeastBytes(NamedTuple):
    """Bytes of the forward and the backward pass together, of all ranks.

    sent: what the plan sends.
    rows: each row of keys that a rank's queries see and that it does not hold, once, by the cheaper route of the interval that it
        lies in: at the price of a key and value with their gradients, or, where moving the queries that see the interval is
        cheaper than moving its keys, at that of a query with its results and gradients.
    cut: the least with which of each visible pair of tokens on two ranks the query or the key travels, a minimum cut between
        each two ranks. What computes so may be as uneven as it will. Of a mask with very many parts, the least that is found.
    """

    sent: int
    rows: int
    cut: int

    @property
    def of_rows(self) -> float:
        """Times the first bound that the plan sends; 1 where nothing must be."""
        return self.sent / self.rows if self.rows else 1.0

    @property
    def of_cut(self) -> float:
        """Times the second."""
        return self.sent / self.cut if self.cut else 1.0


def least_bytes(found: Routes, row: RowBytes, seen: Coverage) -> LeastBytes:
    """What routes send, beside both bounds for their shards."""
    shards = found.shards
    sent = total(found, row)
    return LeastBytes(sent, of_rows(found, row, seen), min(sent, total(routes(shards, seen, row), row)))


def of_rows(found: Routes, row: RowBytes, seen: Coverage) -> int:
    """The first bound."""
    return least_of_rows(routes(found.shards, seen, row, keys_only=True), row, seen)


def total(found: Routes, row: RowBytes) -> int:
    """Bytes of both passes, of all ranks."""
    return sum(int(found.sent(row, backward=backward).sum()) for backward in (False, True))
