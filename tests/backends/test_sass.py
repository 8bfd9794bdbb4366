"""What is read off a kernel's PTX: barriers that stand among tiles are found."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tools.sass import Facts, barrier_addresses

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
