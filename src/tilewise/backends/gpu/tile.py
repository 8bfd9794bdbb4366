"""The tile operations that the kernels are made of: find the work tile, load, store, multiply, scores, dropout.

Letters: M queries, N keys, D and DV head dims; `q`, `k` are index tiles of positions within the sequence that broadcast against
each other, so one function serves S = QKᵀ and its transpose. Scores inside kernels are in units of log 2.

With FP16_SPLIT, products of fp32 tiles go through the 16-bit tensor cores: a number is the sum of two of fp16 (11 + 11 bits and
a sign), and the three largest of the four products of two such sums are enough. fp16 has no exponents to spare, so every token
has a power of two as its scale. A tile is then a tuple: high parts, low parts, a column of scales. Operands come split from
memory, their parts one after another along the batch and the scales behind them. Weights are split in registers: what they
multiply has a scale for each of their columns, so that is multiplied in first, and then each row of weights gets a scale of its
own. Tokens share no scale, for one that a row must not see would cost the others their bits.

The tensor cores cut off what does not fit their accumulator, always towards 0, so a sum over a whole sequence would shrink: each
tile's products are summed on their own and added by the fp32 units, which round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.structs import Head, SeqInfo

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_sequence(cu, batch, tile, BLOCK: tl.constexpr, UNIT: tl.constexpr = 1):
    """The packed sequence that owns `tile`, and the tile's number in it. A token has UNIT rows.

    Sequence b owns the tiles from UNIT · cu[b] // BLOCK + b on: at least as many as it fills, computed without knowing the
    lengths on the host. Tiles beyond a sequence's end have nothing to do.
    """
    lo = 0
    hi = batch
    # the owner is in [lo, hi); each step waits for memory, so the last 128 are loaded together
    while hi - lo > 128:
        mid = (lo + hi) // 2
        mine = tl.load(cu + mid) * UNIT // BLOCK + mid <= tile
        lo = tl.where(mine, mid, lo)
        hi = tl.where(mine, hi, mid)
    b = lo + tl.arange(0, 128)
    first = tl.load(cu + b, mask=b < hi, other=0) * UNIT // BLOCK + b
    mine = (b < hi) & (first <= tile)
    return lo + tl.sum(mine.to(tl.int32), 0) - 1, tile - tl.max(tl.where(mine, first, 0), 0)


@triton.jit
def work_tile(a, pid, cu, length, heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr, C: tl.constexpr):
    """A program's tile, head and sequence: neighbours share a sequence, then they are heads of it.

    For that, packed sequences count as being of average length. All tiles of one head first would leave the rows of memory, in
    which heads lie side by side, half read.
    """
    if C.VARLEN:
        tiles = length // BLOCK + a.batch  # an upper bound for all sequences together
        average = tl.cdiv(tiles, a.batch)
        first = pid // (average * heads) * average
        some = tl.minimum(average, tiles - first)
        rest = pid - first * heads
        tile, h, b = first + rest % some, rest // some, pid * 0
    else:
        tiles = tl.cdiv(length, BLOCK)
        tile, h, b = pid % tiles, pid // tiles % heads, pid // tiles // heads
    if LAST_FIRST:
        tile = tiles - 1 - tile
    if C.VARLEN:
        b, tile = find_sequence(cu, a.batch, tile, BLOCK, C.PACK)
    return tile, h, b


@triton.jit
def seq_info(a, b, h, C: tl.constexpr):
    """The sequence b as query head h (a number or a column of numbers) sees it."""
    group = a.heads // a.kv_heads
    if C.VARLEN:
        q_start = tl.load(a.cu_q + b)
        k_start = tl.load(a.cu_k + b)
        q_len = tl.load(a.cu_q + b + 1) - q_start
        k_len = tl.load(a.cu_k + b + 1) - k_start
        return SeqInfo(b, h, h // group, b * 0, q_start, k_start, q_len, k_len)
    else:
        return SeqInfo(b, h, h // group, b, b * 0, b * 0, a.len_q, a.len_k)


@triton.jit
def row_block(length, heads, BLOCK: tl.constexpr, PIECES: tl.constexpr = 1):
    """For kernels that go over rows alone: this program's rows, which of them exist, its batch row, head, and 0. PIECES programs
    share a block."""
    pid = tl.program_id(0) // PIECES
    tiles = tl.cdiv(length, BLOCK)
    rows = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    h = pid // tiles % heads
    row = pid // tiles // heads
    return rows, rows < length, row, h, pid * 0


@triton.jit
def base(head):
    """The address of a head's first token (64 bits: any tensor that fits in memory)."""
    view = head.view
    return (
        view.ptr
        + head.row.to(tl.int64) * view.stride_b
        + head.h.to(tl.int64) * view.stride_h
        + head.start.to(tl.int64) * view.stride_s
    )


@triton.jit
def rows_at(at, view, rows, ok, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of the matrix at an address as a tile [rows, PADDED]; 0 where not `ok` (None: all are) and beyond WIDTH."""
    cols = tl.arange(0, PADDED)
    where = at + rows[:, None] * view.stride_s + cols[None, :] * view.stride_d
    if ok is None:
        if WIDTH == PADDED:
            return tl.load(where)
        else:
            return tl.load(where, mask=(cols < WIDTH)[None, :], other=0.0)
    elif WIDTH == PADDED:
        return tl.load(where, mask=ok[:, None], other=0.0)
    else:
        return tl.load(where, mask=ok[:, None] & (cols < WIDTH)[None, :], other=0.0)


@triton.jit
def load_rows(head, rows, ok, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    return rows_at(base(head), head.view, rows, ok, WIDTH, PADDED)


@triton.jit
def load_stream(a, head, n, ok, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr):
    """ROWS tokens of a streamed operand from token n on, split where it is fp32; `ok` None: all its tokens exist."""
    high = _streamed(head, n, ok, ROWS, WIDTH, PADDED)
    if C.FP16_SPLIT:
        batch = batch_rows(a, C)
        low = _streamed(Head(head.view, head.desc, head.row + batch, head.h, head.start), n, ok, ROWS, WIDTH, PADDED)
        at = split_scales(head, batch) + head.start + n + tl.arange(0, ROWS)
        if ok is None:
            scale = tl.load(at)
        else:
            scale = tl.load(at, mask=ok, other=1.0)
        return high, low, scale
    else:
        return high


@triton.jit
def _streamed(head, n, ok, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """By the tensor map if there is one and all tokens exist."""
    if ok is None and head.desc is not None:
        return head.desc.load([head.row, head.h, head.start + n, 0]).reshape(ROWS, PADDED)
    else:
        at = base(head) + tl.cast(n, tl.int64) * head.view.stride_s
        return rows_at(at, head.view, tl.arange(0, ROWS), ok, WIDTH, PADDED)


@triton.jit
def load_resident(a, head, rows, ok, WIDTH: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr):
    """Rows of a head (or of a column of heads) that stay, split where they are fp32."""
    at = base(head)
    if C.PACK > 1:
        at = at[:, None]
    high = rows_at(at, head.view, rows, ok, WIDTH, PADDED)
    if C.FP16_SPLIT:
        batch = batch_rows(a, C)
        low = rows_at(at + batch * head.view.stride_b, head.view, rows, ok, WIDTH, PADDED)
        scales = split_scales(head, batch) + head.start
        return high, low, tl.load(scales + rows, mask=ok, other=1.0)
    else:
        return high


@triton.jit
def split_scales(head, batch):
    """Where the scales of a head begin: behind the two parts, each of which has `batch` rows along the batch."""
    parts = head.view
    behind = (parts.ptr + 2 * batch * parts.stride_b).to(tl.pointer_type(tl.float32), bitcast=True)
    return behind + (head.row.to(tl.int64) * parts.stride_b + head.h.to(tl.int64) * parts.stride_h) // parts.stride_s


@triton.jit
def batch_rows(a, C: tl.constexpr):
    """Rows along the batch that one tensor takes."""
    if C.VARLEN:
        return 1
    else:
        return a.batch


@triton.jit
def any_infinite(tile):
    """Does a tile hold an infinity or a NaN?"""
    # over all at once: Blackwell's tensor memory allows no other way
    return tl.max((tile * 0.0 != 0.0).to(tl.int32)) > 0


@triton.jit
def store_rows(at, view, rows, ok, tile, WIDTH: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr):
    """Write a tile's rows that are `ok` to the matrix at an address, in its own dtype."""
    cols = tl.arange(0, PADDED)
    where = at + rows[:, None] * view.stride_s + cols[None, :] * view.stride_d
    tl.store(where, cast(tile, at.dtype.element_ty, C), mask=ok[:, None] & (cols < WIDTH)[None, :])


@triton.jit
def cast(tile, dtype: tl.constexpr, C: tl.constexpr):
    """To `dtype`, rounding to nearest. The interpreter would truncate on the way to bf16."""
    if C.INTERPRET and dtype == tl.bfloat16 and tile.dtype == tl.float32:
        bits = tile.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # what is left of a 0 would count as a subnormal
        tile = tl.where(tile != tile, tile, bits.to(tl.float32, bitcast=True))
    return tile.to(dtype)


@triton.jit
def scale_of(size, HEADROOM: tl.constexpr):
    """A power of two not far below a column of sizes, and its inverse: a size over it lies in [2^HEADROOM, 2^(HEADROOM + 1)).

    Neither is 0 or infinite, whatever the size; tiny sizes give smaller ones.
    """
    exponent = tl.minimum((size.to(tl.uint32, bitcast=True) >> 23).to(tl.int32), 254)
    exponent = tl.maximum(exponent - HEADROOM, 1)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp16_split(tile):
    """An fp32 tile as high part, low part and scales, each part the nearest to what is left; an infinity or NaN stays high."""
    size = tl.abs(tile)
    # room for what scores of huge and tiny operands make on the way: 2⁶ of 2¹⁵
    scale, inverse = scale_of(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 6)
    tile *= inverse[:, None]
    high = tile.to(tl.float16)
    rest = tile - high.to(tl.float32)
    return high, tl.where(rest == rest, rest, 0.0).to(tl.float16), scale


@triton.jit
def fp16_split_weights(tile):
    """The same for weights, which are finite: cutting bits off is cheaper than rounding."""
    scale, inverse = scale_of(tl.max(tl.abs(tile), 1), 13)
    tile *= inverse[:, None]
    high = (tile.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return high.to(tl.float16), (tile - high).to(tl.float16), scale


@triton.jit
def mma(x, y, acc, C: tl.constexpr):
    """acc + x·y, summed in fp32. The interpreter multiplies bf16 as raw bits, so there tiles are widened first."""
    if C.INTERPRET:
        return acc + tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(x, y, acc, input_precision=C.PRECISION)


@triton.jit
def split_dot(x, y, C: tl.constexpr):
    """x·y of split operands, scales aside, the small products first."""
    acc = tl.full([x[0].shape[0], y[0].shape[1]], 0.0, tl.float32)
    acc = mma(x[1], y[0], acc, C)
    acc = mma(x[0], y[1], acc, C)
    return mma(x[0], y[0], acc, C)


@triton.jit
def dot(weights_tile, y, acc, C: tl.constexpr):
    """acc + weights·y: fp32 weights, in the precision of y."""
    if C.FP16_SPLIT:
        x = fp16_split_weights(weights_tile * y[2][None, :])
        return acc + split_dot(x, y, C) * x[2][:, None]
    else:
        return mma(cast(weights_tile, y.dtype, C), y, acc, C)


@triton.jit
def product(x, y, C: tl.constexpr):
    """x·yᵀ in fp32 as a tile and factors: the tile's rows are still to be multiplied by these, which fold into others."""
    if C.FP16_SPLIT:
        return split_dot(x, (tl.trans(y[0]), tl.trans(y[1])), C) * y[2][None, :], x[2]
    elif C.INTERPRET:
        return tl.dot(x.to(tl.float32), tl.trans(y).to(tl.float32), input_precision="ieee"), 1.0
    else:
        return tl.dot(x, tl.trans(y), input_precision=C.PRECISION), 1.0


@triton.jit
def per_row(factors, C: tl.constexpr):
    """The factors of a product's rows as they broadcast to its tile."""
    if C.FP16_SPLIT or C.PAGES.Q_FACTORS:
        return factors[:, None]
    else:
        return factors


@triton.jit
def tanh(x):
    """Accurate to rounding near 0 too, where (1 - e) / (1 + e) would cancel."""
    z = x * x
    small = x * (1.0 + z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835)))))
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(z < 0.06, small, tl.where(x < 0, -large, large))


@triton.jit
def load_bias(a, seq, q, k):
    """The additive bias over the tile q × k in fp32; -inf beyond the sequence, where nobody sees anything."""
    # positions of a bias count within the sequence, packed or not
    at = base(Head(a.bias, None, seq.b, seq.h, seq.b * 0)) + q.to(tl.int64) * a.bias.stride_s + k * a.bias.stride_d
    return tl.load(at, mask=(q < seq.len_q) & (k < seq.len_k), other=float("-inf")).to(tl.float32)


@triton.jit
def exponential(x, bias_tile):
    """e to the score x, in the unit of `scores`."""
    if bias_tile is None:
        return tl.exp2(x)
    else:
        return tl.exp2(x * LOG2E)


@triton.jit
def scores(a, seq, s_tile, bias_tile, q, k, C: tl.constexpr):
    """Products q·k as scores, and the slope dscore/d(scale·q·k) where a softcap bends them (else 1).

    In units of log 2 without a bias; in natural units with one, since models write masks as the lowest finite number, which
    leaves fp32 when multiplied by log2(e). A bias of -inf hides a key, whatever the key holds.
    """
    UNIT: tl.constexpr = LOG2E if bias_tile is None else 1.0
    slope = 1.0
    if C.SOFTCAP:
        t_tile = tanh(s_tile * (a.scale / a.softcap))
        slope = 1.0 - t_tile * t_tile
        x_tile = t_tile * (a.softcap * UNIT)
    else:
        x_tile = s_tile * (a.scale * UNIT)
    if bias_tile is not None:
        x_tile = tl.where(bias_tile == float("-inf"), float("-inf"), x_tile + bias_tile)
    if a.alibi is not None:
        steepness = tl.load(a.alibi.ptr + seq.b.to(tl.int64) * a.alibi.stride_b + seq.h * a.alibi.stride_h)
        if a.origins is None:
            ahead = seq.len_k - seq.len_q
        else:
            ahead = origin(a, seq, 0) - origin(a, seq, 1)
        x_tile -= (steepness * UNIT) * tl.abs(q + ahead - k).to(tl.float32)
    return x_tile, slope


@triton.jit
def origin(a, seq, SIDE: tl.constexpr):
    """Where in the whole the sequence begins: along queries, keys, heads (0, 1, 2), or (3) the number of the sequence."""
    return tl.load(a.origins + seq.b * 4 + SIDE)


@triton.jit
def philox_words(a, seq, q, fours):
    """The random words of keys 4·fours, … 4·fours + 3, which count in the whole; q does not."""
    seed = tl.load(a.seed_ptr)
    none = (q + fours) * 0
    if a.origins is None:
        return tl.philox(seed, fours + none, q + none, seq.h + none, seq.b + none)
    else:
        rows, head, b = q + origin(a, seq, 0), seq.h + origin(a, seq, 2), origin(a, seq, 3)
        return tl.philox(seed, fours + none, rows + none, head + none, b + none)


@triton.jit
def dropout_keep(a, seq, q, n, C: tl.constexpr):
    """1 for weights of the keys from n on that survive dropout, else 0: Philox4x32-10 of (k // 4, q, head, batch), word k % 4.

    One counter serves four neighbouring keys, so words are drawn for a quarter of the tile and then spread over it. They are
    numbers, not booleans: triton 3.9 cannot move single bits between layouts on AMD's GPUs.
    """
    below = a.drop_below.to(tl.uint32)
    QUARTER: tl.constexpr = C.BLOCK_N // 4
    if a.origins is not None:
        n += origin(a, seq, 1)
    if q.shape[0] == 1:
        fours = (n // 4 + tl.arange(0, QUARTER))[:, None]
    else:
        fours = (n // 4 + tl.arange(0, QUARTER))[None, :]
    w0, w1, w2, w3 = philox_words(a, seq, q, fours)
    if a.origins is not None:
        if n % 4 != 0:  # the tile's fours begin inside those of the whole
            x0, x1, x2, _ = philox_words(a, seq, q, fours + 1)
            if n % 4 == 1:
                w0, w1, w2, w3 = w1, w2, w3, x0
            elif n % 4 == 2:
                w0, w1, w2, w3 = w2, w3, x0, x1
            else:
                w0, w1, w2, w3 = w3, x0, x1, x2
    even = tl.join((w0 >= below).to(tl.int8), (w2 >= below).to(tl.int8))
    odd = tl.join((w1 >= below).to(tl.int8), (w3 >= below).to(tl.int8))
    words = tl.join(even, odd)  # [..., 2, 2]: words 0 1 2 3 in order
    if q.shape[0] == 1:
        return tl.permute(words, (0, 2, 3, 1)).reshape(C.BLOCK_N, C.BLOCK_M).to(tl.float32)
    else:
        return words.reshape(C.BLOCK_M, C.BLOCK_N).to(tl.float32)
