"""Repeated calls over a cache: one that is laid out like an earlier call goes straight to its backend's launch.

The table and the rules are those of `call_cache`, with one difference: lengths and the table change under a call. On a CPU every
call looks at their values, and one whose lengths are out of range takes the long way, where the checks name them. On a GPU
kernels read what is there, and with TILEWISE_CHECK=1 every call takes the long way.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import dispatch
from tilewise.api.cache import KVCache
from tilewise.api.cached_call import CachedCall, problem_of
from tilewise.api.cached_checks import check_table, sees_ahead
from tilewise.api.cached_write import even_steps, is_traced
from tilewise.api.call_cache import Guard, keep_call, kept_call, make_guard
from tilewise.backends.base import PagedLauncher
from tilewise.backends.pages import Pages
from tilewise.errors import KernelError
from tilewise.masks import Mask
from tilewise.ops.run import any_autocast, is_empty
from tilewise.ops.tensors import PLAIN, checks_values

UNSIGNED: dict[torch.dtype, Any] = {torch.int32: np.dtype(np.uint32), torch.int64: np.dtype(np.uint64)}
"""As these, numbers below 0 are the largest: one comparison finds whatever is out of range."""
_dispatch_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
num_threads = torch.get_num_threads


class Repeated(NamedTuple):
    """A launch for queries and pages that `guard` accepts, and for so many threads."""

    guard: Guard
    launch: PagedLauncher
    threads: int
    latent: bool
    """Are values columns of the keys? No tensor tells."""


class Settings(NamedTuple):
    """The options of a call that has no tensors but its queries and its cache."""

    mask: Mask | None
    scale: float | None
    softcap: float
    splits: int | None
    invariant: bool
    precision: str
    backend: str

    def key(self) -> Any:
        return "repeated", self, *map(type, self[1:]), dispatch.registry_key(self.backend)


def repeated(q: Any, cache: Any, settings: Settings, want_lse: bool) -> Tensor | tuple[Tensor, Tensor] | None:
    """out, or out and the log-sum-exp, if the call is like an earlier one; else None."""
    if torch.compiler.is_compiling():
        return None
    try:
        key = settings.key()
        call: Repeated | None = kept_call(key)
        modes = _dispatch_modes() or _transforms() is not None or forward_ad._current_level >= 0
        if call is None or modes or not isinstance(cache, KVCache) or q.is_nested:
            return None
        pages = cache.pages
        tensors = (q, *_tensors(pages))
        if pages.latent is not call.latent or not call.guard(*tensors):  # not the last call with these options: one before it?
            call = kept_call((key, _facts(tensors), pages.latent))
            if call is None or not call.guard(*tensors):
                return None
            keep_call(key, call)
    except (AttributeError, TypeError, RuntimeError):  # no tensor, no hash: the checks will name it
        return None
    if pages.indptr is not None or num_threads() != call.threads:
        return None
    lengths, table = pages.lengths, pages.table
    if pages.entries.data_ptr() != table.data_ptr():  # the table has other memory than it had
        return None
    if checks_values(lengths.device):
        room = pages.most * pages.page
        if not lengths.is_cpu or lengths.numpy().view(UNSIGNED[lengths.dtype]).max() > room:
            return None
        if pages.entries.numpy().view(np.uint32).max() >= pages.k.shape[0]:  # somebody may see it
            check_table(pages, even_steps(q.shape[0], q.shape[1], q.device), settings.mask)
    try:
        found = call.launch(q, pages, want_lse)
    except KernelError:  # of a kernel for other addresses: the long way knows who is next
        return None
    return found if want_lse else found[0]


def keep_repeated(call: CachedCall, given: Tensor, cache: KVCache, settings: Settings) -> None:
    """Keep the launch of a call that has been served, for `repeated`; `given` are its queries as they came."""
    pages, (packed, _, shape), mask = cache.pages, call.queries, settings.mask
    if is_traced(given) or len(shape) != 4 or any_autocast() or (checks_values(given.device) and not given.is_cpu):
        return
    lengths, table = pages.lengths, pages.table
    if pages.indptr is not None or table.dtype != torch.int32 or not table.is_contiguous():  # read anew in each call
        return
    tensors = (given, *_tensors(pages))
    if packed.data_ptr() != given.data_ptr() or not table.numel() or pages.k is pages.v:
        return
    if any(type(x) not in PLAIN or x.is_neg() or x._is_zerotensor() for x in tensors):
        return
    if not (mask is None or mask.static) or any(type(x) not in (int, float, NoneType) for x in settings[1:3]):
        return
    if lengths.dtype not in UNSIGNED or not lengths.is_contiguous() or (shape[1] != 1 and sees_ahead(mask)):
        return
    problem, inputs = problem_of(call)
    reader = problem.memory.get(("pages", dispatch.registry_key(settings.backend)))
    if is_empty(problem) or reader is None:
        return
    launch = reader.paged_launcher(problem, inputs, pages)
    if launch is None:
        return
    kept, key = Repeated(make_guard(*tensors), launch, num_threads(), pages.latent), settings.key()
    keep_call(key, kept)
    keep_call((key, _facts(tensors), pages.latent), kept)


def _tensors(pages: Pages) -> list[Tensor]:
    """Those by which a call is known, each once."""
    k_scale, v_scale = pages.k_scale, pages.v_scale
    found = [pages.k, pages.v, pages.table, pages.entries, pages.lengths, pages.starts]
    if k_scale is not None:
        found.append(k_scale)
    if v_scale is not None and v_scale is not k_scale:
        found.append(v_scale)
    return found


def _facts(tensors: tuple[Tensor, ...]) -> Any:
    return tuple([(x.shape, x.stride(), x.dtype) for x in tensors])
