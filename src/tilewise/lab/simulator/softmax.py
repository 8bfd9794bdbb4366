"""The online softmax in its two right forms, and the scores of one tile."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from tilewise.lab.simulator.memory import Array, Hbm
from tilewise.masks import TileClass, allowed
from tilewise.masks.program import Literal
from tilewise.problem import Problem

FORMS = ("unnormalised", "normalised")


@dataclass
class Counts:
    """What a run did, beside moving bytes."""

    updates: int = 0
    """Online-softmax updates: one per visited tile."""
    rescales: int = 0
    """Updates in which some row's maximum grew, so that what was accumulated had to be scaled by alpha < 1."""
    rescaled_rows: int = 0
    """Rows of all those updates."""
    exps: int = 0
    flops: int = 0
    """Of the matrix products."""

    def matmul(self, shape: tuple[int, ...], k: int) -> None:
        """A product of this shape, summed over k."""
        self.flops += 2 * math.prod(shape) * k


def finite(m: Array) -> Array:
    """Maxima, 0 for rows without keys: exp(−inf − 0) is 0."""
    return np.where(np.isfinite(m), m, 0.0)


def divided(acc: Array, l: Array) -> Array:
    """acc / l by row; rows without keys stay 0."""
    return np.asarray(acc / np.where(l > 0, l, 1.0)[..., None])


def log_sum_exp(m: Array, l: Array) -> Array:
    """m + log l; −inf for rows without keys."""
    return np.where(l > 0, finite(m) + np.log(np.where(l > 0, l, 1.0)), -np.inf)


@dataclass
class RowState:
    """Statistics and accumulator of a block of rows.

    Over the keys seen so far: m = max s, l = Σ exp(s − m), and acc = Σ exp(s − m)·v (unnormalised form) or the same
    divided by l (normalised form).
    """

    m: Array
    l: Array
    acc: Array
    form: str = "unnormalised"

    @staticmethod
    def empty(rows: int, dv: int, form: str = "unnormalised") -> RowState:
        return RowState(np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, dv)), form)

    def update(self, s_tile: Array, v_tile: Array, counts: Counts) -> None:
        """Take in one tile of scores [M, N] and values [N, Dv]."""
        m_new = np.maximum(self.m, s_tile.max(axis=1, initial=-np.inf))
        safe = finite(m_new)  # a row that has seen nothing yet stays empty
        alpha = np.exp(np.where(np.isfinite(self.m), self.m - safe, -np.inf))
        p_tile = np.exp(s_tile - safe[:, None])  # [M, N]
        l_new = alpha * self.l + p_tile.sum(axis=1)
        pv = p_tile @ v_tile  # [M, Dv]
        if self.form == "normalised":
            self.acc = divided(self.acc * (alpha * self.l)[:, None] + pv, l_new)
        else:
            self.acc = self.acc * alpha[:, None] + pv
        grown = np.isfinite(self.m) & (m_new > self.m)
        counts.updates += 1
        counts.rescales += bool(grown.any())
        counts.rescaled_rows += int(grown.sum())
        counts.exps += s_tile.size
        self.m, self.l = m_new, l_new

    def finish(self) -> tuple[Array, Array]:
        """Output rows and their LSE; a row without keys gives 0 and −inf."""
        lse = log_sum_exp(self.m, self.l)
        return (self.acc if self.form == "normalised" else divided(self.acc, self.l)), lse


@dataclass
class ScoreTile:
    """Where a tile of scores lies."""

    b: int
    h: int
    q: tuple[int, int]
    k: tuple[int, int]
    kind: TileClass = field(default=TileClass.FULL)


def _mask_tile(problem: Problem, hbm: Hbm, at: ScoreTile) -> Array:
    """Visible pairs of a PARTIAL tile, [M, N]; the mask's tensors are read for it."""
    for term in problem.program.terms():
        for kind, ints, tensors in term:
            for position, tensor in enumerate(tensors):
                part = _part(Literal(kind, ints, (tensor,)), position, at)
                hbm.traffic.read("mask", part.size * part.itemsize)
    shape = (problem.batch, problem.heads, at.q[1] - at.q[0], at.k[1] - at.k[0])
    tile = allowed(problem.program, problem.shape, at.q, at.k, np.arange)
    return np.asarray(np.broadcast_to(True if tile is None else tile, shape)[at.b, at.h])


def scores(problem: Problem, hbm: Hbm, q_tile: Array, k_tile: Array, at: ScoreTile, counts: Counts) -> Array:
    """softcap(scale·QKᵀ) + bias of one tile, [M, N], masked unless it is FULL."""
    s_tile = problem.scale * (q_tile @ k_tile.T)  # [M, N]
    counts.matmul(s_tile.shape, q_tile.shape[1])
    if problem.softcap:
        s_tile = problem.softcap * np.tanh(s_tile / problem.softcap)
    if problem.bias is not None:
        s_tile = s_tile + hbm.load("bias", _broadcast_index(problem.bias, at))
    if at.kind != TileClass.FULL:
        s_tile = np.where(_mask_tile(problem, hbm, at), s_tile, -np.inf)
    return np.asarray(s_tile)


def _part(literal: Literal, position: int, at: ScoreTile) -> Array:
    """The elements that a tile needs of a mask tensor, the one at that position of its literal."""
    kind, ints, (tensor,) = literal
    head = tensor[at.b if tensor.shape[0] > 1 else 0]
    if not kind.reads_data:
        return np.asarray(head)
    if kind.is_documents:
        return np.asarray(head[slice(*(at.q if position == 0 else at.k))])
    if kind.is_dense:
        return np.asarray(tensor[_broadcast_index(tensor.shape, at)])
    head, rows = head[literal.side(at.h)], slice(at.q[0] // ints[0], (at.q[1] - 1) // ints[0] + 1)
    if kind.is_selected:
        return np.asarray(head[rows])
    return np.asarray(head[rows, at.k[0] // ints[1] : (at.k[1] - 1) // ints[1] + 1])


def _broadcast_index(shape: tuple[int, ...], at: ScoreTile) -> tuple[int | slice, ...]:
    return (
        at.b if shape[0] > 1 else 0,
        at.h if shape[1] > 1 else 0,
        slice(*at.q) if shape[2] > 1 else slice(None),
        slice(*at.k) if shape[3] > 1 else slice(None),
    )
