"""What happens to a score between the product and the softmax, and dropout after it; one key of a strip at a time.

Scores leave here in the kernel's unit, `Kernel.score_unit` times log 2: kernels exponentiate with 2**x.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewise.backends.cpu.elementary import LOG2E, philox, tanh
from tilewise.backends.cpu.ir import I32, I64, Emit, Value
from tilewise.backends.cpu.masking import Place, gather
from tilewise.backends.cpu.pack import fetch
from tilewise.backends.cpu.spec import Kernel, Register


class Modifier:
    """softcap -> + bias -> + alibi for the rows q0, q0 + 1, … of one head."""

    def __init__(self, e: Emit, kernel: Kernel, place: Place, q0: Value) -> None:
        self.e, self.kernel, self.place, self.q0 = e, kernel, place, q0
        args, tile = place.args, kernel.tile
        self.unit = LOG2E / kernel.score_unit
        self.cap = e.splat(args.num("cap_factor"))
        if kernel.bias:
            base = e.plus(e.times(place.batch, args.word("bias_b")), e.times(place.head, args.word("bias_h")))
            last, step = e.minus(place.Sq, 1), args.word("bias_s")
            self.rows = [e.plus(base, e.times(e.least(e.plus(q0, r), last), step)) for r in range(tile.rows)]
        if kernel.alibi:
            slope = e.get(args.ptr("alibi"), e.plus(e.times(place.batch, args.word("alibi_b")), place.head))
            self.slope = e.splat(e.fmul(slope, e.num(-self.unit)))
            # row r stands at key q0 + r + Sk - Sq
            start = e.splat(e.sitofp(e.plus(q0, e.minus(place.Sk, place.Sq)), e.real.type))
            lanes = [e.iconst(range(i * e.lanes, (i + 1) * e.lanes)) for i in range(tile.vectors)]
            self.stands = [e.fadd(start, e.sitofp(r, e.vtype())) for r in lanes]

    def apply(self, s: list[Value], k: Value) -> tuple[list[Value], list[Value] | None, list[Value] | None]:
        """Scores of key k changed; which lanes the bias leaves visible (None: all); tanh of the raw score (None without cap)."""
        e, kernel = self.e, self.kernel
        tanhs = [tanh(e, x) for x in s] if kernel.softcap else None
        if tanhs:
            s = [e.fmul(x, self.cap) for x in tanhs]
        visible = None
        if kernel.bias:
            args = self.place.args
            k_in = e.least(k, e.minus(self.place.Sk, 1))
            column = e.times(k_in, args.word("bias_d"))
            pointer = args.ptr("bias")
            cells = [fetch(e, pointer, e.plus(row, column), kernel.bias) for row in self.rows]
            bias = gather(e, kernel.tile, cells)
            visible = [e.fcmp_unordered("!=", b, e.const(float("-inf"))) for b in bias]
            s = [e.mad(b, e.const(self.unit), x) for b, x in zip(bias, s, strict=True)]
        if kernel.alibi:
            key = e.splat(e.sitofp(k, e.real.type))
            for i, stand in enumerate(self.stands):
                gap = e.fsub(stand, key)
                gap = e.intrinsic(e._named("fabs", gap.type), gap.type, [gap])
                s[i] = e.mad(gap, self.slope, s[i])
        return s, visible, tanhs


def drop(
    e: Emit,
    tile: Register,
    place: Place,
    q0: Value,
    n0: Value,
    keys: tuple[Value, Value],
    visit: Callable[[Value, int, Value], None],
) -> None:
    """For each key j of [j0, j1), counted from n0, and vector i of the strip: `visit(j, i, kept)`.

    One Philox block serves four adjacent keys, so groups are aligned in the sequence, not in the tile.
    """
    args, (j0, j1) = place.args, keys
    seed = args.word("seed")
    key = (e.trunc(seed, I32), e.trunc(e.lshr(seed, I64(32)), I32))
    threshold = e.splat(e.trunc(args.word("threshold"), I32))
    head, batch = (e.splat(e.trunc(x, I32)) for x in (place.head, place.batch))
    first = e.splat(e.trunc(q0, I32))
    rows = [e.add(first, e.iconst(range(i * e.lanes, (i + 1) * e.lanes), I32)) for i in range(tile.vectors)]
    group0, group1 = e.over(e.plus(n0, j0), 4), e.over(e.plus(n0, j1, 3), 4)
    with e.loop(group0, group1) as group:
        low = e.splat(e.trunc(group.index, I32))
        words = [philox(e, [low, row, head, batch], key) for row in rows]
        for w in range(4):
            j = e.minus(e.plus(e.times(group.index, 4), w), n0)
            inside = e.and_(e.icmp_signed(">=", j, j0), e.icmp_signed("<", j, j1))
            with e.if_then(inside):
                for i in range(tile.vectors):
                    visit(j, i, e.icmp_unsigned(">=", words[i][w], threshold))
