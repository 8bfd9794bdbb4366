"""Compile the GPU kernels without a GPU, and check their machine code.

    python tools/compile_kernels.py                          every case for every target, with the triton at hand
    python tools/compile_kernels.py --few                    a choice of them
    python tools/compile_kernels.py --triton 3.6.0 3.9.0     under other versions, each in a directory of its own
    python tools/compile_kernels.py --only hopper --target sm_90

Each line is one kernel for one target: registers and stack bytes a thread (NVIDIA), shared memory, the time it took, and what is
wrong with it. A kernel fails the run that does not compile, does not fit the target, multiplies with memory that is none of its
tiles (lost addresses: `backends/gpu/sass.py`), spills where it must not, lacks what its speed rests on (`machine_code.py`), or is
not what its backend's plan says of it: shared memory, registers, buffers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tools.listed_masks import LISTED  # noqa: E402

from tilewise import masks  # noqa: E402
from tilewise.lab.bench.cases import Case  # noqa: E402


class Target(NamedTuple):
    gpu: tuple[str, int | str, int]  # triton's GPUTarget
    device: str  # in tilewise's catalogue


TARGETS = {
    "sm_80": Target(("cuda", 80, 32), "a100-80"),
    "sm_90": Target(("cuda", 90, 32), "h200"),
    "sm_100": Target(("cuda", 100, 32), "b200"),
    "sm_120": Target(("cuda", 120, 32), "rtx5090"),
    "gfx942": Target(("hip", "gfx942", 64), "mi300x"),
}
HOPPER_ONLY = ("sm_90",)
MOST = ("sm_80", "sm_90", "sm_100", "gfx942")
CHECKED = ("sm_80", "sm_90")
"""Where loops must not use local memory."""


@dataclass(frozen=True)
class Check:
    """A case whose kernels are compiled, by the backend that has them; `kernels` () are all that it launches."""

    backend: str
    case: Case
    kernels: tuple[str, ...] = ()
    targets: tuple[str, ...] = tuple(TARGETS)
    few: bool = False  # enough to see that another triton takes the language the kernels use
    may_spill: bool = False  # its masks or features need more registers than are left
    loose: bool = False  # packed sequences, or loads behind branches: Triton gives some of them fewer buffers than asked for
    maps: bool | None = None
    made: Callable[[], masks.Mask] | None = None  # a mask that a case has no words for
    part: bool = False  # of a whole, in which its origins lie
    page: int = 0  # tokens of a page
    stored: str = ""  # the dtype of pages with scales
    scaled: str = ""  # of what: "head" or "token"
    latent: int = 0  # columns of keys whose first are the values

    @property
    def name(self) -> str:
        return f"{self.backend} {self.case.name}"


class Compiled(NamedTuple):
    name: str
    kernel: Any
    config: Any
    text: str = ""  # its tile
    seconds: float = 0.0
    tile: Any = None  # as planned
    whole: bool = True  # does the launch compute all that its tile is planned for?


FIELDS = ("few", "targets", "may_spill", "loose", "maps", "made", "part", "page", "stored", "scaled", "latent")


def portable(name: str, *kernels: str, d: int = 128, **more: Any) -> Check:
    own = {field: more.pop(field) for field in FIELDS if field in more}
    sizes = {"batch": 2, "heads": 8, "kv_heads": 2, "seqlen": 1024, "head_dim": d, "dtype": "bfloat16"}
    return Check("triton", Case(name, **{**sizes, **more}), kernels, **own)


MAIN = ("forward", "keys", "queries")
CAREFUL = ("forward careful", "keys careful", "queries careful")
"""What runs where something is not finite: it may spill."""
CLASSIFIER = ("summary", "classify", "map", "pack")
DERIVATIVES = ("jvp", "second_queries", "second_keys")
STATISTICS = ("statistics", "mass", "entropy_queries", "entropy_keys")
DECODE = {"seqlen": 1, "kv_seqlen": 4096}
PAGES = {"mask": "causal", "lengths": (1, 1), "loose": True}
"""Packed queries over pages with room for 4096 keys of each sequence."""
TWO = ("sm_80", "sm_90")
PORTABLE = (
    portable("d128", *MAIN, mask="causal", few=True),
    portable("d64", *MAIN, d=64, mask="causal", few=True),
    portable("d128 full", *MAIN),
    portable("d256", *MAIN, d=256, mask="causal"),
    portable("d256 full", *MAIN, d=256, targets=TWO),
    portable("fp16 d128", *MAIN, dtype="float16", mask="causal", targets=TWO),
    portable("fp32 d128", dtype="float32", mask="causal", few=True),
    portable("fp32 d64", *MAIN, d=64, dtype="float32", mask="causal", targets=TWO),
    portable("fp32 d256", *MAIN, d=256, dtype="float32", mask="causal", targets=TWO),
    portable("decode", "decode", "merge", few=True, **DECODE),
    portable("decode d64", "decode", d=64, targets=TWO, **DECODE),
    portable("decode d256", "decode", d=256, targets=TWO, **DECODE),
    portable("fp32 decode", "decode", "merge", dtype="float32", few=True, **DECODE),
    portable("pages of 16", "decode", "merge", "append", page=16, few=True, targets=TWO, **PAGES),
    portable("pages of 256", "decode", page=256, targets=HOPPER_ONLY, **PAGES),
    portable("pages of 3", "decode", page=3, targets=("sm_80",), **PAGES),
    portable("pages of int8", "decode", "append", page=64, stored="int8", scaled="token", few=True, targets=TWO, may_spill=True,
             **PAGES),  # four accesses in a step of 128 keys
    portable("pages of float8", "decode", "append", page=64, stored="float8_e4m3fn", scaled="head", targets=TWO, **PAGES),
    portable("pages of latents", "decode", d=512, latent=576, page=64, targets=TWO,
             **(PAGES | {"heads": 16, "kv_heads": 1})),
    portable("pages of 16, 256 rows", "decode", page=16, targets=HOPPER_ONLY, **(PAGES | {"lengths": (64, 64)})),
    portable("pages, prefill", "forward", page=16, few=True, targets=TWO, **(PAGES | {"lengths": (512, 512)})),
    portable("prepare", "prepare", few=True),
    *(portable(f"bias d{d}", "bias", d=d, bias=(1, 8, 1024, 1024), targets=TWO) for d in (64, 128, 256)),
    portable("d512", "forward", d=512, targets=MOST),
    *(portable(f"derivatives d{d}", *DERIVATIVES, d=d, mask="causal", few=True, targets=MOST) for d in (64, 128)),
    *(portable(f"derivatives d{d} full", *DERIVATIVES, d=d, few=True, targets=TWO) for d in (64, 128)),
    *(portable(f"statistics d{d}", *STATISTICS, d=d, mask="causal", few=True, targets=MOST) for d in (64, 128)),
    portable("derivatives of everything", *DERIVATIVES, d=64, softcap=30.0, alibi=True, sinks=True, dropout_p=0.1, targets=TWO,
             may_spill=True, few=True),
    portable("d96 dv32 prefix", *MAIN, d=96, head_dim_v=32, mask="causal | prefix(7)", targets=MOST, may_spill=True),
    portable("window fp16", *MAIN, dtype="float16", mask="window(64)", targets=MOST),
    portable("varlen", *MAIN, mask="causal", lengths=(512, 512), targets=MOST, few=True, loose=True),
    portable("everything", *MAIN, "bias", d=64, few=True, softcap=30.0, bias=(1, 8, 1024, 1024), alibi=True, sinks=True,
             dropout_p=0.1, targets=MOST, may_spill=True, loose=True),
    portable("part of a whole", *MAIN, d=64, mask="causal", alibi=True, dropout_p=0.1, part=True, few=True, targets=MOST,
             may_spill=True, loose=True),
    *(
        portable(f"documents d{d}", *MAIN, *CAREFUL, *CLASSIFIER, d=d, mask="causal", data="documents", few=True, targets=MOST)
        for d in (64, 128)
    ),
    portable("documents varlen", *MAIN, *CLASSIFIER, made=lambda: packed_documents(), lengths=(512, 512), targets=TWO,
             loose=True),
    portable("documents fp32", *MAIN, d=64, dtype="float32", mask="causal", data="documents", targets=TWO),
    *(
        portable(f"{name} d{d}", *MAIN, *CLASSIFIER, d=d, made=made, targets=MOST, few=d == 64)
        for name, made in (("blocks", lambda: some_blocks()), ("dense", lambda: dense_mask())) for d in (64, 128)
    ),
    *(
        portable(f"first keys and window d{d}", *MAIN, *CLASSIFIER, d=d, mask="causal & (prefix(4) | window(100))", targets=TWO)
        for d in (64, 128)
    ),
    portable("selected or window", *MAIN, *CLASSIFIER, made=lambda: selected_or_window(), targets=TWO, few=True),
    portable("blocks and dense", *MAIN, *CLASSIFIER, d=64, made=lambda: blocks_or_not_dense(), targets=MOST, may_spill=True,
             loose=True),
    *(
        portable(f"trusted d{d} {mask}{' varlen' * bool(lengths)}{' short' * (not maps)}", *MAIN, d=d, mask=mask, lengths=lengths,
                 maps=maps, targets=HOPPER_ONLY, few=True, loose=bool(lengths))
        for d in (64, 128) for mask in ("full", "causal") for lengths in ((), (512, 512)) for maps in (False, True)
    ),
)  # fmt: skip
"""The last ones are all that ptxas 12.8 is trusted with (`backends/gpu/assemble.py`): they are searched for lost addresses."""


def hopper(backend: str, name: str, d: int = 128, dv: int | None = None, few: bool = False, **more: Any) -> Check:
    made = more.pop("made", None)
    sizes = {"batch": 2, "heads": 4, "seqlen": 3072, "head_dim": d, "head_dim_v": dv or d, "dtype": "bfloat16"}
    return Check(backend, Case(name, **{**sizes, **more}), targets=HOPPER_ONLY, few=few, made=made)


WIDTHS = (64, 128, 256)
PACKED = {"lengths": (1536, 1536)}
MASKS: dict[str, dict[str, str]] = {
    "full": {},
    "causal": {"mask": "causal"},
    "window": {"mask": "causal & window(100)"},
    "padding": {"data": "padding"},
    "causal padding": {"mask": "causal", "data": "padding"},
    "prefix-lm": {"mask": "causal | prefix(9)"},
    "offsets": {"data": "offsets"},
}
GPT_OSS = {"mask": "causal & window(128)"}
FORWARD_FEW = ("d64 full", "d64 causal", "d128 full", "d128 window", "d128 causal varlen", "d256 causal", "d256 full long",
               "d128 documents lists")
FORWARD: list[tuple[Any, ...]] = [
    *((f"d{d} {name}", d, mask) for d in WIDTHS for name, mask in MASKS.items()),
    *((f"d{d} dv{dv} causal", d, {"dv": dv, "mask": "causal"}) for d in WIDTHS for dv in WIDTHS if d != dv),
    *((f"d{d} {name} short", d, {**MASKS[name], "seqlen": 512}) for d in (64, 128) for name in ("full", "causal")),
    ("d256 full short", 256, {"seqlen": 512}),
    ("d64 causal 2048 queries", 64, {"mask": "causal", "seqlen": 2048}),
    ("d128 wide window", 128, {"mask": "causal & window(2000)"}),
    *((f"d{d} full tail", d, {"seqlen": 3000}) for d in WIDTHS),
    *((f"d{d} fp16", d, {"dtype": "float16"}) for d in WIDTHS),
    *((f"d{d} softcap", d, {"mask": "causal", "softcap": 20.0}) for d in WIDTHS),
    *((f"d{d} {name} varlen", d, {**MASKS[name], **PACKED}) for d in WIDTHS for name in ("full", "causal", "window")),
    ("negative scale", 128, {"scale": -1.0}),
    *((f"d{d} sinks", d, {**GPT_OSS, "sinks": True}) for d in WIDTHS),
    *((f"d{d} sinks varlen", d, {**GPT_OSS, **PACKED, "sinks": True}) for d in (64, 128)),
    *((f"d{d} alibi {name}", d, {**MASKS[name], "alibi": True}) for d in WIDTHS for name in ("full", "causal")),
    ("d128 alibi varlen", 128, {"mask": "causal", **PACKED, "alibi": True}),
    *((f"d{d} dropout {name}", d, {**MASKS[name], "dropout_p": 0.1}) for d in WIDTHS for name in ("full", "causal")),
    ("d256 full long", 256, {"seqlen": 16384}),
    *((f"d{d} {name} lists", d, mask) for d in WIDTHS for name, mask in LISTED.items()),
    *(
        (f"d{d} {name} {m}x{n}", d, {**MASKS[name], "tile": (("forward", m, n),)})
        for d in (64, 128) for name in ("full", "causal") for m, n in ((128, 64), (192, 64))
    ),
]  # fmt: skip
FEATURES_FEW = (
    *("d64 sinks", "d128 sinks varlen", "d64 alibi full", "d128 alibi causal", "d64 dropout causal", "d128 dropout full"),
)
"""Of both passes."""
BACKWARD_FEW = ("d64 full", "d128 causal", "d256 causal", "d128 causal varlen", "d64 causal deterministic",
                "d128 documents lists")
BACKWARD_MASKS = ("full", "causal", "window", "padding", "prefix-lm")
DETERMINISTIC = {"deterministic": True}
BACKWARD: list[tuple[Any, ...]] = [
    *((f"d{d} {name}", d, MASKS[name]) for d in WIDTHS for name in BACKWARD_MASKS),
    *((f"d{d} {name} deterministic", d, {**MASKS[name], **DETERMINISTIC}) for d in (64, 128) for name in ("full", "causal")),
    *((f"d{d} dv{dv} causal", d, {"dv": dv, "mask": "causal"}) for d, dv in ((128, 64), (64, 256), (256, 64), (192, 128))),
    *((f"d{d} fp16", d, {"dtype": "float16"}) for d in WIDTHS),
    *((f"d{d} softcap", d, {"mask": "causal", "softcap": 20.0}) for d in WIDTHS),
    *((f"d{d} sinks", d, {**GPT_OSS, "sinks": True}) for d in WIDTHS),
    *((f"d{d} alibi {name}", d, {**MASKS[name], "alibi": True}) for d in WIDTHS for name in ("full", "causal")),
    *((f"d{d} alibi deterministic", d, {"mask": "causal", "alibi": True, **DETERMINISTIC}) for d in (64, 128)),
    ("d128 alibi varlen", 128, {"mask": "causal", **PACKED, "alibi": True}),
    *((f"d{d} dropout {name}", d, {**MASKS[name], "dropout_p": 0.1}) for d in WIDTHS for name in ("full", "causal")),
    *((f"d{d} causal varlen deterministic", d, {"mask": "causal", **PACKED, **DETERMINISTIC}) for d in (64, 128)),
    ("d128 softcap deterministic", 128, {"mask": "causal", "softcap": 20.0, **DETERMINISTIC}),
    *((f"d{d} {name} varlen", d, {**MASKS[name], **PACKED}) for d in WIDTHS for name in ("full", "causal")),
    *((f"d{d} {name} lists", d, mask) for d in WIDTHS for name, mask in LISTED.items()),
    *((f"d{d} documents lists deterministic", d, {**LISTED["documents"], **DETERMINISTIC}) for d in (64, 128)),
    *((f"d{d} causal {m}x{n}", d, {"mask": "causal", "tile": (("backward_dkdv", m, n), ("backward_dq", 128, 64))})
      for d, m, n in ((64, 64, 128), (64, 64, 64), (128, 64, 64))),
]  # fmt: skip
CHECKS = (
    *PORTABLE,
    *(hopper("hopper", name, d, few=name in (*FORWARD_FEW, *FEATURES_FEW), **more) for name, d, more in FORWARD),
    *(hopper("hopper-backward", name, d, few=name in (*BACKWARD_FEW, *FEATURES_FEW), **more) for name, d, more in BACKWARD),
)
BY_NAME = {check.name: check for check in CHECKS}
assert len(BY_NAME) == len(CHECKS), "two checks of one name"


def blocks_or_not_dense(length: int = 1024) -> masks.Mask:
    import torch

    table = torch.ones(1, 1, length // 64, length // 64, dtype=torch.bool)
    return masks.blocks(table, 64) | ~masks.dense(torch.ones(2, 1, length, length, dtype=torch.bool))


def packed_documents(tokens: int = 1024) -> masks.Mask:
    import torch

    return masks.causal() & masks.documents(torch.zeros(tokens, dtype=torch.int32))


def some_blocks(length: int = 1024) -> masks.Mask:
    import torch

    return masks.blocks(torch.ones(1, 1, length // 256, length // 256, dtype=torch.bool), 256)


def dense_mask(length: int = 1024) -> masks.Mask:
    import torch

    return masks.causal() & masks.dense(torch.ones(2, 1, length, length, dtype=torch.bool))


def selected_or_window(length: int = 1024) -> masks.Mask:
    import torch

    lists = torch.zeros(1, 1, length // 128, 2, dtype=torch.int32)
    return masks.causal() & (masks.selected(lists, 128, 128) | masks.window(100))


def problem_of(check: Check) -> tuple[Any, Any]:
    """The problem, and tensors without storage."""
    problem, tensors = replace(check.case.problem(), needs_lse=True, device="cuda"), check.case.tensors()
    if check.made:
        problem = replace(problem, mask=check.made())
    inputs = check.case.inputs(tensors)
    if check.page:
        room = problem.batch * (4096 // check.page) * check.page
        problem = replace(problem, page=check.page, stored=check.stored, seqlen_k=room, rows=problem.seqlen_q // problem.batch)
    if check.latent:
        problem = replace(problem, head_dim=check.latent)
        inputs = inputs._replace(q=inputs.q.new_empty((*inputs.q.shape[:3], check.latent)))
    if check.part:
        problem, inputs = replace(problem, origins=True), inputs._replace(origins=inputs.q.new_empty((2, 4)).int())
    return problem, type(inputs)(*(None if x is None else x.to("meta") for x in inputs))


def compile_check(check: Check, target: str, kernels: tuple[str, ...] = ()) -> Iterator[Compiled]:
    """A check's kernels, compiled for a target; raises what the compiler raises."""
    from triton.backends.compiler import GPUTarget

    gpu = GPUTarget(*TARGETS[target].gpu)
    problem, inputs = problem_of(check)
    if check.backend == "triton":
        yield from _portable(check, problem, inputs, gpu, target, kernels or check.kernels)
        return
    from tools.hopper_launches import planned_kernels

    start = time.perf_counter()
    for name, kernel, config, tile in planned_kernels(problem, gpu, backward=check.backend != "hopper"):
        yield Compiled(name, kernel, config, str(tile), time.perf_counter() - start, tile)


def _portable(
    check: Check, problem: Any, inputs: Any, gpu: Any, target: str, kernels: tuple[str, ...]
) -> Iterator[Compiled]:
    from tools.gpu_launches import derivative_launches, launches, page_launches, pass_of, statistics_launches

    from tilewise.backends.base import Needs
    from tilewise.backends.gpu.launch import compile_for, signature
    from tilewise.backends.triton import plan
    from tilewise.hardware import device

    spec = device(TARGETS[target].device)
    tiles = plan.tiles(problem, spec)
    derived, watched = (bool(kernels) and set(kernels) <= set(names) for names in (DERIVATIVES, STATISTICS))
    if check.page:
        found = page_launches(problem, inputs, spec, check.scaled)
    elif derived:
        found = derivative_launches(problem, inputs, spec)
    elif watched:
        found = statistics_launches(problem, inputs, spec)
    else:
        found = launches(problem, inputs, spec, maps=check.maps)
    if problem.seqlen_q > 1 and not derived and not watched and not check.page:
        found += launches(problem, inputs, spec, needs=Needs(dbias=inputs.bias is not None), maps=check.maps)
    # the same kernel may serve several operands, and one of a name may come in two forms
    different = {(name, str(signature(launch.args))): launch for name, launch in found if not kernels or name in kernels}
    for (name, _), launch in different.items():
        start = time.perf_counter()
        config, options = launch.config, launch.options
        kernel = compile_for(gpu, launch.kernel, signature(launch.args), config, options)
        sizes = (getattr(config, name, 0) for name in ("BLOCK_M", "BLOCK_N"))
        text = f"{'x'.join(map(str, sizes))} w{options.num_warps} s{options.num_stages}"
        whole = name != "keys" or launch.args[1].dk is not None  # where dK and dV are computed apart, dV takes less
        unplanned = (*CLASSIFIER, *CAREFUL, *DERIVATIVES, *STATISTICS, "append")
        planned = None if name in unplanned else tiles[pass_of(name, tiles)]
        yield Compiled(name, kernel, config, text, time.perf_counter() - start, planned, whole)


TIGHT = ("window", "padding", "varlen", "softcap")
"""With these, head dim 256 spills from Triton 3.8 on, loops included: right, but slower. 3.6 and 3.7 have registers for all."""


DERIVATIVE_SPILLS = {("jvp", 128): 48, ("second_keys", 64): 44, ("second_keys", 128): 108}
"""Accesses to local memory in the loops of derivatives for sm_90, by head dim (22 to 41 and 92 to 103 counted for dK and dV)."""


def short_of_registers(case: Case) -> bool:
    """Backward kernels that are right and lack registers: softcap at 128 (ten to thirty values a step wait in memory), dropout at
    128 (four), ALiBi at 128 (one under Triton 3.6, thirty where keys lie ahead), packed batches at 64 (two or three); from Triton
    3.8 on others too."""
    full = case.softcap > 0 or case.dropout_p > 0 or case.alibi
    return (full and case.head_dim == 128) or (bool(case.lengths) and case.head_dim == 64)


def full_of_features(case: Case) -> bool:
    """Hopper kernels that are right and lack registers: ALiBi and dropout at 256 columns (seven accesses a step), dropout at 64
    (56 bytes, outside of loops)."""
    return (case.head_dim == 256 and case.alibi) or (case.head_dim in (64, 256) and case.dropout_p > 0)


def tuned_spills(check: Check, tile: Any, target: str) -> int:
    """Accesses to local memory in loops that a tile may have which was measured to be the fastest although it spills.

    The same source compiles to slightly different code from run to run (127 or 129 accesses for dK/dV at head dim 256), so a
    tile may have two more than recorded, or 5 %.
    """
    from tilewise.backends.triton.tuned import TUNED
    from tilewise.problem import ITEMSIZE

    dims = (check.case.head_dim, ITEMSIZE[check.case.dtype])
    same = (
        entry.spills
        for entry in TUNED
        if (entry.arch, entry.pass_, entry.block_q, entry.block_k) == (target, tile.pass_, *tile.sizes)
        and (entry.head_dim, entry.itemsize) == dims
    )
    most = max(same, default=0)
    return most and most + max(2, most // 20)


def faults(check: Check, compiled: Compiled, target: str, strict: bool = True) -> tuple[Any, list[str]]:
    """The facts of a compiled kernel, and what is wrong with it. Without `strict`, under other versions, spills are no fault and
    plans are not compared."""
    from tools import gpu_launches
    from tools.hopper_launches import plan_faults
    from tools.machine_code import backward_faults, facts, forward_faults, portable_faults

    from tilewise.backends.hopper.compiler import newer_registers
    from tilewise.hardware import device

    newer = check.backend != "triton" and newer_registers()
    known = facts(compiled.kernel, target in CHECKED, warnings=check.backend != "triton")
    if check.backend == "hopper":
        tight = check.case.head_dim == 256 and any(word in check.name for word in TIGHT)
        planned = plan_faults(known, compiled.kernel.asm["ptx"], compiled.tile) if strict else []
        listed = getattr(compiled.config, "LISTS", None) is not None  # from Triton 3.8 on, as with what is tight
        may_spill = (newer and (tight or listed)) or full_of_features(check.case)
        return known, [*forward_faults(known, compiled.config, may_spill, newer), *planned]
    if check.backend == "hopper-backward":
        may_spill = newer or (compiled.name != "queries_kernel" and short_of_registers(check.case))
        may_spill |= full_of_features(check.case)
        may_spill |= getattr(compiled.config, "LISTS", None) is not None  # the mask of a PARTIAL tile: right, and slower
        planned = plan_faults(known, compiled.kernel.asm["ptx"], compiled.tile) if strict else []
        return known, [*backward_faults(compiled.name, known, compiled.config, may_spill), *planned]
    columns = getattr(compiled.kernel.metadata, "tmem_size", 0)
    may_spill = check.may_spill or not strict or compiled.name in CAREFUL or (
        compiled.tile is not None and known.spills <= tuned_spills(check, compiled.tile, target)
    )
    if target == "sm_90" and known.spills <= DERIVATIVE_SPILLS.get((compiled.name, check.case.head_dim), -1):
        may_spill = True
    wrong = portable_faults(known, columns, device(TARGETS[target].device).sram_per_block, may_spill)
    if strict and compiled.tile is not None:  # what other versions lay out is their affair
        pipelined = compiled.whole and not check.loose
        wrong += gpu_launches.plan_faults(known, compiled.kernel.asm.get("ptx", ""), compiled.tile, pipelined)
    return known, wrong


def run_job(job: tuple[str, str, bool]) -> tuple[list[str], int]:
    """In a worker process: the lines to print for one check and target, and how many of them are failures."""
    import triton

    name, target, strict = job
    check, lines, failures = BY_NAME[name], [], 0
    head = f"triton {triton.__version__}  {target:7} {check.name:34}"
    try:
        for one in compile_check(check, target):
            known, wrong = faults(check, one, target, strict)
            failures += bool(wrong)
            spills = known.spills if known.code else "?"
            lines.append(
                f"{head} {one.name:17} {one.text:15} {known.registers:4} regs {known.stack:5} B stack {spills:>4} in loops "
                f"{known.shared:7} B shared{_planned(one.tile)} {one.seconds:6.1f} s  {'; '.join(wrong)}"
            )
    except Exception as error:
        while error.__cause__ is not None:  # the innermost one names the line
            error = error.__cause__
        lines.append(f"{head} FAILED {type(error).__name__}: {str(error)[-800:]}")
        failures += 1
    return lines, failures


def _planned(tile: Any) -> str:
    return "" if tile is None else f" of {tile.on_chip_bytes:7} planned"


def run_here(options: argparse.Namespace) -> int:
    """Every chosen check for every target, in as many processes as asked for."""
    words = options.only or [""]
    chosen = [check for check in CHECKS if any(word in check.name for word in words) and (check.few or not options.few)]
    targets = [(check, target) for target in options.target or TARGETS for check in chosen if target in check.targets]
    jobs = [(check.name, target, not options.any_spills) for check, target in targets]
    failures = 0
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for lines, bad in pool.map(run_job, jobs):
            failures += bad
            print("\n".join(lines), flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def run_under(version: str, arguments: list[str]) -> int:
    """The exit status with another triton, which is installed beside the environment's on first use."""
    home = ROOT / "build" / f"triton-{version}"
    if not home.exists():
        unfinished = home.with_name(f"{home.name}.part")  # renamed when whole: an interrupted installation is not taken for one
        shutil.rmtree(unfinished, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished)]
        subprocess.run([*install, f"triton=={version}"], check=True)
        unfinished.rename(home)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home), str(ROOT / "src"), str(ROOT)])}
    return subprocess.run([sys.executable, __file__, *arguments], env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", nargs="*", default=[], help="versions to compile under instead of the environment's")
    parser.add_argument("--target", nargs="*", choices=list(TARGETS))
    parser.add_argument("--few", action="store_true", help="only a choice of checks")
    parser.add_argument("--any-spills", action="store_true", help="spilled registers of portable kernels are no failure")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--only", nargs="*", help="words of which a check's name holds one, such as hopper or d128")
    options = parser.parse_args()
    if not options.triton:
        return run_here(options)
    # registers are the assembler's business, which comes with triton: tiles are chosen for the environment's
    return max(run_under(version, [*sys.argv[1:], "--any-spills", "--triton"]) for version in options.triton)


if __name__ == "__main__":
    sys.exit(main())
