"""The stages of a plan, run: tensors of the next stage travel while the kernels of this one compute.

Results are merged, and gradients summed, in the order of the plan, so every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Grads, Needs, empty_out, rounded, sink_gradient
from tilewise.distributed.exchange import Link, Pending
from tilewise.distributed.pieces import TOKENS, Pieces
from tilewise.distributed.schedule import Chunk, Move, What
from tilewise.distributed.segments import Call, Local, Segment, bias_part, sender
from tilewise.distributed.totals import Merged, Totals, row_products
from tilewise.numerics.merge import join_sink


class Parcel(NamedTuple):
    """What travels with each token of a move: tensors (B, H, tokens, …) of one dtype, by their shapes without tokens."""

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, dtype: torch.dtype, *tensors: Tensor) -> Parcel:
        return cls(dtype, tuple((*x.shape[:TOKENS], 0, *x.shape[TOKENS + 1 :]) for x in tensors))

    def sized(self, chunk: Chunk) -> list[tuple[int, ...]]:
        return [(*shape[:TOKENS], chunk.tokens, *shape[TOKENS + 1 :]) for shape in self.shapes]


class Arrival(NamedTuple):
    """An exchange of moves under way."""

    pending: Pending
    moves: list[Move]
    tensors: int  # of a parcel
    home: bool

    def wait(self) -> list[Pieces]:
        """For each tensor of a parcel, the tokens of all moves."""
        received: dict[int, Iterator[Tensor]] = {peer: iter(x) for peer, x in self.pending.wait().items()}
        rows = [[next(received[sender(move, self.home)]) for _ in range(self.tensors)] for move in self.moves]
        chunks = [move.chunk for move in self.moves]
        return [Pieces.apart(chunks, column) for column in zip(*rows, strict=True)] or [Pieces()] * self.tensors


class Run:
    """One pass of a call over the ranks."""

    def __init__(self, call: Call, link: Link, local: Local) -> None:
        self.call, self.link, self.local = call, link, local
        self.stages = call.plan.stages
        self.own = [Pieces.of(call.chunks, x) for x in local[:3]]

    def exchange(self, stage: int, what: What, parcel: Parcel, tensors: Sequence[Pieces], home: bool = False) -> Arrival:
        """Start the moves of a kind; `home`: the same the other way, with gradients of what they brought."""
        leaving, coming = self.call.moves(stage, what, home)
        outgoing: dict[int, list[Tensor]] = {}
        for move in leaving:
            message = outgoing.setdefault(sender(move, not home), [])
            message.extend(x.take((move.chunk,)).to(parcel.dtype) for x in tensors)
        incoming: dict[int, list[tuple[int, ...]]] = {}
        for move in coming:
            incoming.setdefault(sender(move, home), []).extend(parcel.sized(move.chunk))
        label = f"stage {stage} of {len(self.stages) - 1}, {'gradients of ' * home}{NAMES[what]}"
        pending = self.link.start(label, outgoing, incoming, parcel.dtype, self.call.device)
        return Arrival(pending, coming, len(parcel.shapes), home)

    def has(self, stage: int, what: What) -> bool:
        """Does any rank move anything of the kind in the stage?"""
        return self.call.has(stage, what)

    def segments(self, stage: int) -> list[Segment]:
        return self.call.segments(self.local, stage)

    def totals(self, what: What, like: Tensor, stage: int | None = None, summed: bool = False) -> Totals:
        """Room for what calls give for this rank's queries or keys, or those that it receives in a stage; `like` has the heads,
        columns and order of strides."""
        split = self.call.split(self.local, what, stage)
        dtype = self.call.summed if like.ndim > TOKENS + 1 else self.call.real
        return Totals(split.summed() if summed else split, like, dtype, self.call.real)


NAMES = {"kv": "k and v", "q": "q", "out": "results of q"}


class Forward(Run):
    """out and lse of this rank's queries, in the dtype of the arithmetic."""

    def compute(self) -> tuple[Tensor, Tensor]:
        local, call = self.local, self.call
        own = self._merged(None)
        ahead = list(self._arrivals(0))
        returning: list[tuple[Arrival, Arrival]] = []
        for stage in range(len(self.stages)):
            here = [arrival.wait() for arrival in ahead]
            ahead = list(self._arrivals(stage + 1))  # travels while the segments below compute
            results = self._merged(stage)
            for segment in self.segments(stage):
                part = call.forward(segment, local, self.tokens(segment, here))
                own.add(segment.block.q, *part, first=segment.first)
                if segment.block.travels:
                    results.add(segment.block.q, *part, first=segment.first)
            for arrivals in returning:
                self._take_in(own, arrivals)
            returning = [self._return(stage, results)] if self.has(stage, "out") else []
        for arrivals in returning:
            self._take_in(own, arrivals)
        out, lse = own.out.total(), own.lse.total()
        return (out, lse) if local.sinks is None else join_sink(out, lse, local.sinks)

    def _merged(self, stage: int | None) -> Merged:
        """Room for the results of own queries, or of those that came in a stage. A sink joins what is not rounded yet."""
        q, v, sinks = self.local.q, self.local.v, self.local.sinks
        like = empty_out(q[:, :, :1], v.shape[3]), q.new_empty((*q.shape[:TOKENS], 1))
        return Merged(*(self.totals("q", x, stage, summed=sinks is not None and stage is None) for x in like))

    def _arrivals(self, stage: int) -> Iterator[Arrival]:
        """k and v, then q, of a stage."""
        if stage >= len(self.stages):
            return
        q, k, v = self.local[:3]
        yield self.exchange(stage, "kv", Parcel.of(k.dtype, k, v), self.own[1:])
        yield self.exchange(stage, "q", Parcel.of(q.dtype, q), self.own[:1])

    def tokens(self, segment: Segment, here: list[list[Pieces]]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a segment, own or received."""
        (k, v), queries, block = here[0], here[1][0], segment.block
        q = (self.own[0] | queries).take(block.q)
        return q, (self.own[1] | k).take(block.k), (self.own[2] | v).take(block.k)

    def _return(self, stage: int, results: Merged) -> tuple[Arrival, Arrival]:
        out, lse = results.out.pieces(), results.lse.pieces()
        return (
            self.exchange(stage, "out", Parcel.of(self.call.summed, results.out.whole), [out]),
            self.exchange(stage, "out", Parcel.of(self.call.real, results.lse.whole), [lse]),
        )

    def _take_in(self, own: Merged, arrivals: tuple[Arrival, Arrival]) -> None:
        (out,), (lse,) = (arrival.wait() for arrival in arrivals)
        for part, part_lse in zip(out.held, lse.held, strict=True):
            own.add((part.chunk,), part.view, part_lse.view, first=False)


class Cotangents(NamedTuple):
    """What comes back to this rank's results, with what the forward left."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    needs: Needs


class Backward(Forward):
    """The gradients of this rank's tensors, each in its dtype; the sums are in the dtype of the arithmetic."""

    def __init__(self, call: Call, link: Link, local: Local, given: Cotangents) -> None:
        super().__init__(call, link, local)
        self.given = given
        self.grads = self._room(None)
        self.rows = [None if x is None else Pieces.of(call.chunks, x) for x in (given.out, given.lse, given.dout, given.dlse)]
        beside = call.beside(local)
        self.delta = Pieces.apart(beside, [self._delta((chunk,)) for chunk in beside])
        wanted = given.needs.dbias and local.bias is not None
        self.dbias = torch.zeros_like(local.bias, dtype=call.real) if wanted and local.bias is not None else None

    def gradients(self) -> Grads:
        local, given = self.local, self.given
        ahead = list(self._arrivals(0))
        returning: list[Arrival] = []
        for stage in range(len(self.stages)):
            here = [arrival.wait() for arrival in ahead]
            ahead = list(self._arrivals(stage + 1))
            received = self._room(stage)
            for segment in self.segments(stage):
                self._segment(segment, here, received)
            for arrival in returning:
                self._sum(arrival)
            returning = list(self._send_home(stage, received))
        for arrival in returning:
            self._sum(arrival)
        dsinks = None
        if given.needs.dsinks and local.sinks is not None:
            dsinks = sink_gradient(local.sinks, given.lse, self._delta(self.call.chunks))
        wanted = zip(self.grads, local[:3], given.needs[:3], strict=True)
        dq, dk, dv = (rounded(grad.total(), x.dtype) if want else None for grad, x, want in wanted)
        dbias = None if self.dbias is None or local.bias is None else rounded(self.dbias, local.bias.dtype)
        return Grads(dq, dk, dv, dbias, dsinks)

    def _delta(self, chunks: Sequence[Chunk]) -> Tensor:
        """rowsum(dO ∘ O) - dLSE of some of this rank's queries."""
        out, lse, dout, dlse = (None if x is None else x.take(chunks) for x in self.rows)
        assert out is not None and lse is not None and dout is not None
        delta = row_products(dout, out, lse.dtype)
        return delta if dlse is None else delta - dlse

    def _arrivals(self, stage: int) -> Iterator[Arrival]:
        """As in the forward; with q come dout, and lse and delta."""
        if stage >= len(self.stages):
            return
        q, k, v = self.local[:3]
        yield self.exchange(stage, "kv", Parcel.of(k.dtype, k, v), self.own[1:])
        _, lse, dout, _ = self.rows
        assert lse is not None and dout is not None
        parcel = Parcel.of(q.dtype, q, self.given.dout)
        yield self.exchange(stage, "q", parcel, [self.own[0], dout])
        if self.has(stage, "q"):
            parcel = Parcel.of(self.call.real, self.given.lse, self.given.lse)
            yield self.exchange(stage, "q", parcel, [lse, self.delta])

    def _room(self, stage: int | None) -> list[Totals]:
        """For the gradients of q, k and v: own ones, or those that came in a stage."""
        kinds: tuple[What, ...] = ("q", "kv", "kv")
        return [self.totals(what, x, stage) for what, x in zip(kinds, self.local[:3], strict=True)]

    def _segment(self, segment: Segment, here: list[list[Pieces]], received: list[Totals]) -> None:
        block = segment.block
        tokens = self.tokens(segment, here)
        grads = self.call.backward(segment, self.local, tokens, self._cotangents(segment, here))
        for home, far, chunks, grad in zip(self.grads, received, (block.q, block.k, block.k), grads[:3], strict=True):
            assert grad is not None
            home.add(chunks, grad)
            far.add(chunks, grad)
        if self.dbias is not None and grads.dbias is not None:
            bias_part(self.call, self.dbias, block).add_(grads.dbias)

    def _cotangents(self, segment: Segment, here: list[list[Pieces]]) -> BackwardInputs:
        """Of own queries, what the forward left; with those of others, delta in the place of an output."""
        block, needs = segment.block, Needs(dbias=self.dbias is not None)
        out, lse, dout, dlse = self.rows
        assert out is not None and lse is not None and dout is not None
        if block.travels:
            (_, far_dout), (far_lse, far_delta) = here[1:]
            given = (dout | far_dout).take(block.q).to(self.call.dtype)
            rows = (lse | far_lse).take(block.q), given, -(self.delta | far_delta).take(block.q)
            return BackwardInputs(torch.zeros_like(given), *rows, needs)
        known = None if dlse is None else dlse.take(block.q)
        kept, given = (x.take(block.q).to(self.call.dtype) for x in (out, dout))
        return BackwardInputs(kept, lse.take(block.q), given, known, needs)

    def _send_home(self, stage: int, received: list[Totals]) -> Iterator[Arrival]:
        q, k, v = self.local[:3]
        dq, dk, dv = (grad.pieces() for grad in received)
        yield self.exchange(stage, "kv", Parcel.of(self.call.summed, k, v), [dk, dv], home=True)
        if self.has(stage, "out"):
            yield self.exchange(stage, "out", Parcel.of(self.call.summed, q), [dq])

    def _sum(self, arrival: Arrival) -> None:
        """Add what came home; from each rank in turn."""
        homes = self.grads[1:] if arrival.home else self.grads[:1]
        for home, pieces in zip(homes, arrival.wait(), strict=True):
            for grad in pieces.held:
                home.add((grad.chunk,), grad.view)
