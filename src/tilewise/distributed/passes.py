"""The stages of a plan, run: tensors of the next stage travel while the kernels of this one compute.

Results are merged, and gradients summed, in the order of the plan, so every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Grads, Needs, rounded, sink_gradient
from tilewise.distributed.exchange import Link, Pending
from tilewise.distributed.pieces import TOKENS, Pieces
from tilewise.distributed.schedule import Chunk, Move, What
from tilewise.distributed.segments import Call, Local, Segment, bias_part, sender
from tilewise.numerics.merge import NEG_INF, join_sink, merge_into


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

    def zeros(self, like: Tensor, columns: int | None = None, fill: float = 0.0, tokens: int | None = None) -> Tensor:
        """A fresh accumulator with the heads and tokens of a tensor."""
        shape = (*like.shape[:2], like.shape[2] if tokens is None else tokens, *(() if columns is None else (columns,)))
        return torch.full(shape, fill, dtype=self.call.real, device=like.device)


NAMES = {"kv": "k and v", "q": "q", "out": "results of q"}


class Partials(NamedTuple):
    """Merged (out, lse) of queries."""

    out: Pieces
    lse: Pieces

    @classmethod
    def of(cls, chunks: Sequence[Chunk], out: Tensor, lse: Tensor) -> Partials:
        return cls(Pieces.of(chunks, out), Pieces.of(chunks, lse))

    def merge(self, chunks: Sequence[Chunk], out: Tensor, lse: Tensor, first: bool) -> None:
        """One more partial result; the first one is taken as it is."""
        for to_out, to_lse in zip(self.out.parts(chunks), self.lse.parts(chunks), strict=True):
            part = to_out.of(out), to_lse.of(lse)
            if first:
                to_out.view.copy_(part[0])
                to_lse.view.copy_(part[1])
            else:
                merge_into((to_out.view, to_lse.view), part)


class Forward(Run):
    """out and lse of this rank's queries, in the dtype of the arithmetic."""

    def compute(self) -> tuple[Tensor, Tensor]:
        local, call = self.local, self.call
        out = self.zeros(local.q, local.v.shape[3])
        lse = self.zeros(local.q, fill=NEG_INF)
        own = Partials.of(call.chunks, out, lse)
        ahead = list(self._arrivals(0))
        returning: list[tuple[Arrival, Arrival]] = []
        for stage in range(len(self.stages)):
            here = [arrival.wait() for arrival in ahead]
            ahead = list(self._arrivals(stage + 1))  # travels while the segments below compute
            results = self._results(here)
            every = Partials(own.out | results.out, own.lse | results.lse)
            for segment in self.segments(stage):
                part = call.forward(segment, local, self.tokens(segment, here))
                every.merge(segment.block.q, *part, first=segment.first)
            for arrivals in returning:
                self._take_in(own, arrivals)
            returning = [self._return(stage, results)] if self.has(stage, "out") else []
        for arrivals in returning:
            self._take_in(own, arrivals)
        if local.sinks is not None:
            out, lse = join_sink(out, lse, local.sinks)
        return out, lse

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

    def _results(self, here: list[list[Pieces]]) -> Partials:
        """Room for the results of queries that came."""
        chunks = [one.chunk for one in here[1][0].held]
        tokens = sum(chunk.tokens for chunk in chunks)
        out = self.zeros(self.local.q, self.local.v.shape[3], tokens=tokens)
        return Partials.of(chunks, out, self.zeros(self.local.q, fill=NEG_INF, tokens=tokens))

    def _return(self, stage: int, results: Partials) -> tuple[Arrival, Arrival]:
        shape = self.zeros(self.local.q, self.local.v.shape[3], tokens=0)
        return (
            self.exchange(stage, "out", Parcel.of(self.call.summed, shape), [results.out]),
            self.exchange(stage, "out", Parcel.of(self.call.real, shape[..., 0]), [results.lse]),
        )

    def _take_in(self, own: Partials, arrivals: tuple[Arrival, Arrival]) -> None:
        (out,), (lse,) = (arrival.wait() for arrival in arrivals)
        for part, part_lse in zip(out.held, lse.held, strict=True):
            own.merge((part.chunk,), part.view, part_lse.view, first=False)


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
        self.sums = [self.zeros(x, x.shape[3]) for x in local[:3]]
        self.grads = [Pieces.of(call.chunks, x) for x in self.sums]
        self.delta = self._delta()
        rows = (given.out, given.lse, given.dout, given.dlse, self.delta)
        self.rows = [None if x is None else Pieces.of(call.chunks, x) for x in rows]
        wanted = given.needs.dbias and local.bias is not None
        self.dbias = torch.zeros_like(local.bias, dtype=call.real) if wanted and local.bias is not None else None

    def gradients(self) -> Grads:
        local, given = self.local, self.given
        ahead = list(self._arrivals(0))
        returning: list[Arrival] = []
        for stage in range(len(self.stages)):
            here = [arrival.wait() for arrival in ahead]
            ahead = list(self._arrivals(stage + 1))
            received = [self._room(pieces) for pieces in (*here[0], here[1][0])]
            for segment in self.segments(stage):
                self._segment(segment, here, received)
            for arrival in returning:
                self._sum(arrival)
            returning = list(self._send_home(stage, received))
        for arrival in returning:
            self._sum(arrival)
        dsinks = None
        if given.needs.dsinks and local.sinks is not None:
            delta = self._delta(always=True)
            assert delta is not None
            dsinks = sink_gradient(local.sinks, given.lse, delta)
        wanted = zip(self.sums, local[:3], given.needs[:3], strict=True)
        dq, dk, dv = (rounded(total, x.dtype) if want else None for total, x, want in wanted)
        dbias = None if self.dbias is None or local.bias is None else rounded(self.dbias, local.bias.dtype)
        return Grads(dq, dk, dv, dbias, dsinks)

    def _delta(self, always: bool = False) -> Tensor | None:
        """rowsum(dO ∘ O) - dLSE of this rank's queries, where they travel or a sink wants it."""
        out, lse, dout, dlse, _ = self.given
        if not always and not any(self.has(stage, "q") for stage in range(len(self.stages))):
            return None
        delta = torch.where(out == 0, 0.0, dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
        return delta if dlse is None else delta - dlse

    def _arrivals(self, stage: int) -> Iterator[Arrival]:
        """As in the forward; with q come dout, and lse and delta."""
        if stage >= len(self.stages):
            return
        q, k, v = self.local[:3]
        yield self.exchange(stage, "kv", Parcel.of(k.dtype, k, v), self.own[1:])
        _, lse, dout, _, delta = self.rows
        none = Pieces()
        parcel = Parcel.of(q.dtype, q, self.given.dout)
        yield self.exchange(stage, "q", parcel, [self.own[0], dout or none])
        if self.has(stage, "q"):
            parcel = Parcel.of(self.call.real, self.given.lse, self.given.lse)
            yield self.exchange(stage, "q", parcel, [lse or none, delta or none])

    def _room(self, pieces: Pieces) -> Pieces:
        """Zeros for the gradients of what came."""
        shapes = [(one.chunk, one.view) for one in pieces.held]
        zeros = [torch.zeros(x.shape, dtype=self.call.real, device=x.device) for _, x in shapes]
        return Pieces.apart([chunk for chunk, _ in shapes], zeros)

    def _segment(self, segment: Segment, here: list[list[Pieces]], received: list[Pieces]) -> None:
        block, (dk, dv, dq) = segment.block, received
        tokens = self.tokens(segment, here)
        grads = self.call.backward(segment, self.local, tokens, self._cotangents(segment, here))
        for home, far, chunks, grad in zip(self.grads, (dq, dk, dv), (block.q, block.k, block.k), grads[:3], strict=True):
            assert grad is not None
            (home | far).add(chunks, grad)
        if self.dbias is not None and grads.dbias is not None:
            bias_part(self.call, self.dbias, block).add_(grads.dbias)

    def _cotangents(self, segment: Segment, here: list[list[Pieces]]) -> BackwardInputs:
        """Of own queries, what the forward left; with those of others, delta in the place of an output."""
        block, needs = segment.block, Needs(dbias=self.dbias is not None)
        out, lse, dout, dlse, delta = self.rows
        assert out is not None and lse is not None and dout is not None
        if block.travels:
            assert delta is not None
            (_, far_dout), (far_lse, far_delta) = here[1:]
            given = (dout | far_dout).take(block.q).to(self.call.dtype)
            rows = (lse | far_lse).take(block.q), given, -(delta | far_delta).take(block.q)
            return BackwardInputs(torch.zeros_like(given), *rows, needs)
        known = None if dlse is None else dlse.take(block.q)
        kept, given = (x.take(block.q).to(self.call.dtype) for x in (out, dout))
        return BackwardInputs(kept, lse.take(block.q), given, known, needs)

    def _send_home(self, stage: int, received: list[Pieces]) -> Iterator[Arrival]:
        q, k, v = self.local[:3]
        yield self.exchange(stage, "kv", Parcel.of(self.call.summed, k, v), received[:2], home=True)
        if self.has(stage, "out"):
            yield self.exchange(stage, "out", Parcel.of(self.call.summed, q), received[2:])

    def _sum(self, arrival: Arrival) -> None:
        """Add what came home; from each rank in turn."""
        homes = self.grads[1:] if arrival.home else self.grads[:1]
        for home, pieces in zip(homes, arrival.wait(), strict=True):
            for grad in pieces.held:
                home.add((grad.chunk,), grad.view)
