"""What torch.func wants of the operators: rules for vmap, and the backward's own gradient.

The public functions differentiate above the operators (`ops.autograd`). These rules are for who calls an operator itself, and for
gradients of gradients under a dispatch mode. What they do not serve raises. torch has no place for a forward-mode rule of an
operator, and would drop tangents on the way to it, so each has a kernel of its own where autograd comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from tilewise.backends.base import BackwardInputs, Inputs, Needs
from tilewise.errors import DerivativeError
from tilewise.masks import Lowered, MaskProgram
from tilewise.ops import vmap
from tilewise.ops.tensors import by_input, has_tangent, needs_of, primal, tangents_of, tensor_fields
from tilewise.problem import SETTINGS, Problem

_COUNT = len(Inputs._fields)
_GIVEN = len(BackwardInputs._fields)
_MASK = _COUNT + 2  # the place of the mask's tensors among the arguments of `attention`


def register_rules(library: torch.library.Library, backward: Any, setup_context: Any) -> None:
    """Give the operators of `ops.library` their rules; `attention` has its first gradient from there."""
    groups = {
        "attention": ((), vmap.RESULTS),
        "attention_backward": (("results", "upstream"), None),
        "attention_jvp": (("tangents",), vmap.RESULTS * 2),
        "attention_double_backward": (("tangents", "results", "results", "upstream"), None),
    }
    for name, (ahead, kinds) in groups.items():
        torch.library.register_vmap(f"tilewise::{name}", _vmap_rule(name, ahead, kinds), lib=library)
    formulas = {
        "attention": Info(backward, setup_context),
        "attention_backward": Info(_differentiate, _remember),
        "attention_jvp": Info(_refuse("attention_jvp"), None),
        "attention_double_backward": Info(_refuse("attention_double_backward"), None),
    }
    for name, formula in formulas.items():
        library.impl(name, _with_tangents(name, formula), "Autograd", with_keyset=True)


def _with_tangents(name: str, formula: Info) -> Callable[..., Any]:
    """The operator where autograd comes in: with tangents their rule, else torch's own way with the formula of the gradient."""
    plain = make_autograd_impl(getattr(torch.ops.tilewise, name).default, formula)

    def kernel(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level < 0 or not any(has_tangent(x) for x in args if isinstance(x, Tensor)):
            return plain(keyset, *args)
        graph = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
        if name != "attention" or graph or torch.compiler.is_compiling():
            raise DerivativeError(
                f"the operator tilewise::{name} has no forward-mode derivative{' together with a graph' if graph else ''}; "
                "call tilewise.attention, which has"
            )
        inputs = Inputs(*args[:_COUNT])
        tangents = tangents_of(inputs)
        assert tangents is not None
        out, lse, out_t, lse_t = torch.ops.tilewise.attention_jvp(*tangents, *map(primal, inputs), *args[_COUNT:])
        return forward_ad.make_dual(out, out_t), forward_ad.make_dual(lse, lse_t)

    return kernel


def _vmap_rule(name: str, ahead: tuple[str, ...], kinds: tuple[str, ...] | None) -> Callable[..., Any]:
    """Fold the mapped dimension into the operator's batch or heads."""
    operator = getattr(torch.ops.tilewise, name)
    first = sum(len(vmap.KINDS[group]) for group in ahead)  # tensors ahead of the Inputs

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        has_needs = kinds is None  # after the tensors ahead
        call, dims = args[first + has_needs :], in_dims[first + has_needs :]
        needs = Needs(*args[first]) if has_needs else ()
        mask, settings = call[_MASK], call[_MASK + 1 :]
        tensors = [*args[:first], *call[:_COUNT], *mask]
        flat_dims = [*in_dims[:first], *dims[:_COUNT], *(dims[_MASK] or [None] * len(mask))]
        named = dict(zip(SETTINGS, settings, strict=False))
        inputs = Inputs(*map(_sample, call[:_COUNT], dims[:_COUNT]))
        lowered = Lowered(MaskProgram(call[_COUNT], tuple(call[_COUNT + 1]), tuple(mask)))
        problem = Problem(**tensor_fields(inputs), mask=lowered, **named)
        roles = vmap.roles(*ahead, "inputs", "mask", mask=len(mask))

        def run(problem: Problem, x: Sequence[Any]) -> Sequence[Tensor]:
            own, rest = x[:first], x[first:]
            middle = (list(needs),) if has_needs else ()
            found = operator(*own, *middle, *rest[:_COUNT], *call[_COUNT:_MASK], list(rest[_COUNT:]), *settings)
            return [x for x, need in zip(found, needs, strict=True) if need] if has_needs else found

        fold = vmap.Fold(problem, info.batch_size, roles, flat_dims, tensors, needs)
        found, places = fold.run(run, vmap.gradients(needs) if kinds is None else kinds)
        if not has_needs:
            return found, places
        each = iter(found)
        empty = inputs.q.new_empty(info.batch_size, 0)
        return tuple(next(each) if need else empty for need in needs), (0,) * len(needs)

    return rule


def _sample(x: Any, dim: int | None) -> Any:
    return x if x is None or dim is None else x.select(dim, 0)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = inputs[_GIVEN:]
    ctx.needs = inputs[_GIVEN - 1]
    ctx.save_for_backward(*inputs[: _GIVEN - 1], *call[:_COUNT], *call[_MASK])
    ctx.rest = call[_COUNT:_MASK], call[_MASK + 1 :]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    """The gradients of the backward: the JVP for the upstream ones, the double backward for the inputs."""
    out, lse, dout, dlse, *rest = ctx.saved_tensors
    inputs, mask, (before, after) = rest[:_COUNT], rest[_COUNT:], ctx.rest
    call = (*inputs, *before, mask, *after)
    tangents = [x if need else None for x, need in zip(cotangents, ctx.needs, strict=True)]
    grads: list[Any] = [None] * (_GIVEN + len(call))
    grads[_GIVEN - 1] = None if ctx.needs else []
    grads[_GIVEN + _COUNT + 1], grads[_GIVEN + _MASK] = None if before[1] else [], [None] * len(mask)
    if all(x is None for x in tangents):
        return tuple(grads)
    _, _, out_t, lse_t = torch.ops.tilewise.attention_jvp(*tangents, *call)
    grads[2], grads[3] = out_t, None if dlse is None else lse_t
    needs = needs_of(ctx.needs_input_grad[_GIVEN : _GIVEN + _COUNT])
    if any(needs):
        given = (out, lse, dout, dlse, list(needs))
        second = torch.ops.tilewise.attention_double_backward(*tangents, out_t, lse_t, *given, *call)
        grads[_GIVEN : _GIVEN + _COUNT] = by_input(second, needs, _COUNT)
    return tuple(grads)


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(ctx: Any, *grads: Any) -> Any:
        raise DerivativeError(f"the operator tilewise::{name} has no gradient of its own; differentiate tilewise.attention")

    return refuse

