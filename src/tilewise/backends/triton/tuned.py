"""Tiles of the Triton kernels that measurement, or the compiler, preferred to the model: the one place for exceptions.

An entry applies where every condition matches. It names the device, the day, the figure and what it was measured against, so that
it can be measured again and struck out when the model or the kernel improves.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from tilewise.backends.gpu.lists import block_sizes, walks_lists
from tilewise.hardware.spec import DeviceSpec
from tilewise.model.gpu import power_of_two, size_of
from tilewise.problem import DECODE_ROWS, Problem


@dataclass(frozen=True)
class Tuned:
    """An exception for one architecture, pass, head dim and dtype size."""

    arch: str
    pass_: str
    head_dim: int
    itemsize: int
    block_q: int
    block_k: int
    num_stages: int
    """As Triton counts them."""
    warps: int
    device: str
    date: str
    figure: str
    """The number, with its unit, and the number of the tile it was measured against."""
    evidence: str
    """How to measure it again."""
    masked: bool | None = None
    """True only with a mask, False only without one, None for both."""
    packed: bool | None = None
    """True only for packed sequences, False only without them, None for both."""
    features: tuple[str, ...] = ()
    """Only with one of these: bias, alibi, softcap, dropout, several (of them), documents, tables (alone). () for all."""
    fills: bool = False
    """Only where there are as many tiles as multiprocessors, since smaller ones are faster in smaller grids, and without features
    and lists, with which it was not timed."""
    spills: int = 0
    """Accesses to local memory in its loops, by the compiler: it was the fastest tile all the same."""

    def applies(self, problem: Problem, spec: DeviceSpec, pass_: str) -> bool:
        return (
            self.arch == spec.arch
            and self.pass_ == pass_
            and self.head_dim == _tuned_dim(max(problem.head_dim, problem.head_dim_v))
            and self.itemsize == problem.itemsize
            and self.masked in (None, bool(problem.program.structure))
            and self.packed in (None, problem.varlen)
            and (not self.features or not set(self.features).isdisjoint(features_of(problem)))
            and (not self.fills or self.is_filling(problem, spec))
            and (pass_ != "decode" or self.decodes(problem, spec))
        )

    def decodes(self, problem: Problem, spec: DeviceSpec) -> bool:
        """Entries of 16 rows are about all calls that take little beside reading keys, of which there are as many tiles as
        multiprocessors: smaller tiles are faster where there are fewer. Of more rows than DECODE_ROWS, of sequences that share
        pages, the model knows more."""
        size = size_of(problem)
        rows = power_of_two(size.rows * size.group)
        if rows < DECODE_ROWS or not problem.page:
            return self.block_q == 16 and size.kv_tasks * -(-size.keys // self.block_k) >= spec.units
        return self.block_q == rows

    def is_filling(self, problem: Problem, spec: DeviceSpec) -> bool:
        """Is it a plain call whose forward has a tile for each multiprocessor?"""
        if features_of(problem) or walks_lists(problem):
            return False
        tiles = -(-problem.seqlen_q // self.block_q)
        return (1 if problem.varlen else problem.batch) * problem.heads * tiles >= spec.units

    def __str__(self) -> str:
        spills = f"; it spills, {self.spills} accesses in its loops" if self.spills else ""
        return f"{self.figure}{spills}; {self.device}, {self.date} ({self.evidence})"


def features_of(problem: Problem) -> list[str]:
    """What is added to the scores or changes the weights, "several" where that is more than one thing. Where there is none of it,
    "documents" if the mask has some, "tables" if it is made of blocks and `selected` alone, and the lengths of whole blocks."""
    given = {"bias": problem.bias, "alibi": problem.alibi, "softcap": problem.softcap, "dropout": problem.dropout_p}
    names = [name for name, value in given.items() if value]
    if not names and walks_lists(problem):
        kinds = problem.program.kinds
        if any(kind.is_documents for kind in kinds):
            return ["documents"]
        tables, sides = all(kind.is_blocks or kind.is_selected for kind in kinds), (problem.seqlen_q, problem.seqlen_k)
        return ["tables"] if tables and not any(map(operator.mod, sides, block_sizes(problem.program))) else []
    return [*names, "several"] if len(names) > 1 else names


def _tuned_dim(head_dim: int) -> int:
    """The head dim whose entries hold: dims above 128 are padded to 256, and take its tiles."""
    return 256 if 128 < head_dim <= 256 else head_dim


_PLANNER, _FP32 = "record gpu-parts, planner", "timed side by side; no record is kept"
_COMPILED, _TODAY = "make compile-matrix", "timed one after the other; no record is kept"
_GRAPHS = "device time of graphs, in turns; no record is kept"
_IN_TURNS = "timed in turns; no record is kept"
_SWEEP = "record sweep-triton-h200"


def _h200(
    pass_: str, head_dim: int, itemsize: int, sizes: tuple[int, int, int, int], evidence: str, figure: str,
    *, masked: bool | None = None, packed: bool | None = None, features: tuple[str, ...] = (), fills: bool = False,
    spills: int = 0,
) -> Tuned:  # fmt: skip
    """An entry for an H200; `sizes` are block_q, block_k, num_stages and warps."""
    device = "compiled for sm_90" if evidence == _COMPILED else "NVIDIA H200"
    days = {_COMPILED: 16, _TODAY: 16, _GRAPHS: 17, _IN_TURNS: 18, _SWEEP: 19}
    date = f"2026-11-{days.get(evidence, 15)}"
    where = (device, date, figure, evidence)
    when: dict[str, Any] = {"masked": masked, "packed": packed, "features": features, "fills": fills}
    return Tuned("sm_90", pass_, head_dim, itemsize, *sizes, *where, **when, spills=spills)


TUNED: tuple[Tuned, ...] = (
    _h200("forward", 64, 2, (64, 64, 3, 4), _PLANNER,
          "bf16 16k full 450 TFLOP/s, causal 426; the model's 128×64 w8 s2 308 and 271"),
    _h200("forward", 128, 2, (128, 64, 2, 8), _COMPILED, "bf16: 0 spills in loops; 64×64 w4 s3 5, s2 2", features=("bias",)),
    _h200("forward", 128, 2, (64, 64, 2, 4), _GRAPHS,
          "bf16 16k causal documents 0.357 ms; three stages 0.461; 128×64 w4 s2 0.330, 128×32 w4 s3 0.302, but they spill",
          features=("documents",)),
    _h200("forward", 128, 2, (64, 64, 3, 4), _PLANNER,
          "bf16 8k full 509 TFLOP/s, causal 497; the model's 128×128 w8 s2 427 and 392"),
    _h200("decode", 128, 2, (16, 128, 3, 4), "record gpu-parts, decode",
          "B 8, 32/8 heads, 16k keys 3.88 TB/s; B 1, 131k keys 3.91; the model's 3.48 and 3.59"),
    _h200("decode", 128, 2, (64, 64, 3, 4), _COMPILED, "bf16 pages: 0 spills in loops; 64×128 w4 s3 11, s2 6"),
    _h200("forward", 256, 2, (128, 64, 2, 8), _TODAY,
          "bf16 4×8 heads, 2k causal 0.210 ms; 128×32 w8 s2 0.293, 64×64 w8 s2 0.343", spills=9),
    _h200("backward_dkdv", 256, 2, (64, 64, 2, 8), _TODAY,
          "bf16 4×8 heads, 2k causal, dK and dV alone 0.600 ms; 64×32 w8 s3 0.761, s2 0.781", spills=127),
    _h200("backward_dq", 256, 2, (64, 64, 2, 4), _TODAY,
          "bf16 4×8 heads, 2k causal, dQ alone 0.335 ms; 64×32 w8 s2 0.741", spills=116),
    _h200("decode", 64, 2, (16, 128, 3, 4), _TODAY,
          "B 8, 32/8 heads, 16k keys 0.073 ms; B 1, 131k keys 0.080; four stages 0.081 and 0.084, 16×64 0.084 and 0.094"),
    _h200("backward_dkdv", 64, 2, (32, 64, 3, 8), _COMPILED,
          "bf16: 0 spills in loops; 32×64 w4 s3 27 with ALiBi and dropout, 20 with everything", features=("several",)),
    _h200("backward_dkdv", 64, 2, (32, 64, 3, 4), _COMPILED,
          "bf16: 0 spills in loops; 64×64 w4 s3 36 with dropout, 11 with a bias", features=("bias", "dropout")),
    _h200("backward_dkdv", 128, 2, (32, 64, 3, 8), _COMPILED,
          "bf16: 0 spills in loops; 32×64 w4 s3 82 with dropout, 49 with a bias, 17 with a softcap, 5 with ALiBi",
          features=("bias", "alibi", "softcap", "dropout")),
    _h200("backward_dkdv", 64, 2, (64, 64, 2, 4), "record gpu-parts, varlen",
          "bf16 causal backward, times of dense: S 512 1.06, 2k 1.02; with three stages 1.13, 1.04, and it spills",
          masked=True, packed=True),
    _h200("backward_dkdv", 64, 2, (64, 64, 3, 4), _PLANNER,
          "bf16 8k backward full 375 TFLOP/s, causal 343; 64×64 w4 s2 351 and 337; 128×64 w4 s2 gives 395, 365 but spills"),
    _h200("backward_dq", 64, 2, (64, 32, 3, 4), _COMPILED,
          "bf16: 0 spills in loops with everything; 64×64 w4 s3 59, w8 s3 2", features=("several",)),
    _h200("backward_dq", 64, 2, (64, 64, 3, 4), _PLANNER, "bf16 512 full, dQ alone 0.31 ms; 128×64 w8 s3 0.46 ms"),
    _h200("backward_dkdv", 128, 2, (32, 64, 2, 4), _COMPILED, "bf16: 0 spills in loops; with three stages 2",
          masked=True, packed=True),
    _h200("backward_dkdv", 128, 2, (64, 64, 2, 4), _IN_TURNS,
          "bf16 2×16 heads, 8k, a quarter of blocks 1.07 ms; 64×128 w8 s3 1.11, 32×64 w4 s3 1.19",
          packed=False, features=("tables",)),
    _h200("backward_dkdv", 128, 2, (32, 64, 3, 4), _PLANNER,
          "bf16 2k backward full 321 TFLOP/s, causal 265; 64×64 w8 s2 211 and 189"),
    _h200("backward_dq", 128, 2, (128, 64, 3, 8), _IN_TURNS,
          "bf16 2×16 heads, 8k, a quarter of blocks 0.77 ms; 128×32 w8 s3 0.78, 64×32 w4 s3 0.87, 64×64 w4 s2 0.89",
          packed=False, features=("tables",)),
    _h200("backward_dq", 128, 2, (64, 32, 3, 4), _PLANNER,
          "bf16 512 backward full 271 TFLOP/s, causal 180; 2k 368, 311; with 64×64 w4 s3 246, 152 and 351, 285"),
    _h200("forward", 64, 4, (64, 64, 2, 4), _FP32, "fp32 2k causal 92 TFLOP/s; 128×64 w8 s2 78, 64×32 w4 s2 71"),
    _h200("forward", 128, 4, (128, 64, 2, 8), _SWEEP,
          "fp32 8×16 heads, 2k full 2.01 ms, causal 1.32; 64×32 w4 s2 2.29 and 1.38", fills=True, spills=11),
    _h200("forward", 128, 4, (64, 32, 2, 4), _FP32,
          "fp32 2k causal 98 TFLOP/s; 128×32 w8 s2 84, 64×64 w4 s1 80", spills=4),
    _h200("backward_dkdv", 64, 4, (64, 64, 2, 4), _FP32,
          "fp32 2k causal, dK and dV alone, of all the backward's FLOPs 131 TFLOP/s; 32×64 w4 s2 117", spills=84),
    _h200("backward_dq", 64, 4, (64, 64, 2, 4), _FP32,
          "fp32 2k causal, dQ alone, of all the backward's FLOPs 196 TFLOP/s; 64×32 w4 s2 151"),
    _h200("backward_dkdv", 128, 4, (32, 128, 2, 8), _FP32,
          "fp32 2k causal, dK and dV in one kernel, of all the backward's FLOPs 91 TFLOP/s; 32×64 w4 s2 69", spills=13),
    _h200("backward_dq", 128, 4, (128, 32, 2, 8), _FP32,
          "fp32 2k causal, dQ alone, of all the backward's FLOPs 162 TFLOP/s; 64×32 w4 s2 129, 128×16 w8 s2 116", spills=14),
    _h200("backward_dq", 256, 4, (16, 16, 3, 8), _COMPILED, "fp32: 0 spills in loops; 16×32 w8 2, with four warps 7"),
)  # fmt: skip


def lookup(problem: Problem, spec: DeviceSpec, pass_: str, blocks: tuple[int, int]) -> Tuned | None:
    """The entry that applies, if any. The mask's blocks must be made of its tiles; (0, 0) where there are no blocks."""
    several = (entry for entry in TUNED if entry.applies(problem, spec, pass_))
    return next((one for one in several if not (blocks[0] % one.block_q or blocks[1] % one.block_k)), None)
