"""The Hopper kernels compile for sm_90 without a GPU, and their machine code is what their speed rests on.

Two kernels here; all of them by `make compile-matrix`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tools.compile_hopper import CASES, compiled, faults
from tools.sass import Instruction, Loop, facts

from tilewise.backends.hopper.config import NARROW, REGISTERS, SHARED_BYTES, TABLE

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["d128 causal", "d64 full"])
def test_machine_code(name: str) -> None:
    kernel, config = compiled(BY_NAME[name])
    assert faults(facts(kernel), config) == []


@pytest.mark.parametrize("config", [*TABLE.values(), NARROW], ids=lambda c: f"d{c.BLOCK_D}-dv{c.BLOCK_DV}-m{c.BLOCK_M}")
def test_budgets(config: object) -> None:
    assert config.shared_bytes <= SHARED_BYTES  # type: ignore[attr-defined]
    assert config.registers <= REGISTERS  # type: ignore[attr-defined]
    assert config.accumulators < config.REGISTERS[0]  # type: ignore[attr-defined]
    # setmaxnreg takes multiples of 8 only
    assert all(n % 8 == 0 for n in config.REGISTERS)  # type: ignore[attr-defined]


def body(*texts: str) -> Loop:
    return Loop([Instruction(16 * n, text) for n, text in enumerate(texts)])


def test_overlap_is_told_from_its_absence() -> None:
    product, wait, exp = (
        "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8]",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "MUFU.EX2 R1, R1",
    )
    assert body(product, exp, exp, wait).overlaps
    assert not body(product, wait, exp, exp).overlaps
    assert body(product).register_products == 1
    assert body("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24").register_products == 0
