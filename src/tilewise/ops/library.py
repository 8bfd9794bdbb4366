"""The operators torch.compile, torch.export and dispatch modes see: `tilewise::attention` and `tilewise::attention_backward`.

Their arguments are flat: tensors, and the problem's scalars. A mask travels as its program: a string that never holds a
length, symbolic integers and tensors. Defined with `Library.define`, which costs a call far less than `custom_op`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Inputs, Needs, empty_lse, empty_out
from tilewise.masks import Lowered, MaskProgram
from tilewise.ops.flops import backward_flops, forward_flops, teach_counters
from tilewise.ops.run import backward, forward
from tilewise.ops.tensors import ARGUMENTS, materialized, materialized_inputs, refuse_tangents, refuse_unknown
from tilewise.problem import Problem

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi, Tensor? sinks, Tensor? seed, Tensor? cu_q, Tensor? cu_k"
)
_RULES = "str structure, SymInt[] ints, Tensor[] tensors, float scale, float softcap, float dropout_p, str options"
_LIBRARY = torch.library.Library("tilewise", "DEF")
_LIBRARY.define(f"attention({_TENSORS}, {_RULES}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needs, {_TENSORS}, {_RULES})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Rules(NamedTuple):
    """The part of a problem that is not read off its tensors, as operators take it."""

    structure: str
    ints: Sequence[int]
    tensors: Sequence[Tensor]
    scale: float
    softcap: float
    dropout_p: float
    options: str

    @classmethod
    def of(cls, problem: Problem, backend: str) -> Rules:
        program = problem.program
        order = "deterministic" if problem.deterministic else "any order"
        options = f"{backend},{problem.precision},{order},{'with lse' if problem.needs_lse else 'without lse'}"
        return cls(*_flat(program), problem.scale, problem.softcap, problem.dropout_p, options)


def _flat(program: MaskProgram) -> tuple[str, list[int], list[Tensor]]:
    return program.structure, list(program.ints), list(program.tensors)


def problem_of(inputs: Inputs, rules: Rules, needs_grad: bool) -> tuple[Problem, str]:
    """The problem and the backend's name back from an operator's arguments."""
    backend, precision, order, lse = rules.options.split(",")
    q, k, v = inputs[:3]
    problem = Problem(
        batch=q.shape[0] if inputs.cu_q is None else inputs.cu_q.shape[0] - 1,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        seqlen_q=q.shape[2],
        seqlen_k=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        mask=Lowered(MaskProgram(rules.structure, tuple(rules.ints), tuple(rules.tensors))),
        scale=rules.scale,
        softcap=rules.softcap,
        bias=None if inputs.bias is None else tuple(inputs.bias.shape),  # type: ignore[arg-type]
        alibi=inputs.alibi is not None,
        sinks=inputs.sinks is not None,
        dropout_p=rules.dropout_p,
        varlen=inputs.cu_q is not None,
        precision=precision,
        deterministic=order == "deterministic",
        needs_grad=needs_grad,
        needs_lse=lse == "with lse",
        device=q.device.type,
    )
    return problem, backend


def attend(problem: Problem, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """The call through the operator."""
    if not torch.compiler.is_compiling():
        teach_counters(_FORMULAS)
    out, lse = torch.ops.tilewise.attention(*inputs, *Rules.of(problem, backend))
    return out, lse


def gradients(problem: Problem, inputs: Inputs, given: BackwardInputs, backend: str) -> tuple[Tensor | None, ...]:
    """The gradients through the operator."""
    teach_counters(_FORMULAS)
    out, lse, dout, dlse, needs = given
    found = torch.ops.tilewise.attention_backward(dout, dlse, out, lse, needs, *inputs, *Rules.of(problem, backend))
    return tuple(grad if need else None for grad, need in zip(found, needs, strict=True))


_COUNT = len(Inputs._fields)


def _arguments(args: tuple[Any, ...]) -> tuple[Inputs, Rules]:
    """The operator's arguments as a backend may read them; what it could not read right is refused."""
    inputs, rules = Inputs(*args[:_COUNT]), Rules(*args[_COUNT:])
    refuse_unknown((*zip(ARGUMENTS, inputs, strict=True), *(("mask", x) for x in rules.tensors)))
    refuse_tangents(inputs)
    return materialized_inputs(inputs), rules._replace(tensors=[materialized(x) for x in rules.tensors])


def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, rules = _arguments(args)
    problem, backend = problem_of(inputs, rules, needs_grad=False)
    out, lse = forward(problem, inputs, backend)
    return out, lse.contiguous()  # as promised, also where nobody asked for it


def _attention_fake(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*args[:_COUNT])
    return empty_out(inputs.q, inputs.v.shape[3]), empty_lse(inputs.q)


def _attention_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    inputs, rules = _arguments(args)
    problem, backend = problem_of(inputs, rules, needs_grad=True)
    grads = backward(problem, inputs, BackwardInputs(out, lse, dout, dlse, Needs(*needs)), backend)
    return tuple(
        inputs.q.new_empty(0) if grad is None else _like(grad, x)
        for grad, x in zip(grads, _sources(inputs), strict=True)
    )


def _attention_backward_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    inputs = Inputs(*args[:_COUNT])
    wanted = zip(_sources(inputs), needs, strict=True)
    return tuple(torch.empty_like(x) if need and x is not None else inputs.q.new_empty(0) for x, need in wanted)


def _sources(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """The inputs that gradients belong to, in the order of Grads."""
    return inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks


def _like(grad: Tensor, x: Tensor | None) -> Tensor:
    """The gradient with the strides the operator promised, those of `empty_like`; copies only if a backend chose others."""
    promised = torch.empty_like(x, device="meta") if x is not None else grad
    return (
        grad
        if grad.stride() == promised.stride()
        else torch.empty_like(grad, device=grad.device).as_strided(grad.shape, promised.stride()).copy_(grad)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, rules = inputs[:_COUNT], Rules(*inputs[_COUNT:])
    ctx.save_for_backward(*tensors, *output, *rules.tensors)
    ctx.rules = rules._replace(tensors=())
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors, (out, lse), mask_tensors = saved[:_COUNT], saved[_COUNT : _COUNT + 2], saved[_COUNT + 2 :]
    rules = ctx.rules._replace(tensors=list(mask_tensors))
    wanted = ctx.needs_input_grad
    needs = [*wanted[:4], wanted[5]]
    if dout is None:
        dout = torch.zeros_like(out)
    grads = torch.ops.tilewise.attention_backward(dout, dlse, out, lse, needs, *tensors, *rules)
    dq, dk, dv, dbias, dsinks = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    # torch takes any empty list for a list of tensors, so the gradient of no integers must be an empty list too
    ints: list[None] | None = None if rules.ints else []
    return (
        dq,
        dk,
        dv,
        dbias,
        None,
        dsinks,
        None,
        None,
        None,
        None,
        ints,
        [None] * len(mask_tensors),
        None,
        None,
        None,
        None,
    )


_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
_LIBRARY.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::attention", _attention_fake, lib=_LIBRARY)
torch.library.register_fake("tilewise::attention_backward", _attention_backward_fake, lib=_LIBRARY)
torch.library.register_autograd("tilewise::attention", _autograd, setup_context=_setup_context, lib=_LIBRARY)


def _count_forward(*args: Any, out_val: Any = None) -> int:
    inputs = Inputs(*args[:_COUNT])
    return forward_flops(problem_of(inputs, Rules(*args[_COUNT:]), needs_grad=False)[0], inputs)


def _count_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *args: Any, out_val: Any = None
) -> int:
    inputs = Inputs(*args[:_COUNT])
    problem, _ = problem_of(inputs, Rules(*args[_COUNT:]), needs_grad=True)
    return backward_flops(problem, inputs, Needs(*needs))


_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.tilewise.attention: _count_forward,
    torch.ops.tilewise.attention_backward: _count_backward,
}
if "torch._dynamo" in sys.modules:  # a compiled graph calls the operator without coming by here
    import torch.utils.flop_counter
teach_counters(_FORMULAS)
