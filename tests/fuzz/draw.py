"""The generator: one integer is one case.

A case number is serial · 3 + profile. Cases of one family (some consecutive serials of a profile) share everything that a
kernel is compiled for: dtype, head dims, the constructors in the mask, which features there are. The rest (lengths, what the
mask is made with, numbers, strides, poison) is each case's own. So compiled backends spend their time on cases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.fuzz.case import Case, Expression
from tests.fuzz.layouts import KINDS

INF, NAN = float("inf"), float("nan")
EDGES = tuple(n + d for n in (4, 8, 16, 32, 64, 128, 256) for d in (-1, 0, 1))
FAR = (-90.0, -18.0, -25.0, -27.0, -1000.0, 80.0, -104.0, 1000.0)
FAR_OFFSET = 2**30 - 1
LEAVES = ("causal", "causal", "window", "window", "prefix", "padding", "documents", "blocks", "selected", "dense", "full")
INTERVALS = ("causal", "causal", "window", "window", "prefix", "padding")
BIASES = ("normal", "normal", "holes", "rows", "far", "lowest", "lowest rows", "huge rows")
SINKS = ("normal", "normal", "far", "none", "some", "huge", "infinite")
DIMS = (1, 2, 3, 5, 8, 8, 15, 16, 16, 17, 24, 31, 32, 32, 33, 40, 64, 64, 64, 80, 96, 128, 160, 256)


@dataclass(frozen=True)
class Profile:
    """What fits a kind of machine."""

    family: int  # cases that share a kernel
    longest: int
    elements: int  # of the scores of all heads and sequences
    dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    plain: float  # share of families without bias, sinks, dropout and their like: all that some backends serve
    odd: float = 0.2  # share of tensors that do not lie plainly
    threads: tuple[int, ...] = (1,)


PROFILES = {
    "cpu": Profile(
        family=24, longest=300, elements=30_000, dims=DIMS, plain=0.15, threads=(1,) * 9 + (2,),
        dtypes=("float32", "float32", "float32", "bfloat16", "float16", "float64"),
    ),
    "interpreter": Profile(
        family=3, longest=40, elements=1_500, dims=(3, 8, 16, 16, 24, 32), plain=0.1,
        dtypes=("float32", "bfloat16", "float16"),
    ),
    "gpu": Profile(
        family=30, longest=600, elements=250_000, dims=(8, 16, 40, 64, 64, 80, 128, 128, 256), plain=0.5, odd=0.1,
        dtypes=("float32", "bfloat16", "bfloat16", "float16"),
    ),
}  # fmt: skip
NAMES = tuple(PROFILES)
SERIALS = 1_000_000
"""Of one seed."""
FAMILIES = 256
"""Of one seed; then they come again, with other members."""


def number_of(profile: str, serial: int) -> int:
    return serial * len(NAMES) + NAMES.index(profile)


def draw(number: int) -> Case:
    """The case of that number."""
    serial, which = divmod(number, len(NAMES))
    profile = PROFILES[NAMES[which]]
    seed, own = divmod(serial, SERIALS)
    family = _family(Random(f"family {NAMES[which]} {seed} {own // profile.family % FAMILIES}"), NAMES[which])
    return _member(Random(f"case {number}"), family, profile, number)


def _chance(r: Random, p: float) -> bool:
    return r.random() < p


def _family(r: Random, name: str) -> Case:
    """A case whose lengths, mask arguments and numbers are still to come."""
    profile = PROFILES[name]
    dtype = r.choice(profile.dtypes)
    packed = _chance(r, 0.25)
    dim = r.choice(profile.dims)
    plain = _chance(r, profile.plain)
    case = Case(
        seed=0,
        lengths=((1, 1),),
        head_dim=dim,
        head_dim_v=dim if plain or _chance(r, 0.6) else r.choice(profile.dims),
        dtype=r.choice(("bfloat16", "float16")) if plain and name == "gpu" else dtype,
        packed=packed,
        mask=_skeleton(r, packed, plain, r.choice((0, 0, 1, 2, 2, 3))) if _chance(r, 0.85) else None,
        softcap=0.0 if plain and name != "gpu" else r.choice((0.0, 0.0, 0.0, 2.0, 30.0)),
        precision="default" if plain else r.choice(("default",) * 8 + ("tf32", "compensated", "double")),
        wanted=r.choice(("qkvbs",) * 7 + ("", "", "q", "k", "v", "qv", "kb", "bs")),
        lse=r.choice(("no", "yes", "grad", "grad")),
    )
    if plain:
        return case
    wide = r.choice(("float32", "float32", dtype, "float64" if dtype == "float64" else "float32"))
    if _chance(r, 0.35):
        case = replace(case, bias=("", "", wide))
    elif _chance(r, 0.15):
        case = replace(case, alibi=(r.choice((1, 2)), wide))
    if _chance(r, 0.25):
        case = replace(case, sinks=("", wide))
    return replace(case, dropout=(0.5, 0)) if _chance(r, 0.2) else case


def _skeleton(r: Random, packed: bool, plain: bool, depth: int) -> Expression:
    """Constructors and operators, without what the constructors are given beyond their kind."""
    if depth and _chance(r, 0.75):
        kind = r.choice(("and", "and", "or", "or", "not"))
        return (kind, *(_skeleton(r, packed, plain, depth - 1) for _ in range(1 if kind == "not" else 2)))
    name = r.choice(INTERVALS if plain else LEAVES)
    if packed and name == "dense":
        name = "blocks"
    if name in ("causal", "window"):
        return (name, r.choice(("bottom_right", "bottom_right", "top_left", "int", "each")))
    return (name, r.choice(("int", "each"))) if name == "prefix" else (name,)


def _filled(r: Random, skeleton: Expression, m: int, n: int) -> Expression:
    """The skeleton with arguments for lengths up to m and n."""
    kind, *given = skeleton
    if kind in ("and", "or", "not"):
        return (kind, *(_filled(r, x, m, n) for x in given))

    def width() -> int:
        return r.choice((0, 1, 2, 5, 12, 40, r.randint(0, max(m, n) + 3)))

    def each(draw: Any) -> tuple[int, ...]:
        return tuple(draw() for _ in range(3))

    if kind in ("causal", "window"):
        anchor = given[0]
        align = anchor if anchor in ("bottom_right", "top_left") else "bottom_right"

        def shift() -> int:
            if _chance(r, 0.02):
                return r.choice((FAR_OFFSET, -FAR_OFFSET))
            return r.choice((0, n - m, r.randint(-m - 2, n + 2), r.randint(-9, 9)))

        offset = {"int": shift, "each": lambda: each(shift)}.get(anchor, lambda: None)()
        if kind == "causal":
            return ("causal", align, offset)
        sides = (max(1, width()), None) if _chance(r, 0.4) else (width(), width())
        return ("window", *sides, align, offset)

    def count() -> int:
        return r.choice((0, n, r.randint(0, n), r.randint(0, n)))

    if kind == "prefix":
        return ("prefix", count() + r.choice((0, 0, 7)) if given[0] == "int" else each(count))
    if kind == "padding":
        return ("padding", each(count), each(lambda: r.randint(0, n)) if _chance(r, 0.4) else None)
    seed = r.randrange(2**31)
    if kind == "documents":
        form = r.choice(("sorted", "mixed")) + r.choice(("", "+b")) + r.choice(("", "+q"))
        return ("documents", seed, r.choice((1, 2, 3, 8)), form)
    if kind == "blocks":
        side = (1, 5, 8, 16, 16, 32, 64)
        return ("blocks", seed, r.choice(side), r.choice(side), r.choice(("", "h", "bh")))
    if kind == "selected":
        return ("selected", seed, r.choice((1, 5, 16, 32, 64)), r.choice((16, 17, 32, 64)), r.choice(("", "h", "bh", "k", "bk")))
    if kind == "dense":
        axes = "".join(axis for axis in "bhqk" if _chance(r, 0.6))
        return ("dense", seed, r.choice((0.02, 0.3, 0.7, 0.98)), axes)
    return (kind,)


def _length(r: Random, longest: int) -> int:
    kind = r.random()
    if kind < 0.03:
        return 0
    if kind < 0.13:
        return 1
    if kind < 0.45:
        return r.randint(1, min(40, longest))
    return r.choice([n for n in EDGES if n <= longest] if kind < 0.85 else range(1, longest + 1))


def _member(r: Random, case: Case, profile: Profile, number: int) -> Case:
    kv_heads, group = r.choice((1, 1, 2, 3)), r.choice((1, 1, 2, 4))
    batch = r.choice((1, 1, 2, 3))
    square = _chance(r, 0.4)
    room = profile.elements // (kv_heads * group * batch)
    pairs = []
    for _ in range(batch if case.packed else 1):
        m = _length(r, profile.longest)
        n = m if square else _length(r, profile.longest)
        while m * n > room:
            m, n = (m // 2, n // 2) if square else (m // 2, n) if m > n else (m, n // 2)
        pairs.append((m, n))
    lengths = tuple(pairs if case.packed else pairs * batch)
    if _chance(r, 0.005):
        lengths = ()
    m, n = max((p[0] for p in lengths), default=0), max((p[1] for p in lengths), default=0)
    strides = tuple(
        (name, r.choice(KINDS)) for name in ("q", "k", "v", "bias", "sinks", "dout", "dlse") if _chance(r, profile.odd)
    )
    half = case.dtype in ("float16", "bfloat16")
    case = replace(
        case,
        seed=number,
        lengths=lengths,
        kv_heads=kv_heads,
        group=group,
        layout="bshd" if not case.packed and _chance(r, 0.25) else "bhsd",
        mask=None if case.mask is None else _filled(r, case.mask, m, n),
        softcap=r.choice((case.softcap, 3.0, 50.0)) if case.softcap else 0.0,
        scale=r.choice((None,) * 6 + (0.5, -0.3, 0.0, 2, 0.01)),
        deterministic=r.choice((None, None, True, False)),
        strides=strides,
        poison=r.choice((NAN, INF, -INF)) if _chance(r, 0.5) else None,
        fresh=_chance(r, 0.3),
        quiet=_chance(r, 0.7),
        threads=r.choice(profile.threads),
        small_tiles=_chance(r, 0.5),
        shift=r.choice(FAR) if _chance(r, 0.25) else 0.0,
        sizes=(
            r.choice((1.0,) * 6 + (0.0, 0.1, 30.0, 30.0 if half else 1e4)),
            r.choice((1.0,) * 8 + (0.1, 5.0)),
            r.choice((1.0,) * 6 + (10.0, 1e-3, 1e-3) if case.dtype == "float16" else (1.0,) * 6 + (10.0, 1e-20, 1e-30)),
            r.choice((1.0,) * 6 + (10.0, 1e-3)),
        ),
    )
    if case.bias is not None:
        kind = r.choice(BIASES)
        kind = f"far {r.choice(FAR)}" if kind == "far" else kind
        case = replace(case, bias=(kind, "".join(axis for axis in "bhqk" if _chance(r, 0.65)), case.bias[2]))
    if case.sinks is not None:
        kind = r.choice(SINKS)
        kind = f"far {r.choice(FAR)}" if kind == "far" else kind
        kind = "far 80.0" if kind == "huge" and case.sinks[1] == "float16" else kind
        case = replace(case, sinks=(kind, case.sinks[1]))
    if case.dropout is not None:
        case = replace(case, dropout=(r.choice((0.001, 0.1, 0.5, 0.9)), r.randrange(-(2**63), 2**63)))
    return case
