"""Real models on tilewise: the numbers and the tokens of `eager`. The criterion is in tests/integrations/models.py."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.errors import ArgumentError, LayoutError
from tilewise.integrations.transformers import PromisedMask, RegistryError, masks, register, use_tilewise
from tilewise.integrations.transformers.attention import attention_function

transformers = pytest.importorskip("transformers")

from tests.integrations.models import (  # noqa: E402  # it needs transformers
    CASES,
    LENGTH,
    NEW,
    PADDING,
    Case,
    excesses,
    lag,
    run_three,
    size,
    tokens,
)

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SETTINGS = [
    pytest.param("cpu", torch.float32, id="cpu-fp32"),
    pytest.param("cuda", torch.bfloat16, id="cuda-bf16", marks=gpu),
]
by_name = {case.name: case for case in CASES}
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
everywhere = pytest.mark.parametrize(("device", "dtype"), SETTINGS)


@pytest.fixture(autouse=True)
def registered(request: pytest.FixtureRequest) -> None:
    register()
    masks._known()  # it tries the mask functions on small dense masks, once: before a test breaks one of them
    case = request.node.callspec.params.get("case") if hasattr(request.node, "callspec") else None
    if case is not None and not case.swappable():
        pytest.skip(f"{case.name} computes its attention itself in transformers {transformers.__version__}")


@pytest.fixture
def no_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask of N × N elements is ever filled in."""

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("a dense mask was built")

    monkeypatch.setattr(PromisedMask, "dense", refuse)
    monkeypatch.setattr(masks, "_warn_dense", refuse)


@each
@everywhere
@pytest.mark.usefixtures("no_dense")
def test_logits_and_gradients_are_as_good_as_eager(case: Case, device: str, dtype: torch.dtype) -> None:
    ours, eager, exact = run_three(case, device, dtype)
    assert excesses(ours, eager, exact, torch.finfo(dtype).eps / 2) == []


@pytest.mark.parametrize("mistake", ["window", "softcap", "sinks", "padding"])
def test_the_criterion_sees_mistakes(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window one key too wide, a cap or a sink left out, padding that is seen: each is far outside."""
    case = by_name["gpt_oss" if mistake == "sinks" else "gemma2"]
    if mistake == "window":
        monkeypatch.setitem(
            masks._LEAVES, "sliding_window_overlay", lambda c, f: masks.window(c["sliding_window"], masks.UNBOUNDED)
        )
    elif mistake == "padding":
        monkeypatch.setattr(masks, "describe_padding", lambda mask, frame: masks.full())
    else:
        left_out = {"softcap": "softcap", "sinks": "s_aux"}[mistake]

        def careless(*args: Any, **kwargs: Any) -> Any:
            return attention_function(*args, **{**kwargs, left_out: None})

        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "tilewise", careless)
    ours, eager, exact = run_three(case, "cpu", torch.float32)
    assert excesses(ours, eager, exact, 2**-24)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("case", [case for case in CASES if case.generates], ids=lambda case: case.name)
@pytest.mark.usefixtures("no_dense")
def test_greedy_generation_gives_the_same_tokens(case: Case, cache: str | None) -> None:
    """The decoder-only batches are padded on the left."""
    model, inputs = case.build("cpu", torch.float32), case.batch("cpu")
    ours, eager = (tokens(model, inputs, name, cache) for name in ("tilewise", "eager"))
    assert ours.tolist() == eager.tolist()
    assert len(set(ours[:, -NEW:].flatten().tolist())) > 3, "the model repeats itself, which shows nothing"


IN_16_BITS = [
    *(pytest.param(by_name[name], "cpu", None, id=f"{name}-cpu") for name in ("llama", "gemma2")),
    *(
        pytest.param(case, "cuda", cache, id=f"{case.name}-cuda-{cache or 'dynamic'}", marks=gpu)
        for case in CASES
        for cache in (None, "static")
        if case.generates
    ),
]


@pytest.mark.parametrize(("case", "device", "cache"), IN_16_BITS)
def test_greedy_generation_in_16_bits_picks_best_tokens(case: Case, device: str, cache: str | None) -> None:
    """Llama's steps over a static cache are compiled, as transformers does on a GPU by itself."""
    found = lag(case, cache, device, torch.bfloat16, compiled=device == "cuda" and case.name == "llama")
    assert found.ok, found


@pytest.mark.usefixtures("no_dense")
def test_training_with_dropout_and_checkpointing_replays_the_same_mask() -> None:
    """With dropout, gradient checkpointing computes the forward twice: both must draw the same mask."""
    case = by_name["llama"]
    found = []
    for checkpointing in (False, True):
        model = case.build("cpu", torch.float32).train()
        model.set_attn_implementation("tilewise")
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(7)
        inputs = case.batch("cpu")
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*found)
    assert found[0].abs().max() > 0


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.usefixtures("no_dense")
def test_beams_chunked_prefill_and_continued_text(name: str) -> None:
    """Other ways through a cache: reordered, filled piece by piece, and taken up again with several tokens."""
    model, inputs = by_name[name].build("cpu", torch.float32), by_name[name].batch("cpu")
    ways: list[dict[str, Any]] = [{"num_beams": 3}, {"prefill_chunk_size": 4}]
    answers = []
    for implementation in ("tilewise", "eager"):
        model.set_attn_implementation(implementation)
        answers.append([model.generate(**inputs, max_new_tokens=6, do_sample=False, **way).tolist() for way in ways])
    assert answers[0] == answers[1]
    model.set_attn_implementation("tilewise")
    ids, seen = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        whole = model(ids, attention_mask=seen).logits[:, 6:]
        start = model(ids[:, :6], attention_mask=seen[:, :6], use_cache=True)
        rest = model(ids[:, 6:], attention_mask=seen, past_key_values=start.past_key_values).logits
    assert size(rest - whole) <= 32 * 2**-24 * size(whole)


@pytest.mark.usefixtures("no_dense")
def test_packed_sequences_do_not_see_each_other() -> None:
    """Position ids that start again (padding-free training) separate sequences."""
    model = by_name["llama"].build("cpu", torch.float32)
    model.set_attn_implementation("tilewise")
    ids = torch.randint(2, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(part).logits for part in (ids[:, :4], ids[:, 4:])], dim=1)
    assert size(packed - alone) <= 8 * 2**-24 * size(alone)


def test_a_given_4d_mask_is_obeyed() -> None:
    model = by_name["llama"].build("cpu", torch.float32)
    ids = by_name["llama"].batch("cpu")["input_ids"]
    seen = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.4
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    answers = []
    for name, mask in (("eager", added), ("tilewise", added), ("tilewise", seen)):
        model.set_attn_implementation(name)
        with torch.no_grad():
            answers.append(model(ids, attention_mask=mask).logits)
    eager, by_bias, by_mask = answers
    # two layers of a few dozen roundings each: an order of magnitude above one float32 rounding
    assert size(by_bias - eager) <= 32 * 2**-24 * size(eager)
    assert size(by_mask - eager) <= 32 * 2**-24 * size(eager)


def test_a_mask_function_of_ones_own_works_and_warns_once() -> None:
    """An unknown function is filled in densely: the right answer, and said so."""
    from transformers.masking_utils import create_causal_mask

    model = by_name["llama"].build("cpu", torch.float32)
    model.set_attn_implementation("tilewise")
    x = torch.zeros(2, 5, 32)

    def every_other(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k) % 2 == 0

    masks._warn_dense.cache_clear()
    with pytest.warns(UserWarning, match="every_other"):
        mask = create_causal_mask(model.config, x, None, None, and_mask_function=every_other)
    q, k = torch.arange(5)[:, None], torch.arange(5)
    assert torch.equal(mask[1, 0], (k <= q) & ((q - k) % 2 == 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create_causal_mask(model.config, x, None, None, and_mask_function=every_other)


def test_registering_twice_changes_nothing() -> None:
    before = dict(transformers.AttentionInterface._global_mapping)
    register()
    assert transformers.AttentionInterface._global_mapping == before


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ArgumentError, match="'sdpa' is the name of another"):
        register("sdpa")
    with pytest.raises(ArgumentError, match="'eager' is the name of another"):
        register("eager")


@pytest.mark.parametrize("installed", [None, ModuleType("transformers")], ids=["missing", "without the registry"])
def test_a_transformers_that_will_not_do(installed: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", installed)
    with pytest.raises(RegistryError, match="pip install"):
        register()


@pytest.mark.parametrize(
    ("features", "complaint"),
    [
        ({"cache": object()}, "paged cache"),
        ({"indices": torch.zeros(1)}, "selected keys"),
    ],
)
def test_features_that_cannot_be_honoured_raise(features: dict[str, Any], complaint: str) -> None:
    x = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ArgumentError, match=complaint):
        attention_function(torch.nn.Module(), x, x, x, None, **features)


def test_a_call_without_a_mask_must_be_clear() -> None:
    q, k = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 5, 4)
    with pytest.raises(ArgumentError, match="where the queries stand"):
        attention_function(torch.nn.Module(), q, k, k, None)
    with pytest.raises(LayoutError, match="rank 4"):
        attention_function(torch.nn.Module(), q, k, k, torch.ones(1, 5))
    attention_function(torch.nn.Module(), q, k, k, None, is_causal=False)


def test_use_tilewise_swaps_a_model_and_refuses_what_it_cannot() -> None:
    model = use_tilewise(by_name["bert"].build("cpu", torch.float32))
    assert model.config._attn_implementation == "tilewise"
    with pytest.raises(ArgumentError, match="PreTrainedModel"):
        use_tilewise(torch.nn.Linear(2, 2))
    config = transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(ArgumentError, match="BloomForCausalLM computes its attention itself"):
        use_tilewise(transformers.BloomForCausalLM(config))


def test_padding_rows_are_zero_and_finite() -> None:
    """A padded query sees no key; nothing it computes is NaN, forward or backward."""
    case = by_name["llama"]
    model, inputs = case.build("cpu", torch.float32), case.batch("cpu")
    model.set_attn_implementation("tilewise")
    logits = model(**inputs).logits
    logits.sum().backward()
    assert logits[0, :PADDING].isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_promise_enters_a_compiled_graph() -> None:
    """Compiled decoding gets a mask made outside: one graph, no break, the description read inside."""
    module = torch.nn.Module()
    x = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(0))

    def layer(x: Tensor, mask: Tensor) -> Tensor:
        return attention_function(module, x, x, x, mask)[0]

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for row in (None, torch.tensor([[False, True, True, True, True], [True] * 5])):
        promise = masks.mask_function(2, 5, 5, attention_mask=row)
        assert torch.equal(compiled(x, promise), layer(x, promise))


def test_inside_a_compiled_graph_transformers_makes_the_mask() -> None:
    compiled = torch.compile(lambda: masks.mask_function(1, 4, 6, q_offset=2), backend="eager", fullgraph=True)
    assert torch.equal(compiled(), torch.ones(1, 1, 4, 6, dtype=torch.bool).tril(2))


def test_a_model_on_sdpa_is_routed_too() -> None:
    """The other way in, for models that have no registry: the same logits."""
    case = by_name["llama"]
    model, inputs = case.build("cpu", torch.float32), case.batch("cpu")
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = model(**inputs).logits[inputs["attention_mask"].bool()]
        with tw.replace_sdpa() as routed:
            got = model(**inputs).logits[inputs["attention_mask"].bool()]
    assert (routed.served, routed.fallbacks.total()) == (2, 0)
    assert size(got - want) <= 32 * 2**-24 * size(want)
