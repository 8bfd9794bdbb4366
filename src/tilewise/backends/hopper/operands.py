"""Operands and results of products: their layouts in registers, columns in pieces, weights as words."""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon


@gluon.constexpr_function
def accumulator(n):
    """The layout of a warpgroup's [64, n] product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def left_operand(n):
    """The layout of the left operand of a [64, n] product in registers: for P·V those of S."""
    return gl.DotOperandLayout(0, accumulator(n), 2)


@gluon.jit
def zeros(n: gl.constexpr):
    """A [64, n] accumulator."""
    LAYOUT: gl.constexpr = accumulator(n)
    return gl.zeros([64, n], gl.float32, LAYOUT)


@gluon.constexpr_function
def spans(first, last, most=256):
    """Columns [first, last) as (first, width), the widths powers of two up to `most` that divide their first."""
    parts = []
    while first < last:
        width = min(most, 1 << (last - first).bit_length() - 1)
        width = min(width, first & -first) if first else width
        parts.append((first, width))
        first += width
    return parts


@gluon.constexpr_function
def _pack(dtype):
    """Two fp32 as one word of two 16-bit numbers, the first in its low half."""
    return f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def packed(p_tile, dtype: gl.constexpr):
    """Weights in 16 bits, two in a word [64, N / 2]. Loops carry words: the compiler would unpack 16-bit numbers and pack them
    again in every step."""
    ASM: gl.constexpr = _pack(dtype)
    N: gl.constexpr = p_tile.type.shape[1]
    even, odd = gl.split(gl.reshape(p_tile, [64, N // 2, 2]))
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_operand(words, dtype: gl.constexpr, C: gl.constexpr):
    """Packed weights as the left operand of a product."""
    N: gl.constexpr = C.BLOCK_N
    LAYOUT: gl.constexpr = left_operand(output_spans(C)[0][1])
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    p_tile = gl.reshape(gl.join(even, odd), [64, N]).to(dtype, bitcast=True)
    return gl.convert_layout(p_tile, LAYOUT, assert_trivial=True)


@gluon.jit
def operand_for(x_tile, n: gl.constexpr):
    """A left operand as that of a product of n columns: the same registers."""
    LAYOUT: gl.constexpr = left_operand(n)
    return gl.convert_layout(x_tile, LAYOUT, assert_trivial=True)


@gluon.jit
def rows_of(x, like):
    """A vector over rows in the layout of the rows of `like`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)[:, None]


@gluon.jit
def columns(tile, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Columns [FIRST, FIRST + WIDTH) of a matrix in shared memory."""
    if tile.type.shape[1] == WIDTH:
        return tile
    else:
        return tile.slice(FIRST, WIDTH, dim=1)


@gluon.jit
def columns_of(tiles, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """The same of matrices that lie side by side; the columns are of one."""
    UNIT: gl.constexpr = tiles[0].type.shape[1]
    return columns(tiles[FIRST // UNIT], FIRST % UNIT, WIDTH)


@gluon.constexpr_function
def output_spans(C):
    """The output's columns by accumulator."""
    return spans(0, C.V_COLUMNS if C.V_COLUMNS > 0 else C.BLOCK_DV)


@gluon.jit
def no_output(C: gl.constexpr):
    """The output before any key, by accumulator."""
    SPANS: gl.constexpr = output_spans(C)
    parts = ()
    for i in gl.static_range(len(SPANS)):
        parts += (zeros(SPANS[i][1]),)
    return parts
