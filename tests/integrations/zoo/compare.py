"""Whether a model on tilewise computes what it computes on eager.

The criterion is that of tests/integrations/models.py for single tensors: against eager in float64 throughout, tilewise in float32
may err four times as much as eager in float32 does, plus one unit roundoff of the size of the numbers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from tests.integrations.models import ONE_TENSOR, Double, size
from tests.integrations.zoo.build import LATER, LENGTH, PADDING, Unbuildable, build, prepare
from tilewise.errors import TilewiseError
from tilewise.integrations.transformers import attention as served
from tilewise.integrations.transformers import refusal, register

U = 2.0**-24
MATTERS = 1e-3
"""How far, as a part of its size, a token's output must move when a token before it changes: attention carries that over."""
WITHOUT_SINK = ("granite_swa", "granitemoe_swa")
"""Eager returns the weights before the sink scales them; tilewise those after, as for every other model with sinks."""
Inputs = dict[str, Tensor]


class Outcome(NamedTuple):
    """`verdict` is one of equal, refused, idle (no attention is asked for), unbuilt, different."""

    model_type: str
    model: str
    verdict: str
    detail: str


class Difference(Exception):
    """tilewise and eager disagree."""


class Counter:
    """Calls of tilewise.attention made by models while it is entered."""

    def __enter__(self) -> Counter:
        self.calls, self._inner = 0, served.attention

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self._inner(*args, **kwargs)

        served.attention = counted
        return self

    def __exit__(self, *problem: Any) -> None:
        served.attention = self._inner


def start() -> None:
    """Make a process ready: one thread, no chatter, tilewise registered."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    register()


def compare(model_type: str) -> Outcome:
    """Build the type twice with the same weights, and run both through everything it can do."""
    try:
        eager, variant, given = prepare(model_type)
        want, seen = output(eager, given), matters(eager, given)
    except Exception as error:
        return Outcome(model_type, "", "unbuilt", short(error))
    name = type(eager).__name__
    if not want.isfinite().all():
        return Outcome(model_type, name, "unbuilt", "eager gives NaN or inf")
    if not seen:
        return Outcome(model_type, name, "unbuilt", "no token sees another at random weights")
    refusal._warn_own.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ours = build(model_type, "tilewise", variant)
        with Counter() as counter:
            done = [label for label, check in CHECKS.items() if check(ours, eager, given)]
            if counter.calls and weighted(ours, eager, given):  # a part that keeps its own attention may return none
                done.append("weights")
    except TilewiseError as error:
        return Outcome(model_type, name, "refused", reason(error))
    except Exception as error:
        return Outcome(model_type, name, "different", short(error))
    own = sorted({str(w.message).split()[0] for w in told if "computes its attention itself" in str(w.message)})
    note = f"; {', '.join(own)} on its own attention" if own else ""
    return Outcome(model_type, name, "equal" if counter.calls else "idle", ", ".join(done) + note)


def plain(ours: Any, eager: Any, given: Inputs) -> bool:
    same("a forward", ours, eager, lambda model: output(model, given))
    return True


def padded(ours: Any, eager: Any, given: Inputs) -> bool:
    """Padding on either side, and nothing compared where there is only padding."""
    if "attention_mask" not in given:
        return False
    try:
        by_position(eager, given)
        sides = (slice(PADDING), slice(LENGTH - PADDING, None))
    except Unbuildable:  # what is pooled may come from the first token, which is padding on the left
        sides = (slice(LENGTH - PADDING, None),)
    for side in sides:
        mask = given["attention_mask"].clone()
        mask[0, side] = 0
        batch = {**given, "attention_mask": mask}
        same("a padded batch", ours, eager, lambda model, batch=batch, mask=mask: output(model, batch, mask))
    return True


def matters(eager: Any, given: Inputs) -> bool:
    """Whether the output of a token depends on the first one, where a type has tokens."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    if name not in given:
        return True
    changed = {**given, name: given[name].clone()}
    changed[name][:, 0] = changed[name][:, 0] % 30 + 4
    try:
        a, b = (by_position(eager, batch)[:, 2] for batch in (given, changed))
    except Unbuildable:
        return True
    return size(a - b) > MATTERS * size(a)


def causal(ours: Any, eager: Any, given: Inputs) -> bool:
    """What the first token gives does not depend on the last one. Skipped where it does in eager."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    if name not in given:
        return False
    changed = {**given, name: given[name].clone()}
    changed[name][:, -1] = changed[name][:, -1] % 30 + 4

    def first(model: Any) -> tuple[Tensor, Tensor]:
        a, b = (by_position(model, batch) for batch in (given, changed))
        return a[:, 0], (a - b)[:, 0]

    try:
        size_first, moved = first(eager)
    except Unbuildable:
        return False
    if size(moved) > 64 * U * size(size_first):
        return False
    moved = first(ours)[1]
    if not size(moved) <= 64 * U * size(size_first):
        raise Difference(f"the first token's output moves by {size(moved):.2g} when the last token changes")
    return True


def cached(ours: Any, eager: Any, given: Inputs) -> bool:
    """Some tokens, then the rest with the cache of the first step, with padding on the left."""
    if "input_ids" not in given or "attention_mask" not in given:
        return False
    mask = given["attention_mask"].clone()
    if "decoder_input_ids" not in given:
        mask[0, :PADDING] = 0
    batch = {**given, "attention_mask": mask}
    try:
        continued(eager, batch)
    except Exception:  # a model without a cache, or one that wants it otherwise
        return False
    same("a step with a cache", ours, eager, lambda model: continued(model, batch))
    return True


def weighted(ours: Any, eager: Any, given: Inputs) -> bool:
    """The attention weights, where eager returns some that sum to the output."""
    if eager.config.model_type in WITHOUT_SINK:
        return False
    try:
        if not attentions(eager, given).numel():
            return False
    except Exception:  # a model that takes no such argument
        return False
    same("attention weights", ours, eager, lambda model: attentions(model, given))
    return True


CHECKS: dict[str, Callable[[Any, Any, Inputs], bool]] = {
    "plain": plain,
    "padded": padded,
    "causal": causal,
    "cached": cached,
}


def attentions(model: Any, given: Inputs) -> Tensor:
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        made = model(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}, output_attentions=True)
    found = [made[k] for k in made if k.endswith("attentions") and isinstance(made[k], tuple)]
    return torch.cat([torch.empty(0), *(x.flatten() for layers in found for x in layers if isinstance(x, Tensor))])


def continued(model: Any, given: Inputs) -> Tensor:
    early = LENGTH - LATER
    step, rest = dict(given), dict(given)
    if "decoder_input_ids" in given:
        step["decoder_input_ids"], rest["decoder_input_ids"] = given["decoder_input_ids"].split([early, LATER], dim=1)
    else:
        step["input_ids"], rest["input_ids"] = given["input_ids"].split([early, LATER], dim=1)
        step["attention_mask"] = given["attention_mask"][:, :early]
    with torch.no_grad():
        before = model(**step, use_cache=True)
        if before.past_key_values is None:
            raise Unbuildable("no cache")
        if "decoder_input_ids" in given:
            del rest["input_ids"]
            rest["encoder_outputs"] = (before.encoder_last_hidden_state,)
        return flat(model(**rest, past_key_values=before.past_key_values, use_cache=True), None, LATER)


def same(what: str, ours: Any, eager: Any, run: Callable[[Any], Tensor]) -> None:
    """Raise unless tilewise is as near to float64 as eager is, by the criterion above."""
    with exactly():
        exact = run(copy.deepcopy(eager).double())
    want, got = run(eager).double(), run(ours).double()
    if want.shape != got.shape:
        raise Difference(f"{what}: {got.numel()} numbers where eager gives {want.numel()}")
    error, peer, scale = size(got - exact), size(want - exact), size(exact)
    if not error <= ONE_TENSOR * peer + U * scale:
        raise Difference(f"{what}: error {error / scale:.2g} of the size, eager's {peer / scale:.2g}")


@contextmanager
def exactly() -> Iterator[None]:
    """float64 wherever a model asks for float32 or for nothing."""
    torch.set_default_dtype(torch.float64)
    try:
        with Double():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def output(model: Any, given: Inputs, real: Tensor | None = None) -> Tensor:
    """All numbers a forward gives, without those of padding."""
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        made = model(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()})
    return flat(made, real, LENGTH)


def by_position(model: Any, given: Inputs) -> Tensor:
    """The output for each token, (batch, tokens, numbers)."""
    with torch.no_grad():
        made = tensors(model(**given))
    for x in made:
        if x.ndim == 3 and x.shape[:2] == (2, LENGTH):
            return x
    raise Unbuildable("no output for each token")


def flat(made: Any, real: Tensor | None, length: int) -> Tensor:
    found = tensors(made)
    by_token = [x for x in found if x.ndim >= 2 and x.shape[:2] == (2, length)]
    if real is not None and by_token:  # what is pooled over all tokens may come from padding
        found = [x[real.bool()] for x in by_token]
    return torch.cat([x.flatten() for x in found])


def tensors(made: Any) -> list[Tensor]:
    """The floating-point outputs, caches left out."""
    values = made.items() if hasattr(made, "items") else enumerate(made)
    found = [v for k, v in values if isinstance(v, Tensor) and v.is_floating_point() and "past" not in str(k)]
    if not found:
        raise Unbuildable("its output holds no numbers")
    return found


def reason(error: Exception) -> str:
    """What a refusal says first."""
    return " ".join(str(error).split()).split(";")[0].partition(" and does not ask")[0].removeprefix("model: ")


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]
