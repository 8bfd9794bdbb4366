"""The Hopper kernels compile for sm_90 without a GPU, and their machine code is what their speed rests on.

Two kernels here; all of them by `make compile-matrix`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tools.compile_checks import BY_NAME
from tools.compile_kernels import compile_check, faults
from tools.machine_code import Instruction, Loop, unwritten

from tilewise.backends.hopper.config import REGISTERS, SHARED_BYTES, TABLE, Config, tiles_for
from tilewise.backends.hopper.intervals import IntervalMask
from tilewise.backends.hopper.shared_memory import on_chip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["d128 causal", "d64 full"])
def test_machine_code(name: str) -> None:
    check = BY_NAME[f"hopper {name}"]
    (compiled,) = compile_check(check, "sm_90")
    assert faults(check, compiled, "sm_90")[1] == []


TILES = list(dict.fromkeys(tile for d, dv in TABLE for tile in tiles_for(d, dv)))


@pytest.mark.parametrize("config", TILES, ids=lambda c: f"d{c.BLOCK_D}-dv{c.BLOCK_DV}-m{c.BLOCK_M}-n{c.BLOCK_N}")
def test_budgets(config: Config) -> None:
    assert sum(size for _, size in on_chip("forward_kernel", config, IntervalMask())) <= SHARED_BYTES
    assert config.WARPGROUPS * config.REGISTERS[0] + config.REGISTERS[1] <= REGISTERS
    # a consumer's thread holds the output, the scores, the weights and its part of the queries
    accumulators = (config.BLOCK_DV + config.BLOCK_N) // 2 + (config.BLOCK_N + config.Q_IN_REGISTERS) // 4
    assert accumulators < config.REGISTERS[0]
    # setmaxnreg takes multiples of 8 only
    assert all(n % 8 == 0 for n in config.REGISTERS)


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


def code(*texts: str) -> list[Instruction]:
    return [Instruction(16 * n, text) for n, text in enumerate(texts)]


def test_a_register_written_on_one_path_only_is_found() -> None:
    product = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT"
    ways = ["ULDC.64 UR4, c[0x0][0x10]", "@P0 BRA 0x30", "UIADD3.64 UR6, UR4, 0x2, URZ", product, "EXIT"]
    assert unwritten(code(*ways)) == [f"0x30 {product}"]
    ways[1] = "NOP"
    assert unwritten(code(*ways)) == []
    # weights from registers: only the right matrix has a descriptor
    weights = "HGMMA.64x64x16.F32.BF16 R88, R124, gdesc[UR4].tnspB, R88"
    assert unwritten(code("UIADD3.64 UR6, URZ, 0x2, URZ", weights, "EXIT")) == []


def test_roles_know_what_stands_before_their_switch() -> None:
    switch = ["S2UR UR4, SR_CTAID.X", "BRX R2 -0x20"]
    role = ["BAR.SYNC 0x1", "UMOV UR5, UR4", "@!P0 BRA 0x20", "UMOV UR7, UR6", "EXIT"]
    assert unwritten(code(*switch, *role)) == ["0x50 UMOV UR7, UR6"]
