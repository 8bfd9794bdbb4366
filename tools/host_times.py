"""The host's share of a call: how long it takes until the call's kernels are launched, for tiny calls with each mask and feature.

A GPU has less to do than the host in every call, so what is timed is the host alone. On a CPU, where a call returns when it is
done, the figures include the arithmetic.

    python -m tools.host_times --device cuda
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import tilewise as tw

HEADS, TOKENS, DIM = 4, 256, 64
ROUNDS = 7


@dataclass(frozen=True)
class HostTime:
    """Microseconds of a call, the least of some rounds."""

    call: str
    forward: float
    backward: float
    both: float


def least(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Microseconds until a call has been launched."""
    found = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
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


def measured(
    name: str, attend: Callable[..., Tensor], inputs: Sequence[Tensor], calls: int, device: torch.device
) -> HostTime:
    """A call that takes q, k and v, without gradients, and with them in two ways."""
    learned = [x.detach().requires_grad_() for x in inputs]
    out = attend(*learned)
    above = torch.ones_like(out)
    return HostTime(
        name,
        least(lambda: attend(*inputs), calls, device),
        least(lambda: torch.autograd.grad(out, learned, above, retain_graph=True), calls, device),
        least(lambda: torch.autograd.grad(attend(*learned), learned, above), calls, device),
    )


def host_times(device: torch.device, calls: int) -> list[HostTime]:
    """Of every variant, of a packed batch, and of SDPA."""
    dtype = torch.bfloat16
    inputs = [torch.randn(1, HEADS, TOKENS, DIM, device=device, dtype=dtype) for _ in range(3)]

    def with_options(options: dict[str, Any]) -> Callable[..., Tensor]:
        return lambda q, k, v: tw.attention(q, k, v, **options)

    found = [measured(name, with_options(options), inputs, calls, device) for name, options in variants(device).items()]
    packed = [x[0].transpose(0, 1) for x in inputs]
    cu = torch.tensor([0, 100, TOKENS], dtype=torch.int32, device=device)

    def attend_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention_varlen(q, k, v, cu, mask=tw.causal())

    sdpa = torch.nn.functional.scaled_dot_product_attention
    return [
        *found,
        measured("packed", attend_packed, packed, calls, device),
        measured("SDPA", lambda q, k, v: sdpa(q, k, v), inputs, calls, device),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.host_times", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=100, help="calls of a round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.calls < 1:
        parser.error(f"--calls: got {options.calls}, need at least 1")
    found = host_times(torch.device(options.device), options.calls)
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
        return
    print(f"{'µs':18}{'forward':>10}{'backward':>10}{'both':>10}")
    for one in found:
        print(f"{one.call:18}{one.forward:10.0f}{one.backward:10.0f}{one.both:10.0f}")


if __name__ == "__main__":
    main()
