"""One case on one backend, held to the oracle."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise as tw
from tests.fuzz import masks
from tests.fuzz.case import Case
from tests.fuzz.limits import limits
from tests.fuzz.oracle import Exact, exact
from tests.fuzz.tensors import Tensors, build, inside
from tests.numerics.checks import check
from tilewise.backends.tiled import plan as tiled
from tilewise.errors import BackendError, MaskError

COMPLETE = {"tiled", "auto"}
"""These must serve every case."""
SMALL_TILES, USUAL_TILES = 1, tiled.TILE_BYTES
LEAVES = {"q": "q", "k": "k", "v": "v", "b": "bias", "s": "sinks"}


class Verdict(NamedTuple):
    """How a case went: `failures` in words, or the backend's reasons to refuse it; neither: it is right."""

    failures: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@lru_cache(maxsize=2)
def truth(case: Case) -> tuple[Tensors, Exact, Exact]:
    """The tensors of a case, their exact results and the bounds: made once for all backends."""
    given = build(case)
    return given, exact(case, given), limits(case, given)


def judge(case: Case, backend: str, device: str = "cpu") -> Verdict:
    """Run a case; never raises for what the backend does."""
    given, want, bound = truth(case)
    try:
        with surroundings(case):
            found, complaints = call(case, given, backend, device)
            found = {name: x.cpu() for name, x in found.items()}
    except BackendError as error:
        reasons = error.verdicts.get(backend, (str(error),))
        return Verdict((f"refused: {reasons}",)) if backend in COMPLETE else Verdict(refused=reasons)
    except MaskError as error:
        if "alternatives" in str(error):
            return Verdict(refused=("the mask expands to more than 32 alternatives",))
        return Verdict((_described(error),))
    except Exception as error:
        return Verdict((_described(error),))
    for name, actual in found.items():
        expected, limit = getattr(want, name), getattr(bound, name)
        if actual.shape != expected.shape:
            complaints.append(f"{name} has shape {tuple(actual.shape)}, need {tuple(expected.shape)}")
        elif excess := check(actual, expected, limit, name):
            complaints.append(str(excess))
        elif name == "lse" and (actual.isinf() & expected.isfinite()).any():
            complaints.append("lse is infinite where it is not, and its dtype could hold it")
    return Verdict(tuple(complaints))


def _described(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:300]} ({where.filename.rsplit('/', 2)[-1]}:{where.lineno})"


@contextmanager
def surroundings(case: Case) -> Iterator[None]:
    """Threads, tiles and fresh memory as the case wants them; afterwards as they were."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        tiled.TILE_BYTES = SMALL_TILES if case.small_tiles else USUAL_TILES
        if threads != case.threads:
            torch.set_num_threads(case.threads)
        if case.fresh:  # deterministic algorithms fill what torch allocates with NaN
            torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    finally:
        tiled.TILE_BYTES = USUAL_TILES
        torch.use_deterministic_algorithms(deterministic)
        if threads != case.threads:
            torch.set_num_threads(threads)


def call(case: Case, given: Tensors, backend: str, device: str) -> tuple[dict[str, Tensor], list[str]]:
    """Results by the names of `Exact`, in the inside layout, and what is wrong beside numbers."""
    leaves = {}
    for letter, name in LEAVES.items():
        x = getattr(given, name)
        if x is not None:
            leaves[name] = _moved(x, device).requires_grad_(letter in case.wanted)
    before = {name: x.detach().clone() for name, x in leaves.items()}
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    complaints = []
    out, lse = attend(case, given, leaves, backend, device)
    if not wanted:  # a second call meets what the first one left behind
        again, _ = attend(case, given, leaves, backend, device)
        promised = case.fresh if case.deterministic is None else case.deterministic
        if promised and not _identical(out, again):
            complaints.append("deterministic, but a second call differs")
    found = {"out": inside(case, out.detach())}
    if lse is not None:
        found["lse"] = lse.detach()[None] if case.packed else lse.detach()
    if wanted:
        results, upstreams = [out], [_moved(given.dout, device)]
        if lse is not None and case.lse == "grad" and lse.requires_grad:
            results, upstreams = [out, lse], [*upstreams, _moved(given.dlse, device)]
        grads = torch.autograd.grad(results, list(wanted.values()), upstreams, allow_unused=True)
        for (name, leaf), grad in zip(wanted.items(), grads, strict=True):
            if grad is None:
                complaints.append(f"no gradient of {name}")
            else:
                found[f"d{name}"] = _inner_gradient(case, name, leaf, grad)
    for name, x in leaves.items():
        if not _identical(x.detach(), before[name]):
            complaints.append(f"{name} was changed")
    return found, complaints


def attend(
    case: Case, given: Tensors, leaves: dict[str, Tensor], backend: str, device: str
) -> tuple[Tensor, Tensor | None]:
    """The call as a user makes it."""
    options: dict[str, Any] = {"softcap": case.softcap, "scale": case.scale, "precision": case.precision}
    options["deterministic"] = case.deterministic
    if case.mask is not None:
        options["mask"] = masks.build(case, case.mask, device)
    if given.alibi is not None:
        options["bias"] = tw.alibi(_moved(given.alibi, device))
    options |= {name: leaves[name] for name in ("bias", "sinks") if name in leaves}
    if case.dropout is not None:
        p, seed = case.dropout
        options |= {"dropout_p": p, "seed": torch.tensor(seed) if case.seed % 3 == 0 else seed}
    tensors = [leaves[name] for name in "qkv"]
    options["return_lse"] = case.lse != "no"
    if case.packed:
        kind = torch.int64 if case.seed % 5 == 0 else torch.int32
        starts = (torch.tensor(case.starts(side), dtype=kind, device=device) for side in (0, 1))
        result = tw.attention_varlen(*tensors, *starts, backend=backend, **options)
    else:
        result = tw.attention(*tensors, layout=case.layout, backend=backend, **options)
    return result if options["return_lse"] else (result, None)


def _moved(x: Tensor, device: str) -> Tensor:
    """On the device, lying as it did: strides, offset and negation are part of the case."""
    if device == "cpu":
        return x.detach()
    negated = x.is_neg()
    bare = torch._neg_view(x) if negated else x
    memory = torch.empty(0, dtype=x.dtype).set_(bare.untyped_storage()).to(device)
    view = memory.as_strided(bare.shape, bare.stride(), bare.storage_offset())
    return torch._neg_view(view) if negated else view


def _inner_gradient(case: Case, name: str, leaf: Tensor, grad: Tensor) -> Tensor:
    if name in ("q", "k", "v"):
        return inside(case, grad)
    return grad[(None,) * (4 - leaf.ndim)] if name == "bias" else grad


def _identical(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
