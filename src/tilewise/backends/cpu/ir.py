"""A small vocabulary over llvmlite: vectors, loops with carried values, typed memory.

Letters used by every kernel in this package:

    L   lanes of one vector register           V   vectors side by side in a strip
    R   rows of a strip, R = L * V             J   keys (or columns) of a register tile
    a strip is R query rows, held transposed: lane = row, so max, sum and rescale are vertical
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir
from llvmlite.ir.instructions import LoadInstr

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
PTR, VOID = ir.PointerType(), ir.VoidType()

Value = Any  # llvmlite values are untyped for mypy


# A kernel has some thousand constants, few of them different. llvmlite writes each object's text once, so equal ones are one.


@cache
def vector_of(kind: Any, lanes: int) -> Any:
    return ir.VectorType(kind, lanes)


@cache
def whole(kind: Any, value: int) -> Value:
    return ir.Constant(kind, value)


@cache
def wholes(kind: Any, *values: int) -> Value:
    return ir.Constant(vector_of(kind, len(values)), [whole(kind, value) for value in values])


@cache
def _broadcast(kind: Any, value: str, lanes: int) -> Value:
    """The value is written in hexadecimal: 0 and -0 are different constants."""
    return ir.Constant(vector_of(kind, lanes), [ir.Constant(kind, float.fromhex(value))] * lanes)


@cache
def unknown(kind: Any) -> Value:
    return ir.Constant(kind, ir.Undefined)


@dataclass(frozen=True)
class Real:
    """A floating-point type kernels compute in, with the constants exp2 needs."""

    type: Any
    bits: Any  # the integer type of the same width
    size: int
    mantissa: int
    suffix: str
    degree: int  # of the exp2 polynomial, for an error below half an ulp
    highest: float

    @property
    def lowest(self) -> float:
        """Stands for "no maximum yet"."""
        return -self.highest

    @property
    def magic(self) -> float:
        """Adding it rounds to an integer and leaves that integer in the low mantissa bits."""
        return 1.5 * 2.0**self.mantissa

    @property
    def tiny(self) -> float:
        """The least normal number."""
        return 2.0 ** (-126 if self.size == 4 else -1022)

    @property
    def floor(self) -> float:
        """The exponent at which 2**x is exactly zero by construction."""
        return -127.0 if self.size == 4 else -1023.0


FLOAT = Real(F32, I32, 4, 23, "f32", 6, (2 - 2.0**-23) * 2.0**127)
DOUBLE = Real(F64, I64, 8, 52, "f64", 12, sys.float_info.max)
REALS = {"float32": FLOAT, "float64": DOUBLE}
STORAGE = {"float32": F32, "float64": F64, "float16": HALF, "bfloat16": I16}
ITEMSIZE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


class Loop:
    """`for i in range(start, stop, step)` with loop-carried values; after the loop `values` are the last ones."""

    def __init__(self, index: Value, values: list[Value]) -> None:
        self.index = index
        self.values = values
        self.following: list[Value] = []

    def carry(self, values: Sequence[Value]) -> None:
        self.following = list(values)


class _VolatileLoad(LoadInstr):  # type: ignore[misc]
    """llvmlite has no volatile accesses; LLVM's text form of one differs by a word."""

    def descr(self, buf: list[str]) -> None:
        super().descr(buf)
        buf[-1] = buf[-1].replace("load ", "load volatile ", 1)


class Emit(ir.IRBuilder):  # type: ignore[misc]
    """An IR builder that speaks in 64-bit indices, byte-addressed pointers and vectors of one Real type."""

    def __init__(self, block: Any, real: Real, lanes: int, arch: str) -> None:
        super().__init__(block)
        self.real, self.lanes, self.arch = real, lanes, arch

    # -- constants and integers
    def word(self, value: int | Value, kind: Any = I64) -> Value:
        return whole(kind, value) if isinstance(value, int) else value

    def num(self, value: float | Value) -> Value:
        return ir.Constant(self.real.type, value) if isinstance(value, int | float) else value

    def plus(self, *terms: int | Value) -> Value:
        total = self.word(terms[0])
        for term in terms[1:]:
            total = self.add(total, self.word(term))
        return total

    def minus(self, left: int | Value, right: int | Value) -> Value:
        return self.sub(self.word(left), self.word(right))

    def times(self, left: int | Value, right: int | Value) -> Value:
        return self.mul(self.word(left), self.word(right))

    def over(self, left: int | Value, right: int | Value) -> Value:
        return self.sdiv(self.word(left), self.word(right))

    def rest(self, left: int | Value, right: int | Value) -> Value:
        return self.srem(self.word(left), self.word(right))

    def less(self, left: int | Value, right: int | Value) -> Value:
        return self.icmp_signed("<", self.word(left), self.word(right))

    def least(self, left: int | Value, right: int | Value) -> Value:
        left, right = self.word(left), self.word(right)
        return self.select(self.icmp_signed("<", left, right), left, right)

    def most(self, left: int | Value, right: int | Value) -> Value:
        left, right = self.word(left), self.word(right)
        return self.select(self.icmp_signed(">", left, right), left, right)

    def round_up(self, value: Value, multiple: int) -> Value:
        """The next multiple at or above a value that is not negative."""
        if multiple & (multiple - 1) == 0:
            return self.and_(self.plus(value, multiple - 1), self.word(-multiple))
        return self.times(self.over(self.plus(value, multiple - 1), multiple), multiple)

    def round_down(self, value: Value, multiple: int) -> Value:
        if multiple & (multiple - 1) == 0:
            return self.and_(value, self.word(-multiple))
        return self.times(self.over(value, multiple), multiple)

    # -- control flow
    @contextmanager
    def loop(
        self, start: int | Value, stop: int | Value, step: int | Value = 1, carry: Sequence[Value] = ()
    ) -> Iterator[Loop]:
        before, function = self.block, self.function
        head, body, done = (function.append_basic_block(n) for n in ("head", "body", "done"))
        start, stop, step = self.word(start), self.word(stop), self.word(step)
        self.branch(head)
        self.position_at_end(head)
        index = self.phi(start.type)
        index.add_incoming(start, before)
        values = [self.phi(v.type) for v in carry]
        for phi, value in zip(values, carry, strict=True):
            phi.add_incoming(value, before)
        self.cbranch(self.icmp_signed("<", index, stop), body, done)
        self.position_at_end(body)
        loop = Loop(index, values)
        yield loop
        last = self.block
        index.add_incoming(self.add(index, step), last)
        for phi, value in zip(values, loop.following, strict=True):
            phi.add_incoming(value, last)
        self.branch(head)
        self.position_at_end(done)

    # -- memory: offsets in elements, pointers untyped
    def at(self, pointer: Value, offset: int | Value, kind: Any = None) -> Value:
        if isinstance(offset, int) and offset == 0:
            return pointer
        return self.gep(pointer, [self.word(offset)], source_etype=kind or self.real.type)

    def get(self, pointer: Value, offset: int | Value = 0, kind: Any = None) -> Value:
        kind = kind or self.real.type
        return self.load(self.at(pointer, offset, kind), typ=kind, align=_size(kind))

    def put(self, value: Value, pointer: Value, offset: int | Value = 0) -> None:
        self.store(value, self.at(pointer, offset, value.type), align=_size(value.type))

    def vget(self, pointer: Value, offset: int | Value = 0, kind: Any = None, lanes: int = 0) -> Value:
        kind = kind or self.real.type
        return self.load(self.at(pointer, offset, kind), typ=vector_of(kind, lanes or self.lanes), align=_size(kind))

    def vput(self, value: Value, pointer: Value, offset: int | Value = 0) -> None:
        kind = value.type.element
        self.store(value, self.at(pointer, offset, kind), align=_size(kind))

    def prefetch(self, address: Value) -> None:
        """Ask for the cache line at an address, to be read and kept in every level."""
        self.intrinsic("llvm.prefetch.p0", VOID, [address, I32(0), I32(3), I32(1)])

    # -- vectors
    def vtype(self, kind: Any = None, lanes: int = 0) -> Any:
        return vector_of(kind or self.real.type, lanes or self.lanes)

    def const(self, value: float, lanes: int = 0) -> Value:
        return _broadcast(self.real.type, float(value).hex(), lanes or self.lanes)

    def addend(self, value: float, lanes: int = 0) -> Value:
        """A constant about to be an FMA's addend.

        NEON's FMLA overwrites its addend, so a constant held in a register is copied first, on the pipes that FMAs need. A
        fresh load runs on the idle load ports instead: it halves the time of a polynomial.
        """
        if self.arch != "aarch64":
            return self.const(value, lanes)
        vector = self.const(value, lanes)
        name = f"addend.{vector.type.count}.{float(value).hex()}".replace("-", "n").replace("+", "p")
        table = self.module.globals.get(name)
        if table is None:
            table = ir.GlobalVariable(self.module, vector.type, name)
            table.linkage, table.global_constant, table.initializer = "internal", True, vector
        return self.fresh(table, vector.type)

    def fresh(self, pointer: Value, kind: Any) -> Value:
        """A load that is neither hoisted nor merged with another."""
        load = _VolatileLoad(self.block, pointer, typ=kind)
        load.align = _size(kind.element)
        self._insert(load)
        return load

    def iconst(self, values: int | Sequence[int], kind: Any = None, lanes: int = 0) -> Value:
        kind = kind or self.real.bits
        many = [values] * (lanes or self.lanes) if isinstance(values, int) else list(values)
        return wholes(kind, *many)

    def splat(self, value: Value, lanes: int = 0) -> Value:
        n = lanes or self.lanes
        return self.pick(self.insert_element(unknown(vector_of(value.type, n)), value, whole(I32, 0)), [0] * n)

    def pick(self, vector: Value, order: Sequence[int], other: Value = None) -> Value:
        other = unknown(vector.type) if other is None else other
        return self.shuffle_vector(vector, other, wholes(I32, *order))

    def lane(self, vector: Value, index: int) -> Value:
        """One lane of a short vector, broadcast over a whole register."""
        return self.pick(vector, [index] * self.lanes)

    def intrinsic(self, name: str, result: Any, args: Sequence[Value], flags: Sequence[str] = ()) -> Value:
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, [a.type for a in args]), name)
        return self.call(function, list(args), fastmath=flags)

    def _named(self, stem: str, like: Any) -> str:
        if isinstance(like, ir.VectorType):
            return f"llvm.{stem}.v{like.count}{'f32' if like.element == F32 else 'f64'}"
        return f"llvm.{stem}.{'f32' if like == F32 else 'f64'}"

    def mad(self, left: Value, right: Value, addend: Value) -> Value:
        """left * right + addend, rounded once."""
        return self.intrinsic(self._named("fma", left.type), left.type, [left, right, addend])

    def top(self, left: Value, right: Value) -> Value:
        """Maximum that ignores a NaN: a wrong maximum is harmless, the NaN itself arrives through exp2."""
        return self.intrinsic(self._named("maxnum", left.type), left.type, [left, right], ("nnan", "nsz"))

    def at_least(self, value: Value, bound: Value) -> Value:
        """max(value, bound) that keeps a NaN: one instruction on both families."""
        if self.arch == "aarch64":
            return self.intrinsic(self._named("maximum", value.type), value.type, [value, bound])
        return self.select(self.fcmp_ordered(">", bound, value), bound, value)

    def at_most(self, value: Value, bound: Value) -> Value:
        """min(value, bound) that keeps a NaN."""
        if self.arch == "aarch64":
            return self.intrinsic(self._named("minimum", value.type), value.type, [value, bound])
        return self.select(self.fcmp_ordered("<", bound, value), bound, value)

    def ceiling(self, value: Value) -> Value:
        return self.intrinsic(self._named("ceil", value.type), value.type, [value])

    def sum(self, vector: Value) -> Value:
        """All lanes added in a fixed tree."""
        n = vector.type.count
        while n > 1:
            n //= 2
            vector = self.fadd(self.pick(vector, range(n)), self.pick(vector, range(n, 2 * n)))
        return self.extract_element(vector, whole(I32, 0))

    def peak(self, vector: Value) -> Value:
        """The largest lane."""
        n = vector.type.count
        while n > 1:
            n //= 2
            vector = self.top(self.pick(vector, range(n)), self.pick(vector, range(n, 2 * n)))
        return self.extract_element(vector, whole(I32, 0))

    # -- storage types
    def widen(self, value: Value, dtype: str) -> Value:
        """A stored value (scalar or vector) in the kernel's Real type."""
        vector = isinstance(value.type, ir.VectorType)
        lanes = value.type.count if vector else 0
        target = self.vtype(lanes=lanes) if vector else self.real.type
        if dtype == "bfloat16":
            wide = vector_of(I32, lanes) if vector else I32
            shift = self.iconst(16, I32, lanes) if vector else I32(16)
            value = self.bitcast(self.shl(self.zext(value, wide), shift), vector_of(F32, lanes) if vector else F32)
        if dtype == "float64" and self.real is FLOAT:  # a bias may be wider than the arithmetic; what is finite stays finite
            most, narrow = target(FLOAT.highest), self.fptrunc(value, target)
            size = self.intrinsic(self._named("fabs", value.type), value.type, [value])
            cut = self.intrinsic(self._named("copysign", target), target, [most, narrow])
            beyond = self.fcmp_ordered(">", size, value.type(FLOAT.highest))
            return self.select(self.and_(beyond, self.fcmp_ordered("!=", size, value.type(float("inf")))), cut, narrow)
        return value if value.type == target else self.fpext(value, target)

    def narrow(self, value: Value, dtype: str) -> Value:
        """Back to storage, rounded to nearest even."""
        vector = isinstance(value.type, ir.VectorType)
        lanes = value.type.count if vector else 0

        def kind(element: Any) -> Any:
            return vector_of(element, lanes) if vector else element

        def number(value: int) -> Value:
            return self.iconst(value, I32, lanes) if vector else whole(I32, value)

        if dtype == "bfloat16":
            bits = self.bitcast(value, kind(I32))
            odd = self.and_(self.lshr(bits, number(16)), number(1))
            rounded = self.add(bits, self.add(odd, number(0x7FFF)))
            # A NaN must stay one: rounding could carry its mantissa away.
            quiet = self.or_(bits, number(0x00400000))
            rounded = self.select(self.fcmp_unordered("uno", value, value), quiet, rounded)
            return self.trunc(self.lshr(rounded, number(16)), kind(I16))
        target = kind(STORAGE[dtype])
        return value if value.type == target else self.fptrunc(value, target)


def _size(kind: Any) -> int:
    return 2 if kind == HALF else 4 if kind == F32 else 8 if isinstance(kind, ir.DoubleType | ir.PointerType) else _bytes(kind)


def _bytes(kind: Any) -> int:
    return int(max(1, kind.width // 8))


class Unit:
    """One module under construction: every function of a kernel shares its Real type, lanes and target family."""

    def __init__(self, name: str, real: Real, lanes: int, arch: str) -> None:
        self.module = ir.Module(name)
        self.real, self.lanes, self.arch = real, lanes, arch

    def function(
        self, name: str, args: Sequence[Any], *, public: bool = False, result: Any = VOID, apart: Sequence[int] = ()
    ) -> tuple[Emit, list[Value], Any]:
        """A new function; `apart` are the pointer arguments that alias nothing else."""
        function = ir.Function(self.module, ir.FunctionType(result, list(args)), name)
        if not public:
            function.linkage = "internal"
            function.attributes.add("noinline")
        function.attributes.add("nounwind")
        for index in apart:
            function.args[index].add_attribute("noalias")
        emit = Emit(function.append_basic_block("entry"), self.real, self.lanes, self.arch)
        return emit, list(function.args), function
