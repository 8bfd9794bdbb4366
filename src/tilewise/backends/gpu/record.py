"""The recorder of GPU launches: kernels are prepared once and repeated with other tensors.

A recording is a call's list of launches without the addresses of its tensors. With addresses filled in, launches are bound;
they are kept too, since allocators hand out the same memory again and again.

Key: all that launches depend on but addresses. That is the problem without the tensors of its mask (`problem_key`), what the
caller adds (which kernels, device, strides, wanted gradients), and the remainders of the addresses modulo 16, since kernels are
compiled for aligned memory. A problem that was met before is recognised by its identity, which costs nothing.

Limit: RECORDINGS of them, each bound to BINDINGS sets of addresses. When one is full, all of its entries are dropped.

Invalidation: nothing recorded becomes wrong, as nothing outside the key matters and addresses are never looked through. The
memory that recordings own (the order of tiles) is freed only after the device has finished, for kernels on other streams may
still read it. Choices of the environment (TILEWISE_AUTOTUNE) are seen by calls of new keys only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import fields
from functools import partial
from operator import itemgetter
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.gpu.launch import Descriptor, LaunchOptions, compiled_kernel, interpreting
from tilewise.problem import Problem

RECORDINGS = 2048
BINDINGS = 256
Tensors = Sequence[Tensor | None]
_FIELDS = [field.name for field in fields(Problem) if field.name not in ("mask", "_program")]


class Launch(NamedTuple):
    """Everything one kernel runs with."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    config: Any
    options: LaunchOptions | None = None  # None: the kernel is compiled already

    def run(self) -> None:
        """Now, on the current device and stream."""
        if interpreting():
            self.kernel[(self.programs,)](*self.args, self.config)
        else:
            self.compiled()[(self.programs, 1, 1)](*self.args, self.config)

    def compiled(self) -> Any:
        if self.options is None:
            return self.kernel
        return compiled_kernel(self.kernel, self.args, self.config, self.options)


class Template:
    """A launch whose arguments are computed from addresses.

    Launchers take an address in place of a tensor and plain tuples in place of structs. `_values` holds the addresses, then
    constants and what is computed from earlier values: structs with an address in them, and tensor maps.
    """

    __slots__ = ("_addresses", "_computed", "_head", "_owned", "_run", "_tail", "_values")

    def __init__(self, launch: Launch, tensors: Tensors) -> None:
        compiled = launch.compiled()
        self._run = compiled.run  # loads the kernel, so it comes first
        self._head = (launch.programs, 1, 1)
        self._tail = (compiled.function, compiled.packed_metadata, None, None, None)
        self._owned: list[Tensor] = []
        self._values: list[Any] = [None] * len(tensors)
        self._computed: dict[int, Callable[[list[Any]], Any]] = {}
        self._addresses = len(tensors)
        where = {id(x): i for i, x in enumerate(tensors) if x is not None}
        self._add_tuple((*launch.args, launch.config), where, launch.config)

    def _add(self, value: Any, where: dict[int, int], config: Any) -> int:
        """The index of an argument among the values."""
        if id(value) in where:
            return where[id(value)]
        if isinstance(value, tuple) and value is not config:
            return self._add_tuple(value, where, config)
        if isinstance(value, Descriptor) and id(value.base) in where:
            return self._compute(_moved_map(value, where[id(value.base)]))
        if isinstance(value, Tensor):
            self._owned.append(value)
            value = value.data_ptr()
        return self._append(value)

    def _add_tuple(self, value: tuple[Any, ...], where: dict[int, int], config: Any) -> int:
        indices = [self._add(part, where, config) for part in value]
        if not any(i < self._addresses or i in self._computed for i in indices):
            return self._append(_items(indices, self._values))
        return self._compute(itemgetter(*indices) if len(indices) > 1 else partial(_items, indices))

    def _compute(self, function: Callable[[list[Any]], Any]) -> int:
        index = self._append(None)
        self._computed[index] = function
        return index

    def _append(self, value: Any) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def bind(self, stream: int, addresses: tuple[int, ...]) -> Callable[[], Any]:
        """The launch over these addresses, as a function of nothing."""
        values = self._values.copy()
        values[: len(addresses)] = addresses
        for i, function in self._computed.items():
            values[i] = function(values)
        return bound(self._run, (*self._head, stream, *self._tail, *values[-1]))


def _moved_map(descriptor: Descriptor, index: int) -> Callable[[list[Any]], Descriptor]:
    return lambda values: descriptor.at(values[index])


def _items(indices: list[int], values: list[Any]) -> tuple[Any, ...]:
    return tuple([values[i] for i in indices])


def bound(run: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    """`run(*args)` as a function of nothing, for the launcher of a compiled kernel.

    Under the launcher's Python wrapper, which encodes the tensor maps anew for every launch, is a C function called `launcher`.
    A copy of the wrapper with another function in its place yields the encoded arguments. A launcher of another build is
    called itself, which is slower and as right.
    """
    wrapper = getattr(run, "launch", None)
    if not isinstance(wrapper, FunctionType) or run.global_scratch_size or run.profile_scratch_size:
        return partial(run, *args)
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    if "launcher" not in cells:
        return partial(run, *args)
    encoded: list[tuple[Any, ...]] = []
    cells["launcher"], launcher = CellType(lambda *final: encoded.append(final)), cells["launcher"].cell_contents
    probe = copy(run)
    probe.launch = FunctionType(wrapper.__code__, wrapper.__globals__, closure=tuple(cells.values()))
    probe(*args)
    return partial(launcher, *encoded[0])


class Recording:
    """The launches of calls with the same key; calling it repeats them for other tensors."""

    __slots__ = ("_bound", "_templates", "device")

    def __init__(self, device: int) -> None:
        self.device = device
        self._templates: dict[tuple[int, ...], list[Template]] = {}
        self._bound: dict[tuple[int, ...], list[Callable[[], Any]]] = {}

    def add(self, launches: list[Launch], tensors: Tensors) -> None:
        remainders = tuple([0 if x is None else x.data_ptr() % 16 for x in tensors])
        self._templates[remainders] = [Template(launch, tensors) for launch in launches]

    def __call__(self, tensors: Tensors) -> bool:
        """False if nothing was launched: addresses have other remainders than those recorded."""
        addresses = tuple([0 if x is None else x.data_ptr() for x in tensors])
        key = (current_stream(self.device), *addresses)
        calls = self._bound.get(key)
        if calls is None:
            templates = self._templates.get(tuple([address % 16 for address in addresses]))
            if templates is None:
                return False
            if len(self._bound) >= BINDINGS:
                self._bound.clear()
            calls = self._bound[key] = [template.bind(key[0], addresses) for template in templates]
        for call in calls:
            call()
        return True


def problem_key(problem: Problem) -> Hashable:
    """What kernels depend on in a problem, the tensors of its mask aside."""
    program = problem.program
    return program.structure, program.ints, *[getattr(problem, name) for name in _FIELDS]


class Recorder:
    """The launches of earlier calls; see above."""

    def __init__(self) -> None:
        self._recordings: dict[Hashable, Recording] = {}
        self._by_identity: dict[Hashable, tuple[Problem, Recording]] = {}

    def repeat(self, problem: Problem, key: Hashable, tensors: Tensors) -> bool:
        """Launch the kernels of an earlier call over these tensors; False if there was none."""
        met = self._by_identity.get((id(problem), key))
        if met is not None and met[0] is problem:
            return met[1](tensors)
        recording = self._recordings.get((problem_key(problem), key))
        if recording is None or not recording(tensors):
            return False
        if len(self._by_identity) >= RECORDINGS:
            self._by_identity.clear()
        self._by_identity[id(problem), key] = problem, recording
        return True

    def record(self, problem: Problem, key: Hashable, tensors: Tensors, launches: list[Launch]) -> None:
        """Launch the kernels of a call that `repeat` did not know, and remember them."""
        if interpreting():
            for launch in launches:
                launch.run()
            return
        whole = (problem_key(problem), key)
        recording = self._recordings.get(whole)
        if recording is None:
            if len(self._recordings) >= RECORDINGS:
                self.forget()
            device = next(x.device.index for x in tensors if x is not None)
            recording = self._recordings[whole] = Recording(device)
        recording.add(launches, tensors)
        recording(tensors)

    def forget(self) -> None:
        for device in {recording.device for recording in self._recordings.values()}:
            torch.cuda.synchronize(device)
        self._recordings.clear()
        self._by_identity.clear()


recorder = Recorder()


def current_stream(device: int) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream
