"""Gluon kernels as Python: tensors are torch's, warps of a role one thread, barriers real ones.

What is checked that way is logic: which tiles are visited, where results go, that masks and sums are right, that no role waits
for ever, and that nothing is overwritten while a product may still read it: products are computed as late as their waits allow.
The language's own compiler is not in play, layouts mean nothing, and memory is in order.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.backends.gluon_values import Product, Shared, Value, arange, load, store, tensor_of
from tilewise.numerics.philox import WORD, philox

LAYOUTS = (
    *("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout", "DistributedLinearLayout"),
    "SwizzledSharedLayout",
)
BARRIERS = object()
"""The layout of barriers."""
LIMIT_S = 60.0
"""A kernel here takes a second; one that hangs is given up after this long."""


class MBarrier:
    """A phase is over when all have arrived and all bytes have landed."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phases = 0

    def end_phase(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phases += 1
            self.pending = self.count


class Descriptor:
    """A tensor map: boxes of a tensor, zeros beyond it."""

    def __init__(self, x: torch.Tensor, box: list[int]) -> None:
        self.x, self.box, self.dtype, self.layout = x, box, x.dtype, None
        size = x.element_size()
        for side in box:
            size *= side
        self.block_type = SimpleNamespace(shape=box, nbytes=size)

    def parts(self, at: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where a box lies in the tensor, and that part of it in the box."""
        first = [int(i) for i in at]
        sizes = [max(0, min(i + n, side) - i) for i, n, side in zip(first, self.box, self.x.shape, strict=True)]
        there = tuple(slice(i, i + n) for i, n in zip(first, sizes, strict=True))
        return there, tuple(slice(0, n) for n in sizes)


class Machine:
    """One multiprocessor: what its threads share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.program = 0
        self.named: dict[int, list[int]] = {}
        self.broken: BaseException | None = None
        self.own = threading.local()

    def wait_for(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.broken is not None or ready(), LIMIT_S):
                raise TimeoutError("a role waits for ever")
            if self.broken is not None:
                raise RuntimeError("another role has failed")

    def change(self, act: Callable[[], None]) -> None:
        with self.changed:
            act()
            self.changed.notify_all()

    # mbarrier
    def init(self, barrier: MBarrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def wait(self, barrier: MBarrier, parity: Any, pred: Any = True) -> None:
        if pred:
            self.wait_for(lambda: barrier.phases % 2 != int(parity))

    def arrive(self, barrier: MBarrier, count: int = 1, pred: Any = True) -> None:
        def act() -> None:
            barrier.pending -= count
            assert barrier.pending >= 0, "more arrivals than the barrier counts"
            barrier.end_phase()

        if pred:
            self.change(act)

    def expect(self, barrier: MBarrier, size: int) -> None:
        def act() -> None:
            barrier.pending -= 1
            barrier.bytes += size

        self.change(act)

    # tensor memory accelerator
    def tma_load(self, desc: Descriptor, at: list[Any], barrier: MBarrier, tile: Shared) -> None:
        there, here = desc.parts(at)
        assert list(tile.value.shape) == desc.box
        tile.value.zero_()
        tile.value[here] = desc.x[there]

        def act() -> None:
            barrier.bytes -= desc.block_type.nbytes
            barrier.end_phase()

        self.change(act)

    def tma_store(self, desc: Descriptor, at: list[Any], tile: Shared) -> None:
        there, here = desc.parts(at)
        desc.x[there] = tile.value[here]

    # wgmma
    def product(self, a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
        assert is_async and a.type.shape[1] == b.type.shape[0]
        issued = Product(a, b, acc if use_acc else None)
        self.in_flight().append(issued)
        return issued

    def product_wait(self, left: int, deps: list[Any]) -> Any:
        """Until all but the last `left` products of this role are done."""
        flying = self.in_flight()
        while len(flying) > left:
            flying.pop(0).finish()
        done = [Value(x.value) for x in deps]
        return done[0] if len(done) == 1 else tuple(done)

    def in_flight(self) -> list[Product]:
        if not hasattr(self.own, "flying"):
            self.own.flying = []
        found: list[Product] = self.own.flying
        return found

    def assembly(self, text: str, constraints: str, args: list[Any], **_: Any) -> Any:
        if text.startswith("mov.b32"):
            return args[0] if isinstance(args[0], Value) else Value(torch.tensor(args[0]))
        if text.startswith("add.f32"):
            return args[0] + args[1]
        if text.startswith("rcp."):
            return 1.0 / args[0]
        if "abs.f32" in text:
            return args[0] + (args[1] - args[2]).abs() * args[3]
        if text.startswith("bmsk.clamp"):
            return bit_masks(*args)
        if "and.b32 own" in text:
            return kept_of_both(*args)
        if "selp.f32" in text:
            return selected(*args, float("-inf") if "0fFF800000" in text else 0.0)
        if text.startswith("movmatrix"):
            return transposed(args[0])
        if "0xFFFF0000" in text or "cvt.f32.f16" in text:
            kind = torch.bfloat16 if "0xFFFF0000" in text else torch.float16
            return tuple(Value(half.float()) for half in halves(args[0].value, kind).unbind(-1))
        if "mul.wide.u32" in text:
            return kept_words(*args)
        if text.startswith("red."):
            where, what = args[0].at.reshape(-1), args[1].value.reshape(-1)
            assert where.unique().numel() == where.numel()
            with self.changed:
                args[0].memory.index_add_(0, where, what)
            return None
        if text.startswith("ld.global.v4"):
            return Value(args[0].memory[args[0].at])
        word, _, threads = text.split(";")[0].partition(",")
        kind, ident = word.split()
        assert kind == "bar.sync", text
        return self.named_sync(int(ident), int(threads) // 128)

    def atomic_add(self, at: Any, x: Value, mask: Any = None, sem: str = "") -> None:
        values, where = torch.broadcast_tensors(x.value, at.at)
        ok = tensor_of(mask).expand_as(where)
        with self.changed:
            at.memory.index_add_(0, where[ok], values[ok])

    def named_sync(self, ident: int, parties: int) -> None:
        state = self.named.setdefault(ident, [0, 0])  # arrived, rounds
        with self.changed:
            mine = state[1]
            state[0] += 1
            if state[0] == parties:
                state[0], state[1] = 0, mine + 1
            self.changed.notify_all()
        self.wait_for(lambda: state[1] != mine)

    def specialise(self, roles: list[tuple[Callable[..., Any], tuple[Any, ...]]], *_: Any) -> None:
        def work(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
            try:
                function(*args)
            except BaseException as error:
                with self.changed:
                    self.broken = self.broken or error
                    self.changed.notify_all()

        threads = [threading.Thread(target=work, args=role, daemon=True) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT_S)
        if self.broken is not None:
            raise self.broken


def halves(words: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The two numbers of 16 bits in each word of 32, the low one first."""
    return words.to(torch.int32).contiguous().view(kind).unflatten(-1, (-1, 2))


def transposed(words: Value) -> Value:
    """movmatrix of blocks of 8×8 numbers, in words [blocks, 8, blocks, 4] of two."""
    blocks = halves(words.value, torch.int16).flatten(3).transpose(1, 3).contiguous()  # [.., 8, .., 8]
    return Value(blocks.view(torch.int32))


def bit_masks(first: Value, count: Value) -> Value:
    """Words of `count` bits from `first` on, both cut at 32."""
    first, past = (x.value.to(torch.int64).clamp(0, 32) for x in (first, first + count))
    return Value(((1 << past) - (1 << first)).to(torch.int64))


def selected(parts: Value, words: Value, other: float) -> Value:
    """Tiles by lane [64, groups, 4, 2] where bit 2 group + pair of a word [64, 1, 4, 1] is set."""
    groups = parts.value.shape[1]
    bits = 2 * torch.arange(groups)[None, :, None, None] + torch.arange(2)
    return Value(parts.value.where(((words.value.to(torch.int64) >> bits) & 1) != 0, other))


def kept_of_both(one: Value, other: Value, words: Value, bit: Value) -> tuple[Value, Value]:
    """Two tiles by lane where a bit is set, 0 elsewhere."""
    ok = (words.value.to(torch.int64) & bit.value.to(torch.int64)) != 0
    return tuple(Value(x.value.where(ok, 0.0)) for x in (one, other))  # type: ignore[return-value]


def kept_words(*args: Any) -> Value:
    """Dropout's own instructions: bits of the words that are no less than the threshold."""
    *counter, low, high, below = (tensor_of(x).to(torch.int64) & WORD for x in args)
    words = philox(tuple(counter), low | (high << 32))  # type: ignore[arg-type]
    return Value(sum((word >= below).to(torch.int64) << i for i, word in enumerate(words)))  # type: ignore[arg-type]


def language(machine: Machine) -> SimpleNamespace:
    """`gl` on that machine."""

    def allocate(dtype: Any, shape: list[int], layout: Any) -> Shared:
        if layout is BARRIERS:
            return Shared([MBarrier() for _ in range(shape[0])])
        left = float("nan") if dtype.is_floating_point else 1 << 20  # by others
        return Shared(torch.full(shape, left, dtype=dtype))

    def whole(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
        return lambda *args, **more: Value(function(*map(tensor_of, args), **more))

    def convert(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
        return x

    return SimpleNamespace(
        constexpr=lambda x: x, tensor=object, tuple=tuple, shared_memory_descriptor=object, static_range=range,
        float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16, int32=torch.int64, int8="int8",
        uint32="uint32", int64=torch.int64,
        program_id=lambda axis: Value(torch.tensor(machine.program)), arange=arange, load=load, store=store,
        atomic_add=machine.atomic_add,
        zeros=lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype)), zeros_like=whole(torch.zeros_like),
        full=lambda shape, x, dtype, layout: Value(torch.full(shape, torch.as_tensor(tensor_of(x)).item(), dtype=dtype)),
        where=whole(torch.where), minimum=whole(torch.minimum), maximum=whole(torch.maximum), exp2=whole(torch.exp2),
        abs=whole(torch.abs), sum=lambda x, axis: Value(x.value.sum(axis)), cdiv=lambda x, y: (x + (y - 1)) // y,
        umulhi=lambda x, y: Value(torch.tensor(int(x) * int(y) >> 32)), barrier=lambda: None,
        broadcast=lambda x, y: tuple(Value(z.clone()) for z in torch.broadcast_tensors(x.value, y.value)),
        split=lambda x: tuple(Value(part) for part in x.value.unbind(-1)), convert_layout=convert,
        join=lambda x, y: Value(torch.stack([x.value, y.value], -1)), permute=lambda x, order: Value(x.value.permute(order)),
        reshape=lambda x, shape: x.reshape(shape),
        reduce=lambda x, axis, combine: functools.reduce(combine, map(Value, x.value.unbind(axis))),
        inline_asm_elementwise=machine.assembly, allocate_shared_memory=allocate, warp_specialize=machine.specialise,
        **dict.fromkeys(LAYOUTS, lambda *_: None),
        NVMMASharedLayout=type("Layout", (), {"__init__": lambda *_, **__: None, "get_default_for": lambda *_: None}),
    )  # fmt: skip


@contextmanager
def kernels(package: str, *names: str) -> Iterator[tuple[Machine, dict[str, ModuleType]]]:
    """Modules `package.name` imported over this machine's language."""
    machine = Machine()
    gl = language(machine)
    barrier = SimpleNamespace(
        MBarrierLayout=lambda: BARRIERS, init=machine.init, wait=machine.wait, arrive=machine.arrive, expect=machine.expect
    )
    hopper = SimpleNamespace(
        fence_async_shared=lambda: None, mbarrier=barrier, warpgroup_mma=machine.product, warpgroup_mma_wait=machine.product_wait,
        tma=SimpleNamespace(async_load=machine.tma_load, async_store=machine.tma_store, store_wait=lambda n: None),
    )  # fmt: skip
    gluon = SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f, aggregate=lambda c: c, language=gl)
    fakes: dict[str, Any] = {
        "triton": SimpleNamespace(), "triton.language": SimpleNamespace(core=None),
        "triton.experimental": SimpleNamespace(gluon=gluon), "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gl, "triton.experimental.gluon.language.nvidia": SimpleNamespace(hopper=hopper),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
    }  # fmt: skip
    with patch.dict(sys.modules, fakes):
        # modules in the language are imported anew; patch.dict puts the others' own back afterwards
        for name in [n for n in sys.modules if n.startswith("tilewise.backends.hopper.")]:
            if hasattr(sys.modules[name], "gl"):
                del sys.modules[name]
        yield machine, {name: importlib.import_module(f"{package}.{name}") for name in names}
        faked = ("triton", *(f"tilewise.backends.{name}" for name in ("gpu", "hopper", "triton")))
        others = {name: module for name, module in sys.modules.items() if not name.startswith(faked)}
        played = [name for name in sys.modules if name.startswith("tilewise.backends.hopper.")]
    sys.modules.update(others)  # imported for good: a second copy of a backend would not be the registered one
    for name in played:  # a package keeps its modules as attributes, and `from package import module` takes those
        parent, _, child = name.rpartition(".")
        if name in sys.modules and parent in sys.modules:
            setattr(sys.modules[parent], child, sys.modules[name])
        elif parent in sys.modules:
            vars(sys.modules[parent]).pop(child, None)
