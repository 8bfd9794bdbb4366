"""Pages of bytes, read two neighbouring columns at a time: int8 and e4m3 as 16-bit numbers, with few instructions.

Shared memory hands out 16-bit numbers in the order that a product wants, bytes it does not. So the tile on chip has one 16-bit
number for two columns, the even one in its low byte. It is taken apart in registers, four bytes at a time. Everything that has
these columns is in two halves, the even ones and the odd ones: keys and queries, whose products are added, values and sums.

Numbers become what they stand for without an error, all 256 of each kind:

    int8 to fp16    b ^ 0x80 in the lowest bits of 1024 is 1024 + 128 + b, from which 1152 is taken
    int8 to bf16    b ^ 0x80 alone is (128 + b) · 2⁻¹³³, as exponents 0 and 1 have one unit: times 2¹²⁷, minus 2, it is b / 64
    e4m3 to fp16    by an instruction, or where there is none moved into place, times 256; beyond 448 all bits are set: NaN

bf16 has no room for 1024 + 128 + b, and no 2¹³³. The 64 (`UNIT`) is multiplied later. Where pages are e4m3, queries of bf16 are
fp16, too, with a power of two as the scale of each row, and so are weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tilewise.backends.gpu.tile as tt

UNIT = tl.constexpr(64.0)
HEADROOM = tl.constexpr(14)
"""The largest number of a row of queries in fp16 lies in [2¹⁴, 2¹⁵)."""
LEAST = tl.constexpr(2.0**-64)
"""Rows of smaller numbers count as having this one: factors that come near 0 would make NaN of hidden scores."""
LIFT = tl.constexpr(15.0)
"""Weights in fp16 in place of bf16 are 2¹⁵ times as large, and l with them: they would be 0 below 2⁻²⁵."""
LIFTED = tl.constexpr(2.0**-15)

INT8_FP16 = tl.constexpr("""{
    .reg .b32 x, y, bias;
    mov.b32 bias, 0xE480E480;
    shr.u32 y, $2, 8;
    lop3.b32 x, $2, 0x00FF00FF, 0x64806480, 0x6A;
    lop3.b32 y, y, 0x00FF00FF, 0x64806480, 0x6A;
    add.rn.f16x2 $0, x, bias;
    add.rn.f16x2 $1, y, bias;
}""")
INT8_BF16 = tl.constexpr("""{
    .reg .b32 x, y, most, bias;
    mov.b32 most, 0x7F007F00;
    mov.b32 bias, 0xC000C000;
    shr.u32 y, $2, 8;
    lop3.b32 x, $2, 0x00FF00FF, 0x00800080, 0x6A;
    lop3.b32 y, y, 0x00FF00FF, 0x00800080, 0x6A;
    fma.rn.bf16x2 $0, x, most, bias;
    fma.rn.bf16x2 $1, y, most, bias;
}""")
"""lop3 0x6A: (a & b) ^ c."""
E4M3_FP16 = tl.constexpr("""{
    .reg .b32 x;
    .reg .b16 even, odd;
    prmt.b32 x, $2, 0, 0x3120;
    mov.b32 {even, odd}, x;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
E4M3_BITS = tl.constexpr("""{
    .reg .b32 x, y, size, unit, most, none;
    mov.b32 unit, 0x5C005C00;
    mov.b32 most, 0x5F005F00;
    shl.b32 x, $2, 7;
    shl.b32 y, $2, 8;
    and.b32 x, x, 0x3F803F80;
    lop3.b32 x, y, 0x80008000, x, 0xEA;
    shr.u32 y, $2, 1;
    and.b32 y, y, 0x3F803F80;
    lop3.b32 y, $2, 0x80008000, y, 0xEA;
    mul.rn.f16x2 x, x, unit;
    mul.rn.f16x2 y, y, unit;
    abs.f16x2 size, x;
    set.gt.u32.f16x2 none, size, most;
    or.b32 $0, x, none;
    abs.f16x2 size, y;
    set.gt.u32.f16x2 none, size, most;
    or.b32 $1, y, none;
}""")
"""lop3 0xEA: (a & b) | c."""


@triton.jit
def apart(tile):
    """The even columns of a tile and the odd ones."""
    return tl.split(tile.reshape(tile.shape[0], tile.shape[1] // 2, 2))


@triton.jit
def together(halves):
    """A tile of its even and its odd columns."""
    return tl.join(halves[0], halves[1]).reshape(halves[0].shape[0], 2 * halves[0].shape[1])


@triton.jit
def product(a, q_halves, pairs, s_tile, C: tl.constexpr):
    """s + q·kᵀ in fp32, of queries apart."""
    even, odd = even_and_odd(a, pairs, C)
    s_tile = tt.mma(q_halves[0], tl.trans(even), s_tile, C)
    return tt.mma(q_halves[1], tl.trans(odd), s_tile, C)


@triton.jit
def unit_of(a, C: tl.constexpr):
    """What numbers of pages are still to be multiplied by."""
    if C.PAGES.PAIRS == "int8" and a.q.ptr.dtype.element_ty == tl.bfloat16:
        return UNIT
    else:
        return 1.0


@triton.jit
def even_and_odd(a, pairs, C: tl.constexpr):
    """The columns of a tile of pairs, apart."""
    if C.INTERPRET:
        return _number(a, pairs & 0xFF, C), _number(a, (pairs >> 8) & 0xFF, C)
    elif C.PAGES.PAIRS == "e4m3" and C.PAGES.BITS:
        return _fp16(pairs, E4M3_BITS)
    elif C.PAGES.PAIRS == "e4m3":
        return _fp16(pairs, E4M3_FP16)
    elif a.q.ptr.dtype.element_ty == tl.bfloat16:
        return _bf16(pairs, INT8_BF16)
    else:
        return _fp16(pairs, INT8_FP16)


@triton.jit
def _fp16(pairs, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def _bf16(pairs, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)


@triton.jit
def _number(a, byte, C: tl.constexpr):
    """The same of one byte, for the interpreter, whose products of bf16 are those of fp32."""
    if C.PAGES.PAIRS == "e4m3":
        bits = (((byte & 0x7F) << 7) | ((byte & 0x80) << 8)).to(tl.int16)
        number = bits.to(tl.float16, bitcast=True) * 256.0
        return tl.where((byte & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)
    else:
        number = ((byte ^ 0x80).to(tl.float32) - 128.0) / unit_of(a, C)
        if a.q.ptr.dtype.element_ty == tl.bfloat16:
            return number
        else:
            return number.to(tl.float16)


@triton.jit
def queries(q_tile, C: tl.constexpr):
    """Queries apart, with factors [M] that are still to be multiplied; `q_tile` is in two parts where there is a REST."""
    factors = 1.0
    if C.REST:
        first, rest = q_tile
        if C.PAGES.Q_FACTORS:
            factors, inverse = tt.scale_of(tl.maximum(_largest(first), _largest(rest)), HEADROOM)
            first, rest = _over(first, inverse), _over(rest, inverse)
        return (apart(first), apart(rest)), factors
    else:
        if C.PAGES.Q_FACTORS:
            factors, inverse = tt.scale_of(_largest(q_tile), HEADROOM)
            q_tile = _over(q_tile, inverse)
        return apart(q_tile), factors


@triton.jit
def _largest(tile):
    size = tl.abs(tile.to(tl.float32))
    return tl.maximum(tl.max(tl.where(size < float("inf"), size, 0.0), 1), LEAST)


@triton.jit
def _over(tile, inverse):
    return (tile.to(tl.float32) * inverse[:, None]).to(tl.float16)
