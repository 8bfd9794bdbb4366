"""From a plan's works to calls of the backends: a segment is a rectangle of the scores as a problem of its own.

It has the mask of the whole restricted to it, and origins, so that dropout and ALiBi are those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Grads, Inputs
from tilewise.distributed.context import ContextPlan
from tilewise.distributed.pieces import Pieces
from tilewise.distributed.schedule import Chunk, Move, What, Work
from tilewise.masks import Lowered, MaskProgram, MaskShape
from tilewise.masks.restrict import picked, restricted
from tilewise.ops import run
from tilewise.ops.tensors import tensor_fields
from tilewise.problem import Origin, Problem

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
    """A work as a problem: `origins` where dropout or ALiBi want them.

    work: None for all works of the rank's own tokens at once, which are its whole tensors.
    """

    work: Work | None
    problem: Problem
    origins: Tensor | None
    first: bool
    """No result of an earlier stage or work has any of its queries."""


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

    def _prepared(self, local: Local) -> Iterator[list[Segment]]:
        program = on_device(self.problem.program, self.device)
        seen: list[Chunk] = []
        for number, stage in enumerate(self.plan.stages):
            works = stage.works_of(self.rank)
            whole = self._whole(program, local) if not number and len(works) > 1 else None
            if whole is not None:
                seen += self.chunks
                yield [whole]
                continue
            segments = []
            for work in works:
                first = not any(_overlap(work.q, chunk) for chunk in seen)
                segments.append(self._segment(work, program, local, first))
                seen.append(work.q)
            seen += [move.chunk for move in stage.returns if move.target == self.rank]
            yield segments

    def _whole(self, program: MaskProgram, local: Local) -> Segment | None:
        """This rank's own tokens as one problem; None where positions count, and these have gaps."""
        problem, lengths = self.problem, self.plan.lengths
        if problem.alibi or problem.dropout_p or local.bias is not None:
            return None
        tokens = torch.from_numpy(self.plan.token_numbers()).to(self.device)
        numbers = [chunk.sequence for chunk in self.chunks for _ in range(chunk.tokens)]
        sequences = torch.tensor(numbers, dtype=torch.int32, device=self.device) if len({*numbers}) > 1 else None
        batch = problem.batch if lengths is None else 1
        mask = picked(program, MaskShape(batch, problem.heads, problem.seqlen_q, problem.seqlen_k), tokens, sequences)
        if mask is None:
            return None
        return Segment(None, self._part(local, batch, mask, (len(tokens), len(tokens)), None), None, first=True)

    def _segment(self, work: Work, program: MaskProgram, local: Local, first: bool) -> Segment:
        q, k = work.q, work.k
        problem, lengths = self.problem, self.plan.lengths
        length = problem.seqlen_q if lengths is None else lengths[q.sequence]
        if lengths is not None:
            start = sum(lengths[: q.sequence])
            program = program.for_sequence(q.sequence, start, start + length, start, start + length)
        batch = problem.batch if lengths is None else 1
        heads = (self.head, self.head + local.q.shape[1])
        shape = MaskShape(batch, problem.heads, length, length)
        part = restricted(program, shape, (q.start, q.end), (k.start, k.end), heads)
        origins = None
        if problem.alibi or problem.dropout_p:
            numbers = range(batch) if lengths is None else (q.sequence,)
            rows = [Origin(q.start, k.start, self.head, b) for b in numbers]
            origins = torch.tensor(rows, dtype=torch.int32, device=self.device)
        return Segment(work, self._part(local, batch, part, (q.tokens, k.tokens), origins), origins, first)

    def _part(
        self, local: Local, batch: int, mask: MaskProgram, lengths: tuple[int, int], origins: Tensor | None
    ) -> Problem:
        """The problem of a part of the scores."""
        problem = self.problem
        return replace(
            problem,
            batch=batch,
            heads=local.q.shape[1],
            kv_heads=local.k.shape[1],
            seqlen_q=lengths[0],
            seqlen_k=lengths[1],
            dtype=str(self.dtype).removeprefix("torch."),
            mask=Lowered(mask),
            precision="default" if problem.widened else problem.precision,
            sinks=False,
            varlen=False,
            origins=origins is not None,
            needs_lse=True,
            device=self.device.type,
        )

    def inputs(self, segment: Segment, local: Local, tokens: tuple[Tensor, Tensor, Tensor]) -> tuple[Problem, Inputs]:
        """The call of a segment, given its q, k and v."""
        q, k, v = (x.to(self.dtype) for x in tokens)
        bias, alibi, work = None, local.alibi, segment.work
        if local.bias is not None and work is not None:
            bias = bias_part(self, local.bias, work)
        if alibi is not None and work is not None and self.plan.lengths is not None and alibi.shape[0] > 1:
            alibi = alibi[work.q.sequence][None]
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


def bias_part(call: Call, bias: Tensor, work: Work) -> Tensor:
    """The part of a bias, or of its gradient, that belongs to a work: a view."""
    if bias.shape[2] > 1:
        bias = Pieces.of(call.chunks, bias).take(work.q)
    return bias[..., work.k.start : work.k.end] if bias.shape[3] > 1 else bias


def sender(move: Move, home: bool) -> int:
    """Who sends the tensors of a move, or, on the way home, their gradients."""
    return move.target if home else move.source


def on_device(program: MaskProgram, device: torch.device) -> MaskProgram:
    tensors = tuple(torch.as_tensor(t, device=device) for t in program.tensors)
    return MaskProgram(program.structure, program.ints, tensors)


def _overlap(a: Chunk, b: Chunk) -> bool:
    return a.sequence == b.sequence and a.start < b.end and b.start < a.end
