"""The call cache: a call like an earlier one skips every check and goes straight to its backend's launch.

The key of a call has two parts.

1. Settings: every option as given but the seed, the types of its numbers (True equals 1.0 and is refused), the gradient mode,
   torch's deterministic switch and what the backend's name means now (`dispatch.registry_key`).
2. Facts of q, k and v: shapes, strides, dtypes, devices, whether one requires a gradient, whether all begin at 16 bytes.

The table holds each call by both parts and, by the settings alone, the last of them: its guard compares the tensors by one
question to torch, which costs a fraction of the facts.

Calls with more tensors than q, k and v (`lookup_more`) have two kinds of them. A bias, slopes, sinks and cumulative lengths are
known by the same facts, and each call's own are read; so is its seed. The tensors of a mask are part of the prepared call, so
it is kept with the mask, and only while they are unchanged: the rules are those of `mask_memory`.

Rules of invalidation:
- A change of any part of the key is another call. Registering a backend changes `registry_key`.
- Never kept: calls with a bare boolean mask; empty ones; tensors whose memory does not hold their values
  (subclasses, meta tensors, lazy negation); all calls under autocast, dispatch modes, functorch transforms and forward-mode
  differentiation, which are looked for again before the last call is repeated.
- What depends on the process, such as the number of threads, is compared by the backend that depends on it.
- The cache keeps no tensor alive. At LIMIT entries it starts afresh.

Calls over a KVCache are kept as Problems, in the same table and by the same rules, with facts of q and the pages: their tensors
are looked at in each call, since lengths and tables change under them. Where their backend has a launch for them, that is kept
too (`cached_repeat`). Calls of `attention` with statistics that have no more tensors and no seed are kept as Problems.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import dispatch
from tilewise.api.bias import Alibi
from tilewise.api.execute import choose, execute_statistics, modes_active
from tilewise.api.mask_memory import Memory, memory_of
from tilewise.api.options import BatchOptions, parameters
from tilewise.api.parse import alibi_slopes, int32_lengths, make_seed, parse_call, rank4_bias
from tilewise.backends.base import Backend, Inputs
from tilewise.errors import KernelError
from tilewise.masks import Mask
from tilewise.ops.plain import PlainCall, attend_plain
from tilewise.ops.run import any_autocast, is_empty
from tilewise.ops.tensors import PLAIN
from tilewise.problem import Problem

Guard = Callable[..., bool]
Launch = Callable[..., Tensor | tuple[Tensor, Tensor]]

LIMIT = 4096
NAMES = (*(one.name for one in parameters(BatchOptions) if one.name != "seed"), "return_lse")
"""The order in which `lookup` takes options."""
_SCALE, _SOFTCAP, _DROPOUT, _BACKEND = map(NAMES.index, ("scale", "softcap", "dropout_p", "backend"))
_grad_mode = torch.is_grad_enabled
_deterministic = torch._C._get_deterministic_algorithms
_dispatch_modes = torch._C._len_torch_dispatch_stack


class CachedCall(NamedTuple):
    """`launch(q, k, v)` is the call for tensors that `guard` accepts, at addresses that are `aligned` (None: at any).

    That of a call with more tensors takes a `More` before them, and its guard sees those of them that are given.
    """

    guard: Guard
    launch: Launch
    aligned: bool | None


class More(NamedTuple):
    """What a call has beside q, k, v and its mask, as it was passed."""

    bias: Tensor | Alibi | None = None
    sinks: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    seed: int | Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Those that are known by facts, each once."""
        bias, sinks, cu_q, cu_k, _ = self
        found = [x for x in (bias.slopes if isinstance(bias, Alibi) else bias, sinks, cu_q) if x is not None]
        return found if cu_k is None or cu_k is cu_q else [*found, cu_k]


_calls: dict[Any, Any] = {}
"""CachedCalls, and Problems of calls over a KVCache or with statistics."""


def has_more(mask: Any, bias: Any, sinks: Any, dropout_p: Any) -> bool:
    """Is a call one for `lookup_more`: has it more tensors than q, k and v, or a seed?"""
    plain = bias is None and sinks is None and type(dropout_p) in (float, int) and dropout_p == 0
    return not (plain and (mask is None or getattr(mask, "static", True)))


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
        if call is None:
            return None
        _keep((settings, facts), call)
    # the same facts may come with other dispatch keys, such as inference mode's; the guard refuses tensors that are one
    if not (q is k or k is v or v is q or call.guard(q, k, v)):
        call = call._replace(guard=make_guard(q, k, v))
    _keep(settings, call)
    return call.launch


def lookup_more(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], more: More) -> Launch | None:
    """`lookup` for calls of which it keeps none, by the same options. The launch takes q, k and v."""
    mask, scale, bias, softcap, sinks, dropout_p, *rest = options
    seed = more.seed
    try:
        if seed is not None and isinstance(seed, Tensor) and (type(seed) not in PLAIN or seed.is_neg() or seed._is_zerotensor()):
            return None
        calls = _calls
        if mask is not None and not mask.static:
            own = memory_of(mask, q.device)
            if own is None:
                return None
            calls, mask = own, None
        given = type(bias), sinks is None, more.cu_q is None, more.cu_k is None, more.cu_k is more.cu_q
        registry = dispatch.REGISTRY
        settings = (
            mask, scale, type(scale), softcap, type(softcap), dropout_p, type(dropout_p), *rest, given,
            _grad_mode(), _deterministic(), registry.get(options[_BACKEND]), len(registry),
        )  # fmt: skip
        tensors = (q, k, v, *more.tensors())
        call: CachedCall | None = calls.get(settings)
        if (
            call is not None
            and True not in [x.is_nested for x in tensors]
            and call.guard(*tensors)
            and (call.aligned is None or call.aligned == aligned(*tensors))
            and not _dispatch_modes()
            and forward_ad._current_level < 0
        ):
            return partial(call.launch, more)
        if not isinstance(scale, (float, int, NoneType)) or not _may_keep_tensors(tensors):
            return None
        facts = tuple([(x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors])
        key = (settings, facts, aligned(*tensors))
        call = calls.get(key)
    except (AttributeError, TypeError, RuntimeError):  # as in `lookup`
        return None
    if call is None:
        call = _prepare(q, k, v, dict(zip(NAMES, options, strict=True)), more)
        if call is None:
            return None
        _keep(key, call, calls)
    elif not call.guard(*tensors):
        call = call._replace(guard=make_guard(*tensors))
    _keep(settings, call, calls)
    return partial(call.launch, more)


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


def kept_call(key: Any) -> Any:
    """What `keep_call` has kept; None if nothing, or if another gradient mode or another registry kept it."""
    return _calls.get((key, _grad_mode(), _deterministic(), len(dispatch.REGISTRY)))


def keep_call(key: Any, call: Any) -> None:
    _keep((key, _grad_mode(), _deterministic(), len(dispatch.REGISTRY)), call)


def lookup_statistics(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], stats: Any) -> Launch | None:
    """`lookup` for a call with statistics, of which the Problem is kept."""
    try:
        facts = tensor_facts(q, k, v) if _may_keep(q, k, v, options) else None
        kinds = [type(options[i]) for i in (_SCALE, _SOFTCAP, _DROPOUT)]
        key = ("statistics", tuple(stats), options, *kinds, facts, dispatch.REGISTRY.get(options[_BACKEND]))
    except (AttributeError, TypeError, RuntimeError):  # as in `lookup`
        return None
    if facts is None or not stats or isinstance(stats, str):
        return None
    named: Any = dict(zip(NAMES, options, strict=True), stats=stats)
    backend, layout = named.pop("backend"), named["layout"]
    problem = kept_problem(key, lambda: parse_call(q, k, v, named)[0])

    def launch(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if layout == "bshd":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return execute_statistics(problem, Inputs(q, k, v), layout, backend)

    return launch


def _keep(key: Any, call: CachedCall | Problem, calls: Memory | None = None) -> None:
    calls = _calls if calls is None else calls
    if len(calls) >= LIMIT:
        calls.clear()
    calls[key] = call


def _may_keep(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> bool:
    mask, scale, bias, _, sinks, dropout_p, *_ = options  # as in NAMES
    return not (
        bias is not None
        or sinks is not None
        or dropout_p
        or not (mask is None or (isinstance(mask, Mask) and mask.static))
        or not isinstance(scale, (float, int, NoneType))
        or not _may_keep_tensors((q, k, v))
    )


def _may_keep_tensors(tensors: tuple[Tensor, ...]) -> bool:
    odd = any(type(x) not in PLAIN or x.is_meta or x.is_neg() or x._is_zerotensor() or not x.numel() for x in tensors)
    return not (odd or any_autocast() or modes_active())


def tensor_facts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """The second part of the key. A sparse tensor has no strides to ask for: it ends in the checks."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.requires_grad or k.requires_grad or v.requires_grad, aligned(q, k, v),
    )  # fmt: skip


def _prepare(q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any], more: More | None = None) -> CachedCall | None:
    """Parse a call and choose the first backend whose kernels can be made; None for an empty problem."""
    backend, layout = named.pop("backend"), named["layout"]
    tensors: tuple[Tensor, ...] = (q, k, v)
    if more is not None:
        tensors = (q, k, v, *more.tensors())
        seed = 0 if more.seed is None else more.seed  # the launch draws one, and there must be one draw a call
        named |= {"cu_seqlens_q": more.cu_q, "cu_seqlens_k": more.cu_k, "seed": seed}
    problem, inputs = parse_call(q, k, v, named)  # type: ignore[arg-type]  # options of `attention`
    if is_empty(problem):
        return None
    chosen = choose(problem, inputs, backend)
    while True:
        try:
            launch = _make_launch(problem, inputs, chosen, layout, backend, more)
            break
        except KernelError as error:
            chosen = dispatch.next_backend(chosen, error, problem, inputs, backend)
    where: bool | None = aligned(*tensors)
    # backends before this one have declined although the addresses were the best there are
    if where and chosen.any_address:
        where = None
    return CachedCall(make_guard(*tensors), launch, where)


def _make_launch(
    problem: Problem, inputs: Inputs, chosen: Backend, layout: str, backend: str, more: More | None
) -> Launch:
    """The backend's own launcher where it has one for this call, else the way through autograd."""
    call = PlainCall.of(problem, inputs, backend, chosen, "packed" if problem.varlen else layout)
    if more is not None:

        def launch_more(more: More, q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            out, lse = attend_plain(call, inside(problem, q, k, v, more))
            if lse is None or not problem.needs_lse:
                return out
            return out, lse.squeeze(0) if problem.varlen else lse

        return launch_more
    quick = None if problem.needs_grad or problem.needs_lse else chosen.launcher(problem, inputs)
    if quick is None:

        def launch(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            out, lse = attend_plain(call, Inputs(q, k, v))
            return out if lse is None or not problem.needs_lse else (out, lse)

        return launch
    if layout == "bhsd":
        return quick
    return lambda q, k, v: quick(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def inside(problem: Problem, q: Tensor, k: Tensor, v: Tensor, more: More) -> Inputs:
    """The inputs of a call like one that was parsed; q, k and v as they were passed."""
    given, sinks, cu_q, cu_k, seed = more
    bias = slopes = None
    if isinstance(given, Alibi):
        slopes = alibi_slopes(given.slopes, q.dtype, problem.precision)
    elif given is not None:
        bias = rank4_bias(given)
    if cu_q is not None:
        cu_k = None if cu_k is cu_q else cu_k
        cu_q = int32_lengths("cu_seqlens_q", cu_q)
        cu_k = cu_q if cu_k is None else int32_lengths("cu_seqlens_k", cu_k)
    return Inputs(q, k, v, bias, slopes, sinks, make_seed(seed, q.device) if problem.dropout_p else None, cu_q, cu_k)


def aligned(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> bool:
    """Do all begin at a multiple of 16 bytes? Some backends refuse other addresses."""
    bits = q.data_ptr() | k.data_ptr() | v.data_ptr()
    for x in more:
        bits |= x.data_ptr()
    return bits & 15 == 0


def make_guard(*tensors: Tensor) -> Guard:
    """One question to torch instead of eighteen: the guard by which its compiler tells calls apart.

    It compares type, dtype, device, sizes, strides, requires_grad and dispatch keys, among them those of autocast, functorch
    and lazy negation. It refuses tensors two of which are one.
    """
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards  # its stub lacks the tensors
        check: Guard = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check
    except (AttributeError, TypeError, RuntimeError):  # another torch: calls are looked up by their facts
        return lambda *tensors: False
