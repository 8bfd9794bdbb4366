"""On-chip bytes and registers of our kernels' tiles."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.hardware.spec import DeviceSpec
from tilewise.model.tile import TilePlan

OVERHEAD_REGISTERS = 24
"""Registers a thread spends on addresses, statistics and loop state beside the fragments. With it the sum of the
fragments gives what the assembler reports for hand-scheduled Hopper kernels, to within four registers."""
OPERAND_REGISTERS = 32
"""Before Hopper the tensor cores take both operands from registers: fragments of Q and of the current K or V."""


@dataclass(frozen=True)
class OnChip:
    """What one block of a kernel takes, and how many blocks a unit can hold."""

    sram: dict[str, int]
    """Shared-memory bytes by buffer."""
    registers: int
    """32-bit registers a thread."""
    blocks: int
    """Blocks resident on a unit; 0 if the tile does not fit."""

    @property
    def sram_bytes(self) -> int:
        return sum(self.sram.values())


def buffers(tile: TilePlan, d: int, dv: int, itemsize: int) -> dict[str, int]:
    """Shared memory of our GPU kernels: what is resident once, what is in flight `stages` times."""
    m, n, s = tile.block_q, tile.block_k, tile.stages
    q, k, v, do = m * d * itemsize, n * d * itemsize, n * dv * itemsize, m * dv * itemsize
    if tile.pass_ in ("forward", "decode"):
        return {"Q": q, "K": s * k, "V": s * v}
    if tile.pass_ == "backward_dkdv":
        return {"K": k, "V": v, "Q": s * q, "dO": s * do, "LSE": s * m * 4, "delta": s * m * 4}
    return {"Q": q, "dO": do, "K": s * k, "V": s * v, "dS": m * n * itemsize}


def fragments(tile: TilePlan, d: int, dv: int, itemsize: int) -> dict[str, int]:
    """Register bytes of our GPU kernels at their fullest: fp32 accumulators, fp32 scores and their narrowed copies."""
    m, n = tile.block_q, tile.block_k
    if tile.pass_ in ("forward", "decode"):
        return {"O": m * dv * 4, "S": m * n * 4, "P": m * n * itemsize}
    both = {"S": m * n * 4, "dP": m * n * 4, "P": m * n * itemsize, "dS": m * n * itemsize}
    if tile.pass_ == "backward_dkdv":
        return {"dK": n * d * 4, "dV": n * dv * 4, **both}
    return {"dQ": m * d * 4, **{name: size for name, size in both.items() if name != "P"}}


def kernel(tile: TilePlan, d: int, dv: int, itemsize: int, spec: DeviceSpec) -> OnChip:
    """On-chip use of our GPU kernel for `tile`, and its occupancy on `spec`."""
    sram = buffers(tile, d, dv, itemsize)
    held = fragments(tile, d, dv, itemsize)
    if (
        spec.vendor == "AMD"
    ):  # twice the registers, a third of the shared memory: what is loaded once lives in registers
        once = ("K", "V") if tile.pass_ == "backward_dkdv" else ("Q", "dO")
        held.update({f"{name} operand": sram.pop(name) for name in once if name in sram})
    threads = tile.warps * spec.warp
    from_shared = spec.capability is not None and spec.capability[0] in (9, 10)  # they read operands from shared memory
    overhead = OVERHEAD_REGISTERS + (0 if from_shared else OPERAND_REGISTERS)
    registers = -(-sum(held.values()) // (4 * threads)) + overhead
    return OnChip(sram, registers, occupancy(sum(sram.values()), registers, threads, spec))


def occupancy(used: int, registers: int, threads: int, spec: DeviceSpec) -> int:
    """Blocks of so many shared-memory bytes, registers a thread and threads that a unit holds; 0 if one does not fit."""
    if used > spec.sram_per_block or registers > spec.max_registers or threads > spec.max_threads_per_block:
        return 0
    per_block = -(-registers // 8) * 8 * threads * 4
    return min(
        spec.sram_bytes // (used + 1024),  # a kibibyte a block is the system's
        spec.register_bytes // per_block,
        spec.max_threads // threads,
        spec.max_blocks,
    )


def given(tile: TilePlan) -> OnChip | None:
    """What a backend says of its tile; None where it says nothing."""
    return OnChip(dict(tile.on_chip), tile.registers, tile.resident) if tile.on_chip and tile.registers else None
