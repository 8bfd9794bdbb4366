"""The tile lists of a call in device memory, as the kernels of each pass take them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise.backends.base import Inputs
from tilewise.backends.gpu.classify import ListSpec, lists_for
from tilewise.backends.gpu.lists import TileLists
from tilewise.backends.hopper.device_order import dealt
from tilewise.backends.hopper.intervals import mask_of
from tilewise.backends.hopper.list_plan import Words, same_ids
from tilewise.problem import Problem

_orders: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_words: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Both by the counts of the lists that they were made from."""


class CallLists(NamedTuple):
    """The lists of one pass of a call; `words` of seen keys and of seeing queries."""

    lists: TileLists
    words: tuple[Words | None, Words | None]
    order: Tensor  # of work tiles, see structs.Arguments

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        lists = self.lists
        read = (lists.runs, lists.counts, lists.terms, lists.q_ids, lists.k_ids, lists.bits, self.order)
        return tuple(x for x in (*read, *(x and x.words for x in self.words)) if x is not None)

    @property
    def key(self) -> Hashable:
        """All that a launch depends on beside addresses."""
        ids = self.lists.q_ids is None, same_ids(self.lists)
        return *self.lists[7:], *(None if x is None else x[1:] for x in self.words), *ids


def is_listed(problem: Problem) -> bool:
    """Does the mask of a supported problem come as lists? Asked in every call, so the answer is kept with the problem."""
    known = problem.memory.get("hopper lists")
    if known is None:
        known = problem.memory["hopper lists"] = mask_of(problem).listed
    return bool(known)


class Dealing(NamedTuple):
    """How work tiles are dealt out: of keys or of queries, to how many programs, for how many heads at once at most."""

    by_key: bool
    units: int
    cluster: int


def call_lists(problem: Problem, inputs: Inputs, config: Any, dealing: Dealing) -> CallLists:
    """Kept lists, or new ones, made on the current stream."""
    lists = lists_for(problem, inputs, ListSpec(config.BLOCK_M, config.BLOCK_N, dealing.by_key))
    if lists.counts not in _orders:
        _orders[lists.counts] = dealt(problem, lists, config, *dealing)
    asked = config.UNSEEN_KEYS, getattr(config, "EMPTY_ROWS", False)
    found = tuple(
        words_for(problem, inputs, config, keys) if wanted else None
        for wanted, keys in zip(asked, (True, False), strict=True)
    )
    return CallLists(lists, (found[0], found[1]), _orders[lists.counts])


def words_for(problem: Problem, inputs: Inputs, config: Any, keys: bool) -> Words:
    """Words of one side, from lists by that side; kept for as long as these are."""
    from tilewise.backends.hopper.seen import seen_words

    lists = lists_for(problem, inputs, ListSpec(config.BLOCK_M, config.BLOCK_N, keys))
    if lists.counts not in _words:
        _words[lists.counts] = seen_words(problem, lists, config, keys)
    return _words[lists.counts]
