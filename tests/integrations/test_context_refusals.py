"""What context parallelism refuses, with the reason; one process that is a group of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers")

from tests.integrations.context_models import WINDOW, build  # noqa: E402  # it needs transformers
from tests.integrations.models import DECODER, bert, causal_lm, t5  # noqa: E402
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError  # noqa: E402
from tilewise.integrations.transformers import use_context_parallel  # noqa: E402
from tilewise.integrations.transformers.context_tokens import Tokens, read_tokens  # noqa: E402

IDS = torch.arange(2, 16).reshape(2, 7)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def llama4() -> Any:
    config = transformers.Llama4TextConfig(
        **{**DECODER, "num_hidden_layers": 2, "head_dim": 8, "attention_chunk_size": 4, "intermediate_size_mlp": 32},
        num_local_experts=2,
    )
    return transformers.Llama4ForCausalLM(config)


def llama(kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, kind)(transformers.LlamaConfig(**{**DECODER, **options}))


def not_causal() -> Any:
    model = causal_lm("Llama")()
    model.config.is_causal = False
    return model


def balancing() -> Any:
    model = build("gpt_oss")
    model.config.output_router_logits = True
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.nn.Linear(2, 2), "need a transformers PreTrainedModel"),
        (t5, "several parts"),
        (bert, "not one of next tokens|not causal"),
        (llama4, "chunked_attention"),
        (llama("LlamaForSequenceClassification"), "model.base_model"),
        (causal_lm("Mamba", num_attention_heads=4), "state from token to token|computes its attention itself"),
        (not_causal, "not causal"),
        (balancing, "output_router_logits = False"),
    ],
    ids=["linear", "t5", "bert", "llama4", "classifier", "mamba", "bidirectional", "router"],
)
def test_models_that_cannot_be_divided(group: Any, make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        use_context_parallel(make(), group)


@pytest.mark.parametrize(
    ("inputs", "error", "says"),
    [
        ({"use_cache": True}, ArgumentError, "use_cache: asks for a cache"),
        ({"past_key_values": object()}, ArgumentError, "past_key_values: asks for a cache"),
        ({"output_attentions": True}, ArgumentError, "attention weights"),
        ({"logits_to_keep": 1}, ArgumentError, "logits of the last tokens"),
        ({"pixel_values": torch.zeros(1)}, ArgumentError, "pixel_values: unknown"),
        ({"inputs_embeds": torch.zeros(2, 7, 32)}, ArgumentError, "exactly one of"),
        ({"labels": IDS[:, :6]}, LayoutError, r"labels: shape \(2, 6\), need \(2, 7\)"),
        ({"position_ids": IDS[:, :6]}, LayoutError, r"position_ids: shape \(2, 6\)"),
        ({"position_ids": torch.zeros(3, 2, 7, dtype=torch.int64)}, ArgumentTypeError, "several dimensions"),
        ({"attention_mask": torch.ones(2, 1, 7, 7)}, LayoutError, "none of Sq × Sk elements"),
        ({"attention_mask": torch.ones(2, 6)}, LayoutError, r"attention_mask: shape \(2, 6\)"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1], [1] * 7])}, ArgumentError, r"rows \[0\] have padding between"),
        ({"attention_mask": torch.zeros(2, 7)}, ArgumentError, "all tokens are padding"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 7])}, ArgumentError, "a batch of 2"),
        ({"input_ids": IDS[0]}, LayoutError, r"input_ids: shape \(7,\)"),
        ({"input_ids": IDS[:, :0]}, LayoutError, "at least one token"),
        ({"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 3, 6])}, ArgumentError, "rise from 0 to 7"),
        (
            {"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 3, 7]), "cu_seq_lens_k": torch.tensor([0, 4, 7])},
            ArgumentError,
            "differs from cu_seq_lens_q",
        ),
    ],
    ids=[
        *("use_cache", "past", "weights", "logits", "pixels", "two_inputs", "labels", "positions", "positions_3d", "mask_4d"),
        *("mask_short", "mask_holes", "mask_empty", "bounds_of_rows", "one_dim", "no_tokens", "bounds_short", "bounds_differ"),
    ],
)
def test_calls_whose_meaning_would_be_lost(group: Any, inputs: dict[str, Any], error: type[Exception], says: str) -> None:
    model = build("llama")
    with use_context_parallel(model, group), pytest.raises(error, match=says):
        model(**{"input_ids": IDS, **inputs})
    assert model(input_ids=IDS).logits.shape[:2] == (2, 7)


def test_generation_is_refused_and_comes_back(group: Any) -> None:
    model = build("llama").float()
    with use_context_parallel(model, group), pytest.raises(ArgumentError, match="generate: not offered"):
        model.generate(input_ids=IDS, max_new_tokens=2)
    assert model.generate(input_ids=IDS, max_new_tokens=2).shape == (2, 9)


def test_twice_and_without_a_group(group: Any) -> None:
    model = build("mistral")
    parallel = use_context_parallel(model)
    with pytest.raises(ArgumentError, match="already; call remove"):
        use_context_parallel(model)
    with pytest.raises(ArgumentError, match="has not been called yet"):
        parallel.unshard(torch.zeros(1, 1))
    parallel.remove()
    parallel.remove()
    use_context_parallel(model).remove()


def test_no_process_group() -> None:
    with pytest.raises(ArgumentError, match="torchrun"):
        use_context_parallel(build("llama"))


def test_a_part_of_the_model_called_alone(group: Any) -> None:
    """The hook is on the whole model; the part inside gets no plans, and says so."""
    model = build("llama")
    with use_context_parallel(model, group), pytest.raises(ArgumentError, match="call the model that was given"):
        model.model(input_ids=IDS)


def test_a_layer_that_asks_for_another_window(group: Any) -> None:
    model = build("gemma2")
    with use_context_parallel(model, group):
        model.model.layers[0].self_attn.sliding_window = WINDOW + 1
        with pytest.raises(ArgumentError, match=rf"asks for {WINDOW + 1}, the configuration says \[{WINDOW}\]"):
            model(input_ids=IDS)
        model.model.layers[0].self_attn.sliding_window = None  # a window that its layer does not tell
        with pytest.raises(ArgumentError, match="asks for None"):
            model(input_ids=IDS)


def test_saved_models_know_nothing_of_it(group: Any, tmp_path: Path) -> None:
    model = build("mistral")
    with use_context_parallel(model, group):
        model(input_ids=IDS, labels=IDS)
        model.save_pretrained(tmp_path / "saved")
    for path in (tmp_path / "saved").glob("*.json"):
        assert "context_parallel" not in path.read_text()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert again.config._attn_implementation in ("eager", "sdpa")
    kept = again.state_dict()
    assert kept.keys() == model.state_dict().keys()
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())


def test_positional_inputs_embeddings_tuples_and_shifted_labels(group: Any) -> None:
    """Other ways to say the same, all on one rank, which holds everything."""
    model = build("llama")
    plain = model(input_ids=IDS, labels=IDS)
    shifted = torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)
    with use_context_parallel(model, group):
        ways = [
            model(IDS, labels=IDS),
            model(inputs_embeds=model.get_input_embeddings()(IDS), labels=IDS),
            model(IDS, labels=IDS, shift_labels=shifted),
            model(IDS, labels=IDS, attention_mask=torch.ones_like(IDS), position_ids=torch.arange(7)[None]),
        ]
        doubled = model(IDS, labels=IDS, num_items_in_batch=24)  # as trainers that accumulate gradients pass it
        as_tuple = model(IDS, labels=IDS, return_dict=False)
        no_labels = model(IDS, output_hidden_states=True)
    for way in ways:
        assert way.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)  # the loss is of float32
        assert way.logits.shape == plain.logits.shape
    assert doubled.loss.item() == pytest.approx(plain.loss.item() * 12 / 24, rel=1e-6)
    assert as_tuple[0].item() == pytest.approx(plain.loss.item(), rel=1e-6)
    assert no_labels.loss is None and len(no_labels.hidden_states) == 3


def test_lengths_from_each_source() -> None:
    lengths = torch.tensor([0, 3, 3, 7])
    assert read_tokens(1, 7, {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}) == Tokens(1, 7, (3, 4))
    positions = torch.tensor([[0, 1, 2, 0, 1], [4, 5, 6, 7, 8]])
    assert read_tokens(2, 5, {"position_ids": positions}) == Tokens(2, 5, (3, 2, 5))
    assert read_tokens(2, 5, {"position_ids": positions[1:]}) == Tokens(2, 5)
    assert read_tokens(2, 5, {"position_ids": positions, "attention_mask": torch.ones(2, 5)}) == Tokens(2, 5)
    padded = read_tokens(3, 4, {"attention_mask": torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]])})
    assert padded.lengths == (3, 2) and padded.kept is not None and padded.kept.tolist() == [1, 2, 3, 8, 9]
    x = torch.arange(12).reshape(3, 4)
    assert padded.pack(x).tolist() == [[1, 2, 3, 8, 9]]
    assert padded.unpack(padded.pack(x)).tolist() == [[0, 1, 2, 3], [0, 0, 0, 0], [8, 9, 0, 0]]


