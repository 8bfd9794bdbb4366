"""Recorded launches: the arguments of a later call differ from the first one's in the addresses alone."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewise.backends.base import BackwardInputs, Inputs
from tilewise.backends.gpu import captured, classify, record
from tilewise.backends.gpu.launch import Address, Descriptor
from tilewise.backends.gpu.record import Launch, Recorder, Recording, bound
from tilewise.masks import causal
from tilewise.problem import Problem

pytest.importorskip("triton")

from tilewise.backends.triton import run


class Collector(Recorder):
    """Adds (key, tensors, launches) to a list in place of running the launches."""

    def __init__(self, found: list[Any]) -> None:
        super().__init__()
        self.found = found

    def get(self, problem: Problem, key: Any, device: torch.device, plan: Any) -> Any:
        chosen = plan()
        add = lambda tensors, launches: self.found.append((key, tensors, launches))  # noqa: E731
        return SimpleNamespace(plan=chosen, repeat=lambda tensors: False, record=add)


def collect(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, tuple[Any, ...], list[Launch]]]:
    """Every (key, tensors, launches) that a call would perform, none of which is run."""
    found: list[Any] = []
    monkeypatch.setattr(run, "recorder", Collector(found))
    monkeypatch.setattr(classify, "launch", lambda *args: None)
    return found


def call(seqlen: int = 64, heads: int = 2, dtype: str = "float16") -> None:
    problem = Problem.of(batch=2, heads=heads, seqlen=seqlen, head_dim=16, dtype=dtype, mask=causal())
    q, k, v, out, dout = (torch.randn(2, heads, seqlen, 16).to(getattr(torch, dtype)) for _ in range(5))
    lse = torch.randn(2, heads, seqlen)
    run.run_forward(problem, Inputs(q, k, v), out, lse)
    run.run_backward(problem, Inputs(q, k, v), BackwardInputs(out, lse, dout))


def plain(launch: Launch) -> tuple[Any, ...]:
    """Arguments as a launcher takes them: addresses for tensors, tuples for structs."""

    def bare(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(bare(part) for part in value)
        return value.data_ptr() if isinstance(value, torch.Tensor) else value

    return (*bare(launch.args), launch.config)


class Compiled:
    """Stands for a kernel: remembers what it was launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.run = lambda *args: self.launched.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launched.append((*grid, *args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """All launches go to it, on stream 7."""
    compiled = Compiled()
    monkeypatch.setattr(Launch, "compiled", lambda self: compiled)
    monkeypatch.setattr(record, "interpreting", lambda: False)
    monkeypatch.setattr(record, "current_stream", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return compiled


def replayed(launches: list[Launch], tensors: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Record launches over some tensors, and repeat them over others."""
    recording = Recording(0, None)
    for _ in range(2):  # the first time they run as they are
        recording.record(tensors, launches)
    launches[0].compiled().launched.clear()
    assert recording.repeat(other)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_recorded_call_has_the_arguments_of_the_next_call(
    monkeypatch: pytest.MonkeyPatch, kernel: Compiled, dtype: str
) -> None:
    found = collect(monkeypatch)
    call(dtype=dtype)
    call(dtype=dtype)
    half = len(found) // 2
    lengths = [4, 7] if dtype == "float32" else [1, 3]  # q, k, v and dO are split first
    assert half == 2 and [len(launches) for _, _, launches in found] == lengths * 2
    for (key, moving, first), (other_key, other, second) in zip(found[:half], found[half:], strict=True):
        assert key == other_key and hash(key) == hash(other_key)
        kernel.launched.clear()
        replayed(first, moving, other)
        assert kernel.launched == [
            (after.programs, 1, 1, 7, "function", "metadata", None, None, None, *plain(after)) for after in second
        ]
        assert [launch.options for launch in first] == [launch.options for launch in second]


def problem_of(seqlen: int = 64) -> Problem:
    return Problem.of(heads=1, seqlen=seqlen, head_dim=16, dtype="float16")


def launches_over(x: torch.Tensor, options: run.LaunchOptions | None = None) -> list[Launch]:
    return [Launch("kernel", 3, ((x, 5),), run.KernelConfig(), options)]


DEVICE = torch.device("cpu")


def test_a_call_is_recorded_at_its_second_coming_and_repeated_from_then_on(kernel: Compiled) -> None:
    recorder, problem = Recorder(), problem_of()
    built: list[int] = []

    def call(problem: Problem, x: torch.Tensor, key: str | None = "key") -> Any:
        def build() -> list[Launch]:
            built.append(1)
            return launches_over(x, run.LaunchOptions())

        recording = recorder.get(problem, key, DEVICE, lambda: None)
        if not recording.repeat((x,)):
            recording.record((x,), build())
        return kernel.launched[-1][9 if len(kernel.launched[-1]) > 9 else 3]

    tensors = [torch.zeros(16) for _ in range(3)]
    # an equal problem, then the same one again; tensors met before, then new ones
    for again in (problem, problem_of()):
        for x in (*tensors, *tensors):
            assert call(again, x) == (x.data_ptr() if built[1:] else x, 5)
    assert len(kernel.launched) == 12 and len(built) == 2
    call(problem, tensors[0], "other")
    call(problem_of(65), tensors[0])
    assert len(built) == 4
    unkept = [call(problem, tensors[0], None) for _ in range(2)]
    assert len(built) == 6 and unkept == [(tensors[0], 5)] * 2, "without a key nothing is kept"


def test_a_plan_is_made_once_for_a_key(kernel: Compiled) -> None:
    recorder, made = Recorder(), iter(range(9))
    plans = [
        recorder.get(problem_of(n), key, DEVICE, lambda: next(made)).plan
        for n, key in ((64, "a"), (64, "a"), (65, "a"), (64, "b"), (64, None), (64, None), (64, "a"))
    ]
    assert plans == [0, 0, 1, 2, 3, 4, 0]


def test_addresses_of_other_remainders_are_recorded_apart(kernel: Compiled) -> None:
    recording = Recording(0, None)
    x = torch.zeros(32)
    odd = x[1:]
    assert odd.data_ptr() % 16
    for tensor in (x, odd):
        assert not recording.repeat((tensor,)), "other kernels"
        recording.record((tensor,), launches_over(tensor))
    for tensor in (x, odd, x[4:], x[5:]):
        assert recording.repeat((tensor,)) and kernel.launched[-1][9] == (tensor.data_ptr(), 5)


def test_full_recorders_forget(kernel: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(record, "RECORDINGS", 2)
    monkeypatch.setattr(record, "BINDINGS", 2)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    recorder, x = Recorder(), torch.zeros(64)
    first = [recorder.get(problem_of(seqlen), "key", DEVICE, list) for seqlen in (64, 65, 66)]
    assert len(waited) == 1, "kernels may still read what recordings own"
    again = [recorder.get(problem_of(seqlen), "key", DEVICE, list) for seqlen in (66, 64)]
    assert again[0] is first[2] and again[1] is not first[0]
    again[0].record((x,), launches_over(x))
    for start in (0, 4, 8, 12, 0):
        assert again[0].repeat((x[start:],)) and kernel.launched[-1][9] == (x[start:].data_ptr(), 5)


def test_tensors_that_do_not_change_are_kept(kernel: Compiled) -> None:
    x, order = torch.zeros(16), torch.arange(4)
    address = order.data_ptr()
    recording = Recording(0, None)
    args = ((x, (order, 1), (2, 3), (x,), Address(8, x)), None, Descriptor(x, [16], [1], [8]))
    recording.record((x,), [Launch("kernel", 3, args, run.KernelConfig())])
    del order, args
    other = torch.zeros(16)
    assert recording.repeat((other,))
    at = other.data_ptr()
    *first, tensor_map = kernel.launched[-1][9:12]
    assert first == [(at, (address, 1), (2, 3), (at,), at + 8), None]
    assert tensor_map.base.data_ptr() == at and tensor_map.shape == [16] and tensor_map.block_shape == [8]


@pytest.mark.parametrize("bound_then", [True, False], ids=("bound", "met"))
@pytest.mark.parametrize("capturing", [True, False])
def test_a_graph_keeps_what_its_recordings_own(
    kernel: Compiled, monkeypatch: pytest.MonkeyPatch, bound_then: bool, capturing: bool
) -> None:
    """Whoever forgets a recording: graphs hold addresses alone."""
    monkeypatch.setattr(captured, "_kept", {})
    x, order = torch.zeros(16), torch.arange(4)
    recorder = Recorder()
    recording = recorder.get(problem_of(), "key", DEVICE, partial(list, [order]))
    launches = [Launch("kernel", 3, ((x, order),), run.KernelConfig(), None if bound_then else run.LaunchOptions())]
    monkeypatch.setattr(captured, "is_capturing", lambda: capturing)
    recording.record((x,), launches)
    monkeypatch.setattr(captured, "is_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    alive = weakref.ref(order)
    recorder.forget()
    kernel.launched.clear()
    del launches, recording, order
    gc.collect()
    assert (alive() is not None) == capturing


class FakeLauncher:
    """Built like Triton's launchers: a wrapper around a function called launcher, which expands some arguments."""

    def __init__(self, native: Any, scratch: int = 0) -> None:
        def wrap(launcher: Any) -> Any:
            def inner(*args: Any) -> Any:
                self.wrapped += 1
                return launcher(*args[:2], *(x for arg in args[2:] for x in arg))

            return inner

        self.wrapped = 0
        self.launch = wrap(native)
        self.global_scratch_size, self.profile_scratch_size = scratch, 0

    def __call__(self, *args: Any) -> None:
        self.launch(*args)


@pytest.mark.parametrize("scratch", [0, 8])
def test_bound_launches_skip_the_wrapper_unless_it_allocates_scratch_memory(scratch: int) -> None:
    ran: list[tuple[Any, ...]] = []
    run = FakeLauncher(lambda *args: ran.append(args), scratch)
    call = bound(run, (1, 2, (3, 4)))
    assert ran == []  # binding launches nothing
    call()
    call()
    assert ran == [(1, 2, 3, 4)] * 2
    assert run.wrapped == (2 if scratch else 1)
    run(5, 6, (7,))
    assert ran[-1] == (5, 6, 7)  # the launcher itself is as it was


def test_a_launcher_in_c_is_called_itself() -> None:
    """Launchers of kernels without tensor maps have no wrapper in Python but their own `__call__`."""
    run = FakeLauncher(None)
    run.launch = "{0}{1}{2[0]}".format
    call: Any = bound(run, (1, 2, (3, 4)))
    assert call.func is run.launch and call.args == (1, 2, (3, 4)) and call() == "123"
    for more in ({"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"gsan_enabled": True}):
        other = FakeLauncher(None)
        other.launch = run.launch
        vars(other).update(more)
        assert bound(other, (1, 2, (3,))).func is other, "it does more than to call it"  # type: ignore[attr-defined]
    del other.global_scratch_size
    assert bound(other, (1, 2, (3,))).func is other, "nobody knows what it does"  # type: ignore[attr-defined]


def test_other_shapes_have_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    found = collect(monkeypatch)
    call()
    call(seqlen=96)
    call(heads=4)
    assert len({key for key, _, _ in found}) == len(found)


def test_masks_are_remembered_by_the_shapes_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels read of a mask, as lists or converted, are tensors like any other."""
    from tilewise import masks

    found = collect(monkeypatch)
    q, k, v, out = (torch.randn(2, 2, 64, 16).half() for _ in range(4))
    lengths, ids = torch.tensor([64, 30]), torch.zeros(2, 64, dtype=torch.int32)
    for mask in (masks.key_padding(lengths), masks.key_padding(lengths[:1]), masks.documents(ids), masks.documents(ids[:1])):
        problem = Problem.of(batch=2, heads=2, seqlen=64, head_dim=16, dtype="float16", mask=mask)
        run.run_forward(problem, Inputs(q, k, v), out, torch.empty(2, 2, 64))
    assert len({key for key, _, _ in found}) == 4
    for _, tensors, (launch, *_) in found[:2]:
        read = launch.args[0].mask.tensors
        assert len(read) == 2 and all(any(x is own for own in tensors) for x in read), "or a repeated launch had old addresses"


def test_a_descriptor_moves_to_other_memory() -> None:
    x = torch.zeros(2, 2, 64, 16, dtype=torch.float16)
    descriptor = Descriptor.of(x, 32, 16)
    moved = descriptor.at(4096)
    assert moved.base.data_ptr() == 4096 and descriptor.base is x
    for name in ("shape", "strides", "block_shape", "padding", "round_f32_to_tf32"):
        assert getattr(moved, name) == getattr(descriptor, name)
