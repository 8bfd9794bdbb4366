"""The operators torch.compile, torch.export and dispatch modes see: `tilewise::attention`, its backward, JVP and double backward.

Their arguments are flat: the Inputs, then the mask as its program (a string that never holds a length, symbolic integers and
tensors), the problem's SETTINGS, the tiles asked for and the backend's name; before all these, for the gradients, the
BackwardInputs, and for derivatives the Tangents or the Direction. The schemas are derived from those types. Defined with
`Library.define`, which costs a call far less than `custom_op`. `ops.library_rules` has what torch.func wants of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Direction, Inputs, Needs, Tangents, empty_lse, empty_out
from tilewise.masks import Lowered, MaskProgram
from tilewise.ops.flops import backward_flops, forward_flops, teach_counters
from tilewise.ops.library_rules import register_rules
from tilewise.ops.run import backward, double_backward, forward, jvp
from tilewise.ops.tensors import DIFFERENTIABLE, as_read, by_input, needs_of, tensor_fields
from tilewise.problem import SETTINGS, Problem, tile_of_text, tile_request, tile_text

_COUNT = len(Inputs._fields)
_INTS, _MASK_TENSORS = _COUNT + 1, _COUNT + 2  # the places of the mask's integers and tensors among the arguments
_PRECISION = _COUNT + 3 + SETTINGS.index("precision")
_BACKWARD, _TANGENTS = len(BackwardInputs._fields), len(Tangents._fields)
_TYPES = {one.name: one.type for one in fields(Problem)}  # "float", "str" and "bool", as schemas write them too
ARGUMENTS = ", ".join(
    [
        *(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in Inputs._fields),
        "str structure, SymInt[] ints, Tensor[] tensors",
        *(f"{_TYPES[name]} {name}" for name in SETTINGS),
        "str tile, str backend",
    ]
)
_GIVEN = "Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool[] needs"
_MOVING = ", ".join(f"Tensor? {name}_t" for name in Tangents._fields)
GRADS = ", ".join(["Tensor"] * len(DIFFERENTIABLE))
_LIBRARY = torch.library.Library("tilewise", "DEF")
for _schema in (
    f"attention({ARGUMENTS}) -> (Tensor, Tensor)",
    f"attention_backward({_GIVEN}, {ARGUMENTS}) -> ({GRADS})",
    f"attention_jvp({_MOVING}, {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    f"attention_double_backward({_MOVING}, Tensor out_t, Tensor lse_t, {_GIVEN}, {ARGUMENTS}) -> ({GRADS})",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def pack(problem: Problem, inputs: Inputs, backend: str) -> tuple[Any, ...]:
    """A call as the operator's arguments."""
    program, settings = problem.program, (getattr(problem, name) for name in SETTINGS)
    mask = (program.structure, list(program.ints), list(program.tensors))
    return (*inputs, *mask, *settings, tile_text(problem.tile), backend)


def unpack(args: Sequence[Any], needs_grad: bool) -> tuple[Problem, Inputs, str]:
    """The call back from the operator's arguments."""
    inputs, (structure, ints, tensors, *settings, tile, backend) = Inputs(*args[:_COUNT]), args[_COUNT:]
    named = dict(zip(SETTINGS, settings, strict=True))
    mask = Lowered(MaskProgram(structure, tuple(ints), tuple(tensors)))
    named |= {"mask": mask, "needs_grad": needs_grad, "tile": tile_request(tile_of_text(tile))}
    return Problem(**tensor_fields(inputs), **named), inputs, backend


def attend(problem: Problem, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """The call through the operator."""
    if not torch.compiler.is_compiling():
        teach_counters(_FORMULAS)
    out, lse = torch.ops.tilewise.attention(*pack(problem, inputs, backend))
    return out, lse


def gradients(problem: Problem, inputs: Inputs, given: BackwardInputs, backend: str) -> tuple[Tensor | None, ...]:
    """The gradients through the operator."""
    teach_counters(_FORMULAS)
    grads = torch.ops.tilewise.attention_backward(*given, *pack(problem, inputs, backend))
    return tuple(grad if need else None for grad, need in zip(grads, given.needs, strict=True))


def derive(problem: Problem, inputs: Inputs, tangents: Tangents, backend: str) -> tuple[Tensor, ...]:
    """Forward and JVP through the operator."""
    return tuple(torch.ops.tilewise.attention_jvp(*tangents, *pack(problem, inputs, backend)))


def derive_gradients(
    problem: Problem, inputs: Inputs, given: BackwardInputs, direction: Direction, backend: str
) -> tuple[Tensor, ...]:
    """The double backward through the operator."""
    tangents, out_t, lse_t = direction
    if out_t is None or lse_t is None:
        _, _, out_t, lse_t = derive(problem, inputs, tangents, backend)
    args = (*tangents, out_t, lse_t, *given, *pack(problem, inputs, backend))
    return tuple(torch.ops.tilewise.attention_double_backward(*args))


def readable(args: Sequence[Any]) -> list[Any]:
    """The operator's arguments with tensors that a backend may read."""
    readable = list(args)
    readable[:_COUNT], readable[_MASK_TENSORS] = as_read(Inputs(*args[:_COUNT]), args[_MASK_TENSORS])
    return readable


def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = forward(*unpack(readable(args), needs_grad=False))
    return out, lse.contiguous()  # as promised, also where nobody asked for it


def fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*args[:_COUNT])
    return empty_out(inputs.q, inputs.v.shape[3]), empty_lse(inputs.q, args[_PRECISION])


def _given(args: Sequence[Any]) -> BackwardInputs:
    return BackwardInputs._make((*args[: _BACKWARD - 1], Needs(*args[_BACKWARD - 1])))


def _attention_backward(*args: Any) -> tuple[Tensor, ...]:
    problem, inputs, backend = unpack(readable(args[_BACKWARD:]), needs_grad=True)
    return as_promised(backward(problem, inputs, _given(args), backend), inputs)


def as_promised(grads: Sequence[Tensor | None], inputs: Inputs) -> tuple[Tensor, ...]:
    """Gradients as the operator gives them: with the strides of their inputs, and empty where there are none."""
    return tuple(
        inputs.q.new_empty(0) if grad is None else _with_strides(grad, inputs[i])
        for grad, i in zip(grads, DIFFERENTIABLE, strict=True)
    )


def _attention_jvp(*args: Any) -> tuple[Tensor, ...]:
    problem, inputs, backend = unpack(readable(args[_TANGENTS:]), needs_grad=False)
    out, lse, out_t, lse_t = jvp(problem, inputs, Tangents(*args[:_TANGENTS]), backend)
    strides = out.stride()
    same = out_t.stride() == strides
    return out, lse.contiguous(), out_t if same else torch.empty_like(out).copy_(out_t), lse_t.contiguous()


def _attention_jvp_fake(*args: Any) -> tuple[Tensor, ...]:
    return (*fake_forward(*args[_TANGENTS:]), *fake_forward(*args[_TANGENTS:]))


def _attention_double_backward(*args: Any) -> tuple[Tensor, ...]:
    direction, args = Direction(Tangents(*args[:_TANGENTS]), *args[_TANGENTS : _TANGENTS + 2]), args[_TANGENTS + 2 :]
    problem, inputs, backend = unpack(readable(args[_BACKWARD:]), needs_grad=True)
    return as_promised(double_backward(problem, inputs, _given(args), direction, backend), inputs)


def _attention_double_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return _attention_backward_fake(*args[_TANGENTS + 2 :])


def _attention_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return fake_gradients(Inputs(*args[_BACKWARD : _BACKWARD + _COUNT]), _given(args).needs)


def fake_gradients(inputs: Inputs, needs: Needs) -> tuple[Tensor, ...]:
    wanted = ((inputs[i], need) for i, need in zip(DIFFERENTIABLE, needs, strict=True))
    return tuple(torch.empty_like(x) if need and x is not None else inputs.q.new_empty(0) for x, need in wanted)


def _with_strides(grad: Tensor, x: Tensor | None) -> Tensor:
    """The gradient with the strides the operator promised, those of `empty_like`; copies only if a backend chose others."""
    promised = grad if x is None else torch.empty_like(x, device="meta")
    if grad.stride() == promised.stride():
        return grad
    return torch.empty_like(grad, device=grad.device).as_strided(grad.shape, promised.stride()).copy_(grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_COUNT], *output, *inputs[_MASK_TENSORS])
    ctx.rest = inputs[_COUNT:_MASK_TENSORS], inputs[_MASK_TENSORS + 1 :]
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    inputs, (out, lse, *tensors) = ctx.saved_tensors[:_COUNT], ctx.saved_tensors[_COUNT:]
    before, after = ctx.rest
    args = (*inputs, *before, tensors, *after)
    needs = needs_of(ctx.needs_input_grad[:_COUNT])
    dout = torch.zeros_like(out) if dout is None else dout
    grads: list[Any] = [None] * len(args)
    found = torch.ops.tilewise.attention_backward(out, lse, dout, dlse, needs, *args)
    grads[:_COUNT] = by_input(found, needs, _COUNT)
    # torch takes any empty list for a list of tensors, so the gradient of no integers must be an empty list too
    grads[_INTS], grads[_MASK_TENSORS] = None if args[_INTS] else [], [None] * len(tensors)
    return tuple(grads)


for _name, _run, _fake in (
    ("attention", _attention, fake_forward),
    ("attention_backward", _attention_backward, _attention_backward_fake),
    ("attention_jvp", _attention_jvp, _attention_jvp_fake),
    ("attention_double_backward", _attention_double_backward, _attention_double_backward_fake),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake, lib=_LIBRARY)
register_rules(_LIBRARY, _autograd, _setup_context)


def _count_forward(*args: Any, out_val: Any = None) -> int:
    return forward_flops(*unpack(args, needs_grad=False)[:2])


def _count_backward(*args: Any, out_val: Any = None) -> int:
    return backward_flops(*unpack(args[_BACKWARD:], needs_grad=True)[:2], _given(args).needs)


_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.tilewise.attention: _count_forward,
    torch.ops.tilewise.attention_backward: _count_backward,
}
if "torch._dynamo" in sys.modules:  # a compiled graph calls the operator without coming by here
    import torch.utils.flop_counter
teach_counters(_FORMULAS)
