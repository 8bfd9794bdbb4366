"""The host's share of a call: how long it takes until the call's kernels are launched, for tiny calls with each mask and feature.

A GPU has less to do than the host in every call, so what is timed is the host alone. On a CPU, where a call returns when it is
done, the figures include the arithmetic. Waking autograd's thread and waiting for it takes as long as a launch or several, and
differs between machines and moments: what Python does is seen best in one thread. Every call is made in every way before any is
timed, and none is before all kernels are compiled: a compiler in a thread of its own takes turns with the calls. Nor does Python
collect garbage in a round.

    python -m tools.host_times --device cuda
    python -m tools.host_times --device cuda --call packed --call bias
    python -m tools.host_times --device cuda --profile blocks
    python -m tools.host_times --without-gpu
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from cProfile import Profile
from dataclasses import asdict, astuple, dataclass
from pstats import Stats
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import tilewise as tw
from tilewise.backends.gpu.compiled import finish_compiling

HEADS, TOKENS, DIM = 4, 256, 64
SEQUENCES, PAGE = 8, 16
ROUNDS = 7
WARM = 3
"""Calls before any is timed: the first compiles kernels, the second records their launches."""
FUNCTIONS = 40
"""Of a profile."""


@dataclass(frozen=True)
class HostTime:
    """Microseconds of a call, the least of some rounds. A call over a cache has no backward."""

    call: str
    forward: float
    backward: float | None
    both: float | None
    one_thread: float | None
    """`both`, where autograd does not pass the backward to a thread of its own."""
    bound: float
    """Launches of a call, forward and backward, that were bound to addresses they had not had before."""


def least(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Microseconds until a call has been launched."""
    found = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        repeated(call, calls)
        found.append((time.perf_counter() - start) / calls * 1e6)
    return min(found[1:])  # the first one prepares what later ones find


def variants(device: torch.device) -> dict[str, dict[str, Any]]:
    """Options of `attention` by name."""
    ids = (torch.arange(TOKENS, device=device) // 64)[None].int()
    table = torch.ones(TOKENS // 128, TOKENS // 128, dtype=torch.bool, device=device).tril()
    listed = torch.zeros(1, 1, TOKENS // 128, 1, dtype=torch.int32, device=device)
    return {
        "plain": {},
        "causal": {"mask": tw.causal()},
        "causal documents": {"mask": tw.causal() & tw.documents(ids)},
        "blocks": {"mask": tw.blocks(table, 128)},
        "selected": {"mask": tw.selected(listed)},
        "padding": {"mask": tw.key_padding(torch.tensor([TOKENS - 50], device=device))},
        "sinks": {"sinks": torch.zeros(HEADS, device=device)},
        "ALiBi": {"bias": tw.alibi(torch.full((HEADS,), 0.1, device=device))},
        "bias": {"bias": torch.zeros(1, HEADS, TOKENS, TOKENS, device=device, dtype=torch.bfloat16)},
        "softcap": {"softcap": 30.0},
        "dropout": {"dropout_p": 0.1},
    }


def calls_of(device: torch.device) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Functions of q, k and v and their inputs: every variant, a packed batch, and SDPA."""
    inputs = [torch.randn(1, HEADS, TOKENS, DIM, device=device, dtype=torch.bfloat16) for _ in range(3)]
    packed = [x[0].transpose(0, 1) for x in inputs]
    cu = torch.tensor([0, 100, TOKENS], dtype=torch.int32, device=device)

    def with_options(options: dict[str, Any]) -> Callable[..., Tensor]:
        return lambda q, k, v: tw.attention(q, k, v, **options)

    def attend_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention_varlen(q, k, v, cu, mask=tw.causal())

    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        **{name: (with_options(options), inputs) for name, options in variants(device).items()},
        "packed": (attend_packed, packed),
        "SDPA": (lambda q, k, v: sdpa(q, k, v), inputs),
    }


def cached_calls(device: torch.device) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Functions of nothing: one query of each sequence over pages, alone and with its key and value, which are new."""
    count = SEQUENCES * TOKENS // PAGE
    pages = [torch.zeros(count, PAGE, HEADS, DIM, device=device, dtype=torch.bfloat16) for _ in range(2)]
    table = torch.arange(count, dtype=torch.int32, device=device).view(SEQUENCES, -1)
    cache = tw.KVCache.paged(*pages, table, torch.full((SEQUENCES,), TOKENS // 2, dtype=torch.int32, device=device))
    q, k, v = (torch.randn(SEQUENCES, 1, HEADS, DIM, device=device, dtype=torch.bfloat16) for _ in range(3))
    return {
        "decode": (lambda: tw.attention_cached(q, cache), []),
        "append, decode": (lambda: tw.attention_cached(q, cache, new=(k, v)), []),
    }


class Ways:
    """A call that takes q, k and v: without gradients, the backward of one that has been made, and both in one. One that takes
    nothing has no gradients."""

    def __init__(self, attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        self.attend, self.inputs = attend, inputs
        self.all: list[Callable[[], object]] = [self.forward]
        if not inputs:
            return
        self.all += (self.backward, self.both)
        self.learned = [x.detach().requires_grad_() for x in inputs]
        self.out = attend(*self.learned)
        self.above = torch.ones_like(self.out)

    def forward(self) -> object:
        return self.attend(*self.inputs)

    def backward(self) -> object:
        return torch.autograd.grad(self.out, self.learned, self.above, retain_graph=True)

    def both(self) -> object:
        return torch.autograd.grad(self.attend(*self.learned), self.learned, self.above)

    def warm(self) -> None:
        for call in self.all:
            repeated(call, WARM)


def measured(name: str, ways: Ways, calls: int, device: torch.device) -> HostTime:
    """A warm call, without gradients, and with them in three ways."""
    with without_garbage():
        times = [least(call, calls, device) for call in ways.all]
        with counted_bindings() as bound:
            repeated(ways.all[-1], calls)
        if len(times) == 1:
            return HostTime(name, times[0], None, None, None, len(bound) / calls)
        with torch.autograd.set_multithreading_enabled(False):
            return HostTime(name, *times, least(ways.both, calls, device), len(bound) / calls)


@contextmanager
def without_garbage() -> Iterator[None]:
    """Garbage is collected now, and then not before the end."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def repeated(call: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        call()


def host_times(device: torch.device, calls: int, names: Sequence[str]) -> Iterator[HostTime]:
    """Each as soon as it is known."""
    known = calls_of(device) | cached_calls(device)
    warm = {name: Ways(*known[name]) for name in names}
    for ways in warm.values():
        ways.warm()
    finish_compiling()
    for name, ways in warm.items():
        yield measured(name, ways, calls, device)


def stub() -> AbstractContextManager[object]:
    from tools.host_stub import without_gpu  # needs triton

    return without_gpu()


@contextmanager
def counted_bindings() -> Iterator[list[int]]:
    """Gets a 1 for every launch that is bound to addresses it has not had before: such a launch takes many times as long."""
    from tilewise.backends.gpu.record import Template

    found: list[int] = []
    bind = Template.bind

    def counting(self: Template, key: tuple[int, ...]) -> Callable[[], Any]:
        found.append(1)
        return bind(self, key)

    with patch.object(Template, "bind", counting):
        yield found


def print_profile(attend: Callable[..., Tensor], inputs: Sequence[Tensor], calls: int, device: torch.device) -> None:
    """Which functions a call spends its time in, all of it in this thread, and how many launches are bound anew."""
    ways = Ways(attend, inputs)
    ways.warm()
    finish_compiling()
    with torch.autograd.set_multithreading_enabled(False), without_garbage():
        for call in ways.all[::2]:
            took = least(call, calls, device)
            profiler = Profile()
            with counted_bindings() as bound:
                profiler.runcall(repeated, call, calls)
            way = call.__name__
            print(f"{way}: {took:.0f} µs without a profiler, {len(bound) / calls:.2f} launches bound anew in a call")
            Stats(profiler).sort_stats("tottime").print_stats(FUNCTIONS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.host_times", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=100, help="calls of a round")
    parser.add_argument("--call", metavar="CALL", action="append", help="only this call; may be repeated")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", metavar="CALL", help="in place of the table, the functions that one of its calls runs")
    parser.add_argument("--without-gpu", action="store_true", help="the GPU backends over CPU tensors, kernels that do nothing")
    options = parser.parse_args(arguments)
    if options.calls < 1:
        parser.error(f"--calls: got {options.calls}, need at least 1")
    device = torch.device("cpu" if options.without_gpu else options.device)
    with stub() if options.without_gpu else nullcontext():
        known = calls_of(device) | cached_calls(device)
        for option, name in (("--profile", options.profile), *(("--call", name) for name in options.call or ())):
            if name is not None and name not in known:
                parser.error(f"{option}: got {name!r}, need one of {', '.join(known)}")
        if options.profile is not None:
            print_profile(*known[options.profile], options.calls, device)
            return
        every = [name for name in known if name != "SDPA" or not options.without_gpu]
        found = host_times(device, options.calls, options.call or every)
        if options.json:
            print(json.dumps([asdict(one) for one in found]))
            return
        print(f"{'µs':18}{'forward':>10}{'backward':>10}{'both':>10}{'one thread':>12}{'bound':>8}", flush=True)
        for one in found:
            widths = zip(astuple(one)[1:-1], (10, 10, 10, 12), strict=True)
            times = "".join(f"{'–' if x is None else round(x):>{width}}" for x, width in widths)
            print(f"{one.call:18}{times}{one.bound:8.2f}", flush=True)


if __name__ == "__main__":
    main()
