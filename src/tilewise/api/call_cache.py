"""The call cache: a call like an earlier one skips every check and goes straight to its backend's launch.

The key of a call has two parts.

1. Settings: every option as given but the seed, the types of its numbers (True equals 1.0 and is refused), the gradient mode,
   torch's deterministic switch and what the backend's name means now (`dispatch.registry_key`).
2. Facts of q, k and v: shapes, strides, dtypes, devices, whether one requires a gradient, whether all begin at 16 bytes.

The table holds each call by both parts and, by the settings alone, the last of them: its guard compares the tensors by one
question to torch, which costs a fraction of the facts.

Rules of invalidation:
- A change of any part of the key is another call. Registering a backend changes `registry_key`.
- Never kept: calls with a bias, sinks, dropout or a mask that holds tensors; empty ones; tensors whose memory does not hold
  their values (subclasses, meta tensors, lazy negation); all calls under autocast, dispatch modes, functorch transforms and
  forward-mode differentiation, which are looked for again before the last call is repeated.
- What depends on the process, such as the number of threads, is compared by the backend that depends on it.
- The cache keeps no tensor alive. At LIMIT entries it starts afresh.

Calls over a KVCache are kept as Problems, in the same table and by the same rules, with facts of q and the pages: their tensors
are looked at in each call, since lengths and tables change under them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import dispatch
from tilewise.api.execute import choose, modes_active, restore_layout
from tilewise.api.options import BatchOptions, parameters
from tilewise.api.parse import parse_call
from tilewise.backends.base import Backend, Inputs
from tilewise.errors import KernelError
from tilewise.masks import Mask
from tilewise.ops.autograd import attend
from tilewise.ops.run import any_autocast
from tilewise.ops.tensors import PLAIN
from tilewise.problem import Problem

Guard = Callable[[Tensor, Tensor, Tensor], bool]
Launch = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]

LIMIT = 4096
NAMES = (*(one.name for one in parameters(BatchOptions) if one.name != "seed"), "return_lse")
"""The order in which `lookup` takes options."""
_SCALE, _SOFTCAP, _DROPOUT, _BACKEND = map(NAMES.index, ("scale", "softcap", "dropout_p", "backend"))
_grad_mode = torch.is_grad_enabled
_deterministic = torch._C._get_deterministic_algorithms
_dispatch_modes = torch._C._len_torch_dispatch_stack


class CachedCall(NamedTuple):
    """`launch(q, k, v)` is the call for tensors that `guard` accepts, at addresses that are `aligned` (None: at any)."""

    guard: Guard
    launch: Launch
    aligned: bool | None


_calls: dict[Any, Any] = {}
"""CachedCalls, and Problems of calls over a KVCache."""


def lookup(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Launch | None:
    """The launch of a call, prepared now if none like it came before; None for a call that is not to be kept."""
    try:
        registry = dispatch.REGISTRY  # `registry_key` and `modes_active` are written out: a tiny call pays for each call
        settings = (
            options, type(options[_SCALE]), type(options[_SOFTCAP]), type(options[_DROPOUT]),
            _grad_mode(), _deterministic(), registry.get(options[_BACKEND]), len(registry),
        )  # fmt: skip
        last: CachedCall | None = _calls.get(settings)
        if (
            last is not None
            and not (q.is_nested or k.is_nested or v.is_nested)  # torch's guard would end the process
            and last.guard(q, k, v)  # not under functorch's transforms, by their dispatch keys
            and (last.aligned is None or last.aligned == aligned(q, k, v))
            and not _dispatch_modes()
            and forward_ad._current_level < 0
        ):
            return last.launch
        facts = tensor_facts(q, k, v) if _may_keep(q, k, v, options) else None
    except (AttributeError, TypeError, RuntimeError):  # no tensor, no hash, no strides: the checks will name it
        return None
    if facts is None:
        return None
    call: CachedCall | None = _calls.get((settings, facts))
    if call is None:
        call = _prepare(q, k, v, dict(zip(NAMES, options, strict=True)))
        _keep((settings, facts), call)
    # the same facts may come with other dispatch keys, such as inference mode's; the guard refuses tensors that are one
    if not (q is k or k is v or v is q or call.guard(q, k, v)):
        call = call._replace(guard=make_guard(q, k, v))
    _keep(settings, call)
    return call.launch


def kept_problem(key: Any, make: Callable[[], Problem]) -> Problem:
    """The problem of an earlier call over a cache with the same key, or a new one; a key without a hash keeps nothing."""
    key = (key, _grad_mode(), _deterministic(), len(dispatch.REGISTRY))
    try:
        problem: Problem | None = _calls.get(key)
    except TypeError:
        return make()
    if problem is None:
        problem = make()
        _keep(key, problem)
    return problem


def _keep(key: Any, call: CachedCall | Problem) -> None:
    if len(_calls) >= LIMIT:
        _calls.clear()
    _calls[key] = call


def _may_keep(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> bool:
    mask, scale, bias, _, sinks, dropout_p, *_ = options  # as in NAMES
    return not (
        bias is not None
        or sinks is not None
        or dropout_p
        or not (mask is None or (isinstance(mask, Mask) and mask.static))
        or not isinstance(scale, (float, int, NoneType))
        or any(type(x) not in PLAIN or x.is_meta or x.is_neg() or x._is_zerotensor() or not x.numel() for x in (q, k, v))
        or any_autocast()
        or modes_active()
    )


def tensor_facts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """The second part of the key. A sparse tensor has no strides to ask for: it ends in the checks."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.requires_grad or k.requires_grad or v.requires_grad, aligned(q, k, v),
    )  # fmt: skip


def _prepare(q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> CachedCall:
    """Parse a call and choose the first backend whose kernels can be made."""
    backend, layout = named.pop("backend"), named["layout"]
    problem, inputs = parse_call(q, k, v, named)  # type: ignore[arg-type]  # options of `attention`
    chosen = choose(problem, inputs, backend)
    while True:
        try:
            launch = _make_launch(problem, inputs, chosen, layout, backend)
            break
        except KernelError as error:
            chosen = dispatch.next_backend(chosen, error, problem, inputs, backend)
    where: bool | None = aligned(q, k, v)
    # backends before this one have declined although the addresses were the best there are
    if where and chosen.any_address:
        where = None
    return CachedCall(make_guard(q, k, v), launch, where)


def _make_launch(problem: Problem, inputs: Inputs, chosen: Backend, layout: str, backend: str) -> Launch:
    """The backend's own launcher where it has one for this call, else the way through autograd."""
    quick = None if problem.needs_grad or problem.needs_lse else chosen.launcher(problem, inputs)
    if quick is None:

        def launch(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            if layout == "bshd":
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            return restore_layout(problem, layout, *attend(problem, Inputs(q, k, v), backend, chosen))

        return launch
    if layout == "bhsd":
        return quick
    return lambda q, k, v: quick(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Do all three begin at a multiple of 16 bytes? Some backends refuse other addresses."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0


def make_guard(q: Tensor, k: Tensor, v: Tensor) -> Guard:
    """One question to torch instead of eighteen: the guard by which its compiler tells calls apart.

    It compares type, dtype, device, sizes, strides, requires_grad and dispatch keys, among them those of autocast, functorch
    and lazy negation. It refuses tensors two of which are one.
    """
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards  # its stub lacks the tensors
        check: Guard = make(q, k, v, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check
    except (AttributeError, TypeError, RuntimeError):  # another torch: calls are looked up by their facts
        return lambda q, k, v: False
