"""The closed forms of the five tutorials this package grew from, with their own constants.

Where a tutorial is loose or wrong, the right value stands beside its own; docs/background/errata.md explains each. Letters are
theirs: N or S tokens, d or D head dim, M bytes or elements of SRAM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KiB, MiB = 2**10, 2**20
SHARED_LIMIT = 48 * KiB

A100_SMS = 108
A100_TFLOPS, A100_TBPS, A100_SRAM_TBPS = 312.0, 2.0, 19.0
H100_TFLOPS, H100_TBPS = 989.4, 3.35


# tiling


def tiling_sram(br: int, bc: int, d: int, itemsize: int) -> int:
    """Q, K, V, S, the accumulator O and the statistics m and l, all of one size."""
    return (br * d + 2 * bc * d + br * bc + br * d + 2 * br) * itemsize


def tiling_sram_rule(br: int, bc: int, d: int) -> int:
    """Q, K, V and S in 16 bits; O, m and l are in registers."""
    return (br * d + 2 * bc * d + br * bc) * 2


def score_bytes(n: int, itemsize: int = 2) -> int:
    """One N × N matrix; S and P are two of them."""
    return n * n * itemsize


def all_sram(per_unit: int, units: int = A100_SMS) -> int:
    """Of the whole GPU. The tutorial takes 192 KB a multiprocessor: L1 and shared memory together."""
    return per_unit * units


def blocks(n: int, block: int) -> int:
    """Tr or Tc."""
    return -(-n // block)


# tile sizes and rescaling


def rescaling_sram(bq: int, bkv: int, d: int, itemsize: int) -> int:
    """Inputs in their own size, scores, accumulator and statistics in double."""
    return (bq + 2 * bkv) * d * itemsize + bq * bkv * 8 + bq * d * 8 + 2 * bq * 8


def updates(src_seq_len: int, block_size_kv: int) -> int:
    """Updates of the online softmax without a mask, one per K/V tile."""
    return blocks(src_seq_len, block_size_kv)


@dataclass(frozen=True)
class Rescaling:
    """What one update does to the accumulated values."""

    alpha: float
    o: float
    l: float


def rescale(m_old: float, m_ij: float, o: float, l: float) -> Rescaling:
    """Alpha = exp(m_old − m_new), and the old accumulator and sum brought to the new maximum."""
    alpha = math.exp(m_old - max(m_old, m_ij))
    return Rescaling(alpha, alpha * o, alpha * l)


def starting_tile(itemsize: int, d: int) -> tuple[int, int]:
    """The tile before shared memory is looked at; 4-byte inputs take the `float` path."""
    if itemsize >= 4:
        return (16, 32) if d >= 128 else (32, 64)
    if d >= 128:
        return 8, 16
    return (8, 32) if d > 64 else (16, 32)


def adapted_tile(itemsize: int, d: int, limit: int = SHARED_LIMIT) -> tuple[int, int]:
    """The starting tile, or 4 × 8 if it does not fit."""
    tile = starting_tile(itemsize, d)
    return tile if rescaling_sram(*tile, d, itemsize) <= limit else (4, 8)


def best_fitting_tile(itemsize: int, d: int, limit: int = SHARED_LIMIT) -> tuple[int, int]:
    """Instead of falling to 4 × 8: the largest power-of-two tile that fits, the widest (fewest updates) of equals."""
    sizes = (4, 8, 16, 32, 64, 128)
    fitting = [
        (bq, bkv) for bq in sizes for bkv in sizes if bkv >= bq and rescaling_sram(bq, bkv, d, itemsize) <= limit
    ]
    return max(fitting, key=lambda tile: (tile[0] * tile[1], tile[1]))


def error_budget(rescalings: int, each: float) -> float:
    """Relative errors of `each` add up. The precision experiment shows how far from that they really stay."""
    return rescalings * each


# the minimal kernel


def minimal_kernel_sram(block_m: int, block_n: int, d: int) -> dict[str, int]:
    """16-bit Q, K, V and fp32 S and P, by buffer."""
    return {
        "Q": block_m * d * 2,
        "K": block_n * d * 2,
        "V": block_n * d * 2,
        "S": block_m * block_n * 4,
        "P": block_m * block_n * 4,
    }


def standard_elements(s: int, d: int) -> int:
    """S(3D + 2S). Its own list (Q, K, V, O once, S written and read) sums to S(4D + 2S), and P is missing."""
    return s * (3 * d + 2 * s)


def standard_elements_listed(s: int, d: int) -> int:
    """What the tutorial's list sums to: S(4D + 2S)."""
    return s * (4 * d + 2 * s)


def flash_elements(s: int, d: int) -> int:
    """4SD, each of Q, K, V, O once. A lower bound: K and V are read again for each Q block."""
    return 4 * s * d


def ideal_speedup(s: int, d: int, sram: float = A100_SRAM_TBPS, hbm: float = A100_TBPS) -> float:
    """(S / 2D)(SRAM bandwidth / HBM bandwidth) = 4.75·S/D; it divides HBM bytes by SRAM bandwidth."""
    return (2 * s * s / hbm) / (4 * s * d / sram)


def equal_bandwidth_speedup(s: int, d: int) -> float:
    """The same ratio with both counts at HBM bandwidth: what the bytes alone allow."""
    return standard_elements_listed(s, d) / flash_elements(s, d)


def standard_intensity(d: int) -> int:
    """4·S²·D / 2·S² → 2D, per element."""
    return 2 * d


def flash_intensity(s: int) -> int:
    """4·S²·D / 4·S·D = S, per element."""
    return s


def memory_table(d: int = 64, flash_bytes: int = 1) -> list[tuple[int, int, int, int]]:
    """S, bytes of standard attention (2S²) and of flash, and their ratio.

    The tutorial counts 2 bytes an element of S × S and 1 of the four tensors of S × D; in fp16 both have 2.
    """
    lengths = (512, 1024, 2048, 4096, 8192)
    return [(s, 2 * s * s, 4 * s * d * flash_bytes, 2 * s * s // (4 * s * d * flash_bytes)) for s in lengths]


def printed_swizzle(row: int, column: int) -> int:
    """The tutorial's figure: elements 1 and 2 of every four change places, in every row alike."""
    return column // 4 * 4 + (0, 2, 1, 3)[column % 4]


def xor_swizzle(row: int, column: int) -> int:
    """What removes the conflicts: the column is XORed with the row, so each row has another order."""
    return column ^ (row % 32)


# IO-aware design

PRINTED_TREND = (1000.0, 10.0)
"""Growth of compute and of bandwidth "in the past ten years"."""


def step_intensities(d: int) -> dict[str, float]:
    """FLOPs per element of each step of standard attention, for N ≫ d."""
    return {"QKᵀ": 2.0 * d, "softmax": 2.5, "PV": 2.0 * d}


def standard_intensity_overall(d: int, itemsize: int = 1) -> float:
    """(4N²d + 5N²) FLOPs over 4N² accesses; per element with itemsize 1, per byte with 2 (fp16)."""
    return (4 * d + 5) / 4 / itemsize


def standard_accesses(n: int, d: int) -> int:
    """4N² + 6Nd as printed."""
    return 4 * n * n + 6 * n * d


def standard_accesses_listed(n: int, d: int) -> int:
    """What the tutorial's list sums to: 4N² and five times Nd (Q, K, K again, V, O)."""
    return 4 * n * n + 5 * n * d


def flash_accesses(n: int, d: int, m: float) -> float:
    """N²d²/M elements for M elements of SRAM. The tutorial prints N²d/M, but its figure of 10 MB has the square."""
    return n * n * d * d / m


def q_outer_accesses(n: int, d: int, br: int) -> int:
    """The exact count of the Q-outer schedule: Q and O once, K and V once per Q block."""
    return n * d * (2 + 2 * blocks(n, br))


def traffic_ratio(m: float, d: int) -> float:
    """4N² over N²d²/M = 4M/d²."""
    return 4 * m / d**2


# FlashAttention v1


def flash_v1_sram(br: int, bc: int, d: int) -> int:
    """fp32 Q, K and V only; S and O are left out."""
    return 4 * br * d + 8 * bc * d


def sram_rule(x: int, y: int, br: int, bc: int, d: int) -> int:
    """The general form x·Br·d + y·Bc·d: x bytes for each element of a row of Q (and O), y for each of K and V together."""
    return x * br * d + y * bc * d


def softmax_and_pv_flops(n: int, d: int) -> tuple[int, int]:
    """About 5N² for the softmax; 2N²d for P·V. The tutorial calls both O(N²)."""
    return 5 * n * n, 2 * n * n * d


def fits_flash_v1(br: int, bc: int, d: int, m: int) -> bool:
    """4·Br·d + 8·Bc·d ≤ M bytes."""
    return 4 * br * d + 8 * bc * d <= m


def extra_memory(n: int) -> int:
    """m and l, one element a row each."""
    return 2 * n
