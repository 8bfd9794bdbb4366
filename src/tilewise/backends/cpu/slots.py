"""A kernel's view of its arguments and of its frame: named 64-bit words behind a pointer."""

from __future__ import annotations

from tilewise.backends.cpu.ir import F64, I64, PTR, Emit, Value


class Slots:
    """Named 64-bit words behind a pointer."""

    def __init__(self, e: Emit, pointer: Value, names: tuple[str, ...]) -> None:
        self.e, self.pointer = e, pointer
        self.index = {name: n for n, name in enumerate(names)}

    def word(self, name: str) -> Value:
        return self.e.get(self.pointer, self.index[name], I64)

    def ptr(self, name: str) -> Value:
        return self.e.load(self.e.at(self.pointer, self.index[name], I64), typ=PTR, align=8)

    def num(self, name: str) -> Value:
        """A number passed as the bits of a double, in the kernel's Real type."""
        value = self.e.get(self.pointer, self.index[name], F64)
        return value if self.e.real.type == F64 else self.e.fptrunc(value, self.e.real.type)

    def set(self, name: str, value: int | Value) -> None:
        self.e.store(self.e.word(value), self.e.at(self.pointer, self.index[name], I64), align=8)
