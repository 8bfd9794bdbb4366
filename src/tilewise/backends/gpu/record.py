"""The recorder of GPU launches: kernels are prepared once and repeated with other tensors.

A recording is a call's list of launches without the addresses of its tensors. With addresses filled in, launches are bound;
they are kept too, since allocators hand out the same memory again and again.

Key: all that launches depend on but addresses. That is the problem without the tensors of its mask (`problem_key`), what the
caller adds (which kernels, device, strides, wanted gradients), and the remainders of the addresses modulo 16, since kernels are
compiled for aligned memory, with which of them are equal, as in attention(x, x, x). A problem that was met before remembers its
recordings by the caller's key, which costs little.

Limit: RECORDINGS of them, each bound to BINDINGS sets of addresses. When one is full, all of its entries are dropped.

Invalidation: nothing recorded becomes wrong, as nothing outside the key matters and no launch depends on what memory holds. The
memory that recordings own (the order of tiles) is freed only after the device has finished, for kernels on other streams may
still read it, and never where a CUDA graph has captured them. Choices of the environment (TILEWISE_AUTOTUNE) are seen by calls
of new keys only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import fields
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.gpu.captured import keep_if_captured
from tilewise.backends.gpu.compiled import is_collecting
from tilewise.backends.gpu.launch import Address, Descriptor, LaunchOptions, compiled_kernel, interpreting
from tilewise.problem import Problem

RECORDINGS = 2048
BINDINGS = 256
Tensors = Sequence[Tensor | None]
_FIELDS = [field.name for field in fields(Problem) if field.compare and field.name != "mask"]


class Launch(NamedTuple):
    """Everything one kernel runs with."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    config: Any
    options: LaunchOptions | None = None  # None: the kernel is compiled already

    def run(self) -> None:
        """Now, on the current device and stream."""
        if is_collecting():
            self.compiled()
        elif self.options is None:
            self.bound()()
        elif interpreting():
            self.kernel[(self.programs,)](*self.args, self.config)
        else:
            self.compiled()[(self.programs, 1, 1)](*self.args, self.config)

    def bound(self) -> Callable[[], Any]:
        """The launch over its own tensors on the current stream, as a function of nothing."""
        return Template(self, []).bind((current_stream(torch.cuda.current_device()),))

    def compiled(self) -> Any:
        if self.options is None:
            return self.kernel
        return compiled_kernel(self.kernel, self.args, self.config, self.options)


class Template:
    """A launch whose arguments are computed from the stream and the addresses of its tensors.

    Launchers take an address in place of a tensor and plain tuples in place of structs. `_values` holds the stream and the
    addresses, then constants and what is computed from earlier values: structs with an address in them, and tensor maps.
    """

    __slots__ = ("_computed", "_inputs", "_owned", "_run", "_values")

    def __init__(self, launch: Launch, tensors: list[Tensor]) -> None:
        compiled = launch.compiled()
        self._run = compiled.run  # loads the kernel, so it comes first
        self._inputs = 1 + len(tensors)
        self._values: list[Any] = [None] * self._inputs
        self._computed: dict[int, Callable[[list[Any]], Any]] = {}
        self._owned: list[Tensor | Address] = []
        where = {id(x): i for i, x in enumerate(tensors, 1)}
        head = [self._append(value) for value in (launch.programs, 1, 1)]
        tail = [self._append(value) for value in (compiled.function, compiled.packed_metadata, None, None, None)]
        args = [self._add(arg, where) for arg in launch.args]
        whole = [*head, 0, *tail, *args, self._append(launch.config)]
        self._compute(itemgetter(*whole))

    def _add(self, value: Any, where: dict[int, int]) -> int:
        """The index of an argument among the values."""
        if id(value) in where:
            return where[id(value)]
        if isinstance(value, tuple):
            indices = [self._add(part, where) for part in value]
            if not any(i < self._inputs or i in self._computed for i in indices):
                return self._append(_items(indices, self._values))
            return self._compute(itemgetter(*indices) if len(indices) > 1 else partial(_items, indices))
        if isinstance(value, Descriptor):
            base, distance = (value.base.base, value.base.bytes) if isinstance(value.base, Address) else (value.base, 0)
            if id(base) in where:
                return self._compute(partial(_moved_map, where[id(base)], distance, value))
        if isinstance(value, Address) and id(value.base) in where:
            return self._compute(partial(_moved_address, where[id(value.base)], value.bytes))
        if isinstance(value, Tensor | Address):
            self._owned.append(value)
            value = value.data_ptr()
        return self._append(value)

    def _compute(self, function: Callable[[list[Any]], Any]) -> int:
        index = self._append(None)
        self._computed[index] = function
        return index

    def _append(self, value: Any) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def bind(self, key: tuple[int, ...]) -> Callable[[], Any]:
        """The launch on a stream over addresses, as a function of nothing."""
        values = self._values.copy()
        values[: self._inputs] = key
        for i, function in self._computed.items():
            values[i] = function(values)
        return bound(self._run, values[-1])


def _moved_map(index: int, distance: int, descriptor: Descriptor, values: list[Any]) -> Descriptor:
    return descriptor.at(values[index] + distance)


def _moved_address(index: int, distance: int, values: list[Any]) -> int:
    return int(values[index] + distance)


def _items(indices: list[int], values: list[Any]) -> tuple[Any, ...]:
    return tuple([values[i] for i in indices])


def bound(run: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    """`run(*args)` as a function of nothing, for the launcher of a compiled kernel.

    The launcher calls a C function, `launch`, or where there are tensor maps a Python wrapper, which encodes them anew for every
    launch, around a C function called `launcher`. A copy with another function in its place yields the encoded arguments. A
    launcher of another build, or one that does more, is called itself, which is slower and as right.
    """
    inner = getattr(run, "launch", None)
    more = [getattr(run, name, True) for name in ("global_scratch_size", "profile_scratch_size")]
    if any(more) or getattr(run, "gsan_enabled", False):
        return partial(run, *args)
    encoded: list[tuple[Any, ...]] = []
    probe = copy(run)
    if isinstance(inner, BuiltinFunctionType):
        probe.launch, launcher = lambda *final: encoded.append(final), inner
    elif isinstance(inner, FunctionType) and "launcher" in inner.__code__.co_freevars:
        cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
        cells["launcher"], launcher = CellType(lambda *final: encoded.append(final)), cells["launcher"].cell_contents
        probe.launch = FunctionType(inner.__code__, inner.__globals__, closure=tuple(cells.values()))
    else:
        return partial(run, *args)
    probe(*args)
    return partial(launcher, *encoded[0])


def pattern(addresses: Sequence[int]) -> tuple[int, ...]:
    """Their remainders modulo 16, and which of them are one: a template does not tell a tensor in two places apart."""
    return *[address % 16 for address in addresses], *map(addresses.index, addresses)


class Recording:
    """What calls with the same key share: `plan`, which was made for the first of them, and their launches."""

    __slots__ = ("_bound", "_met", "_templates", "device", "kept", "plan")

    def __init__(self, device: int, plan: Any, kept: bool = True) -> None:
        self.device, self.plan, self.kept = device, plan, kept
        self._met = False
        self._templates: dict[tuple[int, ...], list[Template]] = {}
        self._bound: dict[tuple[int, ...], list[Callable[[], Any]]] = {}

    def repeat(self, tensors: Tensors) -> bool:
        """Launch the recorded kernels over these tensors. False if there are none for the pattern of their addresses."""
        if not self._templates:
            return False
        key = (current_stream(self.device), *[x.data_ptr() for x in tensors if x is not None])
        calls = self._bound.get(key)
        if calls is None:
            templates = self._templates.get(pattern(key[1:]))
            if templates is None:
                return False
            if len(self._bound) >= BINDINGS:
                self._bound.clear()
            calls = self._bound[key] = [template.bind(key) for template in templates]
            keep_if_captured(self)  # a graph's results have memory of its own: its launches are bound while it is captured
        for call in calls:
            call()
        return True

    def record(self, tensors: Tensors, launches: list[Launch]) -> None:
        """Launch kernels, and remember them if that is allowed.

        The first time, kernels that are looked up by their arguments run as they are, since many calls are made only once.
        """
        if self.kept and not (interpreting() or is_collecting()) and (self._met or launches[0].options is None):
            present = [x for x in tensors if x is not None]
            self._templates[pattern([x.data_ptr() for x in present])] = [Template(launch, present) for launch in launches]
            self.repeat(tensors)
            return
        self._met = True
        keep_if_captured(self)
        for launch in launches:
            launch.run()


def problem_key(problem: Problem) -> Hashable:
    """What kernels depend on in a problem, the tensors of its mask aside."""
    program = problem.program
    return program.structure, program.ints, *[getattr(problem, name) for name in _FIELDS]


class Recorder:
    """The recordings of earlier calls; see above."""

    def __init__(self) -> None:
        self._recordings: dict[Hashable, Recording] = {}
        self._epoch = object()  # another one whenever recordings were dropped

    def get(self, problem: Problem, key: Hashable | None, device: torch.device, plan: Callable[[], Any]) -> Recording:
        """The recording of a problem and key, with what `plan` gives if it is new; for a key of None one that is not kept."""
        if key is None or is_collecting():
            return Recording(device.index, plan(), kept=False)
        epoch, recording = problem.memory.get(key, (None, None))
        if epoch is self._epoch:
            return recording  # type: ignore[no-any-return]
        whole = (problem_key(problem), device, key)
        recording = self._recordings.get(whole)
        if recording is None:
            if len(self._recordings) >= RECORDINGS:
                self.forget()
            recording = self._recordings[whole] = Recording(device.index, plan())
        problem.memory[key] = self._epoch, recording
        return recording

    def forget(self) -> None:
        for device in {recording.device for recording in self._recordings.values()}:
            torch.cuda.synchronize(device)
        self._recordings.clear()
        self._epoch = object()


recorder = Recorder()


current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]
"""Of a device; builds of torch for CPUs have none."""
