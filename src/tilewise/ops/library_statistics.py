"""The operators of calls with statistics: what torch.compile, torch.export, dispatch modes and meta tensors work on.

Statistics travel as text, `stats=("entropy", "key_mass")` as "entropy,key_mass"; a statistic that was not asked for is an empty
tensor. The entropy has a gradient, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Inputs, Needs, Statistics
from tilewise.errors import DerivativeError
from tilewise.ops import statistics
from tilewise.ops.library import ARGUMENTS, GRADS, as_promised, fake_forward, fake_gradients, pack, readable, unpack
from tilewise.ops.tensors import by_input, needs_of
from tilewise.problem import Problem, top_size

_COUNT, _STATS = len(Inputs._fields), len(Statistics._fields)
_INTS, _MASK_TENSORS = _COUNT + 1, _COUNT + 2
_GIVEN = "Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, Tensor? dentropy, Tensor entropy, Tensor key_lse, bool[] needs"
_AHEAD = _GIVEN.count(",") + 1
_LIBRARY = torch.library.Library("tilewise", "FRAGMENT")
_LIBRARY.define(
    f"attention_statistics({ARGUMENTS}, str stats) -> ({', '.join(['Tensor'] * (2 + _STATS))})",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    f"attention_statistics_backward({_GIVEN}, {ARGUMENTS}, str stats) -> ({GRADS})", tags=(torch.Tag.pt2_compliant_tag,)
)


def attend(problem: Problem, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor, Statistics]:
    """The call through the operator."""
    found = torch.ops.tilewise.attention_statistics(*pack(problem, inputs, backend), ",".join(problem.stats))
    out, lse, *stats = found
    asked = _asked(problem.stats)
    return out, lse, Statistics(*(x if there else None for x, there in zip(stats, asked, strict=True)))


def _asked(stats: Sequence[str]) -> tuple[bool, ...]:
    """Which fields of Statistics a call has."""
    top = any(name not in Statistics._fields for name in stats)
    known = {name: name in stats for name in Statistics._fields} | {"key_lse": "entropy" in stats}
    return tuple((known | {"weights": top, "indices": top}).values())


def _called(args: Sequence[Any], needs_grad: bool) -> tuple[Problem, Inputs, str]:
    *call, text = args
    problem, inputs, backend = unpack(readable(call), needs_grad)
    return replace(problem, stats=tuple(text.split(","))), inputs, backend


def _statistics(*args: Any) -> tuple[Tensor, ...]:
    problem, inputs, backend = _called(args, needs_grad=False)
    out, lse, stats = statistics.forward(problem, inputs, backend)
    return (out, *((inputs.q.new_empty(0) if x is None else x.contiguous()) for x in (lse, *stats)))


def _statistics_fake(*args: Any) -> tuple[Tensor, ...]:
    out, lse = fake_forward(*args[:-1])
    names = args[-1].split(",")
    widest = (*lse.shape, next(map(top_size, (name for name in names if name not in Statistics._fields)), 0))
    shapes = {"key_mass": (*lse.shape[:2], args[1].shape[2]), "weights": widest, "indices": widest}
    stats = []
    for name, there in zip(Statistics._fields, _asked(names), strict=True):
        dtype = torch.int64 if name == "indices" and there else lse.dtype
        stats.append(lse.new_empty(shapes.get(name, lse.shape), dtype=dtype) if there else args[0].new_empty(0))
    return (out, lse, *stats)


def _gradients(*args: Any) -> tuple[Tensor, ...]:
    out, lse, dout, dlse, dentropy, entropy, key_lse, needs, *call = args
    problem, inputs, backend = _called(call, needs_grad=True)
    dout = torch.zeros_like(out) if dout is None else dout
    given = BackwardInputs(out, lse, dout, dlse, Needs(*needs))
    return as_promised(statistics.all_gradients(problem, inputs, given, (dentropy, entropy, key_lse), backend), inputs)


def _gradients_fake(*args: Any) -> tuple[Tensor, ...]:
    return fake_gradients(Inputs(*args[_AHEAD : _AHEAD + _COUNT]), Needs(*args[_AHEAD - 1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, lse, *found = output
    stats = Statistics(*found)
    ctx.save_for_backward(*inputs[:_COUNT], out, lse, stats.entropy, stats.key_lse, *inputs[_MASK_TENSORS])
    ctx.rest = inputs[_COUNT:_MASK_TENSORS], inputs[_MASK_TENSORS + 1 :]
    moving = "entropy" if "entropy" in inputs[-1].split(",") else ""
    ctx.mark_non_differentiable(*(x for name, x in stats._asdict().items() if name != moving))
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *dstats: Tensor | None) -> tuple[Any, ...]:
    inputs, (out, lse, entropy, key_lse, *tensors) = ctx.saved_tensors[:_COUNT], ctx.saved_tensors[_COUNT:]
    before, after = ctx.rest
    args = (*inputs, *before, tensors, *after)
    needs = needs_of(ctx.needs_input_grad[:_COUNT])
    given = (out, lse, dout, dlse, Statistics(*dstats).entropy, entropy, key_lse, list(needs))
    grads: list[Any] = [None] * len(args)
    found = torch.ops.tilewise.attention_statistics_backward(*given, *args)
    grads[:_COUNT] = by_input(found, needs, _COUNT)
    # torch takes any empty list for a list of tensors, so the gradient of no integers must be an empty list too
    grads[_INTS], grads[_MASK_TENSORS] = None if args[_INTS] else [], [None] * len(tensors)
    return tuple(grads)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise DerivativeError(statistics.ONCE)


for _name, _run, _fake in (
    ("attention_statistics", _statistics, _statistics_fake),
    ("attention_statistics_backward", _gradients, _gradients_fake),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("tilewise::attention_statistics", _autograd, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd("tilewise::attention_statistics_backward", _refuse, lib=_LIBRARY)
