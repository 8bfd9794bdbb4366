"""What is read off a kernel: barriers that stand among tiles are found, and products whose address is none."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tools.machine_code import Facts, barrier_addresses

from tilewise.backends.gpu.sass import Instruction, lost_addresses

PTX = """
	mov.b32 	%r9, global_smem;
	add.s32 	%r10, %r9, 230848;
	@%p1 mbarrier.init.shared::cta.b64 [%r10], 1;
	@%p1 mbarrier.init.shared::cta.b64 [%r10+8], 2;
"""


def apart(ptx: str) -> bool:
    return Facts(0, 0, 0, [], [], barrier_addresses(ptx)).barriers_apart


def test_addresses() -> None:
    assert barrier_addresses(PTX) == [230848, 230856]
    assert apart(PTX)


@pytest.mark.parametrize("where", ["%r9", "%r9+196608", "%r10+8"], ids=["first tile", "another tile", "the same twice"])
def test_a_barrier_among_tiles_is_found(where: str) -> None:
    assert not apart(f"{PTX}	@%p1 mbarrier.init.shared::cta.b64 [{where}], 2;\n")


def test_a_kernel_without_barriers_is_not_taken_for_a_right_one() -> None:
    assert not apart("")


PRODUCT = "HGMMA.64x16x16.F32 R24, R40, gdesc[UR4].tnspB, R24"
SOUND = [
    "S2UR UR8, SR_CgaCtaId",
    "ULEA UR8, UR8, UR9, 0x18",
    "USHF.R.U32.HI UR8, URZ, 0x4, UR8",
    "USGXT.U32 UR6, UR8, 0xe",
]
HIGH = "UMOV UR7, 0xc0000010"


def lost(*texts: str) -> list[str]:
    return lost_addresses([Instruction(16 * n, text) for n, text in enumerate((*texts, "EXIT"))])


def test_an_address_may_be_copied_added_to_and_kept_on_the_stack() -> None:
    kept = ["MOV R2, UR6", "STL [R1+0x10], R2", "MOV R2, 0x5", "LDL R3, [R1+0x10]", "R2UR UR6, R3"]
    assert lost(*SOUND, *kept, "UIADD3 UR6, UP0, UR6, 0x20, URZ", HIGH, PRODUCT) == []


@pytest.mark.parametrize(
    "fault",
    [
        ["USHF.L.U64.HI UR6, UR10, 0x1, UR12"],
        ["@P0 LDG.E.U16 R3, desc[UR4][R44.64]", "R2UR UR6, R3"],
        ["@P0 BRA 0x60", "ULDC UR6, c[0x0][0x2a0]"],
        [
            "STL.64 [R1+0xc], R30",
            "IMAD.WIDE.U32 R30, R106, 0x2, R46",
            "STL [R1+0x10], R31",
            "LDL R3, [R1+0x10]",
            "R2UR UR6, R3",
        ],
    ],
    ids=["part of a pointer", "data", "on one path only", "through the stack"],
)
def test_an_address_that_comes_from_elsewhere_is_found(fault: list[str]) -> None:
    found = lost(*SOUND, *fault, "UIADD3 UR6, UP0, UR6, 0x20, URZ", HIGH, PRODUCT)
    assert found and all("HGMMA" in line for line in found)


def test_only_the_right_matrix_has_an_address_where_the_left_comes_from_registers() -> None:
    assert lost("ULDC.64 UR4, c[0x0][0x10]", *SOUND, HIGH, PRODUCT) == []
    both = PRODUCT.replace("R40, ", "")
    assert len(lost("ULDC.64 UR4, c[0x0][0x10]", *SOUND, HIGH, both)) == 2


def test_roles_have_what_stands_before_their_switch() -> None:
    role = ["BAR.SYNC 0x1", HIGH, PRODUCT, "EXIT"]
    assert lost(*SOUND, "BRX R2 -0x20", *role) == []
    assert lost("ULDC UR6, c[0x0][0x2a0]", "BRX R2 -0x20", *role)
