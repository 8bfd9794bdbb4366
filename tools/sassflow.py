"""Uniform registers that machine code for sm_90 reads on a path on which nothing wrote them.

ptxas 12.8 produces such code: where two loops in a row address the same shared memory, part of the address is computed before
the first loop only, and whoever passes that loop by multiplies with what the register happened to hold. Only wrong results tell.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tilewise.backends.gpu.sass import Instruction, successors

ZERO = 63
"""URZ and above: always there."""


class Effect(NamedTuple):
    name: str
    conditional: bool
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
    return Effect(name, text.startswith("@"), frozenset(written), frozenset(n for n in read if n < ZERO))


def unwritten(code: Sequence[Instruction]) -> list[str]:
    """The instructions that read a uniform register which some path leaves unwritten."""
    effects = [effect_of(line.text) for line in code]
    follow = successors(code)
    known: list[frozenset[int] | None] = [None] * len(code)
    shared: frozenset[int] = (
        frozenset()
    )  # what stands before the switch to the roles, through which all others are entered
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
