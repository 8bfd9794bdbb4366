"""What a plan of context parallelism consists of: who holds, sends and computes what. Values only; torch is not imported.

Every rank computes the same schedule on its host, from the problem alone, so ranks need not talk to agree.

A **stage** has moves, works and returns. Its works need the rank's own tokens and what the moves of *that* stage bring; nothing
received in an earlier stage is used again, so it may be freed. A work is one of

    own queries × own keys              (q_rank == rank; only in the first stage, which has no moves)
    own queries × received keys         (q_rank == rank; its keys come by "kv" moves of this stage)
    received queries × own keys         (q_rank != rank; its queries come by "q" moves of this stage, (out, lse) go back)

Tokens received by a rank in a stage stand in its buffer ordered by (sequence, start), whoever sent them; the chunks of
works are contiguous there. So are chunks of own tokens in the rank's shard, which has the same order.

The backward pass runs the same stages. Nothing that was received in the forward is kept: "kv" moves are sent again and dK, dV
return the other way; "q" moves carry q, dout, lse and delta = Σ dout·out - dlse, and dQ returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tilewise.problem import ITEMSIZE, Problem

What = Literal["kv", "q", "out"]


class Chunk(NamedTuple):
    """Tokens [start, end) of one sequence, counted within it. In a batch (B, H, S, D) sequence 0 stands for all entries."""

    sequence: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


class Work(NamedTuple):
    """A rectangle of the score matrix that `rank` computes.

    q: queries, tokens of `q_rank`; k: keys, own or received in this stage.
    area: the (query, key) pairs in it that the mask lets through, of one head, all batch entries together.
    """

    rank: int
    q_rank: int
    q: Chunk
    k: Chunk
    area: int

    @property
    def travels(self) -> bool:
        """Do the queries travel instead of the keys?"""
        return self.rank != self.q_rank


class Move(NamedTuple):
    """Tokens that go from rank `source`, which holds them, to rank `target`: "kv" or "q".

    "out" is the result (out, lse) of queries that came by "q": `source` computed it, `target` holds the queries.
    """

    source: int
    target: int
    what: What
    chunk: Chunk


@dataclass(frozen=True)
class Stage:
    """Moves, the works that need them, and results that return afterwards; each sorted by rank, then (sequence, start)."""

    works: tuple[Work, ...] = ()
    moves: tuple[Move, ...] = ()
    returns: tuple[Move, ...] = ()

    def works_of(self, rank: int) -> list[Work]:
        return [work for work in self.works if work.rank == rank]

    def sent_by(self, rank: int, what: What) -> list[Move]:
        """Moves and returns of a kind that start at `rank`, sorted by (target, sequence, start)."""
        return sorted(m for m in (*self.moves, *self.returns) if m.source == rank and m.what == what)

    def received_by(self, rank: int, what: What) -> list[Move]:
        """Moves and returns of a kind that end at `rank`, in the order of its buffer: by (sequence, start, source)."""
        found = [m for m in (*self.moves, *self.returns) if m.target == rank and m.what == what]
        return sorted(found, key=lambda m: (m.chunk, m.source))


class RowBytes(NamedTuple):
    """Bytes of one token on the wire, all heads and batch entries together.

    Everything travels in the dtype of the problem but lse and delta, which have that of lse (float32, or float64), and, where a
    precision asks for float64, partial results and gradients, which are not rounded before they are summed.
    """

    kv: int
    """k and v; in the backward pass again."""
    q: int
    out: int
    """out and lse."""
    dout: int
    """dout, lse and delta, which go with q in the backward pass."""
    dkv: int
    """dk and dv on their way back."""
    dq: int

    @classmethod
    def of(cls, problem: Problem) -> RowBytes:
        size, entries = ITEMSIZE[problem.dtype], 1 if problem.varlen else problem.batch
        lse = ITEMSIZE[problem.arithmetic]
        summed = lse if problem.widened else size
        heads, dim_v = problem.heads * entries, problem.head_dim_v
        columns = problem.kv_heads * entries * (problem.head_dim + dim_v)
        return cls(
            kv=columns * size,
            q=heads * problem.head_dim * size,
            out=heads * (dim_v * summed + lse),
            dout=heads * (dim_v * size + 2 * lse),
            dkv=columns * summed,
            dq=heads * problem.head_dim * summed,
        )

    def sent(self, what: What, *, backward: bool = False) -> int:
        """Bytes that the source of a move sends for each token of its chunk."""
        if what == "kv":
            return self.kv
        if what == "q":
            return self.q + self.dout if backward else self.q
        return self.dq if backward else self.out  # dq returns in the place of out

    def returned(self, what: What, *, backward: bool = False) -> int:
        """Bytes that the target of a move sends back to its source: the gradients of what it received."""
        return self.dkv if backward and what == "kv" else 0

    def route(self, what: Literal["kv", "q"], *, gradients: bool = True) -> int:
        """Bytes of a token that travels by "kv" or "q", there and back, forward and (with `gradients`) backward."""
        passes = (False, True) if gradients else (False,)
        kinds: tuple[What, ...] = ("kv",) if what == "kv" else ("q", "out")
        return sum(self.sent(k, backward=b) + self.returned(k, backward=b) for k in kinds for b in passes)
