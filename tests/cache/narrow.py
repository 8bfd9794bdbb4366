"""Pages of int8 and e4m3 that kernels read two columns at a time, and such as have to be read otherwise; for 16-bit queries.

    TRITON_INTERPRET=1 python -m tests.cache.narrow 0 2       every second of the cases, from the first, in Triton's interpreter
    TRITON_INTERPRET=1 python -m tests.cache.narrow latent    the cases of that name
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

import tilewise as tw
from tests.cache.caches import Built, build, worst
from tests.cache.program import run_checks
from tests.cache.test_cached import attend
from tilewise.backends.triton import paged

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
ROWS = {"rows": [1, 3, 0, 1, 2], "lengths": [33, 20, 9, 1, 70]}
LATENT = {"latent": True, "dims": (96, 64), "heads": (8, 1)}
FORMS: dict[str, dict[str, Any]] = {
    "decode": {"rows": [1] * 4, "lengths": [1, 70, 33, 20]},
    "scale of a tensor": {"scaled": "tensor"},
    "scale of a head": {"scaled": "head"},
    "scale of a token": {"scaled": "token"},
    "fp16, scale of a head": {"scaled": "head", "dtype": FP16},
    "fp16, scale of a token": {"scaled": "token", "dtype": FP16},
    "d128": {"dims": (128, 128), "page": 64},
    "d80": {"dims": (80, 80), "scaled": "head"},
    "other value dims": {"dims": (24, 40)},
    "one head a key head": {"heads": (2, 2), "page": 1},
    "eight heads a key head": {"heads": (8, 1), "scaled": "head"},
    "pages of three": {"page": 3},
    "heads before places": {"order": "hnd", "page": 64},
    "csr": {"csr": True},
    "latent": LATENT,
    "latent, scale of a head, fp16": {**LATENT, "scaled": "head", "dtype": FP16},
    "latent in two": {**LATENT, "dims": (160, 128)},
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "columns apart": {"order": "columns"},
    "fp32": {"dtype": torch.float32},
    "odd dims": {"dims": (33, 47)},
    "few columns": {"dims": (16, 16)},
}
"""Where columns are read one at a time."""
MANY_ROWS = {"rows": [40, 30], "lengths": [40, 100], "heads": (8, 1)}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"mask": tw.causal() & tw.window(9)},
    "gaps": {"mask": tw.causal() & (tw.prefix(3) | tw.window(9))},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": SINKS},
    "alibi": {"bias": tw.alibi(torch.tensor([0.5, 0.25, 0.1, 0.0]))},
    "in parts": {"splits": 3, "sinks": SINKS},
    "invariant": {"invariant": True},
    "bias": {"bias": torch.linspace(-1, 1, 4 * 80).view(1, 4, 1, 80)},
}


def cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, cache, options."""
    for kind, stored in KINDS.items():
        base = {**ROWS, "stored": stored, "dtype": BF16, "dims": (64, 64)}
        for name, form in {**FORMS, **OTHERWISE, "many rows": MANY_ROWS}.items():
            yield f"{kind}, {name}", {**base, **form}, {}
        for name, options in OPTIONS.items():
            yield f"{kind}, {name}", {**base, "scaled": "head" if name == "gaps" else "token"}, options


CASES = {name: (form, options) for name, form, options in cases()}


def conform(name: str, device: str = "cpu") -> None:
    """Within the bounds of the oracle, by the way of reading that is meant."""
    form, options = CASES[name]
    built = build(**form, device=device)
    given = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    if "alibi" in name:
        given["bias"] = tw.alibi(options["bias"].slopes.to(device))
    with mock.patch.object(paged, "in_pairs", side_effect=paged.in_pairs) as asked:
        out, lse = attend(built, "triton", **given)
    ways = {bool(paged.in_pairs(*call.args)) for call in asked.call_args_list}
    kind = name.partition(", ")[2]
    if kind in (*OTHERWISE, "bias"):
        assert ways <= {False}, ways
    elif device == "cpu" or kind == "decode":  # rows of tiles follow from the device
        assert ways <= {True}, ways
    assert out.dtype == built.q.dtype and not out.isnan().any(), "NaN"
    plain = {key: x for key, x in options.items() if key not in ("splits", "invariant")}
    error = worst(built, out, lse, **plain)
    assert error <= 1.0, f"{error} of the bound"


def all_numbers(stored: torch.dtype, dtype: torch.dtype, device: str = "cpu") -> None:
    """A sequence of one key gives its value, so every byte the number that it stands for; NaN only where there is one."""
    codes = torch.arange(256, dtype=torch.uint8)
    v = torch.stack([codes, codes.flip(0)]).view(stored)[:, None, None]  # two pages of one token
    k = torch.zeros_like(v.view(torch.uint8))[..., :32].contiguous().view(stored)
    one = torch.ones((), device=device)
    table, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0], [1]], [1, 1]))
    cache = tw.KVCache.paged(k.to(device), v.to(device), table, lengths, k_scale=one, v_scale=one)
    q = torch.ones((2, 1, 1, 32), dtype=dtype, device=device)
    out = tw.attention_cached(q, cache, backend="triton").cpu()  # type: ignore[union-attr]
    want = v.to(dtype)
    assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.nan_to_num(), want.nan_to_num())


def wide_queries(device: str = "cpu") -> None:
    """Rows of bf16 far beyond the numbers of fp16, or far below, beside others and a row of zeros."""
    built = build(**CASES["e4m3, scale of a head"][0], device=device)
    for exponent in (40, -40):
        q = built.q * 2.0**exponent
        q[1], q[3] = 0.0, q[3] * 2.0**-9
        wide = Built(**{**vars(built), "q": q})
        options = {"scale": 2.0**-exponent / 8}
        out, lse = attend(wide, "triton", **options)
        assert not out.isnan().any() and worst(wide, out, lse, **options) <= 1.0


def light_weights(device: str = "cpu") -> None:
    """Many keys that weigh too little each for fp16, but not together."""
    n, light = 2000, -26 * math.log(2)  # of one key that sees value 0
    k = torch.zeros((1, n, 1, 32))
    k[0, 1:, 0, 0] = light / 8
    v = torch.full((1, n, 1, 32), 256.0)
    v[0, 0] = 0.0
    one = torch.ones((), device=device)
    step = k[0, 1, 0, 0].to(torch.float8_e4m3fn).double().item()  # as it is stored
    table, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0]], [n]))
    pages = [x.to(torch.float8_e4m3fn).to(device) for x in (k, v)]
    cache = tw.KVCache.paged(*pages, table, lengths, k_scale=one, v_scale=one)
    q = torch.zeros((1, 1, 1, 32), dtype=BF16, device=device)
    q[..., 0] = 8.0
    weight = (n - 1) * math.exp(8 * step)
    want = 256 * weight / (1 + weight)
    out = tw.attention_cached(q, cache, scale=1.0, backend="triton").cpu()  # type: ignore[union-attr]
    assert bool(((out.double() - want).abs() <= 2.0**-7 * want).all())


def checks(device: str = "cpu") -> dict[str, Any]:
    found: dict[str, Any] = {name: lambda name=name: conform(name, device) for name in CASES}
    for kind, stored in KINDS.items():
        for dtype in (BF16, FP16):
            name = f"{kind}, all numbers, {str(dtype)[6:]}"
            found[name] = lambda stored=stored, dtype=dtype: all_numbers(stored, dtype, device)
    return found | {"wide queries": lambda: wide_queries(device), "light weights": lambda: light_weights(device)}


if __name__ == "__main__":
    every = checks()
    sys.exit(run_checks(every, [*every], sys.argv[1:]))
