"""Values of generated code that take part in arithmetic: `a + b * c` emits the instructions.

Letters used by every kernel in this package:

    L   lanes of one vector register           V   vectors side by side in a strip
    R   rows of a strip, R = L * V             J   keys (or columns) of a register tile
    a strip is R query rows, held transposed: lane = row, so max, sum and rescale are vertical

A Value is a number or a vector, a Strip is V vectors, a Pointer knows the type of its elements. Numbers of Python take the type
of the value they meet. Instructions are emitted in the order in which Python evaluates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
PTR, VOID = ir.PointerType(), ir.VoidType()


@dataclass(frozen=True)
class Real:
    """A floating-point type kernels compute in, with the constants exp2 needs."""

    type: Any
    bits: Any  # the integer type of the same width
    size: int
    mantissa: int
    degree: int  # of the exp2 polynomial, for an error below half an ulp
    highest: float
    tiny: float  # the least normal number
    floor: float  # the exponent at which 2**x is exactly zero by construction

    @property
    def lowest(self) -> float:
        """Stands for "no maximum yet"."""
        return -self.highest

    @property
    def magic(self) -> float:
        """Adding it rounds to an integer and leaves that integer in the low mantissa bits."""
        return 1.5 * 2.0**self.mantissa


LARGEST = (2 - 2.0**-23) * 2.0**127
FLOAT = Real(F32, I32, size=4, mantissa=23, degree=6, highest=LARGEST, tiny=2.0**-126, floor=-127.0)
DOUBLE = Real(F64, I64, size=8, mantissa=52, degree=12, highest=sys.float_info.max, tiny=2.0**-1022, floor=-1023.0)
REALS = {"float32": FLOAT, "float64": DOUBLE}
STORAGE = {"float32": F32, "float64": F64, "float16": HALF, "bfloat16": I16, "int8": I8, "float8_e4m3fn": I8}


# A kernel has some thousand constants, few of them different. llvmlite writes each object's text once, so equal ones are one.


@cache
def vector_of(kind: Any, lanes: int) -> Any:
    """The type of a vector; 0 lanes: of a scalar."""
    return ir.VectorType(kind, lanes) if lanes else kind


@cache
def integers(kind: Any, *values: int) -> Any:
    return ir.Constant(vector_of(kind, len(values)), [constant(value, kind) for value in values])


@cache
def _constant(kind: Any, value: int | str) -> Any:
    """Floats come in hexadecimal: 0 and -0 are different constants."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [_constant(kind.element, value)] * kind.count)
    return ir.Constant(kind, float.fromhex(value) if isinstance(value, str) else value)


def constant(value: float, kind: Any) -> Any:
    """A number as an LLVM constant; in every lane, if the type is a vector's."""
    return _constant(kind, float(value).hex() if is_float(kind) else int(value))


@cache
def undefined(kind: Any) -> Any:
    return ir.Constant(kind, ir.Undefined)


@cache
def is_float(kind: Any) -> bool:
    return (kind.element if isinstance(kind, ir.VectorType) else kind) in (HALF, F32, F64)


def size_of(kind: Any) -> int:
    """Bytes of an element."""
    if isinstance(kind, ir.IntType):
        return int(max(1, kind.width // 8))
    return 2 if kind == HALF else 4 if kind == F32 else 8


# -- values


def _operator(integer: str, real: str = "") -> Any:
    """`a ∘ b` and, with a number of Python on the left, its reflection."""
    return (
        lambda self, other: self.e.binary(integer, real, self, other),
        lambda self, other: self.e.binary(integer, real, other, self),
    )


def _comparison(sign: str) -> Any:
    return lambda self, other: self.e.compare(sign, self, other)


def _conversion(name: str) -> Any:
    return lambda self, kind: self.e.convert(name, self, kind)


class Arithmetic:
    """What values and strips have in common. Integers are signed. Comparisons of floats are those of C: with a NaN only `!=` is
    true. Conversions take the type of an element."""

    e: Any

    __add__, __radd__ = _operator("add", "fadd")
    __sub__, __rsub__ = _operator("sub", "fsub")
    __mul__, __rmul__ = _operator("mul", "fmul")
    __truediv__, __rtruediv__ = _operator("", "fdiv")
    __floordiv__, __rfloordiv__ = _operator("sdiv")  # rounds towards 0
    __mod__, __rmod__ = _operator("srem")
    __and__, __rand__ = _operator("and_")
    __or__, __ror__ = _operator("or_")
    __xor__, __rxor__ = _operator("xor")
    __lshift__, __rlshift__ = _operator("shl")
    __rshift__, __rrshift__ = _operator("ashr")
    __lt__, __le__, __gt__, __ge__ = (_comparison(sign) for sign in ("<", "<=", ">", ">="))
    __eq__, __ne__ = _comparison("=="), _comparison("!=")
    __hash__ = object.__hash__
    sext, zext, trunc, bitcast = (_conversion(name) for name in ("sext", "zext", "trunc", "bitcast"))
    fpext, fptrunc, to_real = _conversion("fpext"), _conversion("fptrunc"), _conversion("sitofp")
    to_integer = _conversion("fptosi")  # towards 0; undefined where there is no such integer

    def __invert__(self) -> Any:
        return self ^ -1

    def __neg__(self) -> Any:
        return self.e.negative(self)

    def __abs__(self) -> Any:
        return self.e.math("fabs", self)

    def __bool__(self) -> bool:
        raise TypeError("a value of generated code is not known while the code is generated")


class Value(Arithmetic):
    """An LLVM value and the function that is being emitted."""

    __slots__ = ("e", "raw")

    def __init__(self, e: Any, raw: Any) -> None:
        self.e, self.raw = e, raw

    @property
    def type(self) -> Any:
        return self.raw.type

    @property
    def lanes(self) -> int:
        """0: a scalar."""
        return self.raw.type.count if isinstance(self.raw.type, ir.VectorType) else 0

    def lshr(self, bits: int) -> Value:
        return Value(self.e, self.e.ir.lshr(self.raw, constant(bits, self.type)))

    def lane(self, index: int) -> Value:
        return Value(self.e, self.e.ir.extract_element(self.raw, constant(index, I32)))

    def with_lane(self, index: int, value: Value) -> Value:
        return Value(self.e, self.e.ir.insert_element(self.raw, value.raw, constant(index, I32)))

    def pick(self, order: Sequence[int], other: Value | None = None) -> Value:
        """Lanes in any order, of this vector and another behind it."""
        behind = undefined(self.type) if other is None else other.raw
        return Value(self.e, self.e.ir.shuffle_vector(self.raw, behind, integers(I32, *order)))

    def splat(self, lanes: int = 0) -> Value:
        """A scalar in every lane."""
        lanes = lanes or self.e.lanes
        return Value(self.e, undefined(vector_of(self.type, lanes))).with_lane(0, self).pick([0] * lanes)

    def splat_lane(self, index: int) -> Value:
        """One lane of a short vector in every lane of a whole register."""
        return self.pick([index] * self.e.lanes)

    def reduce(self, join: Callable[[Value, Value], Value]) -> Value:
        """All lanes joined in a fixed tree."""
        vector, n = self, self.lanes
        while n > 1:
            n //= 2
            vector = join(vector.pick(range(n)), vector.pick(range(n, 2 * n)))
        return vector.lane(0)

    def sum(self) -> Value:
        return self.reduce(lambda x, y: x + y)


class Strip(Arithmetic, tuple[Any, ...]):
    """V vectors, one number for each of R rows: what is done to a strip is done to one vector after the other."""

    @property
    def e(self) -> Any:
        return self[0].e


def elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function vector by vector where arguments are strips; what is not a strip is the same for every vector."""

    @wraps(function)
    def apply(*values: Any, **options: Any) -> Any:
        if Strip not in map(type, values):
            return function(*values, **options)
        count = next(len(value) for value in values if isinstance(value, Strip))
        rows = (value if isinstance(value, Strip) else (value,) * count for value in values)
        return Strip(function(*row, **options) for row in zip(*rows, strict=True))

    return apply


class Pointer:
    """An address and the type of what lies there. `p + n` is n elements on, `p[n]` loads or stores element n."""

    __slots__ = ("dtype", "e", "kind", "raw")

    def __init__(self, e: Any, raw: Any, kind: Any, dtype: str = "") -> None:
        self.e, self.raw, self.kind, self.dtype = e, raw, kind, dtype

    def of(self, kind: Any) -> Pointer:
        """The same address as that of other elements."""
        return Pointer(self.e, self.raw, kind)

    def stored(self, dtype: str) -> Pointer:
        return Pointer(self.e, self.raw, STORAGE[dtype], dtype)

    def __add__(self, offset: int | Value) -> Pointer:
        if isinstance(offset, int) and offset == 0:
            return self
        raw = self.e.ir.gep(self.raw, [self.e.raw(offset)], source_etype=self.kind)
        return Pointer(self.e, raw, self.kind, self.dtype)

    def __getitem__(self, offset: int | Value) -> Value:
        return self.vector(offset, 0)

    def vector(self, offset: int | Value = 0, lanes: int | None = None) -> Value:
        """So many adjacent elements; None: a register of the Real type's."""
        kind = vector_of(self.kind, self.e.lanes if lanes is None else lanes)
        return Value(self.e, self.e.ir.load((self + offset).raw, typ=kind, align=size_of(self.kind)))

    def strip(self, offset: int | Value = 0) -> Strip:
        return Strip((self + offset).vector(i * self.e.lanes) for i in range(self.e.tile.vectors))

    def fetch(self, offset: int | Value = 0, lanes: int = 0) -> Any:
        """Elements of a stored dtype as the Real type: one, or `lanes` adjacent ones."""
        return self.e.widen(self.vector(offset, lanes), self.dtype)

    def fetch_run(self, offset: int | Value, vectors: int) -> list[Any]:
        """So many registers of adjacent elements of a stored dtype as the Real type."""
        start, lanes = self + offset, self.e.lanes
        several = self.e.vectors_of_a_load(self.dtype)
        several = 1 if vectors % several else several
        found = []
        for i in range(0, vectors, several):
            found += self.e.widen_several(start.vector(i * lanes, several * lanes), self.dtype)
        return found

    def __setitem__(self, offset: int | Value, value: float | Value | Strip) -> None:
        if isinstance(value, Strip):
            for i, vector in enumerate(value):
                (self + offset)[i * self.e.lanes] = vector
            return
        raw = self.e.raw(value, self.kind)
        kind = raw.type.element if isinstance(raw.type, ir.VectorType) else raw.type
        self.e.ir.store(raw, (self + offset).raw, align=size_of(kind))

    @property
    def address(self) -> Value:
        return Value(self.e, self.e.ir.ptrtoint(self.raw, I64))


def gather(scalars: list[Any]) -> Strip:
    """R scalars as V vectors."""
    e, vectors = scalars[0].e, []
    for i in range(e.tile.vectors):
        vector = Value(e, undefined(vector_of(scalars[0].type, e.lanes)))
        for lane in range(e.lanes):
            vector = vector.with_lane(lane, scalars[i * e.lanes + lane])
        vectors.append(vector)
    return Strip(vectors)


def joined_lanes(parts: Sequence[Value]) -> Value:
    """Short vectors one behind the other."""
    while len(parts) > 1:
        both = range(2 * parts[0].lanes)
        parts = [x.pick(both, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
