"""The suites over caches: pages beside contiguous memory and beside who else reads them, and what each option of a call costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from tilewise.lab.bench.cases import Cache, Case

Shape = tuple[int, int, int, int]
"""Sequences, heads, key heads, tokens of a sequence."""

LARGEST = 30e9
"""Bytes of K and V of a cell at most."""
LARGE, LARGE_RATE = 256e6, 3.9e12
"""From so many bytes of K and V on, a call reads so many a second on an H200."""
FIRST_RATE = 0.82e12
"""Of `tw.attention` at 1×64/8×8192 on an H200, before there were caches: 1.3 times it is asked for."""
GPU: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "head_dim": 128, "mask": "causal"}
PEERS = ("cudnn-paged", "varlen_attn", "cache-cudnn")


def over(what: str, shape: Shape, page: int = 16, *, graph: bool = True, rows: int = 1, **more: Any) -> Case:
    """A call of one query for each sequence, in a CUDA graph, unless it says otherwise; its name has the page size. Keywords that
    a cache has are taken for it."""
    batch, heads, kv_heads, keys = shape
    own = {name: more.pop(name) for name in tuple(more) if name in Cache.__dataclass_fields__}
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seqlen": rows, "kv_seqlen": keys}
    name = f"{what}/{page} {batch}×{heads}/{kv_heads}×{keys}"
    return Case(name, **{**GPU, **sizes, **more}, cache=Cache(page=page, graph=graph, **own))


def kv_bytes(shape: Shape) -> int:
    batch, _, kv_heads, keys = shape
    return batch * kv_heads * keys * 128 * 2 * 2


def decode(shape: Shape, page: int) -> Case:
    """Beside own contiguous memory, and beside the best of who reads pages or contiguous rows."""
    rate = LARGE_RATE if kv_bytes(shape) >= LARGE else None
    promises: dict[str, Any] = {"against": PEERS, "floor": 0.98, "least": (("contiguous", 0.97),), "rate": rate}
    return over("decode", shape, page, group=f"decode/{page}", **promises)


CELLS = tuple(
    (batch, *heads, keys)
    for heads, batch, keys in product(((32, 8), (64, 8), (16, 1)), (1, 4, 16, 64, 256), (1024, 8192, 32768, 131072))
    if kv_bytes((batch, *heads, keys)) <= LARGEST
)
FULL: tuple[Shape, ...] = ((64, 32, 8, 8192), (16, 64, 8, 32768), (1, 32, 8, 131072))
"""Shapes that fill the machine."""
PLAIN: dict[str, Any] = {"against": ("plain",)}

CACHE_GPU = (
    *(decode(cell, page) for page in (16, 64) for cell in CELLS),
    over("mixed", (64, 32, 8, 32768), mixed=True, against=(*PEERS, "contiguous")),
    *(
        over(kind, shape, page, stored=stored, floor=1.7, **PLAIN)
        for kind, stored in (("int8", "int8"), ("fp8", "float8_e4m3fn"))
        for page in (16, 64)
        for shape in FULL
    ),
    over("shared", (64, 32, 8, 33024), shared=32768, plan=True, against=("plain", "unshared"), floor=10.0),
    *(over("append", shape, new=True, floor=1 / 1.1, **PLAIN) for shape in (*FULL, (1, 64, 8, 8192))),
    over("graph", (1, 64, 8, 8192), against=("as called", "cache-cudnn"), rate=1.3 * FIRST_RATE),
    over("graph", (1, 64, 8, 8192), 64, against=("as called", "cache-cudnn"), rate=1.3 * FIRST_RATE),
    *(over("invariant", shape, page, invariant=True, floor=0.9, **PLAIN) for page in (16, 64) for shape in FULL),
    over("invariant prefill", (4, 32, 8, 8192), rows=2048, graph=False, invariant=True, **PLAIN),
    over("prefill", (4, 32, 8, 8192), rows=2048, graph=False, against=("contiguous", "cudnn-paged", "varlen_attn")),
)
"""Floors for an H200. Bytes, ratios and rates of decoding are those of the device: a graph leaves the host out."""
CACHE_MEANS = {f"decode/{page}": 1.02 for page in (16, 64)}


def on_cpu(what: str, shape: Shape, dtype: str, **more: Any) -> Case:
    """Pages of 16, as users call them."""
    case = over(what, shape, graph=False, dtype=dtype, device="cpu", **more)
    return replace(case, name=f"{case.name.replace('/16 ', ' ')} {'fp32' if dtype == 'float32' else 'bf16'}")


HEADS = ((32, 8), (16, 8), (8, 8))
BOTH = ("float32", "bfloat16")
CACHE = (
    *(
        on_cpu(place, (batch, *heads, keys), dtype, in_order=place == "in order", against=("contiguous",), floor=0.95)
        for dtype, heads, (batch, keys), place in product(
            BOTH, HEADS, ((1, 4096), (4, 4096), (1, 16384), (4, 16384)), ("in order", "at random")
        )
    ),
    *(on_cpu("int8", (1, *heads, 16384), "bfloat16", stored="int8", floor=1.0, aim=1.6, **PLAIN) for heads in HEADS),
    *(on_cpu("invariant", (4, *heads, 4096), dtype, invariant=True, **PLAIN) for dtype in BOTH for heads in HEADS[:2]),
    on_cpu("append", (4, 32, 8, 4096), "bfloat16", new=True, **PLAIN),
)
"""Floors for any CPU; int8 is to be no slower than bfloat16 on a Neoverse N1, and 1.6 times as fast on a Xeon."""
