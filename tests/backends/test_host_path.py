"""What Python does for a call like an earlier one, through the public functions and Hopper's launches, without a GPU.

A repeated call builds nothing but memory for its results, and its kernels get what they would get if all was built anew.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tools.host_stub import Kernel, without_gpu
from tools.host_times import HEADS, TOKENS, calls_of

import tilewise as tw
from tilewise import dispatch
from tilewise.api import call_cache
from tilewise.backends import base
from tilewise.backends.gpu import classify, record
from tilewise.backends.gpu.launch import Address, Descriptor
from tilewise.backends.gpu.record import Launch, Recording, Template
from tilewise.backends.hopper import feature_launch, hidden, list_launch, packed_order
from tilewise.backends.hopper import launch as forward_launch
from tilewise.backends.hopper.backward import launch as backward_launch
from tilewise.problem import Problem

CPU = torch.device("cpu")
BIASES = {
    "bias by word": torch.zeros(1, HEADS, TOKENS, TOKENS + 2, dtype=torch.bfloat16)[..., :TOKENS],
    "bias of fp32": torch.zeros(HEADS, TOKENS, TOKENS),
    "bias of keys": torch.zeros(1, 1, 1, TOKENS),
    "bias and padding": torch.zeros(1, HEADS, TOKENS, TOKENS, dtype=torch.bfloat16),
}


def attend_with(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: tw.attention(q, k, v, **options)


def packed_with(cu: Tensor, **options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: tw.attention_varlen(q, k, v, cu, **options)


def all_calls() -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Those that are timed, a call whose bias learns, more kinds of bias, and the other layout."""
    found = calls_of(CPU)
    inputs = found["plain"][1]
    del found["SDPA"]
    padding = tw.key_padding(torch.tensor([TOKENS - 50]))
    for name, bias in BIASES.items():
        found[name] = attend_with(bias=bias, mask=padding if "padding" in name else None), inputs
    learned = torch.zeros(1, HEADS, TOKENS, TOKENS, dtype=torch.bfloat16).requires_grad_()
    found["bias that learns"] = attend_with(bias=learned), inputs
    found["sinks that learn"] = attend_with(sinks=torch.zeros(HEADS).requires_grad_()), inputs
    cu = torch.tensor([0, 100, TOKENS], dtype=torch.int32)
    packed = [x.contiguous() for x in found["packed"][1]]
    found["packed, tokens first"] = packed_with(cu, mask=tw.causal()), packed
    found["packed with sinks"] = packed_with(cu, sinks=torch.zeros(HEADS).requires_grad_()), packed
    found["packed with a bias"] = packed_with(cu, bias=torch.zeros(HEADS, TOKENS, TOKENS)), packed
    swapped = [x.transpose(1, 2).contiguous() for x in inputs]
    found["bshd"] = attend_with(layout="bshd", mask=tw.causal()), swapped
    return found


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with without_gpu() as kernel:
        yield kernel


NAMES = list(all_calls())


def both(attend: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """A forward without gradients, and one with its backward, over tensors of its own."""
    attend(*[x.clone() for x in inputs])
    learned = [x.clone().requires_grad_() for x in inputs]
    out = attend(*learned)
    torch.autograd.grad(out, learned, torch.ones_like(out))


@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_call_builds_nothing(kernel: Kernel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = all_calls()[name]
    built: Counter[str] = Counter()

    def watch(owner: Any, what: str) -> None:
        made = getattr(owner, what)

        def counting(*args: Any, **more: Any) -> Any:
            built[what] += 1
            return made(*args, **more)

        monkeypatch.setattr(owner, what, counting)

    for owner, what in (
        (call_cache, "parse_call"), (dispatch, "select"), (Problem, "__init__"), (Template, "__init__"), (Launch, "run"),
        (classify, "make_lists"), (list_launch, "make_lists"), (packed_order, "order_launch"), (feature_launch, "bias_arguments"),
        (feature_launch, "broadcast_strides"), (base, "to_rank4"), (base, "from_rank4"), (forward_launch, "to_rank4"),
        (backward_launch, "to_rank4"),
    ):  # fmt: skip
        watch(owner, what)
    both(*call)
    assert built["parse_call"] and built["__init__"]
    both(*call)
    built.clear()
    both(*call)
    dbias = Counter({"broadcast_strides": 1} if name == "bias that learns" else {})  # of memory that is there in this call only
    assert built == dbias


def flat(value: Any) -> Any:
    """A launcher's arguments, by value."""
    if isinstance(value, Descriptor):
        return value.base.data_ptr(), tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
    if isinstance(value, Tensor | Address):
        return value.data_ptr()
    return tuple(flat(part) for part in value) if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("name", NAMES)
def test_kernels_get_what_they_would_get_if_all_was_built_anew(
    kernel: Kernel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch is repeated, and built over the same tensors; none of these lies where one of an earlier call did."""
    call, kept, compared = all_calls()[name], [], Counter[str]()
    both(*call)
    both(*call)
    repeat = Recording.repeat

    def repeated(self: Recording, tensors: Any) -> bool:
        kept.append(tensors)  # so that later ones lie elsewhere
        kernel.seen = []
        assert repeat(self, tensors), "was recorded before"
        return False

    def rebuilt(self: Recording, tensors: Any, launches: list[Launch]) -> None:
        got, kernel.seen = kernel.seen, []
        present = [x for x in tensors if x is not None]
        key = (0, *[x.data_ptr() for x in present])
        for launch in launches:
            Template(launch, []).bind((0,))()  # over the tensors themselves
        assert got is not None and flat(got) == flat(kernel.seen) and len(got) == len(launches)
        moved = {x for launched in got for x in leaves(flat(launched)) if isinstance(x, int)}
        assert set(key[1:]) - moved <= {x.data_ptr() for x in present if x.numel() == 0}, "a tensor that no kernel gets"
        compared[name] += len(launches)

    with monkeypatch.context() as patched:
        patched.setattr(Recording, "repeat", repeated)
        patched.setattr(Recording, "record", rebuilt)
        both(*call)
    assert compared[name] >= 4


def leaves(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, tuple) else [value]


def test_views_of_the_layout_are_no_nodes_of_the_graph(kernel: Kernel) -> None:
    """Each would cost as much as a launch, in the forward and again in the backward."""
    calls = all_calls()
    for name in ("plain", "bshd", "packed", "blocks", "bias"):
        attend, inputs = calls[name]
        out = attend(*[x.clone().requires_grad_() for x in inputs])
        assert out.grad_fn is not None and type(out.grad_fn).__name__ == "PlainAttentionBackward", name
        nodes = [node for node, _ in out.grad_fn.next_functions if node is not None]
        assert [type(node).__name__ for node in nodes] == ["AccumulateGrad"] * 3, name


def test_threads_ask_quickly_whether_launches_are_collected() -> None:
    """A thread's memory that lacks an attribute raises and catches an error at every question."""
    assert "jobs" in vars(type(record.is_collecting.__globals__["_collected"]))


def test_packed_gradients_that_no_kernel_can_read_are_copied(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a sum is one number in all places. Inputs and results of a packed call keep the user's rank and strides."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    whole = torch.zeros(TOKENS, HEADS, 3, 64, dtype=torch.bfloat16).requires_grad_()
    cu = torch.tensor([0, 100, TOKENS], dtype=torch.int32)
    for _ in range(3):
        out, lse = tw.attention_varlen(*whole.unbind(2), cu, return_lse=True)
        assert out.shape == (TOKENS, HEADS, 64) and out.is_contiguous() and lse.shape == (HEADS, TOKENS)
        before, kernel.seen = kernel.launched, []
        (found,) = torch.autograd.grad(out.sum() + lse.sum(), whole)
        assert found.shape == whole.shape and kernel.launched - before >= 2
        maps = [x for args in kernel.seen for x in args if isinstance(x, Descriptor)]
        assert maps and all(min(one.strides) > 0 for one in maps)


def test_flags_of_a_bias_are_those_of_a_thread(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads may take turns between the launches of a call. A captured call has flags of its own: graphs run at any time."""
    call, found = all_calls()["bias"], []
    copies = hidden.Copies.of

    def watched(*args: Any) -> hidden.Copies:
        found.append(copies(*args))
        return found[-1]

    monkeypatch.setattr(hidden.Copies, "of", watched)

    def flags() -> set[int]:
        found.clear()
        call[0](*call[1])
        return {one.flag.data_ptr() for one in found}

    own, kept = flags(), list(found)
    assert len(own) == 1 and flags() == flags() == own and kept[0].second.data_ptr() in {x + 16 for x in own}
    other: list[set[int]] = []
    thread = threading.Thread(target=lambda: other.append(flags()))
    thread.start()
    thread.join()
    assert other[0].isdisjoint(own) and flags() == own
    monkeypatch.setattr("tilewise.backends.gpu.kept.capturing", lambda q: True)
    first = flags()
    held = list(found)
    assert first.isdisjoint(own) and first.isdisjoint(flags()) and held
