"""Functions of a kernel under construction: control flow, and the instructions that are no operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir as llvm
from llvmlite.ir.instructions import LoadInstr

from tilewise.backends.cpu import ir
from tilewise.backends.cpu.ir import I32, I64, Pointer, Strip, Value, constant, elementwise, vector_of
from tilewise.backends.cpu.spec import Register


class Loop:
    """`for index in range(start, stop, step)` with loop-carried values; after the loop `values` are the last ones."""

    def __init__(self, index: Value, values: Any) -> None:
        self.index, self.values = index, values
        self.following: Sequence[Any] = ()

    def carry(self, values: Sequence[Any]) -> None:
        self.following = values


class _VolatileLoad(LoadInstr):  # type: ignore[misc]
    """llvmlite has no volatile accesses; LLVM's text form of one differs by a word."""

    def descr(self, buf: list[str]) -> None:
        super().descr(buf)
        buf[-1] = buf[-1].replace("load ", "load volatile ", 1)


class Emit:
    """The body of a function: 64-bit indices, typed pointers, vectors of one Real type. `ir` is LLVM's own builder."""

    args: Any
    frame: Any
    """The kernel's arguments and its thread's scratch memory, in functions that have them."""

    def __init__(self, block: Any, unit: Unit) -> None:
        self.ir = llvm.IRBuilder(block)
        self.unit, self.real, self.tile, self.arch = unit, unit.real, unit.tile, unit.arch
        self.lanes = unit.tile.lanes

    # -- numbers
    def raw(self, value: Any, kind: Any = I64) -> Any:
        """LLVM's value; a number of Python as a constant of that type."""
        return constant(value, kind) if isinstance(value, int | float) else value.raw

    def const(self, value: float, kind: Any = None) -> Value:
        """A constant; of the Real type, if none is given."""
        return Value(self, constant(value, kind or self.real.type))

    def vector(self, value: float, lanes: int = 0, kind: Any = None) -> Value:
        """A number in every lane."""
        return self.const(value, vector_of(kind or self.real.type, lanes or self.lanes))

    def integers(self, values: Sequence[int], kind: Any = None) -> Value:
        return Value(self, ir.integers(kind or self.real.bits, *values))

    def strip(self, value: float, kind: Any = None) -> Strip:
        return Strip([self.vector(value, kind=kind)] * self.tile.vectors)

    def addend(self, value: float, lanes: int) -> Value:
        """A constant about to be an FMA's addend.

        NEON's FMLA overwrites its addend, so a constant held in a register is copied first, on the pipes that FMAs need. A
        fresh load runs on the idle load ports instead: it halves the time of a polynomial.
        """
        vector = self.vector(value, lanes)
        if self.arch != "aarch64":
            return vector
        name = f"addend.{lanes}.{float(value).hex()}".replace("-", "n").replace("+", "p")
        table = self.unit.module.globals.get(name)
        if table is None:
            table = llvm.GlobalVariable(self.unit.module, vector.type, name)
            table.linkage, table.global_constant, table.initializer = "internal", True, vector.raw
        load = _VolatileLoad(self.ir.block, table, typ=vector.type)  # neither hoisted nor merged with another
        load.align = ir.size_of(self.real.type)
        self.ir._insert(load)
        return Value(self, load)

    # -- what operators stand for
    def _alike(self, left: Any, right: Any) -> tuple[Any, Any]:
        """LLVM's values; a number of Python takes the type of the other."""
        kind = left.type if isinstance(left, Value) else right.type if isinstance(right, Value) else I64
        return self.raw(left, kind), self.raw(right, kind)

    @elementwise
    def binary(self, integer: str, real: str, left: Any, right: Any) -> Any:
        left, right = self._alike(left, right)
        return Value(self, getattr(self.ir, real if ir.is_float(left.type) else integer)(left, right))

    @elementwise
    def compare(self, sign: str, left: Any, right: Any, nan: bool | None = None) -> Any:
        """`nan`: the result for floats that are no numbers; as in C, if it is not given."""
        left, right = self._alike(left, right)
        if not ir.is_float(left.type):
            return Value(self, self.ir.icmp_signed(sign, left, right))
        nan = sign == "!=" if nan is None else nan
        return Value(self, (self.ir.fcmp_unordered if nan else self.ir.fcmp_ordered)(sign, left, right))

    @elementwise
    def convert(self, name: str, value: Any, kind: Any) -> Any:
        return Value(self, getattr(self.ir, name)(value.raw, vector_of(kind, value.lanes)))

    @elementwise
    def negative(self, value: Any) -> Any:
        return Value(self, self.ir.fneg(value.raw))

    # -- choices
    @elementwise
    def each(self, function: Callable[..., Any], *values: Any) -> Any:
        """Several steps for one vector after the other."""
        return function(*values)

    @elementwise
    def select(self, condition: Any, left: Any, right: Any) -> Any:
        return Value(self, self.ir.select(condition.raw, *self._alike(left, right)))

    @elementwise
    def min(self, left: Any, right: Any, sign: str = "<") -> Any:
        """Of integers."""
        left, right = self._alike(left, right)
        return Value(self, self.ir.select(self.ir.icmp_signed(sign, left, right), left, right))

    def max(self, left: Any, right: Any) -> Any:
        return self.min(left, right, ">")

    def call(self, function: Any, *args: Any) -> Value:
        """Numbers of Python take the parameters' types."""
        kinds = function.function_type.args
        return Value(self, self.ir.call(function, [self.raw(x, kind) for x, kind in zip(args, kinds, strict=True)]))

    def intrinsic(self, name: str, result: Any, args: Sequence[Any], flags: Sequence[str] = ()) -> Value:
        function = self.unit.module.globals.get(name)
        if function is None:
            function = llvm.Function(self.unit.module, llvm.FunctionType(result, [a.raw.type for a in args]), name)
        return Value(self, self.ir.call(function, [a.raw for a in args], fastmath=flags))

    @elementwise
    def math(self, stem: str, *values: Any, flags: Sequence[str] = ()) -> Any:
        """An intrinsic that has a form for every type of its operands."""
        kind, lanes = values[0].type, values[0].lanes
        element = "f32" if (kind.element if lanes else kind) == ir.F32 else "f64"
        return self.intrinsic(f"llvm.{stem}.{f'v{lanes}' if lanes else ''}{element}", kind, values, flags)

    def fma(self, left: Any, right: Any, addend: Any) -> Any:
        """left * right + addend, rounded once."""
        return self.math("fma", left, right, addend)

    def fmax(self, left: Any, right: Any) -> Any:
        """Maximum that ignores a NaN: a wrong maximum is harmless, the NaN itself arrives through exp2."""
        return self.math("maxnum", left, right, flags=("nnan", "nsz"))

    def at_least(self, value: Any, bound: Any) -> Any:
        """max(value, bound) that keeps a NaN: one instruction on both families."""
        return self._bounded("maximum", ">", value, bound)

    def at_most(self, value: Any, bound: Any) -> Any:
        """min(value, bound) that keeps a NaN."""
        return self._bounded("minimum", "<", value, bound)

    @elementwise
    def _bounded(self, stem: str, sign: str, value: Any, bound: Any) -> Any:
        bound = Value(self, self.raw(bound, value.type))
        if self.arch == "aarch64":
            return self.math(stem, value, bound)
        return self.select(self.compare(sign, bound, value), bound, value)

    def prefetch(self, address: Pointer, level: int = 1) -> None:
        """Ask for the cache line at an address, to be read and kept in every level from that one on."""
        self.intrinsic("llvm.prefetch.p0", ir.VOID, [address, *(self.const(n, I32) for n in (0, 4 - level, 1))])

    # -- control flow
    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1, carry: Sequence[Any] = ()) -> Iterator[Loop]:
        before = self.ir.block
        head, body, done = self.blocks("head", "body", "done")
        start, stop, step = self.raw(start), self.raw(stop), self.raw(step)
        first = [self.raw(value) for value in carry]
        self.ir.branch(head)
        self.ir.position_at_end(head)
        index, *phis = (self.ir.phi(raw.type) for raw in (start, *first))
        for phi, raw in zip((index, *phis), (start, *first), strict=True):
            phi.add_incoming(raw, before)
        self.ir.cbranch(self.ir.icmp_signed("<", index, stop), body, done)
        self.ir.position_at_end(body)
        values = [
            Pointer(self, phi, old.kind, old.dtype) if isinstance(old, Pointer) else Value(self, phi)
            for phi, old in zip(phis, carry, strict=True)
        ]
        loop = Loop(Value(self, index), Strip(values) if isinstance(carry, Strip) else values)
        yield loop
        last = self.ir.block
        index.add_incoming(self.ir.add(index, step), last)
        for phi, value in zip(phis, loop.following, strict=True):
            phi.add_incoming(self.raw(value), last)
        self.ir.branch(head)
        self.ir.position_at_end(done)

    @contextmanager
    def range(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Value]:
        """A loop that carries nothing."""
        with self.loop(start, stop, step) as loop:
            yield loop.index

    def blocks(self, *names: str) -> list[Any]:
        return [self.ir.append_basic_block(name) for name in names]

    def go(self, block: Any) -> None:
        """On to a block, and what follows is emitted there."""
        self.ir.branch(block)
        self.ir.position_at_end(block)

    def branch(self, condition: Value, then: Any, otherwise: Any) -> None:
        self.ir.cbranch(condition.raw, then, otherwise)

    def if_(self, condition: Value, likely: bool | None = None) -> Any:
        return self.ir.if_then(condition.raw, likely)

    def if_else(self, condition: Value) -> Any:
        return self.ir.if_else(condition.raw)

    def value_if(self, condition: Value, compute: Callable[[], Value], otherwise: Value) -> Value:
        """What `compute` emits, run only under the condition."""
        with self.if_else(condition) as (then, other):
            with then:
                value = compute()
                then_block = self.ir.block
            with other:
                other_block = self.ir.block
        return self.phi((value, then_block), (otherwise, other_block))

    def phi(self, *incoming: tuple[Value, Any]) -> Value:
        phi = self.ir.phi(incoming[0][0].type)
        for value, block in incoming:
            phi.add_incoming(value.raw, block)
        return Value(self, phi)

    def ret(self, value: Any = None) -> None:
        if value is None:
            self.ir.ret_void()
        else:
            self.ir.ret(self.raw(value))

    # -- storage types
    def widen(self, value: Value, dtype: str) -> Any:
        """A stored value (scalar or vector) in the kernel's Real type."""
        target = vector_of(self.real.type, value.lanes)
        if dtype == "bfloat16":
            value = (value.zext(I32) << 16).bitcast(ir.F32)
        if dtype == "int8":
            return value.sext(I32).to_real(self.real.type)
        if dtype == "float8_e4m3fn":
            value = self._from_float8(value)
        if dtype == "float64" and self.real is ir.FLOAT:  # a bias may be wider than the arithmetic; what is finite stays finite
            highest, narrow = self.const(ir.FLOAT.highest, target), value.fptrunc(ir.F32)
            size = abs(value)
            clamped = self.math("copysign", highest, narrow)
            beyond = size > ir.FLOAT.highest
            return self.select(beyond & self.compare("!=", size, float("inf"), nan=False), clamped, narrow)
        if dtype == "float16" and self.real is ir.DOUBLE:  # by way of float, as not every CPU has the conversion
            value = value.fpext(ir.F32)
        return value if value.type == target else value.fpext(self.real.type)

    def vectors_of_a_load(self, dtype: str) -> int:
        """How many registers of the Real type `widen_several` makes of one register of a stored dtype."""
        narrow = self.arch == "aarch64" and self.lanes == 4 and self.real is ir.FLOAT
        return {"bfloat16": 2, "int8": 4}.get(dtype, 1) if narrow else 1

    def widen_several(self, value: Value, dtype: str) -> list[Any]:
        """The same of a whole register, as several. NEON zips twice a cycle, and shifts once; bfloat16 gets zeros below."""
        L, lanes = self.lanes, value.lanes
        if lanes == L:
            return [self.widen(value, dtype)]
        if dtype == "int8":
            return [self._from_bytes(value, n) for n in range(0, lanes, L)]
        zeros, order = self.const(0, value.type), [x for lane in range(lanes) for x in (lane, lanes + lane)]
        parts = [zeros.pick(order[n : n + 2 * L], value) for n in range(0, 2 * lanes, 2 * L)]
        return [Value(self, self.ir.bitcast(part.raw, vector_of(ir.F32, L))) for part in parts]

    def _from_bytes(self, value: Value, first: int) -> Any:
        """Four of a register's bytes, moved to the upper ends of their lanes, as fractions of 2**24: two instructions."""
        places = [x for n in range(first, first + 4) for x in (-1, -1, -1, n)]
        upper = self.intrinsic("llvm.aarch64.neon.tbl1.v16i8", value.type, [value, self.integers(places, ir.I8)])
        fixed = Value(self, self.ir.bitcast(upper.raw, vector_of(I32, 4)))
        return self.intrinsic(
            "llvm.aarch64.neon.vcvtfxs2fp.v4f32.v4i32", vector_of(ir.F32, 4), [fixed, self.const(24, I32)]
        )

    def _from_float8(self, value: Value) -> Any:
        """e4m3 as a float: its bits moved to those of the wider type, whose exponents count from 127 and not from 7."""
        bits = value.sext(I32)
        size = ((bits & 0x7F) << 20).bitcast(ir.F32) * 2.0**120
        nan = (bits & 0x7F) == 0x7F
        size = self.select(nan, float("nan"), size)
        return (size.bitcast(I32) | (bits & -0x80000000)).bitcast(ir.F32)

    def narrow(self, value: Value, dtype: str) -> Any:
        """Back to storage, rounded to nearest even."""
        if self.real is ir.DOUBLE and dtype in ("float16", "bfloat16"):
            value = self._odd_float(value)
        if dtype == "bfloat16":
            bits = value.bitcast(I32)
            odd = bits.lshr(16) & 1
            rounded = bits + (odd + 0x7FFF)
            # A NaN must stay one: rounding could carry its mantissa away.
            quiet = bits | 0x00400000
            return self.select(self.compare("uno", value, value, nan=True), quiet, rounded).lshr(16).trunc(ir.I16)
        kind = ir.STORAGE[dtype]
        return value if value.type == vector_of(kind, value.lanes) else value.fptrunc(kind)


    def _odd_float(self, value: Value) -> Any:
        """A double as a float, rounded towards zero with the last bit set if anything was cut off: the 16-bit number that comes
        of it is then rounded once and not twice."""
        near = value.fptrunc(ir.F32)
        back, bits = near.fpext(ir.F64), near.bitcast(I32)
        bits = self.select(abs(back) > abs(value), bits - 1, bits)
        return self.select(back != value, bits | 1, bits).bitcast(ir.F32)


class Unit:
    """One module under construction: every function of a kernel shares its Real type, register tile and target family."""

    def __init__(self, name: str, real: ir.Real, tile: Register, arch: str) -> None:
        self.module = llvm.Module(name)
        self.real, self.tile, self.arch = real, tile, arch

    def function(
        self, name: str, kinds: Sequence[Any], *, public: bool = False, result: Any = ir.VOID, noalias: Sequence[int] = ()
    ) -> tuple[Emit, list[Any], Any]:
        """A new function and its parameters; pointers are to the Real type. `noalias`: those that alias nothing else."""
        function = llvm.Function(self.module, llvm.FunctionType(result, list(kinds)), name)
        if not public:
            function.linkage = "internal"
            function.attributes.add("noinline")
        function.attributes.add("nounwind")
        for index in noalias:
            function.args[index].add_attribute("noalias")
        e = Emit(function.append_basic_block("entry"), self)
        return e, [Pointer(e, x, self.real.type) if x.type == ir.PTR else Value(e, x) for x in function.args], function
