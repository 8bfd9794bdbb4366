"""A sample of the model types of transformers beside eager; `make test-models` takes all of them."""

from __future__ import annotations

import pytest
import torch

from tilewise.errors import ArgumentError
from tilewise.integrations.transformers import refusal, register, use_tilewise

transformers = pytest.importorskip("transformers")

from tests.integrations.zoo import compare, table  # noqa: E402  # they need transformers
from tests.integrations.zoo.build import build, prepare  # noqa: E402

SAMPLE = {
    "equal": ["llama", "gemma2", "qwen2_vl", "bert", "clip_text_model", "bart", "kosmos_2_text_model", "got_ocr2"],
    "refused": [
        *("mpt", "codegen", "xglm", "bloom", "trocr"),  # a boolean mask was added to their scores, or filled the wrong way
        *("megatron-bert", "rembert", "roformer", "ibert", "mpnet", "convbert"),  # so was their padding
        *("gptj", "gpt_neo", "falcon", "git"),  # KeyError: 'tilewise'
        "deberta",  # all of it computes attention itself
    ],
    "idle": ["mamba", "sam_vision_model"],
}
TYPES = [pytest.param(verdict, name, id=name) for verdict, names in SAMPLE.items() for name in names]


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


@pytest.mark.parametrize(("verdict", "name"), TYPES)
def test_a_type_is_equal_to_eager_or_refused(verdict: str, name: str) -> None:
    outcome = compare.compare(name)
    assert outcome.verdict == verdict, outcome
    if transformers.__version__ in table.PAGE.read_text(encoding="utf-8"):
        assert table.stale([outcome], table.read(table.PAGE.read_text(encoding="utf-8"))) == []


def test_a_refusal_says_why() -> None:
    config = transformers.GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2, rotary_dim=4)
    with pytest.raises(ArgumentError, match="GPTJForCausalLM computes its attention itself"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tilewise")


def test_the_page_holds_every_type_and_enough_are_compared() -> None:
    page = table.read(table.PAGE.read_text(encoding="utf-8"))
    assert sum(outcome.verdict == "equal" for outcome in page.values()) >= 150
    assert not [outcome for outcome in page.values() if outcome.verdict == "different"]
    if transformers.__version__ in table.PAGE.read_text(encoding="utf-8"):
        assert page.keys() == set(transformers.CONFIG_MAPPING.keys())


def test_the_page_is_read_as_it_was_written() -> None:
    outcomes = [
        compare.Outcome("llama", "LlamaForCausalLM", "equal", "plain, padded"),
        compare.Outcome("mpt", "MptForCausalLM", "refused", "a reason, with a | in it"),
        compare.Outcome("align", "", "unbuilt", ""),
    ]
    page = table.read(table.write(outcomes))
    assert table.stale(outcomes, page) == []
    assert table.stale([outcomes[0]._replace(verdict="different")], page)
    assert table.stale([outcomes[0]._replace(verdict="unbuilt")], page)
    assert table.stale([outcomes[0]._replace(model_type="new")], page)


@pytest.mark.parametrize("language", table.PAGES)
def test_both_pages_are_what_is_written_for_the_same_outcomes(language: str) -> None:
    """`python -m tests.integrations.zoo --write TYPE` writes both anew."""
    english = table.PAGE.read_text(encoding="utf-8")
    outcomes, page = table.read(english), table.PAGES[language].read_text(encoding="utf-8")
    assert page == table.write(outcomes.values(), language, table.versions(english))
    assert table.read(page) == outcomes


@pytest.mark.parametrize("mistake", ["leak", "padding", "nothing"])
def test_the_comparison_sees_mistakes(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that hides nothing, padding that is seen, and for all that the right answer."""
    from tilewise.integrations.transformers import masks

    masks._known()  # it tries the mask functions once, and would notice
    if mistake == "leak":
        monkeypatch.setitem(masks._LEAVES, "causal_mask_function", lambda cells, frame: masks.full())
    elif mistake == "padding":
        monkeypatch.setattr(masks, "describe_padding", lambda mask, frame: masks.full())
    assert compare.compare("llama").verdict == ("equal" if mistake == "nothing" else "different")


def test_a_model_with_its_own_attention_does_not_take_the_name_later() -> None:
    """Layers that were chosen for eager stay, so neither way of setting the name may go on to masks made for tilewise."""
    model, _, given = prepare("git")
    for set_name in (use_tilewise, lambda model: model.set_attn_implementation("tilewise")):
        with pytest.raises(ArgumentError, match="computes its attention itself"):
            set_name(model)
    with torch.no_grad():
        assert model(**given).logits.isfinite().all()


def test_parts_can_be_named(recwarn: pytest.WarningsRecorder) -> None:
    """The remedy of the refusal: only the language model on tilewise."""
    with pytest.raises(ArgumentError, match="text_config"):
        build("granite_speech", "tilewise", {})
    eager, variant, given = prepare("granite_speech")
    ours = build("granite_speech", {"text_config": "tilewise"}, variant)
    with compare.Counter() as counter:
        assert compare.plain(ours, eager, given)
    assert counter.calls


def test_a_part_with_its_own_attention_is_named_once() -> None:
    refusal._warn_own.cache_clear()
    with pytest.warns(UserWarning, match="SamVisionSdpaAttention computes its attention itself"):
        build("sam_vision_model", "tilewise", {})
