"""Labels of the next token at every border: of chunks, of ranks and of sequences."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tests.distributed import label_ranks
from tests.distributed.processes import Ranks, start
from tilewise.distributed import plan
from tilewise.distributed.labels import next_labels
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError, PlanError


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with start(4, tmp_path_factory.mktemp("ranks")) as running:
        yield running


def expected(labels: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Token by token."""
    want = labels.clone()
    start = 0
    for length in lengths:
        for at in range(start, start + length):
            want[..., at] = labels[..., at + 1] if at + 1 < start + length else -100
        start += length
    return want


@st.composite
def divided(draw: st.DrawFn, ranks: int) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Lengths, cuts and owners: any division at all, ranks without tokens and empty sequences included."""
    lengths = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=5)))
    tokens = sum(lengths)
    inner = draw(st.sets(st.integers(1, tokens - 1), max_size=8)) if tokens > 1 else set()
    cuts = sorted({0, *inner, tokens})
    owners = [draw(st.integers(0, ranks - 1)) for _ in cuts[1:]]
    return lengths, cuts, owners


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whole_labels_give_each_rank_the_next_of_its_tokens(data: st.DataObject) -> None:
    lengths, cuts, owners = data.draw(divided(3).filter(lambda made: sum(made[0]) > 0))
    labels = torch.arange(2 * sum(lengths)).reshape(2, -1)
    want = expected(labels, lengths)
    for rank in range(3):
        made = label_ranks.planned(None, lengths, cuts, owners, ranks=3)
        object.__setattr__(made, "rank", rank)
        assert torch.equal(made.shift(labels, 1), want[:, made.token_numbers(rank)])


@pytest.mark.parametrize("count", [2, 4])
def test_labels_of_other_ranks_arrive_at_every_border(ranks: Ranks, count: int) -> None:
    """Many divisions in one go, drawn at random; one rank may hold everything, another nothing."""
    random = np.random.default_rng(count)
    jobs, labels = [], []
    for number in range(40):
        lengths = tuple(random.integers(0, 12, random.integers(1, 6)).tolist()) if number else (1,)
        tokens = sum(lengths)
        if not tokens:
            continue
        cuts = np.unique([0, *random.integers(0, tokens + 1, random.integers(0, 9)), tokens])
        jobs.append((lengths, cuts.tolist(), random.integers(0, count, len(cuts) - 1).tolist()))
        labels.append(torch.arange(2 * tokens).reshape(2, -1))
    for rank, answers in enumerate(ranks.run(count, label_ranks.shifted, jobs, labels)):
        for (lengths, cuts, owners), whole, found in zip(jobs, labels, answers, strict=True):
            numbers = label_ranks.planned(None, lengths, cuts, owners, ranks=count).token_numbers(rank)
            for ours in found:
                assert torch.equal(ours, expected(whole, lengths)[:, numbers])


def test_rows_of_a_batch_end_with_their_last_token() -> None:
    problem = tw.Problem.of(heads=2, head_dim=8, seqlen=5, batch=2, mask=tw.causal())
    made = plan(problem, ranks=1)
    assert made.shift(torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])).tolist() == [[2, 3, 4, 5, -100], [7, 8, 9, 10, -100]]
    assert made.shift(torch.arange(10).reshape(5, 2), 0, ignore_index=-1)[-2:].tolist() == [[8, 9], [-1, -1]]


def test_next_labels_leave_what_they_are_given() -> None:
    labels = torch.arange(6, dtype=torch.int32)
    assert next_labels(labels, (2, 0, 4)).tolist() == [1, -100, 3, 4, 5, -100]
    assert labels.tolist() == list(range(6))


@pytest.mark.parametrize(
    ("labels", "options", "error", "says"),
    [
        (torch.zeros(2, 5), {}, ArgumentTypeError, "need integers"),
        (torch.zeros(2, 5, dtype=torch.bool), {}, ArgumentTypeError, "need integers"),
        (torch.zeros(2, 5, dtype=torch.int8), {"ignore_index": -200}, ArgumentError, "does not fit"),
        (torch.zeros(2, 5, dtype=torch.int64), {}, LayoutError, "need 4, this rank's, or 8"),
        (torch.zeros(2, 8, dtype=torch.int64), {"dim": 2}, LayoutError, "2 dimensions"),
        (torch.zeros(2, 4, dtype=torch.int64), {}, PlanError, "pass those of all 8"),
    ],
)
def test_wrong_labels_are_named(labels: Tensor, options: dict[str, int], error: type[Exception], says: str) -> None:
    made = plan(tw.Problem.of(heads=2, head_dim=8, seqlen=8, mask=tw.causal()), ranks=2, shards="contiguous")
    with pytest.raises(error, match=says):
        made.shift(labels, **options)


def test_shards_of_other_tokens_are_refused() -> None:
    problem = tw.Problem.of(heads=2, head_dim=8, seqlen=8, mask=tw.causal())
    shards = plan(problem, ranks=2).shards
    other = tw.Problem.of(heads=2, head_dim=8, seqlen=9, mask=tw.causal())
    with pytest.raises(ArgumentError, match=r"need \(9,\) tokens over 2"):
        plan(other, ranks=2, shards=shards)
    with pytest.raises(ArgumentError, match="over 3; leave shards out"):
        plan(problem, ranks=3, shards=shards)


def test_the_mean_loss_and_its_gradients_are_those_of_one_rank(ranks: Ranks) -> None:
    """Ranks have unlike numbers of labels, so a mean of their means would be another number."""
    lengths = (7, 1, 12, 3)
    (losses, weight), = ranks.run(1, label_ranks.learn, 4, lengths)
    assert losses[-1] < losses[0]
    for count in (2, 3, 4):
        for ours, trained in ranks.run(count, label_ranks.learn, 4, lengths):
            # sums of 23 tokens and 6 dims in another order, four steps
            assert ours == pytest.approx(losses, rel=4 * 29 * 2**-53)
            assert (trained - weight).abs().max() <= 4 * 29 * 2**-53 * weight.abs().max()


def test_gradients_of_some_ranks_count_as_zero_on_the_others(ranks: Ranks) -> None:
    assert ranks.run(4, label_ranks.gradients_of_some_ranks) == [[1.0, 1.0]] * 4


def test_the_mean_loss_refuses_what_is_no_sum() -> None:
    with pytest.raises(ArgumentTypeError, match="one floating-point number"):
        tw.distributed.mean_loss(torch.zeros(3), 3)
    with pytest.raises(ArgumentTypeError, match="an integer"):
        tw.distributed.mean_loss(torch.zeros(()), torch.tensor(3.0))
