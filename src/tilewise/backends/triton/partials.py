"""Rows of partial attention where ranks or calls share them: merged in place, and the row sums that gradients want.

Each is one pass over memory; composed of torch's operators they would be four to eight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.gpu.merge import add_part, normalized
from tilewise.backends.gpu.structs import Head, View
from tilewise.backends.gpu.tile import base, load_rows, store_rows


class Numbers(NamedTuple):
    """One for each row, (B, H, rows)."""

    ptr: Any
    stride_b: int
    stride_h: int
    stride_s: int


class RowArgs(NamedTuple):
    """Two matrices (B, H, rows, DV), and numbers of their rows."""

    a: View
    b: View
    a_numbers: Numbers
    b_numbers: Numbers | None
    rows: int
    heads: int
    none: None = None  # beside it triton 3.6 learns of constants among the strides


class RowConfig(NamedTuple):
    DV: int = 64
    BLOCK_DV: int = 64
    BLOCK_M: int = 32
    INTERPRET: bool = False


@triton.jit
def own_rows(a, C: tl.constexpr):
    """A program's rows, those that exist, its head and batch entry, and a zero."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(a.rows, C.BLOCK_M)
    rows = pid % tiles * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    return rows, rows < a.rows, pid // tiles % a.heads, pid // tiles // a.heads, pid * 0


@triton.jit
def numbers_at(numbers, row, h, rows):
    """Where the numbers of rows stand."""
    first = row.to(tl.int64) * numbers.stride_b + h.to(tl.int64) * numbers.stride_h
    return numbers.ptr + first + rows * numbers.stride_s


@triton.jit
def merge_rows_kernel(a, C: tl.constexpr):
    """(a, a_numbers) = merge of both parts (out, lse)."""
    rows, ok, h, row, zero = own_rows(a, C)
    acc = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
    l = tl.full([C.BLOCK_M], 0.0, tl.float32)
    m = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    at = numbers_at(a.a_numbers, row, h, rows)
    own_tile = load_rows(Head(a.a, None, row, h, zero), rows, ok, C.DV, C.BLOCK_DV)  # [M, DV]
    acc, l, m = add_part(acc, l, m, own_tile, tl.load(at, mask=ok, other=float("-inf")))
    other = tl.load(numbers_at(a.b_numbers, row, h, rows), mask=ok, other=float("-inf"))
    part_tile = load_rows(Head(a.b, None, row, h, zero), rows, ok, C.DV, C.BLOCK_DV)  # [M, DV]
    acc, l, m = add_part(acc, l, m, part_tile.to(tl.float32), other)
    out_tile, lse = normalized(acc, l, m)
    store_rows(base(Head(a.a, None, row, h, zero)), a.a, rows, ok, out_tile, C.DV, C.BLOCK_DV, C)
    tl.store(at, lse, mask=ok)


@triton.jit
def row_products_kernel(a, C: tl.constexpr):
    """a_numbers = rowsum(a ∘ b) where b is not 0."""
    rows, ok, h, row, zero = own_rows(a, C)
    dout_tile = load_rows(Head(a.a, None, row, h, zero), rows, ok, C.DV, C.BLOCK_DV).to(tl.float32)  # [M, DV]
    out_tile = load_rows(Head(a.b, None, row, h, zero), rows, ok, C.DV, C.BLOCK_DV).to(tl.float32)
    products = tl.where(out_tile == 0.0, 0.0, dout_tile * out_tile)
    tl.store(numbers_at(a.a_numbers, row, h, rows), tl.sum(products, 1), mask=ok)
