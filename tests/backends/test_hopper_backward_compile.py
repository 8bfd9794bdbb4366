"""The Hopper backward's kernels compile for sm_90 without a GPU, and their machine code is what their speed rests on.

A few kernels here; all of them by `make compile-matrix`.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from tools.compile_checks import BY_NAME
from tools.compile_kernels import compile_check, faults
from tools.machine_code import PREPOST, Facts, Instruction, backward_faults, backward_products

from tilewise.backends.hopper.backward.choose import dq_parts
from tilewise.backends.hopper.backward.config import (
    KEYS,
    KEYS_SHORT,
    QUERIES,
    QUERIES_SHORT,
    SEPARATE_DQ,
    SEPARATE_DQ_SOFTCAP,
    SEPARATE_DQ_UNMASKED,
    SPLIT,
    KeysConfig,
    QueriesConfig,
    widths,
)
from tilewise.backends.hopper.config import REGISTERS, SHARED_BYTES, used_columns
from tilewise.backends.hopper.intervals import IntervalMask
from tilewise.backends.hopper.shared_memory import on_chip

CONFIGS: list[KeysConfig | QueriesConfig] = [
    *KEYS.values(),
    *KEYS_SHORT.values(),
    *SEPARATE_DQ.values(),
    *SEPARATE_DQ_SOFTCAP.values(),
    *SEPARATE_DQ_UNMASKED.values(),
    *QUERIES.values(),
    *QUERIES_SHORT.values(),
    *SPLIT.values(),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["d64 dropout causal", "d128 causal", "d256 full"])
def test_machine_code(name: str) -> None:
    check = BY_NAME[f"hopper-backward {name}"]
    for compiled in compile_check(check, "sm_90"):
        assert faults(check, compiled, "sm_90")[1] == [], compiled.name


def accumulators(config: KeysConfig | QueriesConfig) -> int:
    """Registers a consumer's thread holds for its gradients and its score tiles."""
    if isinstance(config, QueriesConfig):
        return config.BLOCK_D // 2 + config.BLOCK_N
    gradients = max(config.BLOCK_D, config.BLOCK_DV) if config.SPLIT else config.BLOCK_D + config.BLOCK_DV
    return gradients // 2 + (config.BLOCK_M // 2 if config.SPLIT else config.BLOCK_M)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{type(c).__name__}-d{c.BLOCK_D}-dv{c.BLOCK_DV}")
def test_budgets(config: Any) -> None:
    kernel = (
        "queries_kernel" if isinstance(config, QueriesConfig) else "split_kernel" if config.SPLIT else "keys_kernel"
    )
    assert sum(size for _, size in on_chip(kernel, config, IntervalMask())) <= SHARED_BYTES
    assert 2 * config.REGISTERS[0] + config.REGISTERS[1] <= REGISTERS
    assert accumulators(config) < config.REGISTERS[0]
    # setmaxnreg takes multiples of 8 only
    assert all(n % 8 == 0 for n in config.REGISTERS)


@pytest.mark.parametrize("d", [8, 64, 72, 96, 128, 136, 192, 256])
@pytest.mark.parametrize("dv", [8, 64, 80, 128, 200, 256])
def test_every_pair_of_head_dims_has_tiles(d: int, dv: int) -> None:
    wide = widths(d, dv)
    assert wide[0] >= d and wide[1] >= dv
    assert wide in KEYS and wide in QUERIES
    for tile in (SEPARATE_DQ[wide], SEPARATE_DQ_SOFTCAP[wide], SEPARATE_DQ_UNMASKED[wide]):
        assert not tile.REDUCE_DQ
        # the kernel of dQ reads plain statistics; its tiles' 64 rows lie within one tile of them
        assert not tile.ACC_FROM_STATS and tile.BLOCK_M % 64 == 0
    # what is added up in memory is halves of columns, or halves of 128 rows; a part of dQ has 16 columns at least
    for tile in (KEYS[wide], KEYS_SHORT[wide]):
        parts = dq_parts(tile.BLOCK_M, used_columns(d, tile.BLOCK_D) or tile.BLOCK_D)
        assert not tile.REDUCE_DQ or (min(parts) >= 16 and 64 * max(parts) <= tile.BLOCK_M * tile.BLOCK_D // 2)
        assert tile.BLOCK_M == 128 or sum(parts) >= d or not tile.REDUCE_DQ
    assert KEYS_SHORT[wide].BLOCK_M == 64 and not KEYS_SHORT[wide].ACC_FROM_STATS


def machine_code(*texts: str) -> Facts:
    """Two loops of these instructions."""
    code: list[Instruction] = []
    for _ in range(2):
        start = 16 * len(code)
        code += [Instruction(start + 16 * n, text) for n, text in enumerate(texts)]
        code.append(Instruction(16 * len(code), f"@P0 BRA {start:#x}"))
    return Facts(168, 0, 1024, code, [], [512, 520])


def test_faults_are_found() -> None:
    product, wait = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    rest = (
        "REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR24][R2.64], R24",
        "USETMAXREG.DEALLOC 0x18",
        "UTMALDG.4D [UR8], [UR6]",
    )
    tile = KEYS[128, 128]
    products = [product] * (backward_products("keys_kernel", tile) // 2)
    good = machine_code(*products, wait, *rest)
    assert backward_faults("keys_kernel", good, tile) == []
    few = machine_code(product, wait, *rest)
    assert any("products, expected" in fault for fault in backward_faults("keys_kernel", few, tile))
    serialised = machine_code(*(x for one in products for x in (one, wait)), *rest)
    assert any("waits for" in fault for fault in backward_faults("keys_kernel", serialised, tile))
    spilled = machine_code(*products, wait, "LDL R1, [R1]", "LDL R2, [R1]", "STL [R1], R2", *rest)
    assert any("local memory" in fault for fault in backward_faults("keys_kernel", spilled, tile))
    assert backward_faults("keys_kernel", spilled, tile, may_spill=True) == []
    among = good._replace(barriers=[512, 4096])
    assert any("among the tiles" in fault for fault in backward_faults("keys_kernel", among, tile))
    scalar = machine_code(*products, wait, *rest[1:])
    assert any("four numbers" in fault for fault in backward_faults("keys_kernel", scalar, tile))
    assert backward_faults(PREPOST[0], machine_code("LDG.E R1, [R2]"), tile) != []
