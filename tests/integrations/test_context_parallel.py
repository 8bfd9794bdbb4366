"""Models whose tokens are divided over processes: losses and gradients of one machine. The criterion is in context_models.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

pytest.importorskip("transformers")

from tests.distributed.processes import Ranks, start
from tests.integrations import context_models as models
from tests.integrations.context_models import Result, apart
from tests.integrations.models import Double


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    kinds = (f"transformers.models.{name}.modeling_{name}" for name in models.CASES)
    with start(4, tmp_path_factory.mktemp("ranks"), *kinds) as running:
        yield running


@cache
def alone(name: str, layout: str = "rows") -> Result:
    return models.alone(name, layout)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", list(models.CASES))
def test_losses_and_gradients_are_those_of_one_rank(ranks: Ranks, name: str, count: int) -> None:
    for found in ranks.run(count, models.on_ranks, name):
        assert apart(found, alone(name)) <= 1


@pytest.mark.parametrize("shards", ["contiguous", "head_tail", "zigzag"])
def test_however_tokens_are_divided(ranks: Ranks, shards: str) -> None:
    for found in ranks.run(4, models.on_ranks, "gpt_oss", "rows", shards):
        assert apart(found, alone("gpt_oss")) <= 1


@pytest.mark.parametrize(
    ("name", "layout"), [("llama", "padded"), ("gpt_oss", "padded"), ("mistral", "packed"), ("gemma2", "packed")]
)
def test_padding_and_packed_sequences(ranks: Ranks, name: str, layout: str) -> None:
    for found in ranks.run(4, models.on_ranks, name, layout):
        assert apart(found, alone(name, layout)) <= 1


@pytest.mark.parametrize(("name", "mistake"), [("gemma2", "window"), ("llama", "positions"), ("llama", "labels")])
def test_the_criterion_sees_mistakes(ranks: Ranks, name: str, mistake: str) -> None:
    """A window one key too wide, positions that are not those of the tokens, a label after the end of a row."""
    found = ranks.run(2, models.mistaken, name, mistake)
    assert min(apart(one, alone(name)) for one in found) > 1e6


def test_dropout_is_the_same_on_any_number_of_ranks(ranks: Ranks) -> None:
    (one,) = ranks.run(1, models.with_dropout, "gpt_oss")
    assert apart(one, alone("gpt_oss")) > 1e6
    for found in ranks.run(4, models.with_dropout, "gpt_oss"):
        assert apart(found, one) <= 1


def test_checkpointing_computes_the_same_again(ranks: Ranks) -> None:
    once, twice = (ranks.run(2, models.with_dropout, "gemma2", checkpointing) for checkpointing in (False, True))
    for a, b in zip(once, twice, strict=True):
        assert a.loss == b.loss
        assert all(torch.equal(a.gradients[name], b.gradients[name]) for name in a.gradients)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_beside_data_parallelism(ranks: Ranks, kind: str) -> None:
    """Two groups of two; every group has the same batch here, so the average over all is that of one."""
    for found in ranks.run(4, models.wrapped, "llama", kind):
        assert apart(found, alone("llama")) <= 1


def test_training_goes_on_with_another_number_of_ranks(ranks: Ranks) -> None:
    """A state dict holds the model's parameters and nothing else."""
    losses, state = ranks.run(1, models.learn, "mistral", 4)[0]
    first, half = ranks.run(4, models.learn, "mistral", 2)[0]
    then, end = ranks.run(2, models.learn, "mistral", 2, half)[0]
    assert state.keys() == half.keys() == models.build("mistral").state_dict().keys()
    assert [*first, *then] == pytest.approx(losses, rel=4 * models.TERMS * models.U)
    largest = max(float(x.abs().max()) for x in state.values())
    assert max(float((state[n] - end[n]).abs().max()) for n in state) <= 4 * models.TERMS * models.U * largest


@pytest.mark.parametrize(("layout", "tokens"), [("rows", models.LENGTH), ("padded", 2 * models.LENGTH - 14)])
def test_outputs_are_of_own_tokens_and_can_be_made_whole(ranks: Ranks, layout: str, tokens: int) -> None:
    inputs = models.batch("gemma3", layout)
    inputs.pop("labels")
    model = models.build("gemma3")
    with torch.no_grad(), Double():
        exact = model(**inputs).logits
    answers = ranks.run(4, models.whole_logits, "gemma3", layout)
    real = inputs.get("attention_mask", torch.ones(exact.shape[:2])).bool()
    for logits, _, windows in answers:
        assert windows == [models.WINDOW, None]
        assert (logits - exact)[real].abs().max() <= models.TERMS * models.U * exact.abs().max()
        assert not logits[~real].any()
    assert sum(own for _, own, _ in answers) == tokens
    assert max(own for _, own, _ in answers) < tokens / 2


def test_ranks_with_other_batches_are_told_the_same(ranks: Ranks) -> None:
    answers = ranks.run(2, models.other_batches)
    assert len({text for text, _ in answers}) == 1
    values, lengths = answers[0][0].split("\n")
    assert "ranks [1] hold another batch" in values and "the same whole batch on every rank" in values
    assert f"1 × {models.LENGTH - 1} on rank 1" in lengths
    for _, loss in answers:
        assert loss == pytest.approx(alone("llama").loss, rel=models.TERMS * models.U)


def test_the_example_learns_alike_and_keeps_less_on_more_ranks(ranks: Ranks) -> None:
    """As long as it is by default. Sums of float32 in another order; weights, which every rank keeps whole, are a hundredth of
    what one rank keeps."""
    length, steps = 4096, 2
    (losses, (tokens, kept, _, sent)), = ranks.run(1, models.example_steps, length, steps)
    assert losses[-1] < losses[0] and tokens == length and sent == 0
    found = ranks.run(4, models.example_steps, length, steps)
    for ours, (own, keeps, _, sends) in found:
        assert ours == pytest.approx(losses, rel=steps * length * 2**-24)
        assert abs(own - length / 4) <= 1 and keeps < 0.26 * kept and sends > 0
    assert len({tuple(ours) for ours, _ in found}) == 1
