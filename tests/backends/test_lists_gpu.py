"""Lists of tiles on a GPU: every backend that walks them, graphs, inference mode, and bad values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.numerics.checks import check_backward, check_forward
from tilewise.api.parse import parse_call
from tilewise.backends.base import Grads
from tilewise.backends.triton import run
from tilewise.lab.bench.cases import long_tailed
from tilewise.masks import Mask

pytestmark = pytest.mark.gpu
LENGTH = 1100


def ids_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().cuda()


@dataclass
class Draw:
    """The tensors that masks are made of."""

    ids: Tensor
    dense: Tensor
    table: Tensor
    lists: Tensor

    @classmethod
    def new(cls) -> Draw:
        torch.manual_seed(0)
        blocks = -(-LENGTH // 128)
        return cls(
            ids_of(long_tailed(LENGTH, 30, 400)),
            torch.rand(2, 1, LENGTH, LENGTH, device="cuda") < 0.5,
            torch.rand(1, 4, blocks, blocks, device="cuda") < 0.3,
            torch.randint(-1, blocks, (2, 2, blocks, 3), device="cuda", dtype=torch.int32),
        )


MASKS: dict[str, Callable[[Draw], Mask]] = {
    "documents": lambda x: tw.documents(x.ids),
    "causal documents": lambda x: tw.causal() & tw.documents(x.ids),
    "documents and window": lambda x: tw.causal() & tw.window(100) & tw.documents(x.ids),
    "documents and prefix-lm": lambda x: tw.prefix(64) & tw.documents(x.ids) | tw.causal() & tw.documents(x.ids),
    "unsorted documents": lambda x: tw.documents(x.ids * 7919 % 5 - 2) & tw.causal(),
    "one token each": lambda x: tw.documents(torch.arange(LENGTH).cuda()),
    "not documents": lambda x: ~tw.documents(x.ids) & tw.causal(),
    "first keys and window": lambda x: tw.causal() & (tw.prefix(4) | tw.window(100)),
    "blocks": lambda x: tw.blocks(x.table, 128),
    "small blocks": lambda x: tw.blocks(x.table.repeat_interleave(8, 2).repeat_interleave(8, 3)[..., :69, :69], 16),
    "blocks or window": lambda x: tw.blocks(x.table, 128) | tw.window(50),
    "selected": lambda x: tw.selected(x.lists),
    "selected or window": lambda x: tw.causal() & (tw.selected(x.lists) | tw.window(50)),
    "dense": lambda x: tw.dense(x.dense),
    "dense and documents": lambda x: tw.dense(x.dense) & tw.documents(x.ids),
    "dense or documents": lambda x: tw.dense(x.dense) | tw.documents(x.ids),
    "rows": lambda x: tw.dense(x.dense[:, :, :, :1]),
    "keys": lambda x: tw.dense(x.dense[:, :, :1]) & tw.causal(),
}


def inputs_of(heads: tuple[int, ...] = (4, 2, 2, 4), dim: int = 64) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, h, LENGTH, dim, device="cuda", dtype=torch.bfloat16) for h in heads]


def attend(mask: Mask, backend: str, tensors: list[Tensor]) -> list[Tensor]:
    """Output and gradients."""
    q, k, v, dout = tensors
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = tw.attention(*leaves, mask=mask, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def held(mask: Mask, tensors: list[Tensor], got: list[Tensor], cu: Tensor | None = None) -> None:
    """Output, and gradients if they are there, within their bounds of the oracle."""
    q, k, v, *dout = tensors
    packed = {} if cu is None else {"cu_seqlens_q": cu}
    problem, inputs = parse_call(q, k, v, {"mask": mask, **packed})
    out = got[0] if cu is None else got[0].transpose(0, 1)[None]
    wrong = check_forward(problem, inputs, out)
    if got[1:]:
        wrong += check_backward(problem, inputs, dout[0], None, Grads(*got[1:], None, None))
    assert not wrong, (mask, wrong)


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_lists_agree_with_the_oracle(name: str, dim: int, backend: str) -> None:
    mask, tensors = MASKS[name](Draw.new()), inputs_of(dim=dim)
    held(mask, tensors, attend(mask, backend, tensors))


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_nothing_hidden_shows(backend: str) -> None:
    draw, tensors = Draw.new(), inputs_of()
    draw.dense[:, :, :, 5], draw.dense[:, :, 7] = False, False
    for x, row in zip(tensors, (7, 5, 5, 7), strict=True):
        x[:, :, row] = float("nan")
    for mask in (tw.dense(draw.dense), tw.dense(draw.dense) & tw.documents(draw.ids)):
        held(mask, tensors, attend(mask, backend, tensors))


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_a_replayed_graph_reads_the_ids_it_finds(backend: str) -> None:
    ids, tensors = ids_of((600, 500)), inputs_of()
    mask = tw.causal() & tw.documents(ids)
    attend(mask, backend, tensors)  # lists of these ids are kept now; compiling is over
    q, k, v, dout = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(tw.attention(*leaves, mask=mask, backend=backend), leaves, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention(*leaves, mask=mask, backend=backend)
        grads = torch.autograd.grad(out, leaves, dout)
    for lengths in ((600, 500), (100, 1000), (1,) * LENGTH):
        new = ids_of(lengths)
        ids.copy_(new)
        graph.replay()
        held(tw.causal() & tw.documents(new), tensors, [out.detach(), *grads])


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_lists_follow_their_tensors(backend: str) -> None:
    q, k, v, _ = inputs_of()
    ids = ids_of((600, 500))
    mask, new = tw.documents(ids), ids_of((100, 1000))

    def check(mask: Mask, ids: Tensor) -> None:
        held(tw.documents(ids.clone()), [q, k, v], [tw.attention(q, k, v, mask=mask, backend=backend)])

    check(mask, ids)
    ids.copy_(new)
    check(mask, new)
    ids.data.copy_(ids_of((300, 800)))  # counts no version: a mask built anew reads it
    check(tw.documents(ids), ids)
    with torch.inference_mode():
        frozen = ids_of((600, 500))
        mask = tw.documents(frozen)
        check(mask, frozen)
        frozen.copy_(new)
        check(mask, new)


def test_values_out_of_range_are_not_seen() -> None:
    """Nothing outside is read: blocks past the last count as unseen."""
    q, k, v, _ = inputs_of()
    blocks = -(-LENGTH // 128)
    lists = torch.tensor([0, 2**30, -5, blocks], dtype=torch.int32, device="cuda").expand(1, 1, blocks, 4).contiguous()
    first = lists.clone()
    first[..., 1:] = -1
    got = tw.attention(q, k, v, mask=tw.selected(lists), backend="triton")
    held(tw.selected(first), [q, k, v], [got])


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_packed_batches(backend: str) -> None:
    """One long sequence beside many short ones, with documents, blocks and lists of each sequence's own."""
    lengths = (900, *(7,) * 20, 0, 60)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    torch.manual_seed(2)
    q, k, v = (torch.randn(LENGTH, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    table = torch.rand(len(lengths), 1, 8, 8, device="cuda") < 0.5
    lists = torch.randint(-1, 1, (len(lengths), 1, 8, 2), device="cuda", dtype=torch.int32)
    for mask in (
        tw.causal(),
        tw.causal() & tw.documents(ids_of(long_tailed(LENGTH, 5, 300))),
        tw.causal() & tw.blocks(table, 128),
        tw.selected(lists) | tw.window(9),
    ):
        got = tw.attention_varlen(q, k, v, cu, mask=mask, backend=backend)
        held(mask, [q, k, v], [got], cu)


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_gradients_of_rows_that_begin_anywhere(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensor maps. Sequences and heads begin off every multiple of 16 bytes; values are wider than keys."""
    monkeypatch.setattr(run, "MAPS_FROM", 0)
    lengths = (301, 202, 1, 97)
    total = sum(lengths)
    ids = ids_of(long_tailed(total, 30, 200))
    torch.manual_seed(3)
    sizes = ((6, 64), (2, 64), (2, 256), (6, 256))
    q, k, v, dout = (torch.randn(heads, total, dim, device="cuda").bfloat16() for heads, dim in sizes)

    def gradients(*leaves: Tensor, cu: Tensor | None) -> list[Tensor]:
        leaves = tuple(x.detach().requires_grad_() for x in leaves)
        if cu is None:
            out = tw.attention(*(x[None] for x in leaves), mask=tw.documents(ids), backend=backend)
            return [out.detach(), *(x[None] for x in torch.autograd.grad(out, leaves, dout[None]))]
        out = tw.attention_varlen(*(x.transpose(0, 1) for x in leaves), cu, mask=tw.documents(ids), backend=backend)
        return [out.detach(), *(x[None] for x in torch.autograd.grad(out, leaves, dout.transpose(0, 1)))]

    for cu in (None, torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")):
        tensors = [x[None] if cu is None else x.transpose(0, 1) for x in (q, k, v)]
        held(tw.documents(ids), [*tensors, dout[None]], gradients(q, k, v, cu=cu), cu)
