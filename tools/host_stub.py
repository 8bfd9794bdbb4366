"""The host's share of a GPU call where there is no GPU: the GPU backends over the host's tensors, with kernels that do nothing.

Everything that Python does before and between launches runs as it does for CUDA tensors: the call cache, autograd, the kept lists
and orders, the recorder. What a driver takes to launch, and to ask for streams, is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from tilewise import dispatch
from tilewise.api import cached_repeat, call_cache, lengths, mask_memory
from tilewise.backends.gpu import record
from tilewise.backends.gpu.record import Launch, Recorder
from tilewise.backends.hopper import launch as forward
from tilewise.backends.hopper import packed_order
from tilewise.backends.hopper.backend import Hopper
from tilewise.backends.hopper.backward import launch as backward
from tilewise.backends.plans import REGISTRY
from tilewise.backends.triton import backend as triton_backend
from tilewise.backends.triton import paged, run
from tilewise.backends.verdict import Verdict
from tilewise.hardware import lookup
from tilewise.ops import packing


class Kernel:
    """A compiled kernel, and its launcher: built like Triton's, a wrapper around a function called `launcher`."""

    function, packed_metadata = 0, ()
    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.launched = 0
        self.seen: list[tuple[Any, ...]] | None = None
        """What it is launched with, if that is wanted."""

        def wrapped(launcher: Any) -> Any:
            def inner(*args: Any) -> Any:
                return launcher(*args)

            return inner

        def count(*args: Any) -> None:
            self.launched += 1
            if self.seen is not None:
                self.seen.append(args)

        self.launch = wrapped(count)

    @property
    def run(self) -> Kernel:
        return self

    def __call__(self, *args: Any) -> None:
        self.launch(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
        return self


@contextmanager
def without_gpu() -> Iterator[Kernel]:
    """Meanwhile bf16 and fp16 calls over CPU tensors go to the Hopper backend, those over pages to Triton's, and launches to this
    kernel. As on a GPU, nobody looks at values."""
    kernel, recorder, spec = Kernel(), Recorder(), lookup("h200")
    with ExitStack() as stack:
        add = stack.enter_context
        stack.callback(mask_memory.forget)  # nothing that is made here serves a call of later
        add(patch.object(call_cache, "_calls", {}))
        add(patch.object(dispatch, "_writers", {}))
        devices = {"hopper": ("cpu",), "triton": ("cpu",), "cpu": ()}
        add(patch.dict(REGISTRY, {name: REGISTRY[name]._replace(devices=served) for name, served in devices.items()}))
        for backend in (Hopper, triton_backend.Triton):
            add(patch.object(backend, "usable", lambda self, device: Verdict(True)))
        add(patch.object(Launch, "compiled", lambda self: kernel))
        add(patch.object(record, "current_stream", lambda device: 0))
        add(patch.object(record, "interpreting", lambda: False))
        add(patch.object(paged, "_appends", {}))
        for recording in (packed_order, run, paged):
            add(patch.object(recording, "recorder", recorder))
        for looking in (mask_memory, packing, lengths, cached_repeat):
            add(patch.object(looking, "checks_values", lambda device: False))
        for planning in (run, paged, triton_backend):
            add(patch.object(planning, "spec_of", lambda device: spec))
        for launches in (forward, backward):
            add(patch.object(launches, "recorder", recorder))
            add(patch.object(launches, "spec_of", lambda index: spec))
            add(patch.object(launches, "kernel_for", lambda *_: kernel))
        yield kernel
