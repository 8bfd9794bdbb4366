"""From a plan's works to calls of the backends: a segment is a part of the scores as a problem of its own.

It has the mask of the whole restricted to it, and origins, so that dropout and ALiBi are those of the whole. Works that one call
can compute together are one segment (`joins`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Grads, Inputs
from tilewise.distributed.context import ContextPlan, catalogued
from tilewise.distributed.coverage import on_host
from tilewise.distributed.joins import Block, Rounds, Seen, common, joined_blocks
from tilewise.distributed.order import own_order
from tilewise.distributed.pieces import Pieces
from tilewise.distributed.schedule import Chunk, Move, What
from tilewise.distributed.totals import Split
from tilewise.masks import Lowered, MaskProgram, MaskShape
from tilewise.masks.restrict import grouped, ordered, picked, restricted
from tilewise.ops import run
from tilewise.ops.tensors import tensor_fields
from tilewise.problem import Origin, Problem

SIDE_BY_SIDE = {"cuda": 1 << 28}
"""Pairs of all heads that a call has at most to be computed with others. On an H200 that is four waves of tiles; a CPU has no
waves to fill."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Local(NamedTuple):
    """This rank's tensors in the inside layout, (B, H, local tokens, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None  # (B or 1, H or 1, local tokens or 1, keys of a sequence or 1)
    alibi: Tensor | None = None  # (sequences or 1, H)
    sinks: Tensor | None = None  # (H,)
    seed: Tensor | None = None


class Segment(NamedTuple):
    """A block as a problem: `origins` where dropout or ALiBi want them."""

    block: Block
    problem: Problem
    origins: Tensor | None
    first: bool
    """No result of an earlier stage or segment has any of its queries."""


@dataclass(frozen=True, eq=False)
class Call:
    """What all calls of a plan with the same options share. `problem` is the whole one, with the options of the call."""

    plan: ContextPlan
    problem: Problem
    backend: str
    device: torch.device
    head: int = 0
    """The whole's number of the first query head here."""
    stages: list[list[Segment]] = field(default_factory=list, init=False)
    memory: dict[Any, Any] = field(default_factory=dict, init=False)

    @property
    def rank(self) -> int:
        return self.plan.rank

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Of this rank."""
        return self.plan.chunks[self.rank]

    @property
    def real(self) -> torch.dtype:
        """In which partial results are merged and gradients summed."""
        return DTYPES[self.problem.arithmetic]

    @property
    def dtype(self) -> torch.dtype:
        """In which segments are computed: in float64 where a precision asks for it."""
        return torch.float64 if self.problem.widened else getattr(torch, self.problem.dtype)

    @property
    def summed(self) -> torch.dtype:
        """In which partial results and gradients travel."""
        return self.real if self.problem.widened else getattr(torch, self.problem.dtype)

    def moves(self, stage: int, what: What, home: bool) -> tuple[list[Move], list[Move]]:
        """What this rank sends and receives of a kind in a stage, each by the other rank; `home`: the same the other way."""
        key = ("moves", stage, what, home)
        found: tuple[list[Move], list[Move]] | None = self.memory.get(key)
        if found is None:
            plan = self.plan.stages[stage]
            moves = sorted(m for m in (*plan.moves, *plan.returns) if m.what == what)
            leaving = [m for m in moves if sender(m, home) == self.rank]
            found = self.memory[key] = leaving, [m for m in moves if sender(m, not home) == self.rank]
        return found

    def has(self, stage: int, what: What) -> bool:
        """Does any rank move anything of the kind in the stage?"""
        key = ("has", stage, what)
        if key not in self.memory:
            plan = self.plan.stages[stage]
            self.memory[key] = any(m.what == what for m in (*plan.moves, *plan.returns))
        return bool(self.memory[key])

    def segments(self, local: Local, stage: int) -> list[Segment]:
        """The works of a stage, prepared at the first call."""
        if not self.stages:
            self.stages.extend(self._prepared(local))
        return self.stages[stage]

    def split(self, local: Local, what: What, stage: int | None = None) -> Split:
        """How many calls, and results that return, have each of this rank's own queries ("q") or keys ("kv"), or with a stage
        of those that it receives there."""
        key = ("split", what, stage)
        found: Split | None = self.memory.get(key)
        if found is None:
            stages = range(len(self.plan.stages))
            blocks = (s.block for number in stages if stage in (None, number) for s in self.segments(local, number))
            calls = [chunk for block in blocks for chunk in (block.q if what == "q" else block.k)]
            if stage is None:
                back: tuple[What, bool] = ("out", False) if what == "q" else ("kv", True)
                calls += [move.chunk for number in stages for move in self.moves(number, *back)[1]]
                found = Split.of(self.chunks, calls)
            else:
                found = Split.of(sorted(move.chunk for move in self.moves(stage, what, home=False)[1]), calls)
            self.memory[key] = found
        return found

    def beside(self, local: Local) -> list[Chunk]:
        """Own queries that travel, or are computed with such: of these delta is wanted."""
        if "beside" not in self.memory:
            stages = range(len(self.plan.stages))
            found = [move.chunk for number in stages for move in self.moves(number, "q", home=False)[0]]
            found += [q for number in stages for s in self.segments(local, number) if s.block.travels for q in s.block.q]
            self.memory["beside"] = [chunk for own in self.chunks for chunk in common(own, found)]
        chunks: list[Chunk] = self.memory["beside"]
        return chunks

    def _prepared(self, local: Local) -> Iterator[list[Segment]]:
        problem, plan = self.problem, self.plan
        programs = on_device(problem.program, self.device), on_host(problem.program)
        works = [stage.works_of(self.rank) for stage in plan.stages]
        apart = bool(problem.alibi or problem.dropout_p or local.bias is not None)  # positions count

        def is_full(block: Block) -> bool:
            (q, *more), (k, *others) = block.q, block.k
            if more or others:
                return True  # made of such
            return block.area == self.entries * q.tokens * k.tokens and not self._mask(programs, local, q, k).structure

        mask = None if apart or len(self.chunks) < 2 else self._picked(programs[0])
        own = None if mask is None else Block(self.chunks, self.chunks, sum(work.area for work in works[0]), travels=False)
        small = SIDE_BY_SIDE.get(problem.device, 0) // (self.entries * local.q.shape[1])
        seen_pairs = Seen(plan.coverage, plan.shards)
        spec = catalogued(problem, plan.device)
        rounds = Rounds(seen_pairs, spec.units, self.entries * local.q.shape[1]) if spec.is_gpu else None
        blocks = joined_blocks(works, seen_pairs, None if apart else is_full, own, small, rounds)
        seen: list[Chunk] = []
        for stage, here in zip(plan.stages, blocks, strict=True):
            segments = []
            for block in here:
                first = not any(_overlap(q, chunk) for q in block.q for chunk in seen)
                whole = mask is not None and here is blocks[0]
                segments.append(self._segment(block, mask if whole else None, programs, local, first))
                seen += block.q
            seen += [move.chunk for move in stage.returns if move.target == self.rank]
            yield segments

    def _picked(self, program: MaskProgram) -> MaskProgram | None:
        """The mask of this rank's own tokens, as if they were a whole; None where positions count, and these have gaps."""
        problem = self.problem
        tokens = torch.from_numpy(self.plan.token_numbers()).to(self.device)
        numbers = [chunk.sequence for chunk in self.chunks for _ in range(chunk.tokens)]
        sequences = torch.tensor(numbers, dtype=torch.int32, device=self.device) if len({*numbers}) > 1 else None
        shape = MaskShape(self.entries, problem.heads, problem.seqlen_q, problem.seqlen_k)
        found = picked(program, shape, tokens, sequences)
        return self._ordered() if found is None else found

    def _ordered(self) -> MaskProgram | None:
        """The mask of this rank's own tokens where a window has gaps, but order says what they see."""
        found = own_order(self.problem.program, self.plan.coverage, self.plan.token_numbers())
        if found is None:
            return None
        ids = torch.from_numpy(found.group).to(self.device, torch.int32) if found.group.any() else None
        return ordered(ids, found.causal)

    @property
    def entries(self) -> int:
        """Of the batch of each segment."""
        return self.problem.batch if self.plan.lengths is None else 1

    def _mask(self, programs: tuple[MaskProgram, MaskProgram], local: Local, q: Chunk, k: Chunk) -> MaskProgram:
        """The mask of a rectangle: what is known without tensors, or with those on the device."""
        problem, lengths = self.problem, self.plan.lengths
        length = problem.seqlen_q if lengths is None else lengths[q.sequence]
        if lengths is not None:
            start = sum(lengths[: q.sequence])
            ends = (start, start + length)
            programs = tuple(program.for_sequence(q.sequence, *ends, *ends) for program in programs)  # type: ignore[assignment]
        heads = (self.head, self.head + local.q.shape[1])
        part = MaskShape(self.entries, problem.heads, length, length), (q.start, q.end), (k.start, k.end), heads
        known = restricted(programs[1], *part, reads=True)
        return restricted(programs[0], *part) if known.tensors else known

    def _segment(
        self, block: Block, mask: MaskProgram | None, programs: tuple[MaskProgram, MaskProgram], local: Local, first: bool
    ) -> Segment:
        """A block as a problem, with a mask that is known or that of its rectangle. In several chunks all is seen."""
        (q, *more), (k, *others) = block.q, block.k
        if block.groups:
            mask = grouped(*(self._numbers(side) for side in zip(*block.groups, strict=True)))
        elif mask is None and (more or others):
            mask = MaskProgram()
        if mask is None:
            mask = self._mask(programs, local, q, k)
        problem, origins = self.problem, None
        if problem.alibi or problem.dropout_p:
            numbers = range(self.entries) if self.plan.lengths is None else (q.sequence,)
            rows = [Origin(q.start, k.start, self.head, b) for b in numbers]
            origins = torch.tensor(rows, dtype=torch.int32, device=self.device)
        return Segment(block, self._part(local, mask, block, origins), origins, first)

    def _numbers(self, sizes: tuple[int, ...]) -> Tensor:
        """0 for the tokens of the first group, and so on."""
        return torch.repeat_interleave(torch.tensor(sizes)).to(self.device, torch.int32)

    def _part(self, local: Local, mask: MaskProgram, block: Block, origins: Tensor | None) -> Problem:
        """The problem of a part of the scores."""
        problem = self.problem
        return replace(
            problem,
            batch=self.entries,
            heads=local.q.shape[1],
            kv_heads=local.k.shape[1],
            seqlen_q=block.sizes[0],
            seqlen_k=block.sizes[1],
            dtype=str(self.dtype).removeprefix("torch."),
            mask=Lowered(mask),
            precision="default" if problem.widened else problem.precision,
            sinks=False,
            varlen=False,
            origins=origins is not None,
            covered=bool(block.groups),
            needs_lse=True,
            device=self.device.type,
        )

    def inputs(self, segment: Segment, local: Local, tokens: tuple[Tensor, Tensor, Tensor]) -> tuple[Problem, Inputs]:
        """The call of a segment, given its q, k and v."""
        q, k, v = (x.to(self.dtype) for x in tokens)
        bias, alibi, block = None, local.alibi, segment.block
        if local.bias is not None:
            bias = bias_part(self, local.bias, block)
        if alibi is not None and self.plan.lengths is not None and alibi.shape[0] > 1:
            alibi = alibi[block.q[0].sequence][None]
        inputs = Inputs(q, k, v, bias, alibi, None, local.seed, origins=segment.origins)
        problem = segment.problem
        if bias is not None and problem.bias != tuple(bias.shape):
            problem = self._with_bias(segment, inputs)
        return problem, inputs

    def _with_bias(self, segment: Segment, inputs: Inputs) -> Problem:
        known = segment.problem.memory
        shape = tensor_fields(inputs)["bias"]
        if ("bias", shape) not in known:
            known["bias", shape] = replace(segment.problem, bias=shape)
        problem: Problem = known["bias", shape]
        return problem

    def forward(self, segment: Segment, local: Local, tokens: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """out and lse of a segment, without sinks."""
        return run.forward(*self.inputs(segment, local, tokens), self.backend)

    def backward(
        self, segment: Segment, local: Local, tokens: tuple[Tensor, Tensor, Tensor], given: BackwardInputs
    ) -> Grads:
        """The gradients of a segment from the log-sum-exp of whole rows."""
        problem, inputs = self.inputs(segment, local, tokens)
        needs = given.needs._replace(dbias=given.needs.dbias and inputs.bias is not None, dsinks=False)
        return run.backward(problem, inputs, given._replace(needs=needs), self.backend)


def bias_part(call: Call, bias: Tensor, block: Block) -> Tensor:
    """The part of a bias, or of its gradient, that belongs to a block, which is one rectangle: a view."""
    if bias.shape[2] > 1:
        bias = Pieces.of(call.chunks, bias).take(block.q)
    (k,) = block.k
    return bias[..., k.start : k.end] if bias.shape[3] > 1 else bias


def sender(move: Move, home: bool) -> int:
    """Who sends the tensors of a move, or, on the way home, their gradients."""
    return move.target if home else move.source


def on_device(program: MaskProgram, device: torch.device) -> MaskProgram:
    """The program with its tensors there; what is one tensor stays one, so that documents are known to see themselves."""
    tensors = {id(t): torch.as_tensor(t, device=device) for t in program.tensors}
    return MaskProgram(program.structure, program.ints, tuple(tensors[id(t)] for t in program.tensors))


def _overlap(a: Chunk, b: Chunk) -> bool:
    return a.sequence == b.sequence and a.start < b.end and b.start < a.end
