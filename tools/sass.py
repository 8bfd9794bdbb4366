"""What the assembler made of a kernel for sm_90: the facts on which the Hopper kernels' speed rests, read off the code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from tilewise.backends.gpu.sass import Instruction, disassembled

COMPLAINT = re.compile(r"C75\d\d|wgmma.*serialized", re.IGNORECASE)


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
        multiplying = [span for span, loop in bodies.items() if loop.count("HGMMA") and not loop.count("EXIT")]
        return [
            bodies[s] for s in multiplying if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in multiplying)
        ]


def facts(compiled: Any) -> Facts:
    """Disassemble a kernel, and assemble its PTX once more to hear what ptxas has to say."""
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder) / "k.cubin", Path(folder) / "k.ptx"
        cubin.write_bytes(compiled.asm["cubin"])
        ptx.write_text(compiled.asm["ptx"])
        usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", cubin)
        log = _run(get_ptxas(90).path, "--gpu-name=sm_90a", ptx, "-o", Path(folder) / "again.cubin")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    complaints = [line for line in log.splitlines() if COMPLAINT.search(line)]
    barriers = barrier_addresses(compiled.asm["ptx"])
    return Facts(
        int(found[1]),
        int(found[2]),
        compiled.metadata.shared,
        disassembled(compiled.asm["cubin"]),
        complaints,
        barriers,
    )


def barrier_addresses(ptx: str) -> list[int]:
    """Offsets in shared memory of all barriers that a kernel initialises."""
    offsets = {register: int(offset) for register, offset in re.findall(r"add\.s\d+\s+(%r\d+), %r\d+, (\d+);", ptx)}
    named = re.findall(r"mbarrier\.init\S* \[(\S+?)(?:\+(\d+))?\]", ptx)
    return [offsets.get(register, 0) + int(more or 0) for register, more in named]


def _run(tool: str, *arguments: object) -> str:
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
