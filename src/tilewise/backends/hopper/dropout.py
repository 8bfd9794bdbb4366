"""Dropout: which weights of a tile are kept, as bits in the registers of the threads that hold the weights.

The mask is that of `numerics.philox`: Philox4x32-10 of (k // 4, q, head, sequence) gives the words of four neighbouring keys. In
an accumulator those belong to two threads (keys along columns) or to four (keys along rows), so threads share the calls: each
makes as many as it holds weights, over 4, and uses all four words. Words become bits at once, 8 calls fill an integer, and one
exchange between lanes brings the bits of a whole tile to where the weights are.

What it costs: a call is 20 wide products, 20 logical operations and 8 for the bits, and 2 more apply the bit of each weight. On
64 lanes a clock and multiprocessor that is 3584 clocks for the 16384 weights of a 128×128 tile, half of it if products and logic
overlap perfectly; the tile's products at head dim 128 take 2048 in the forward. Calls are computed while products are in flight.
"""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon
from tilewise.backends.hopper.lists import tile_number


@gluon.constexpr_function
def philox_rounds(n, arg):
    """n calls: word i of call e in register ci_e. `arg`: four counters and two halves of the key, each by call."""
    lines = [".reg .b32 key0, key1, low0, high0, low1, high1;", ".reg .b64 wide;", ".reg .pred kept;"]
    lines += [f".reg .b32 {', '.join(f'c{i}_{e}' for e in range(n))};" for i in range(4)]
    lines += [f"mov.b32 c{i}_{e}, {arg[i][e]};" for i in range(4) for e in range(n)]
    lines += [f"mov.b32 key{i}, {arg[4 + i][0]};" for i in range(2)]
    for turn in range(10):
        if turn > 0:
            lines += ["add.u32 key0, key0, 0x9E3779B9;", "add.u32 key1, key1, 0xBB67AE85;"]
        for e in range(n):
            lines += [
                f"mul.wide.u32 wide, c0_{e}, 0xD2511F53;", "mov.b64 {low0, high0}, wide;",
                f"mul.wide.u32 wide, c2_{e}, 0xCD9E8D57;", "mov.b64 {low1, high1}, wide;",
                f"lop3.b32 c0_{e}, high1, c1_{e}, key0, 0x96;", f"mov.b32 c1_{e}, low1;",
                f"lop3.b32 c2_{e}, high0, c3_{e}, key1, 0x96;", f"mov.b32 c3_{e}, low0;",
            ]  # fmt: skip
    return lines


@gluon.constexpr_function
def _philox(n):
    """n calls: bit i of output e is set if word i of call e is no less than the threshold."""
    arg = [[f"${n * (1 + j) + e}" for e in range(n)] for j in range(7)]
    lines = philox_rounds(n, arg)
    for e in range(n):
        lines.append(f"mov.b32 ${e}, 0;")
        for i in range(4):
            lines += [f"setp.ge.u32 kept, c{i}_{e}, {arg[6][e]};", f"@kept or.b32 ${e}, ${e}, {1 << i};"]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _operands(n):
    return ",".join(["=&r"] * n + ["r"] * 7 * n)


@gluon.jit
def kept_of_four(fours, q, h, b, a, CALLS: gl.constexpr):
    """Four bits for each call: which of four neighbouring keys are kept. `fours` and `q` broadcast against each other. CALLS are
    computed together: they share the keys of the rounds, and take registers."""
    ASM: gl.constexpr = _philox(CALLS)
    OPERANDS: gl.constexpr = _operands(CALLS)
    low = gl.load(a.seed_ptr)
    high = gl.load(a.seed_ptr + 1)
    fours, q = gl.broadcast(fours, q)
    return gl.inline_asm_elementwise(
        ASM, OPERANDS, [fours, q, h, b, low, high, a.drop_below], dtype=gl.int32, is_pure=True, pack=CALLS
    )


@gluon.constexpr_function
def _calls_by_row(n):
    """The layout of calls [64 queries, N / 4]: of the threads that hold four keys of two rows, each takes a row."""
    registers = [[0, 2 << i] for i in range((n // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        registers, [[8, 0], [0, 1], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, n // 4]
    )


@gluon.constexpr_function
def _calls_by_column(m):
    """The layout of calls [16, M queries]: of the threads that hold four keys, and those 8 on, of two queries each takes one."""
    registers = [[0, 8 << i] for i in range((m // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        registers, [[0, 2], [0, 4], [0, 1], [2, 0], [1, 0]], [[4, 0], [8, 0]], [], [16, m]
    )


@gluon.constexpr_function
def _halfway():
    """The layout of words [16, 8 queries, 2, 2] when even and odd keys are where their weights are."""
    registers = [[0, 1, 0, 0], [0, 0, 0, 1]]
    lanes = [[0, 2, 0, 0], [0, 4, 0, 0], [0, 0, 1, 0], [2, 0, 0, 0], [1, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[4, 0, 0, 0], [8, 0, 0, 0]], [], [16, 8, 2, 2])


@gluon.constexpr_function
def accumulator_parts(n):
    """The layout of a [64, N] accumulator as [64, N / 8, 4, 2]."""
    registers = [[0, 0, 0, 1], [8, 0, 0, 0], *([0, 1 << i, 0, 0] for i in range((n // 8).bit_length() - 1))]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[16, 0, 0, 0], [32, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, n // 8, 4, 2])


@gluon.jit
def counted(N: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr):
    """0, 1, … along an axis of a tensor of rank 4, by register."""
    if axis == 1:
        return gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[None, :, None, None]
    elif axis == 2:
        return gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))[None, None, :, None]
    else:
        return gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]


@gluon.jit
def kept_by_row(row0, key0, b, h, a, N: gl.constexpr, C: gl.constexpr):
    """Bits of a tile [64 queries, N keys], as [64, 4] words: the thread's two rows. Of a list, key0 is the tile's place."""
    if C.LISTS is not None:
        key0 = tile_number(key0) * C.BLOCK_N
    LAYOUT: gl.constexpr = _calls_by_row(N)
    q = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    fours = key0 // 4 + gl.arange(0, N // 4, gl.SliceLayout(0, LAYOUT))
    CALLS: gl.constexpr = 2 if C.BLOCK_D == 256 or C.BLOCK_DV == 256 else 4
    kept = gl.reshape(kept_of_four(fours[None, :], q[:, None], h, b, a, CALLS), [64, N // 64, 8, 2])
    WORDS: gl.constexpr = kept.type.layout
    words = gl.sum(kept << (4 * counted(8, 2, WORDS)), 2)  # [64, N / 64, 2]
    both = gl.join(words & 0x33333333, (words >> 2) & 0x33333333)  # [64, N / 64, 2, 2]: keys 0 and 1, keys 2 and 3
    BOTH: gl.constexpr = both.type.layout
    both = gl.sum(both << (2 * counted(N // 64, 1, BOTH)), 1)  # [64, 2, 2]
    TARGET: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, accumulator_parts(N)))
    return gl.convert_layout(gl.reshape(both, [64, 4]), TARGET)


@gluon.jit
def kept_by_column(m, k0, b, h, a, C: gl.constexpr):
    """Bits of a tile [64 keys, 64 queries], as [64, 4, 2] words: the thread's four pairs of a row and a neighbouring query."""
    M: gl.constexpr = C.BLOCK_M
    first = m
    if C.LISTS is not None:
        first = tile_number(m.cursor) * M
    LAYOUT: gl.constexpr = _calls_by_column(M)
    fours = k0 // 4 + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
    q = first + gl.arange(0, M, gl.SliceLayout(0, LAYOUT))
    kept = gl.reshape(kept_of_four(fours[:, None], q[None, :], h, b, a, 2), [16, 1, 8, 8])
    WORDS: gl.constexpr = kept.type.layout
    words = gl.reshape(gl.sum(kept << (4 * counted(8, 2, WORDS)), 2), [16, 8])
    even = gl.join(words & 0x11111111, (words >> 1) & 0x11111111)
    odd = gl.join((words >> 2) & 0x11111111, (words >> 3) & 0x11111111)
    # [16, 8, 2, 2]: of key 2 · last + the one before. Two exchanges of one bit: shuffles, where one of two needs shared memory
    HALFWAY: gl.constexpr = _halfway()
    keys = gl.convert_layout(gl.join(even, odd), HALFWAY)
    TARGET: gl.constexpr = gl.SliceLayout(1, accumulator_parts(M))
    return gl.convert_layout(gl.reshape(gl.permute(keys, (0, 3, 2, 1)), [64, 4, 2]), TARGET)


@gluon.jit
def is_kept(words, N: gl.constexpr, BY_ROW: gl.constexpr):
    """The bits of a tile as [64, N / 8, 4, 2] booleans."""
    LAYOUT: gl.constexpr = accumulator_parts(N)
    eight = counted(N // 8, 1, LAYOUT)
    if BY_ROW:
        bit = 4 * (eight % 8) + 2 * (eight // 8) + counted(2, 3, LAYOUT)
        return ((words[:, None, :, None] >> bit) & 1) != 0
    else:
        bit = 4 * eight
        return ((words[:, None, :, :] >> bit) & 1) != 0


@gluon.jit
def dropped(x_tile, words, BY_ROW: gl.constexpr):
    """A tile [64, N] with 0 where a weight is dropped."""
    N: gl.constexpr = x_tile.type.shape[1]
    x_tile, kept = parts_of(x_tile), is_kept(words, N, BY_ROW)
    return whole(gl.where(kept, x_tile, 0.0), N)


@gluon.jit
def signed(x_tile, words, BY_ROW: gl.constexpr):
    """Weights, negative where they are dropped."""
    N: gl.constexpr = x_tile.type.shape[1]
    x_tile, kept = parts_of(x_tile), is_kept(words, N, BY_ROW)
    return whole(gl.where(kept, x_tile, -x_tile), N)


@gluon.jit
def parts_of(x_tile):
    N: gl.constexpr = x_tile.type.shape[1]
    LAYOUT: gl.constexpr = accumulator_parts(N)
    return gl.convert_layout(gl.reshape(x_tile, [64, N // 8, 4, 2]), LAYOUT, assert_trivial=True)


@gluon.jit
def whole(x_parts, N: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    return gl.convert_layout(gl.reshape(x_parts, [64, N]), LAYOUT, assert_trivial=True)
