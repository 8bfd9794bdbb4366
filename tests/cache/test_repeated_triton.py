"""Repeated calls over pages on Triton's launches, without a GPU: what is repeated, and what is not taken for a repetition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tools.host_stub import Kernel, without_gpu

import tilewise as tw
from tests.backends.test_host_path import flat, leaves
from tests.cache.test_repeated import is_short
from tilewise.api import cached_repeat
from tilewise.backends.base import Inputs
from tilewise.backends.gpu import record
from tilewise.backends.gpu.record import Launch, Recording, Template
from tilewise.backends.pages import Pages
from tilewise.backends.triton import paged
from tilewise.backends.triton.backend import Triton
from tilewise.errors import KernelError

PAGE, HEADS, DIM = 16, 2, 64


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with without_gpu() as kernel:
        yield kernel


def make(batch: int = 2, most: int = 64, dtype: torch.dtype = torch.bfloat16, wide: bool = False, **more: Any) -> tw.KVCache:
    k, v = (torch.zeros(batch * most, PAGE, HEADS, DIM, dtype=dtype) for _ in range(2))
    if dtype == torch.int8:
        more |= {"k_scale": torch.ones(HEADS), "v_scale": torch.ones(HEADS)}
    table = torch.arange(batch * most, dtype=torch.int32).reshape(batch, most)
    lengths = torch.full((batch,), 40, dtype=torch.int64 if wide else torch.int32)
    return tw.KVCache.paged(k, None if "value_dim" in more else v, table, lengths, **more)


def queries(cache: tw.KVCache, rows: int = 1, heads: int = 8) -> Tensor:
    return torch.zeros(cache.pages.starts.shape[0], rows, heads, DIM, dtype=torch.bfloat16)


def part_of(cache: tw.KVCache) -> Tensor:
    """Queries out of one tensor with keys and values."""
    return torch.zeros(cache.pages.starts.shape[0], 1, 24, DIM, dtype=torch.bfloat16)[:, :, 4:12]


FORMS: dict[str, tuple[Callable[[], tw.KVCache], Callable[[tw.KVCache], Tensor], dict[str, Any]]] = {
    "split": (make, queries, {}),
    "whole": (lambda: make(most=2), queries, {}),
    "one sequence": (lambda: make(batch=1), queries, {"mask": None}),
    "rows": (make, lambda cache: queries(cache, 3), {"mask": tw.causal() & tw.window(20)}),
    "int8, int64": (lambda: make(dtype=torch.int8, wide=True), queries, {"softcap": 5.0}),
    "latent": (lambda: make(value_dim=32), queries, {"scale": 0.5}),
    "part": (make, part_of, {}),
    "invariant": (make, queries, {"invariant": True}),
    "by rows of memory": (
        lambda: tw.KVCache.static(*torch.zeros(2, 3, 512, HEADS, DIM, dtype=torch.bfloat16), torch.full((3,), 40)), queries, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("lse", [False, True])
def test_kernels_get_what_they_would_get_if_all_was_built_anew(
    kernel: Kernel, name: str, lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache, make_q, options = FORMS[name]

    def call() -> Any:
        cache = make_cache()
        q = make_q(cache)
        held.append((q, cache))  # so that later ones lie elsewhere
        return q, cache, tw.attention_cached(q, cache, return_lse=lse, **options)

    held: list[Any] = []
    for _ in range(3):
        *_, want = call()
    assert is_short(call)
    memory: list[Any] = []
    seen: list[Any] = []
    partials, repeat = paged.partials_of, Recording.repeat

    def same_partials(*args: Any) -> Any:
        memory.append(memory[0] if memory else partials(*args))
        return memory[0]

    def repeated(self: Recording, tensors: Any) -> bool:
        kernel.seen = []
        assert repeat(self, tensors), "was recorded before"
        seen.append(flat(tuple(kernel.seen)))
        return False

    def rebuilt(self: Recording, tensors: Any, launches: list[Launch]) -> None:
        kernel.seen = []
        for launch in launches:
            Template(launch, []).bind((0,))()  # over the tensors themselves
        seen.append(flat(tuple(kernel.seen)))
        present = {x.data_ptr() for x in tensors if x is not None}
        assert present <= set(leaves(seen[-1])), "a tensor that no kernel gets"

    with monkeypatch.context() as patched:
        patched.setattr(paged, "partials_of", same_partials)
        patched.setattr(Recording, "repeat", repeated)
        patched.setattr(Recording, "record", rebuilt)
        q, cache, found = call()
    assert len(seen) == 3 and seen[0] == seen[1] == seen[2]
    pages = cache.pages
    addresses = set(leaves(seen[0]))
    out = found[0] if lse else found
    assert {x.data_ptr() for x in (q, pages.k, pages.entries, pages.lengths, out)} <= addresses
    for x, y in zip(found, want, strict=True) if lse else [(found, want)]:
        assert x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype


def test_a_repeated_call_builds_nothing(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make()
    q = queries(cache)
    for _ in range(3):
        tw.attention_cached(q, cache)
    for owner, what in ((paged, "key_of_pages"), (paged, "paged_tiles"), (paged, "paged_launches"), (Template, "__init__")):
        monkeypatch.setattr(owner, what, mock.Mock(side_effect=AssertionError(what)))
    before = kernel.launched
    tw.attention_cached(q, cache)
    assert kernel.launched == before + 2


def test_no_other_call_is_taken_for_it(kernel: Kernel) -> None:
    cache = make()
    q = queries(cache)
    for _ in range(2):
        tw.attention_cached(q, cache)
    pages = cache.pages

    def over(**changed: Any) -> Callable[[], Any]:
        return lambda: tw.attention_cached(q, tw.KVCache(pages._replace(**changed)))

    twice = torch.zeros(*pages.k.shape[:3], 2 * DIM, dtype=torch.bfloat16)[..., :DIM]
    others: dict[str, Callable[[], Any]] = {
        "scale": lambda: tw.attention_cached(q, cache, scale=0.5),
        "splits": lambda: tw.attention_cached(q, cache, splits=2),
        "backend": lambda: tw.attention_cached(q, cache, backend="triton"),
        "queries": lambda: tw.attention_cached(q[:, :, :4], cache),
        "strides of q": lambda: tw.attention_cached(part_of(cache), cache),
        "rows": lambda: tw.attention_cached(queries(cache, 2), cache),
        "strides": over(k=twice),
        "latent": over(latent=True),
        "lengths": over(lengths=pages.lengths.long()),
        "lengths apart": over(lengths=torch.stack((pages.lengths, pages.lengths), 1)[:, 0]),
        "another table": over(table=pages.table.clone()),  # entries are the old one's
        "table": over(table=pages.table.long()),
        "sinks": lambda: tw.attention_cached(q, cache, sinks=torch.zeros(8)),
        "batch": lambda: tw.attention_cached(queries(make(3)), make(3)),
        "types": lambda: tw.attention_cached(queries(cache), make(dtype=torch.int8)),
    }
    for name, call in others.items():
        assert not is_short(call), name
    assert is_short(lambda: tw.attention_cached(q, cache))


def test_values_are_looked_at_where_that_is_asked(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """TILEWISE_CHECK=1, in the middle of a process: the long way looks, and reports."""
    cache = make()
    q = queries(cache)
    for _ in range(2):
        tw.attention_cached(q, cache)
    cache.lengths[0] = 5000
    assert is_short(lambda: tw.attention_cached(q, cache)), "a GPU is not waited for"
    monkeypatch.setattr(cached_repeat, "checks_values", lambda device: True)
    assert not is_short(lambda: tw.attention_cached(q, cache))


def test_a_changed_table_and_longer_sequences_are_read_by_the_kernels(kernel: Kernel) -> None:
    """Launches know where lengths and tables lie, not what they hold."""
    cache = make()
    q = queries(cache)
    for _ in range(3):
        tw.attention_cached(q, cache)
    kernel.seen = []
    tw.attention_cached(q, cache)
    cache.lengths.add_(1)
    cache.pages.table.copy_(cache.pages.table.flip(1))
    before, kernel.seen = kernel.seen, []
    assert is_short(lambda: tw.attention_cached(q, cache))
    numbers = {cache.lengths.data_ptr(), cache.pages.table.data_ptr()}
    assert numbers <= set(leaves(flat(tuple(before)))) & set(leaves(flat(tuple(kernel.seen))))


def test_launches_that_were_dropped_are_made_again(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    cache = make()
    q = queries(cache)
    for _ in range(3):
        tw.attention_cached(q, cache)
    old = paged.recorder._epoch
    paged.recorder.forget()
    assert paged.recorder._epoch is not old and is_short(lambda: tw.attention_cached(q, cache))
    assert len(paged.recorder._recordings) == 1


def test_a_kernel_that_cannot_be_made_is_told_by_the_long_way(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other addresses need another kernel: that is the first to fail."""
    cache = make()
    q = queries(cache)
    for _ in range(3):
        tw.attention_cached(q, cache, backend="triton")
    monkeypatch.setattr(record.Launch, "compiled", mock.Mock(side_effect=KernelError("no registers left")))
    odd = torch.zeros(q.numel() + 1, dtype=torch.bfloat16)[1:].view(q.shape)
    tw.attention_cached(q, cache, backend="triton")
    with pytest.raises(KernelError, match="no registers left"):
        tw.attention_cached(odd, cache, backend="triton")


def test_turned_queries_are_known_again(kernel: Kernel) -> None:
    """As they are turned, not as they came: those of one tensor with keys and values are side by side then."""
    cache = make()
    rotary = tw.rotary(torch.rand(90, DIM // 2), torch.rand(90, DIM // 2))
    k, v = (torch.zeros(2, 1, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    for make_q in (queries, part_of):
        for _ in range(3):
            tw.attention_cached(make_q(cache), cache, new=(k, v), rotary=rotary)
        q = make_q(cache)
        assert is_short(lambda q=q: tw.attention_cached(q, cache, new=(k, v), rotary=rotary))


def test_where_new_tokens_begin_is_kept(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes two launches on a GPU, and a repeated call makes only the append's and its own."""
    cache = make()
    q, k, v = queries(cache), *(torch.zeros(2, 1, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        tw.attention_cached(q, cache, new=(k, v))
    monkeypatch.setattr(torch, "arange", mock.Mock(side_effect=AssertionError("made anew")))
    before = kernel.launched
    tw.attention_cached(q, cache, new=(k, v))
    assert kernel.launched == before + 3


def test_a_backend_with_another_paged_keeps_nothing() -> None:
    class Other(Triton):
        def paged(self, problem: Any, inputs: Inputs, pages: Pages) -> Any:
            return super().paged(problem, inputs, pages)

    assert Other().paged_launcher(None, None, None) is None  # type: ignore[arg-type]
