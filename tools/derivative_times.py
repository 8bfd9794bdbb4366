"""How fast derivatives and statistics are: JVP beside the forward and the package jvp_flash_attention where it can be imported,
JVP and second gradients beside SDPA's math backend, statistics beside the plain call. Contenders take turns.

    python -m tools.derivative_times --device cuda --length 16384
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from tilewise.hardware.timers import clock_for
from tilewise.lab.bench.timing import Effort, Spread, interleave, ratio

Call = Callable[[], object]
STATISTICS = {"max_logit": ("max_logit",), "entropy": ("max_logit", "entropy")}
APART = 5e-2
"""A peer whose result is further off than this, in its norm, is not timed."""
MATH_LENGTH = 4096
"""SDPA's math backend keeps matrices of length × length: it takes part up to here."""


class Row(NamedTuple):
    """A contender's seconds, and how many times as fast as the first of its group it is, round by round."""

    group: str
    contender: str
    seconds: Spread
    speed: Spread


class Setting(NamedTuple):
    """Tensors of a shape."""

    q: Tensor
    k: Tensor
    v: Tensor
    tangents: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    causal: bool

    @classmethod
    def of(cls, heads: int, length: int, dim: int, dtype: str, device: str, causal: bool) -> Setting:
        torch.manual_seed(0)
        q, k, v, a, b, c, dout = (
            torch.randn(1, heads, length, dim, device=device, dtype=getattr(torch, dtype)) for _ in range(7)
        )
        return cls(q, k, v, (a, b, c), dout, causal)

    @property
    def mask(self) -> tw.Mask | None:
        return tw.causal() if self.causal else None

    def math(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """SDPA's math backend."""
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def dual(setting: Setting, attend: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """out and its tangent."""
    with forward_ad.dual_level():
        q, k, v = (forward_ad.make_dual(x, t) for x, t in zip(setting[:3], setting.tangents, strict=True))
        out = forward_ad.unpack_dual(attend(q, k, v))
        return out.primal, out.tangent


def statistics_calls(setting: Setting) -> Iterator[tuple[str, Call]]:
    """The forward without and with statistics: alone, for what a call takes depends on the power that the one before it took."""
    for name, stats in ({"forward": None} | STATISTICS).items():
        yield name, partial(tw.attention, *setting[:3], mask=setting.mask, stats=stats)


def forward_calls(setting: Setting) -> Iterator[tuple[str, Call]]:
    """The forward, JVP, and the peer's JVP."""
    ours = partial(tw.attention, mask=setting.mask)
    yield "forward", lambda: ours(*setting[:3])
    yield "JVP", lambda: dual(setting, ours)
    if setting.q.shape[2] <= MATH_LENGTH:
        yield "JVP of SDPA math", lambda: dual(setting, setting.math)
    try:
        from jvp_flash_attention.jvp_attention import JVPAttn
    except ImportError:
        return
    want = dual(setting, ours)[1]
    for specialised, maps in ((False, False), (False, True), (True, False), (True, True)):
        peer = partial(JVPAttn.fwd_dual, causal=setting.causal, warp_specialize=specialised, USE_TMA=maps)
        name = "jvp_flash_attention" + " warp-specialised" * specialised + " TMA" * maps
        try:
            apart = float((dual(setting, peer)[1] - want).float().norm() / want.float().norm())
        except Exception as error:  # a peer may fail in any way
            print(f"{name}: not run, {type(error).__name__}: {str(error)[:80]}")
            continue
        if apart > APART:
            print(f"{name}: not timed, its tangent is {apart:.2g} of ours away")
            continue
        yield name, lambda peer=peer: dual(setting, peer)  # type: ignore[misc]


def second_calls(setting: Setting) -> Iterator[tuple[str, Call]]:
    """The gradient of <gradient, tangents>, alone and with all that comes before it: SDPA's, then ours."""
    for name, attend in (("SDPA math", setting.math), ("tilewise", partial(tw.attention, mask=setting.mask))):
        leaves = tuple(x.clone().requires_grad_() for x in setting[:3])

        def first(attend: Any = attend, leaves: Any = leaves) -> Tensor:
            grads = torch.autograd.grad(attend(*leaves), leaves, setting.dout, create_graph=True)
            return torch.stack([(g * t).sum() for g, t in zip(grads, setting.tangents, strict=True)]).sum()

        loss = first()
        yield name, partial(torch.autograd.grad, loss, leaves, retain_graph=True)
        yield f"{name}, all passes", lambda first=first, leaves=leaves: torch.autograd.grad(first(), leaves)  # type: ignore[misc]


KINDS = {"statistics": statistics_calls, "JVP": forward_calls, "second": second_calls}


def timed(group: str, calls: Iterator[tuple[str, Call]], device: str, seconds: float) -> Iterator[Row]:
    """In turns. What a name shares with an earlier one up to its comma is not its rival: alone is compared with alone."""
    timers = {name: partial(clock_for(device), call) for name, call in calls}
    samples = interleave(timers, Effort(seconds).on(device))
    for name, values in samples.items():
        kind = name.partition(",")[2]
        rival = next(other for other in samples if other.partition(",")[2] == kind)
        yield Row(group, name, Spread.of(values), ratio(samples[rival], values))


def show(row: Row) -> str:
    low, middle, high, _ = row.speed
    return f"{row.group:24} {row.contender:42} {1e3 * row.seconds.p50:10.3f} {middle:7.3f} ({low:.3f} to {high:.3f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dims", type=int, nargs="*", default=[128, 64])
    for name, default in {"heads": 16, "length": 16384, "second-length": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each group")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, help="what to time")
    parser.add_argument("--json", help="a file for the rows")
    options = parser.parse_args(arguments)
    print(f"{'':24} {'':42} {'ms':>10} {'speed of the first':>7}")
    rows = []
    for dim in options.dims:
        for causal in (False, True):
            name = f"d{dim} {'causal' if causal else 'full'}"
            for kind in options.kinds:
                length = options.second_length if kind == "second" else options.length
                setting = Setting.of(options.heads, length, dim, options.dtype, options.device, causal)
                for row in timed(f"{name} {kind}", KINDS[kind](setting), options.device, options.seconds):
                    print(show(row), flush=True)
                    rows.append(row._asdict() | {"length": length, "heads": options.heads, "dtype": options.dtype})
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
