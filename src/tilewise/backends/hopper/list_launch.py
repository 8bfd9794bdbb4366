"""The tile lists of a call in device memory, as the kernels of each pass take them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.gpu.classify import ListSpec, bits_by_key, lists_for
from tilewise.backends.gpu.kept import kept, lengths_of
from tilewise.backends.gpu.lists import TileLists
from tilewise.backends.hopper.device_order import dealt
from tilewise.backends.hopper.intervals import mask_of
from tilewise.backends.hopper.list_plan import Words, has_bounds, lists_of, same_ids
from tilewise.backends.hopper.structs import Lists
from tilewise.problem import Problem


class CallLists(NamedTuple):
    """The lists of one pass of a call; `words` of seen keys and of seeing queries."""

    lists: TileLists
    words: tuple[Words | None, Words | None]
    bounds: Tensor | None
    order: Tensor  # of work tiles, see structs.Arguments
    tensors: tuple[Tensor, ...]
    """What launches read of these."""
    key: Hashable
    """All that a launch depends on beside addresses."""

    @classmethod
    def of(
        cls, lists: TileLists, words: tuple[Words | None, Words | None], bounds: Tensor | None, order: Tensor
    ) -> CallLists:
        read = (lists.runs, lists.counts, lists.terms, lists.q_ids, lists.k_ids, lists.bits, bounds, order)
        tensors = tuple(x for x in (*read, *(x and x.words for x in words)) if x is not None)
        ids = lists.q_ids is None, same_ids(lists)
        return cls(lists, words, bounds, order, tensors, (*lists[7:], *(None if x is None else x[1:] for x in words), *ids))

    @property
    def arguments(self) -> Lists:
        """As the kernels take them."""
        return lists_of(self.lists, self.words, self.bounds)


def is_listed(problem: Problem) -> bool:
    """Does the mask of a supported problem come as lists? Asked in every call, so the answer is kept with the problem."""
    known = problem.memory.get("hopper lists")
    if known is None:
        known = problem.memory["hopper lists"] = mask_of(problem).listed
    return bool(known)


@dataclass(frozen=True, eq=False)
class Walk:
    """The config of a kernel that walks lists, and how work tiles are dealt out: of keys or of queries, to how many programs, for
    how many heads at once at most. Kept with a problem, so what is made for one is known by it."""

    config: Any
    by_key: bool
    units: int
    cluster: int


def call_lists(problem: Problem, inputs: Inputs, walk: Walk) -> CallLists:
    """Kept lists with what is made from them, or new ones, made on the current stream."""
    return kept(problem, inputs.q, walk, partial(make_lists, problem, inputs, walk), lengths_of(inputs))


def make_lists(problem: Problem, inputs: Inputs, walk: Walk) -> CallLists:
    config = walk.config
    asked = config.UNSEEN_KEYS, getattr(config, "EMPTY_ROWS", False)
    lists = lists_for(problem, inputs, ListSpec(config.BLOCK_M, config.BLOCK_N, walk.by_key))
    seen, seeing = (words_for(problem, inputs, config, keys) if asked[not keys] else None for keys in (True, False))
    if walk.by_key and config.LISTS.bits:
        lists = bits_by_key(problem, lists, inputs.q.device)
    bounds = bounds_for(problem, lists, config, walk.by_key)
    order = dealt(problem, lists, config, walk.by_key, walk.units, walk.cluster)
    return CallLists.of(lists, (seen, seeing), bounds, order)


def bounds_for(problem: Problem, lists: TileLists, config: Any, by_key: bool) -> Tensor | None:
    """The bounds of lists whose layout has some."""
    from tilewise.backends.hopper.bounds import list_bounds

    return list_bounds(problem, lists, config, by_key) if has_bounds(config.LISTS) else None


def words_for(problem: Problem, inputs: Inputs, config: Any, keys: bool) -> Words:
    """Words of one side, from lists by that side."""
    from tilewise.backends.hopper.seen import seen_words

    sizes = config.BLOCK_M, config.BLOCK_N

    def make() -> Words:
        return seen_words(problem, lists_for(problem, inputs, ListSpec(*sizes, keys)), config, keys)

    return kept(problem, inputs.q, ("hopper words", sizes, keys), make, lengths_of(inputs))
