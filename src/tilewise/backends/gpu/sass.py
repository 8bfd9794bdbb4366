"""Machine code for sm_90, and where it takes the addresses of its matrix products from.

ptxas 12.8 loses such addresses: it adds a step to a register that, on some path, holds something else by then (part of a pointer,
or data just loaded). The product reads the wrong memory, or faults; there is no other sign. `assemble.py` avoids that assembler,
and checks its code where it cannot.

A descriptor is 14 or 15 bits of a shared address and constants. So every path backwards from a product's descriptor, through
copies, sums and the stack, has to end where these bits are cut out, or at a constant. Where one ends elsewhere, the address is
lost.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    address: int
    text: str


def disassembled(cubin: bytes) -> list[Instruction]:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?) ;", text)
    return [Instruction(int(address, 16), code) for address, code in lines]


def successors(code: Sequence[Instruction]) -> list[list[int]]:
    """Of each instruction those that may follow it."""
    at = {line.address: n for n, line in enumerate(code)}
    result: list[list[int]] = []
    for n, line in enumerate(code):
        name = re.sub(r"^@!?U?P[T\d]+\s+", "", line.text).partition(" ")[0]
        conditional = line.text.startswith("@")
        after = [n + 1] if n + 1 < len(code) else []
        if name.startswith("BRA"):
            jump = re.search(r"0x([0-9a-f]+)", line.text)
            goes_on = conditional or re.search(r"BRA\S* !?U?P\d", line.text) is not None
            target = at.get(int(jump[1], 16)) if jump else None
            result.append([*(after if goes_on else []), *([] if target is None else [target])])
        elif name.startswith(("EXIT", "RET", "BRX")):
            result.append(after if conditional else [])
        else:
            result.append(after)
    return result


PASSES_ON = re.compile(
    r"(R2UR|U?MOV|IMAD\.MOV|IMAD\.U32|IMAD\.X|U?IADD3|VIADD|U?LOP3|U?SEL|LDL|STL|U?IADD|CS2R|U?PRMT)\b"
)
"""Instructions that copy or add."""
CUT = re.compile(r"U?SGXT\.U32 \S+, \S+, 0x[ef]$|U?LOP3\.LUT .*\b0x[37]fff\b")
NOWHERE = re.compile(
    r"(ST|RED|BAR|BRA|EXIT|DEPBAR|WARPGROUP|MEMBAR|FENCE|NOP|BSYNC|BSSY|WARPSYNC|UTMA|SYNCS|LDGSTS|CCTL|YIELD|BRX|R2P)"
)
"""Instructions whose first operand is no register they write."""
WIDE = re.compile(r"\.64\b|\.WIDE\b|\.128\b|\.F64\b|^CS2R\b(?!\.32)|^D(ADD|MUL|FMA)\b")


class Move(NamedTuple):
    """What an instruction writes, and from what: registers (R4, UR4) and words of the stack (S16)."""

    written: tuple[str, ...]
    sources: dict[str, tuple[str, ...]]
    conditional: bool
    ends: bool
    """It makes an address, or a constant."""
    passes: bool


def _words(operand: str, number: int) -> tuple[str, ...]:
    slot = re.fullmatch(r"\[R1(?:\+0x([0-9a-f]+))?\]", operand)
    if slot:
        return tuple(f"S{int(slot[1] or '0', 16) + 4 * i}" for i in range(number))
    register = re.search(r"\b(U?R)(\d+)\b", operand)
    return tuple(f"{register[1]}{int(register[2]) + i}" for i in range(number)) if register else ()


def move_of(text: str) -> Move:
    plain = re.sub(r"^@!?U?P[T\d]+\s+", "", text)
    conditional = text.startswith("@")
    name, _, rest = plain.partition(" ")
    operands = [operand.strip() for operand in rest.split(",")] if rest else []
    if name.startswith("HGMMA"):
        columns = int(name.split("x")[1])
        return Move(_words(operands[0], columns // 2), {}, False, False, False)
    number = 4 if ".128" in name else 2 if WIDE.search(name) else 1
    if name.startswith(("LDL", "STL")):
        stack_operand, register_operand = (
            (operands[1], operands[0]) if name.startswith("LDL") else (operands[0], operands[1])
        )
        stack, registers = _words(stack_operand, number), _words(register_operand, number)
        written, read = (registers, stack) if name.startswith("LDL") else (stack, registers)
        return Move(written, {w: (r,) for w, r in zip(written, read, strict=False)}, conditional, False, True)
    if not operands or NOWHERE.match(name) or re.match(r"U?P\d", operands[0]):
        return Move((), {}, conditional, False, False)
    written = _words(operands[0], number)
    pairs = name.startswith("UIADD3.64")
    sources = {word for operand in operands[1:] for word in _words(operand, 2 if pairs or ".64" in operand else 1)}
    return Move(
        written,
        dict.fromkeys(written, tuple(sources)),
        conditional,
        bool(CUT.match(plain)),
        bool(PASSES_ON.match(name)),
    )


def _predecessors(code: Sequence[Instruction]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in code]
    for n, following in enumerate(successors(code)):
        for m in following:
            before[m].append(n)
    switches = [
        n for n, line in enumerate(code) if "BRX" in line.text
    ]  # to the warp roles, which nothing else leads to
    return [sources or ([] if n == 0 else switches) for n, sources in enumerate(before)]


def lost_addresses(code: Sequence[Instruction]) -> list[str]:
    """The products that may take an address from something that is none, and that something."""
    moves = [move_of(line.text) for line in code]
    before = _predecessors(code)
    lost: set[str] = set()
    seen: set[tuple[int, str]] = set()
    work: list[tuple[int, str, str]] = []
    for n, line in enumerate(code):
        descriptor = re.search(r"HGMMA.*gdesc\[UR(\d+)\]", line.text)
        if descriptor:
            from_registers = re.match(r"HGMMA\S* R\d+, R\d+", line.text) is not None
            first = int(descriptor[1])
            product = f"{line.address:#x} {line.text}"
            work += [(n, f"UR{i}", product) for i in range(first + 2 * from_registers, first + 4)]
    while work:
        n, word, product = work.pop()
        if (n, word) in seen:
            continue
        seen.add((n, word))
        for m in before[n]:
            move = moves[m]
            if word in move.written and not move.ends:
                if move.passes:
                    work += [(m, source, product) for source in move.sources.get(word, ())]
                else:
                    lost.add(f"{product} takes {word} from {code[m].address:#x} {code[m].text}")
            if word not in move.written or move.conditional:
                work.append((m, word, product))
    return sorted(lost)
