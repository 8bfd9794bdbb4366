"""Random problems, tiles and masks, small enough to run literally."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

import tilewise.masks as masks
from tilewise.masks import Mask
from tilewise.model import TilePlan
from tilewise.problem import Problem

LENGTHS = st.integers(1, 23)


@st.composite
def mask_values(draw: st.DrawFn, batch: int, heads: int, m: int, n: int) -> Mask:
    """One mask, or two combined."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))

    def one() -> Mask:
        kind = draw(
            st.sampled_from(["full", "causal", "top_left", "window", "prefix", "padding", "docs", "blocks", "dense"])
        )
        if kind == "causal":
            return masks.causal()
        if kind == "top_left":
            return masks.causal(align="top_left")
        if kind == "window":
            return masks.window(draw(st.integers(1, 9)))
        if kind == "prefix":
            return masks.prefix(draw(st.integers(0, 9)))
        if kind == "padding":
            return masks.key_padding(rng.integers(0, n + 1, batch).astype(np.int32))
        if kind == "docs":
            q_ids = np.sort(rng.integers(0, 3, (batch, m)), axis=1).astype(np.int32)
            k_ids = np.sort(rng.integers(0, 3, (batch, n)), axis=1).astype(np.int32)
            return masks.documents(k_ids, q_ids=q_ids)
        if kind == "blocks":
            size = draw(st.integers(1, 5))
            shape = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), -(-m // size), -(-n // size))
            return masks.blocks(rng.random(shape) < 0.5, size)
        if kind == "dense":
            shape = tuple(draw(st.sampled_from([1, full])) for full in (batch, heads, m, n))
            return masks.dense(rng.random(shape) < 0.6)
        return masks.full()

    first = one()
    joined = draw(st.sampled_from(["", "&", "|", "~"]))
    if joined == "&":
        return first & one()
    if joined == "|":
        return first | one()
    return ~first if joined == "~" else first


@st.composite
def problems(
    draw: st.DrawFn, gradient: bool = False, dtypes: tuple[str, ...] = ("float16", "float32", "float64")
) -> Problem:
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    m, n = draw(LENGTHS), draw(LENGTHS)
    heads = kv_heads * group
    features = {}
    if not gradient:
        features["softcap"] = draw(st.sampled_from([0.0, 0.0, 5.0]))
        if draw(st.booleans()):
            features["bias"] = tuple(draw(st.sampled_from([1, full])) for full in (batch, heads, m, n))
    return Problem.of(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen=m,
        kv_seqlen=n,
        head_dim=draw(st.integers(1, 6)),
        head_dim_v=draw(st.integers(1, 6)),
        dtype=draw(st.sampled_from(dtypes)),
        mask=draw(mask_values(batch, heads, m, n)),
        **features,
    )


@st.composite
def tiles(draw: st.DrawFn, pass_: str = "forward") -> TilePlan:
    decode = pass_ == "decode"
    return TilePlan(
        draw(st.integers(1, 9)),
        draw(st.integers(1, 9)),
        stages=draw(st.integers(1, 3)),
        splits=draw(st.integers(1, 4)) if decode else 1,
        pack_gqa=draw(st.booleans()) if decode else False,
        pass_=pass_,
    )
