"""Launches that are prepared once and then repeated: for a call like one seen before, only the tensors' addresses change."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.gpu.launch import Descriptor, Options, compiled_kernel, interpreting

KNOWN_LIMIT = 2048


class Launch(NamedTuple):
    """Everything one kernel runs with."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    config: Any
    options: Options

    def run(self) -> None:
        """Now, on the current device and stream, looking the kernel up by its signature."""
        if interpreting():
            self.kernel[(self.programs,)](*self.args, self.config)
        else:
            self.compiled()[(self.programs, 1, 1)](*self.args, self.config)

    def compiled(self) -> Any:
        return compiled_kernel(self.kernel, self.args, self.config, self.options)


class Prepared:
    """A launch without its addresses."""

    __slots__ = ("_fill", "_function", "_keep", "_metadata", "_programs", "_run")

    def __init__(self, launch: Launch, moving: tuple[Tensor | None, ...]) -> None:
        compiled = launch.compiled()
        self._run = compiled.run  # loads the kernel
        self._function, self._metadata = compiled.function, compiled.packed_metadata
        self._programs = launch.programs
        self._fill, self._keep = filler((*launch.args, launch.config), moving)

    def __call__(self, stream: int, addresses: list[int]) -> None:
        self._run(
            self._programs, 1, 1, stream, self._function, self._metadata, None, None, None, *self._fill(addresses)
        )


def filler(
    args: tuple[Any, ...], moving: tuple[Tensor | None, ...]
) -> tuple[Callable[[list[int]], tuple[Any, ...]], Any]:
    """A function from addresses of `moving` to the arguments, with everything else a literal; and what must stay alive.

    Launchers take an address in place of a tensor and plain tuples in place of named ones. Written out as one expression the
    hundred arguments cost a microsecond; walking the structs would cost twenty.
    """
    fixed: list[Any] = []
    place = {id(x): i for i, x in enumerate(moving) if x is not None}

    def text(value: Any) -> str:
        if value is None or type(value) in (int, float, bool):
            return repr(value)
        if type(value) is tuple or (isinstance(value, tuple) and value is not args[-1]):
            return "(" + "".join(f"{text(part)}, " for part in value) + ")"
        if isinstance(value, Tensor) and id(value) in place:
            return f"p[{place[id(value)]}]"
        fixed.append(value)
        if isinstance(value, Descriptor) and id(value.base) in place:
            return f"c[{len(fixed) - 1}].at(p[{place[id(value.base)]}])"
        return f"c[{len(fixed) - 1}]"

    source = f"lambda p: {text(args)}"
    return eval(source, {"c": fixed}), fixed


_known: dict[Hashable, list[Prepared] | None] = {}


def perform(key: Hashable | None, moving: tuple[Tensor | None, ...], build: Callable[[], list[Launch]]) -> None:
    """Run the launches of a call. `build` makes them; for a key met before, it is not even asked.

    `key` holds everything the launches depend on but addresses, or is None. The first call of a key runs as it is, since
    many come but once; the second prepares. Addresses that are no multiples of 16 would need other kernels.
    """
    addresses, bits = [], 0
    for x in moving:
        address = 0 if x is None else x.data_ptr()
        addresses.append(address)
        bits |= address
    steps = None if key is None or bits & 15 else _known.get(key)
    if steps is not None:
        stream = current_stream(moving)
        for step in steps:
            step(stream, addresses)
        return
    launches = build()
    if key is not None and not bits & 15 and not interpreting():
        if len(_known) >= KNOWN_LIMIT:
            _known.clear()
        _known[key] = [Prepared(launch, moving) for launch in launches] if key in _known else None
    for launch in launches:
        launch.run()


def current_stream(moving: tuple[Tensor | None, ...]) -> int:
    assert moving[0] is not None
    stream: int = torch._C._cuda_getCurrentRawStream(moving[0].device.index)
    return stream
