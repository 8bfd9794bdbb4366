"""What the ranks of tests/integrations/test_context_parallel.py do: tiny models in float64, under context parallelism or alone.

The criterion. Both computations are float64 throughout, on the same weights, and commit roundings at the same places but for the
order of sums. A gradient is a path of sums of at most `TERMS` terms in all (two layers' hidden, intermediate and head dims and
keys, there and back, and the vocabulary), each off by a unit roundoff of its size. What they may differ by is that many roundoffs
of the largest gradient. Measured are 12 to 31. A mistake in meaning is a million times what is allowed, as a test shows.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import tilewise as tw
from tests.integrations.example_text import TEXT
from tests.integrations.models import DECODER, TWO_KINDS, Case, Double, causal_lm
from tilewise.errors import ArgumentError
from tilewise.integrations.transformers import context_parallel, use_context_parallel

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
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


def batch(name: str, layout: str = "rows") -> dict[str, Any]:
    """Inputs and labels, as rows, padded at either end, or packed into one row."""
    inputs = CASES[name].batch("cpu")
    ids = inputs["input_ids"]
    labels = ids.clone()
    labels[:, 3::7] = -100  # as prompts are
    if layout == "padded":
        mask = torch.ones_like(ids)
        mask[0, :9], mask[1, -5:] = 0, 0
        labels[0, 9] = -100  # alone, models predict the first token of a row from the padding before it
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
            "use_cache": False,  # with a cache models take them for one sequence
        }
    return {"input_ids": ids, "labels": labels}


def differentiate(model: Any, inputs: dict[str, Any]) -> float:
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


def mistaken(group: Any, name: str, mistake: str) -> Result:
    """A hook that is wrong in one place."""
    with pytest.MonkeyPatch.context() as patch:
        if mistake == "window":
            patch.setattr(context_parallel, "window", lambda n: tw.window(n + 1))
        elif mistake == "positions":
            patch.setattr(context_parallel, "check_positions", lambda ids, *size: ids.copy_(ids.flip(-1)))
        else:
            patch.setattr(context_parallel, "next_labels", lambda labels, lengths, dim, ignored: labels.roll(-1, dim))
        return on_ranks(group, name)


def with_dropout(group: Any, name: str, checkpointing: bool | None = None) -> Result:
    """In training, with dropout of attention; with or without recomputation, if told, which `Double` does not reach."""
    model = build(name).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    if checkpointing:
        model.gradient_checkpointing_enable()
    parallel = use_context_parallel(model, group)
    torch.manual_seed(7 if dist.get_rank(group) == 0 else 8)  # the first rank draws for all
    if checkpointing is None:
        loss = differentiate(model, batch(name))
    else:
        whole = model(**batch(name)).loss
        whole.backward()
        loss = whole.item()
    parallel.average_gradients()
    return Result(loss, gradients(model))


def wrapped(group: Any, name: str, kind: str) -> Result:
    """Inside DDP, or with FSDP2, which average gradients themselves; over a mesh of two dimensions of which one is ours."""
    mesh = dist.device_mesh.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("data", "context"))
    model = build(name)
    use_context_parallel(model, mesh["context"])
    outer = model
    if kind == "ddp":
        outer = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh._flatten() if hasattr(mesh, "_flatten") else mesh)
        fully_shard(model, mesh=mesh._flatten() if hasattr(mesh, "_flatten") else mesh)
    loss = differentiate(outer, batch(name))
    found = {n: p.grad.full_tensor() if kind == "fsdp2" else p.grad for n, p in model.named_parameters()}
    return Result(loss, found)


def learn(group: Any, name: str, steps: int, state: Any = None) -> tuple[list[float], dict[str, Tensor]]:
    """Some steps of training from a state dict, or from the start; what would be saved."""
    model = build(name)
    if state is not None:
        model.load_state_dict(state)
    parallel = use_context_parallel(model, group)
    losses = []
    for _ in range(steps):
        losses.append(differentiate(model, batch(name)))
        parallel.average_gradients()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
                p.grad = None
    return losses, {n: x.clone() for n, x in model.state_dict().items()}


def whole_logits(group: Any, name: str, layout: str) -> tuple[Tensor, int, list[Any]]:
    """Logits of all tokens, how many of them were this rank's, and the windows that were planned for."""
    model = build(name)
    with use_context_parallel(model, group) as parallel, torch.no_grad(), Double():
        inputs = batch(name, layout)
        inputs.pop("labels")
        own = model(**inputs).logits
        found = parallel.unshard(own), own.shape[1], sorted(parallel.plans(), key=str)
    assert model.config._attn_implementation == "eager"
    with torch.no_grad(), Double():
        assert model(**inputs).logits.shape[:2] == inputs["input_ids"].shape  # the model is as it was
    return found


def other_batches(group: Any) -> tuple[str, float]:
    """What a rank with another batch than the others is told, and that the group works afterwards."""
    model = build("llama")
    use_context_parallel(model, group)
    told = []
    for length in (LENGTH, LENGTH - 1):
        rank = dist.get_rank(group)
        ids = torch.full((1, length if rank == 1 else LENGTH), 5 + rank)
        with pytest.raises(ArgumentError) as caught:
            model(input_ids=ids)
        told.append(str(caught.value))
    return "\n".join(told), differentiate(model, batch("llama"))


def example_steps(group: Any, length: int, steps: int) -> tuple[list[float], Any]:
    """What examples/context_parallel.py does on a rank, over a text that stays the same when the repository's change."""
    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("context_parallel")
    with patch.object(example, "repository_text", lambda: TEXT):
        losses, figures = example.train(length, steps, group)
    return losses, tuple(figures)


def apart(ours: Result, exact: Result) -> float:
    """The largest difference over what the criterion above allows: more than 1 is a difference in meaning."""
    assert ours.gradients.keys() == exact.gradients.keys()
    largest = max(float(g.abs().max()) for g in exact.gradients.values())
    off = max(float((ours.gradients[n] - g).abs().max()) for n, g in exact.gradients.items())
    return max(off / largest, abs(ours.loss - exact.loss) / abs(exact.loss)) / (TERMS * U)


