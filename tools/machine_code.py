"""What the assembler made of a kernel: the facts on which its speed rests, and registers that are read unwritten."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from tilewise.backends.gpu.sass import Instruction, disassembled, lost_addresses, successors
from tilewise.backends.hopper.quick_softmax import pieces_of

COMPLAINT = re.compile(r"C75\d\d|wgmma.*serialized", re.IGNORECASE)


PRODUCTS = ("HGMMA", "HMMA", "UTCHMMA")


class Loop(NamedTuple):
    """A loop that multiplies, innermost."""

    body: list[Instruction]

    def count(self, *names: str) -> int:
        return sum(any(name in i.text for name in names) for i in self.body)

    @property
    def overlaps(self) -> bool:
        """Is softmax work (exp2) done before the last wait for a product?"""
        waits = [n for n, i in enumerate(self.body) if "WARPGROUP.DEPBAR" in i.text]
        exps = [n for n, i in enumerate(self.body) if "MUFU.EX2" in i.text]
        return bool(waits and exps) and sum(n < waits[-1] for n in exps) > len(exps) // 2

    @property
    def register_products(self) -> int:
        """Products whose left operand comes straight from registers."""
        return sum(re.search(r"HGMMA\S* R\d+, R\d+, gdesc", i.text) is not None for i in self.body)


class Facts(NamedTuple):
    registers: int
    stack: int
    shared: int
    code: list[Instruction]
    complaints: list[str]
    barriers: list[int]  # where in shared memory each mbarrier is initialised

    @property
    def barriers_apart(self) -> bool:
        """Do all barriers stand together, away from the tiles? One that nobody waits for ends up inside a tile, and the GPU
        rewrites it when it comes back to the kernel from another process."""
        return len(set(self.barriers)) == len(self.barriers) > 0 and max(self.barriers) - min(self.barriers) < 512

    def count(self, name: str) -> int:
        return sum(name in i.text for i in self.code)

    @property
    def spills(self) -> int:
        """Accesses to local memory in the innermost loops that multiply."""
        return sum(loop.count("LDL", "STL") for loop in self.loops)

    @property
    def loops(self) -> list[Loop]:
        """The innermost loops that multiply, found by their backward branches."""
        at = {i.address: n for n, i in enumerate(self.code)}
        spans = []
        for n, i in enumerate(self.code):
            target = re.search(r"BRA(?:\.\S+)? (?:\S+, )?(0x[0-9a-f]+)", i.text)
            if target and int(target[1], 16) < i.address and int(target[1], 16) in at:
                spans.append((at[int(target[1], 16)], n))
        bodies = {span: Loop(self.code[span[0] : span[1] + 1]) for span in spans}
        # the retries of barrier waits stand behind the kernel's end and jump back into it: no loops
        multiplying = [span for span, loop in bodies.items() if loop.count(*PRODUCTS) and not loop.count("EXIT")]
        return [bodies[s] for s in multiplying if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in multiplying)]


def facts(compiled: Any, instructions: bool = True, warnings: bool = True) -> Facts:
    """Resources of a kernel; its instructions if asked for; with `warnings` what ptxas says of its PTX, assembled again."""
    if "cubin" not in compiled.asm:  # AMD's tools are not at hand, but its assembly tells
        said = [re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"]) for name in ("vgpr_count", "private_segment_fixed_size")]
        registers, stack = (int(found[1]) if found else 0 for found in said)
        return Facts(registers, stack, compiled.metadata.shared, [], [], [])
    log = ""
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder) / "k.cubin", Path(folder) / "k.ptx"
        cubin.write_bytes(compiled.asm["cubin"])
        ptx.write_text(compiled.asm["ptx"])
        usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", cubin)
        if warnings:
            log = _run(get_ptxas(90).path, "--gpu-name=sm_90a", ptx, "-o", Path(folder) / "again.cubin")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    complaints = [line for line in log.splitlines() if COMPLAINT.search(line)]
    code = disassembled(compiled.asm["cubin"]) if instructions else []
    barriers = barrier_addresses(compiled.asm["ptx"])
    return Facts(int(found[1]), int(found[2]), compiled.metadata.shared, code, complaints, barriers)


def barrier_addresses(ptx: str) -> list[int]:
    """Offsets in shared memory of all barriers that a kernel initialises."""
    offsets = {register: int(offset) for register, offset in re.findall(r"add\.s\d+\s+(%r\d+), %r\d+, (\d+);", ptx)}
    named = re.findall(r"mbarrier\.init\S* \[(\S+?)(?:\+(\d+))?\]", ptx)
    return [offsets.get(register, 0) + int(more or 0) for register, more in named]


def _run(tool: str, *arguments: object) -> str:
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


ZERO = 63
"""URZ and above: always there."""


class Effect(NamedTuple):
    name: str
    written: frozenset[int]
    read: frozenset[int]


def effect_of(text: str) -> Effect:
    """Which uniform registers an instruction writes and reads."""
    plain = re.sub(r"^@!?U?P[T\d]+\s+", "", text)
    name, _, rest = plain.partition(" ")
    operands = [operand.strip() for operand in rest.split(",")] if rest else []
    product = name.startswith("HGMMA")
    wide = ("WIDE" in name or re.search(r"\.64\b", name) is not None) and not product
    target = re.fullmatch(r"UR(\d+)", operands[0]) if operands else None
    written: set[int] = set()
    if target and not product and not name.startswith(("ST", "UTMA", "SYNCS", "BAR")):
        written = {int(target[1]), int(target[1]) + wide}
        operands = operands[1:]
    read: set[int] = set()
    from_registers = re.match(r"HGMMA\S* R\d+, R\d+", plain) is not None
    for operand in operands:
        for kind, number in re.findall(r"(g?desc\[)?UR(\d+)", operand):
            first = int(number)
            if kind == "gdesc[":  # descriptors of the left and the right matrix, two registers each
                read |= set(range(first + (2 if from_registers else 0), first + 4))
            elif kind or (".64" in name and not operand.startswith("[")):
                read |= {first, first + 1}
            else:
                read.add(first)
    return Effect(name, frozenset(written), frozenset(n for n in read if n < ZERO))


def unwritten(code: Sequence[Instruction]) -> list[str]:
    """The instructions that read a uniform register which some path leaves unwritten.

    ptxas 12.8 produces such code: where two loops in a row address the same shared memory, part of the address is computed before
    the first loop only, and a path around that loop multiplies with what the register happened to hold. Only wrong results tell.
    """
    effects = [effect_of(line.text) for line in code]
    follow = successors(code)
    known: list[frozenset[int] | None] = [None] * len(code)
    # what is written before the switch to the roles, through which all others are entered
    shared: frozenset[int] = frozenset()
    for entry in range(len(code)):
        if known[entry] is not None:
            continue
        known[entry] = shared
        work = [entry]
        # known[n]: written on every path found so far
        while work:
            n = work.pop()
            here = known[n]
            assert here is not None
            out = here | effects[n].written
            if effects[n].name.startswith("BRX"):
                shared = out
            for m in follow[n]:
                old = known[m]
                new = out if old is None else old & out
                if new != old:
                    known[m] = new
                    work.append(m)
    return [
        f"{line.address:#x} {line.text}"
        for line, effect, there in zip(code, effects, known, strict=True)
        if there is not None and effect.read - there
    ]


PREPOST = ("preprocess_kernel", "postprocess_kernel")
TENSOR_COLUMNS = 512
"""Tensor memory of a Blackwell multiprocessor."""
FORWARD_STACK = 32
"""Outside the loops a handful of registers may wait in memory: once for a tile of queries, not once for a tile of keys."""
FORWARD_STACK_WIDEST = 64
"""The same with 256 columns of output, 128 registers, where rows begin after key 0 or keys are seen by no query."""
FORWARD_STACK_THREE = 64
"""The same with the largest scores kept by three warpgroups, which have 160 registers."""
FORWARD_STACK_NEWER = 192
"""The same from Triton 3.8 on, where three warpgroups at head dim 64 keep 42 registers there."""
LISTED_SAVES = 2
"""In the loop over a list's PARTIAL tiles: the address of an array is read back from memory, once for a tile."""
JVP_STACK = 64
JVP_SAVES = 4
"""At the edges of a mask, so in a few tiles; loops without a mask have none."""
JVP_STACK_NEWER = 240
JVP_SAVES_NEWER = (1, 5)
"""From Triton 3.8 on, at head dim 128 under a mask: a register is read back once for a tile also where nothing is masked."""
BACKWARD_STACK = 64


def portable_faults(facts: Facts, tensor_columns: int, shared_limit: int, may_spill: bool) -> list[str]:
    """Of a kernel of the Triton backend. One that does not fit compiles to a trap, or is refused at its launch."""
    lost = lost_addresses(facts.code)
    checks = {
        f"{facts.spills} accesses to local memory in loops": not may_spill and facts.spills,
        "does not fit": facts.shared > shared_limit or tensor_columns > TENSOR_COLUMNS,
        f"addresses of products are lost: {lost[:2]}": lost,
    }
    return _those(checks)


ARITHMETIC = ("FFMA", "FADD", "FMUL", "FMNMX", "MUFU", "SHFL", *PRODUCTS)


def invariant_faults(facts: Facts) -> list[str]:
    """Of the portable kernel with `invariant=True`: a tile of keys gives the same bits with a mask and without, and the first
    tiles of a part are asked for before the part before it ends, in the same loop."""
    loops = facts.loops
    sums = [tuple(loop.count(name) for name in ARITHMETIC) for loop in loops]
    ends = [[n for n, i in enumerate(loop.body) if "MUFU.RCP" in i.text] for loop in loops]
    loads = [[n for n, i in enumerate(loop.body) if "LDGSTS" in i.text] for loop in loops]
    checks = {
        f"{len(loops)} loops multiply, expected one with a mask and one without": len(loops) != 2,
        f"loops differ in more than the mask: {ARITHMETIC} {sums}": len(set(sums)) > 1,
        "a part ends before its successor is loaded": not all(
            load and end and load[-1] < end[-1] for load, end in zip(loads, ends, strict=True)
        ),
    }
    return _those(checks)


def hopper_faults(facts: Facts, config: Any) -> dict[str, Any]:
    """Of any kernel of the Hopper backend."""
    lost = lost_addresses(facts.code)
    return {
        f"ptxas: {facts.complaints}": facts.complaints,
        f"addresses of products are lost: {lost[:3]}": lost,
        "setmaxnreg does not divide the registers among the warpgroups": not facts.count("USETMAXREG"),
        f"barriers among the tiles: {facts.barriers}": not facts.barriers_apart,
        "tiles are not loaded by TMA": not facts.count("UTMALDG"),
    }


def forward_faults(facts: Facts, config: Any, may_spill: bool = False, newer: bool = False) -> list[str]:
    """Of the Hopper forward; `may_spill`: registers are too few, `newer`: of a Triton that shares them out otherwise."""
    loops, unknown = facts.loops, unwritten(facts.code)
    allowed = FORWARD_STACK_NEWER if newer else FORWARD_STACK
    if config.BLOCK_DV == 256 and (config.LEFT or config.UNSEEN_KEYS):
        allowed = max(allowed, FORWARD_STACK_WIDEST)
    if config.STATS and config.WARPGROUPS == 3:
        allowed = max(allowed, FORWARD_STACK_THREE)
    masked = 1 if config.LISTS is not None else (config.BAND and config.PINGPONG) + config.LEFT
    expected = config.WARPGROUPS * (1 + masked)
    saves = LISTED_SAVES if config.LISTS is not None else 0
    # where a list's values may have to be zeroed, nothing runs under P·V in the loop over PARTIAL tiles
    overlapping = config.WARPGROUPS if config.LISTS is not None and config.UNSEEN_KEYS else len(loops)
    summed = config.BLOCK_N // 4 + 4 if newer else config.BLOCK_N // 2  # newer Tritons sum in pairs, others in chains
    entropy = summed if config.STATS == "entropy" else 0
    alibi = config.BLOCK_N // 4 if config.ALIBI_FIRST else 0  # what scores accumulate from, one a column
    # one product a weight, two for sums
    weighed = [config.BLOCK_N // 2 + 2 + entropy + alibi] * len(loops)
    if config.QUICK:  # without a mask a step may weigh once more, and what it has begun ahead too
        parts = pieces_of.fn(config.BLOCK_N // 4, config.QUICK)
        begun = 2 * sum(len(part[: config.QUICK_AHEAD]) for part in parts[1:])
        weighed[-config.WARPGROUPS :] = [weighed[0] + config.BLOCK_N // 2 + begun] * config.WARPGROUPS
    # products take 16 columns of their left operand, for each accumulator
    held = (config.BLOCK_N * accumulators(config.V_COLUMNS, config.BLOCK_DV) + config.Q_IN_REGISTERS) // 16
    products = ((config.QK_COLUMNS or config.BLOCK_D) - config.Q_IN_REGISTERS) // 16 + held
    checks = {
        **hopper_faults(facts, config),
        f"registers are read that some path leaves unwritten: {unknown[:3]}": unknown,
        f"{len(loops)} loops multiply, expected {expected}": len(loops) != expected,
        f"a loop has not {products} products": any(loop.count("HGMMA") != products for loop in loops),
        "a loop uses local memory": not may_spill and any(loop.count("LDL", "STL") > saves for loop in loops),
        f"{facts.stack} bytes of registers saved in memory": not may_spill and facts.stack > allowed,
        "weights or queries do not come from registers": any(loop.register_products != held for loop in loops),
        "the output is rescaled where no row needs it": config.LAZY_RESCALE and not all(loop.count("VOTE") for loop in loops),
        # of two rounded numbers: a row whose maximum stays is rescaled by exactly 1
        "the rescaling factor is not exp2 of a plain difference": config.SCORES == "fold"
        and sorted(loop.count("FFMA") for loop in loops) != weighed,
        "the softmax waits for P·V": sum(loop.overlaps for loop in loops) < overlapping,
    }
    return _those(checks)


def jvp_faults(facts: Facts, config: Any, newer: bool = False) -> list[str]:
    """Of the Hopper JVP; `newer`: of a Triton that shares registers out otherwise."""
    usual, at_edges = JVP_SAVES_NEWER if newer else (0, JVP_SAVES)
    loops, unknown = facts.loops, unwritten(facts.code)
    moving = config.Q_T or config.K_T
    masked = config.BAND + config.LEFT
    held = config.BLOCK_N * accumulators(config.V_COLUMNS, config.BLOCK_DV) * (1 + moving + config.V_T) // 16
    products = (config.QK_COLUMNS or config.BLOCK_D) * (1 + config.Q_T + config.K_T) // 16 + held
    saved = [loop.count("LDL", "STL") for loop in sorted(loops, key=lambda loop: len(loop.body))]  # those without a mask first
    checks = {
        **hopper_faults(facts, config),
        f"registers are read that some path leaves unwritten: {unknown[:3]}": unknown,
        f"{len(loops)} loops multiply, expected {2 * (1 + masked)}": len(loops) != 2 * (1 + masked),
        f"a loop has not {products} products": any(loop.count("HGMMA") != products for loop in loops),
        f"loops use local memory: {saved}": max(saved[:2], default=0) > usual or max(saved, default=0) > at_edges,
        f"{facts.stack} bytes of registers saved in memory": facts.stack > (JVP_STACK_NEWER if newer else JVP_STACK),
        "weights do not come from registers": any(loop.register_products != held for loop in loops),
        "the output is rescaled where no row needs it": not all(loop.count("VOTE") for loop in loops),
        "products are waited for one by one": any(loop.count("WARPGROUP.DEPBAR") > 3 for loop in loops),
    }
    return _those(checks)


def backward_faults(name: str, facts: Facts, config: Any, may_spill: bool = False) -> list[str]:
    """Of a kernel of the Hopper backward."""
    if name in PREPOST:
        return _those({"rows are not read 16 bytes at a time": not facts.count("LDG.E.128")})
    loops, reduces = facts.loops, getattr(config, "REDUCE_DQ", False)
    products, waits = (sum(loop.count(what) for loop in loops) for what in ("HGMMA", "WARPGROUP.DEPBAR"))
    saved = sum(loop.count("LDL", "STL") for loop in loops)
    expected = backward_products(name, config)
    checks = {
        **hopper_faults(facts, config),
        f"{len(loops)} loops multiply, expected one for each warpgroup": len(loops) != 2,
        f"{products} products, expected {expected}": products != expected,
        f"{saved} accesses to local memory in loops": not may_spill and saved,
        f"{facts.stack} bytes of registers saved in memory": not may_spill and facts.stack > BACKWARD_STACK,
        "weights do not come from registers": not all(loop.register_products for loop in loops),
        f"{waits} waits for {products} products": waits * 3 > products,
        "dQ is not added up four numbers at a time": reduces and not facts.count("REDG.E.ADD.F32x4"),
    }
    return _those(checks)


def accumulators(used: int, width: int) -> int:
    """Of a result: one for each power of two of its columns."""
    return (used or width).bit_count()


def backward_products(name: str, config: Any) -> int:
    """Of the loops of both warpgroups: each takes 16 columns or rows."""
    scores = (config.QK_COLUMNS or config.BLOCK_D) + (config.V_COLUMNS or config.BLOCK_DV)
    d = accumulators(config.QK_COLUMNS, config.BLOCK_D)
    dv = accumulators(config.V_COLUMNS, config.BLOCK_DV)
    if name == "queries_kernel":
        return 2 * (scores + config.BLOCK_N * d) // 16
    if config.SPLIT:  # a gradient each
        return (scores + config.BLOCK_M * (d + dv)) // 16
    return 2 * (scores + config.BLOCK_M * (d + dv) + (config.BLOCK_N if config.REDUCE_DQ else 0)) // 16


def _those(checks: dict[str, Any]) -> list[str]:
    return [fault for fault, there in checks.items() if there]
