"""The suites: cases by name, with floors where a promise was made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tilewise.errors import ArgumentError
from tilewise.lab.bench.cache_suites import CACHE, CACHE_GPU, CACHE_MEANS
from tilewise.lab.bench.cases import Case, long_tailed


@dataclass(frozen=True)
class Suite:
    """Cases, and the geometric mean of the ratios that each group of them must reach."""

    cases: tuple[Case, ...]
    means: dict[str, float] = field(default_factory=dict)


QUICK = (
    Case("full", seqlen=1024),
    Case("causal", seqlen=2048, mask="causal"),
    Case("window", seqlen=4096, heads=4, mask="causal & window(256)"),
    Case("gqa", heads=16, kv_heads=4, seqlen=512, head_dim=128, mask="causal"),
    Case("cross", seqlen=256, kv_seqlen=4096),
    Case("bshd", seqlen=1024, layout="bshd"),
    Case("training", seqlen=512, mask="causal", passes="training"),
    Case("small", batch=4, heads=12, seqlen=128),
)

SMOKE = (
    Case("causal", heads=2, seqlen=128, head_dim=32, mask="causal"),
    Case("training", heads=2, seqlen=64, head_dim=32, mask="causal & window(16)", passes="training"),
)

GROUPED: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
DECODE: dict[str, Any] = {"batch": 8, "seqlen": 1, "kv_seqlen": 4096, **GROUPED}
UPCAST = ("sdpa-upcast",)

CPU: tuple[Case, ...] = (
    Case("full 1024", seqlen=1024, floor=1.18, aim=1.28),
    Case("full 4096", seqlen=4096, floor=1.18, aim=1.28),
    Case("full d128", seqlen=4096, head_dim=128, floor=1.10, aim=1.15),
    Case("causal 1024", seqlen=1024, mask="causal", floor=1.85, aim=2.1),
    Case("causal 2048", seqlen=2048, mask="causal", floor=1.5, aim=1.6),
    Case("causal 4096", seqlen=4096, mask="causal", floor=1.35, aim=1.45),
    Case("causal d128", seqlen=4096, head_dim=128, mask="causal", floor=1.25, aim=1.3),
    Case("gqa causal", seqlen=1024, mask="causal", floor=1.6, aim=1.75, **GROUPED),
    Case("window 8192", heads=2, seqlen=8192, mask="window(256)", floor=15, aim=25),
    Case("cross", seqlen=256, kv_seqlen=4096, floor=1.25, aim=1.3),
    Case("bshd", seqlen=1024, layout="bshd", floor=1.15, aim=1.2),
    Case("small", batch=4, heads=12, seqlen=128, floor=1.1, aim=1.2),
    Case("tiny", heads=1, seqlen=16, floor=0.6, aim=0.9),
    Case("float16", seqlen=1024, dtype="float16", against=UPCAST, floor=1.2, aim=1.3),
    Case("bfloat16", seqlen=1024, dtype="bfloat16", against=UPCAST, floor=1.2, aim=1.3),
    Case("decode", floor=2.0, aim=3.5, **DECODE),
    Case("decode bfloat16", dtype="bfloat16", floor=40, aim=100, **DECODE),
    Case("decode one head", heads=1, seqlen=1, kv_seqlen=65536, threads=2, floor=1.6, aim=1.9),
    Case("training full", seqlen=1024, passes="training", floor=1.15, aim=1.25),
    Case("training causal 1024", seqlen=1024, mask="causal", passes="training", floor=1.6, aim=1.8),
    Case("training causal 4096", seqlen=4096, mask="causal", passes="training", floor=1.3, aim=1.4),
    Case("training d128", seqlen=2048, head_dim=128, passes="training", floor=1.0, aim=1.1),
    Case("training d128 causal", seqlen=2048, head_dim=128, mask="causal", passes="training", floor=1.12, aim=1.25),
)
"""Floors for a 64-bit Arm with NEON and two threads; errors are no larger than SDPA's."""
CPU = tuple(replace(case, accurate=True) for case in CPU)

AVX512_FLOORS = {
    **{case.name: (1.15, 1.35) for case in CPU if case.name.startswith("full")},
    "causal 1024": (1.5, 1.75),
    "causal 4096": (1.2, 1.4),
    **{case.name: (1.0, 1.2) for case in CPU if case.name.startswith("training")},
}
HALVES = tuple(
    replace(case, name=f"{case.name} {dtype}", dtype=dtype)
    for case in CPU
    for dtype in ("float16", "bfloat16")
    if case.name in ("full d128", "causal 4096", "gqa causal", "bshd", "small", "tiny", "training full", "training d128 causal")
)
"""The other dtypes, each beside SDPA in the same dtype: where torch has matrix instructions for it, its kernel is called."""


def on_avx512(threads: int) -> tuple[Case, ...]:
    """All cases on a Xeon: with two threads some have floors of their own; with more nothing may be slower than SDPA, a 16-bit
    dtype hardly, and a tiny call no more than elsewhere."""
    cases = []
    for case in (*CPU, *HALVES):
        least = 0.95 if case.dtype != "float32" else 1.0 if threads > 2 else None
        least = 0.6 if case.name.startswith("tiny") else least
        floor, aim = (AVX512_FLOORS if threads == 2 else {}).get(case.name, (least, None))
        cases.append(replace(case, threads=threads, against=("sdpa",), floor=floor, aim=aim))
    return tuple(cases)


TOKENS, HIDDEN = 16384, 2048


def gpu_cell(passes: str, mask: str, dim: int, length: int, **more: Any) -> Case:
    """Constant work: as many sequences as 16k tokens make, as many heads as fill a hidden size of 2048."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "group": passes, "backend": "triton", **more}
    sizes = {"batch": TOKENS // length, "heads": HIDDEN // dim, "seqlen": length, "head_dim": dim}
    return Case(f"{settings['group']} {mask} d{dim} {length}", **{**sizes, **settings}, mask=mask, passes=passes, device="cuda")


def gpu_grid(passes: str, lengths: tuple[int, ...], dims: tuple[int, ...] = (64, 128), **more: Any) -> tuple[Case, ...]:
    return tuple(
        gpu_cell(passes, mask, dim, length, **more) for mask in ("full", "causal") for dim in dims for length in lengths
    )


def gpu_decode(batch: int, heads: int, kv_heads: int, keys: int, floor: float | None = None) -> Case:
    """One query for each sequence: how fast K and V are read, beside cuDNN."""
    more: dict[str, Any] = {"kv_heads": kv_heads, "kv_seqlen": keys, "against": ("sdpa-cudnn",), "floor": floor, "group": ""}
    case = gpu_cell("forward", "full", 128, 1, batch=batch, heads=heads, **more)
    return replace(case, name=f"decode {batch}×{heads}/{kv_heads}×{keys}")


FP32: dict[str, Any] = {"lengths": (2048, 8192), "dtype": "float32", "against": ("sdpa-efficient",), "floor": 1.5}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
GPU = (
    *gpu_grid("forward", LENGTHS, against=("sdpa-flash",), floor=1.0),
    *gpu_grid("backward", LENGTHS, against=("sdpa-flash",)),
    *gpu_grid("forward", group="float32 forward", **FP32),
    *gpu_grid("backward", group="float32 backward", **FP32),
    gpu_decode(8, 32, 8, 16384, 0.9),
    gpu_decode(1, 32, 8, 131072, 0.9),
    gpu_decode(1, 64, 8, 8192, 1.0),
    gpu_decode(64, 32, 8, 4096),
    gpu_decode(8, 16, 1, 16384),
)
"""The portable kernels, which Hopper's own come before in the automatic choice."""
GPU_MEANS = {"forward": 1.30, "backward": 1.0, "float32 forward": 1.5, "float32 backward": 1.5}


def hopper(passes: str) -> tuple[Case, ...]:
    """Hopper's own kernels beside FlashAttention-4 and cuDNN."""
    more: dict[str, Any] = {"backend": "hopper", "against": ("fa4", "sdpa-cudnn")}
    window = gpu_cell(passes, "causal & window(4096)", 128, 16384, **more)
    return (
        *gpu_grid(passes, (512, 2048, 8192, 16384), (64, 128, 256), **more),
        replace(gpu_cell(passes, "causal", 128, 16384, **more, heads=32, kv_heads=8), name=f"{passes} gqa 32/8 d128 16384"),
        replace(window, name=f"{passes} window d128 16384"),
    )


def features(passes: str, **sizes: Any) -> tuple[Case, ...]:
    """What a call may ask for beyond q, k, v and causal, each alone. Peers without it are left out, with the reason."""
    shared: dict[str, Any] = {"mask": "causal", "passes": passes, "against": ("sdpa", "flex"), **sizes}

    def base(feature: str, **more: Any) -> Case:
        return Case(f"{passes} {feature}", **{**shared, **more})

    heads, length = sizes["heads"], sizes["seqlen"]
    thirds = (length // 2, length // 3, length - length // 2 - length // 3)
    return (
        base("sinks", sinks=True),
        base("ALiBi", alibi=True),
        base("bias", bias=(1, heads, length, length)),
        base("softcap", softcap=30.0),
        base("dropout", dropout_p=0.1),
        base("documents", data="documents"),
        base("packed", lengths=thirds),
        base("window", mask=f"causal & window({length // 8})"),
        base("gqa", kv_heads=heads // 4),
        *((base("decode", seqlen=1, kv_seqlen=8 * length, kv_heads=heads // 4),) if passes == "forward" else ()),
    )


def hopper_features(passes: str) -> tuple[Case, ...]:
    """What a model asks for beyond q, k, v and a band, on Hopper's kernels: beside who has it, or beside the plain call."""
    shared: dict[str, Any] = {"heads": 16, "seqlen": 8192, "head_dim": 128, "batch": 2, "mask": "causal"}
    shared |= {"passes": passes, "dtype": "bfloat16", "device": "cuda", "layout": "bshd"}
    backward = passes == "backward"
    oss: dict[str, Any] = {"batch": 1, "heads": 64, "kv_heads": 8, "head_dim": 64, "sinks": True, "against": ("fa4",)}
    biased: dict[str, Any] = {"batch": 1, "seqlen": 4096, "head_dim": 64, "mask": "full", "bias": (1, 16, 4096, 4096)}
    biased |= {"layout": "bhsd"}
    dropped: dict[str, Any] = {"batch": 4, "seqlen": 4096, "dropout_p": 0.1, "against": ("sdpa-flash", "sdpa-cudnn")}
    odd: dict[str, Any] = {"against": ("fa4",), "floor": 0.97, "aim": 1.03}
    gemma: dict[str, Any] = {"head_dim": 256, "kv_heads": 8, "softcap": 50.0, "against": ("fa4",), "aim": 1.05}
    learned: dict[str, Any] = {"bias_gradient": backward, "against": ("sdpa-efficient",), "floor": 1.1 if backward else 1.3}

    def case(name: str, **more: Any) -> Case:
        return Case(f"{passes} {name}", **{**shared, **more})

    return (
        case("sinks, window 128", **{**oss, "mask": "causal & window(128)", "floor": 0.97, "aim": 1.05}),
        case("sinks", **oss, floor=0.97, aim=1.05),
        case("softcap d256", **gemma, floor=0.97 if backward else 0.98),
        case("ALiBi", alibi=True, against=("plain",), floor=0.85, aim=0.92),
        case("bias", **biased, against=("sdpa-cudnn",), floor=0.95, aim=1.1),
        case("bias with its gradient", **biased, **learned),
        case("dropout d64", **dropped, head_dim=64, floor=0.95, aim=1.1),
        case("dropout d128", **dropped, floor=0.95, aim=1.1),
        case("192/128", head_dim=192, head_dim_v=128, **odd),
        *(case(f"d{dim}", head_dim=dim, **odd) for dim in (96, 80, 32)),
    )


LONG: dict[str, Any] = {"heads": 16, "seqlen": 16384, "head_dim": 128, "dtype": "bfloat16", "device": "cuda", "layout": "bshd"}
SPARSE: dict[str, Any] = {**LONG, "batch": 2, "seqlen": 8192}


def masks_on_gpu(passes: str) -> tuple[Case, ...]:
    """Masks that are walked tile by tile, beside FlexAttention and FlashAttention-4's packed call. Floors are
    of the one that a case names."""
    backward = passes == "backward"
    packed: dict[str, Any] = {"against": ("fa4-packed",), "mask": "causal"}
    flex: dict[str, Any] = {"against": ("flex",), "floor": 1.2 if backward else 1.3}
    documents: dict[str, Any] = {"data": "packing", "floor": 0.95, "aim": 1.05, **packed}
    varlen: dict[str, Any] = {"floor": 0.97, "aim": 1.05, **packed}
    portable: dict[str, Any] = {"backend": "triton", "against": ("flex",), "floor": 1.0}

    def case(name: str, sizes: dict[str, Any], **more: Any) -> Case:
        return Case(f"{passes} {name}", passes=passes, **{**sizes, **more})

    return (
        case("documents d128", LONG, **documents),
        case("documents d64", LONG, **{**documents, "head_dim": 64}),
        case("documents d128, of flex", LONG, data="packing", mask="causal", **{**flex, "floor": 1.3 if backward else 1.5}),
        case("packed d128", LONG, lengths=long_tailed(16384), **varlen),
        case("packed d64", LONG, lengths=long_tailed(16384), **{**varlen, "head_dim": 64}),
        case("packed d256", LONG, lengths=long_tailed(16384), **{**varlen, "head_dim": 256, "heads": 8}),
        case("packed 32/8", LONG, lengths=long_tailed(16384), **{**varlen, "heads": 32, "kv_heads": 8}),
        case("packed, equal lengths", LONG, lengths=(1024,) * 16, **varlen),
        case("packed, one long", LONG, lengths=(16384, *(32,) * 500), **varlen),
        case("quarter of blocks", SPARSE, data="quarter", **flex),
        case("selected 16 of 128", SPARSE, data="selected", **{**flex, "seqlen": 16384, "batch": 1}),
        case("documents & window", LONG, data="packing", mask="causal & window(1024)", **flex),
        case("documents & prefix-lm", LONG, data="packing", mask="causal | prefix(64)", **flex),
        case("first keys and window", LONG, mask="causal & (prefix(4) | window(1024))", **flex),
        case("dense, half empty", SPARSE, data="half dense", **{**flex, "floor": 1.1 if backward else 1.2}),
        case("portable documents", LONG, data="packing", mask="causal", **portable),
        case("portable quarter of blocks", SPARSE, data="quarter", **portable),
    )


ON_CPU: dict[str, Any] = {"heads": 8, "seqlen": 1024}
ON_GPU: dict[str, Any] = {"heads": 16, "seqlen": 4096, "head_dim": 128, "dtype": "bfloat16", "device": "cuda"}

SUITES = {
    "quick": Suite(QUICK),
    "smoke": Suite(SMOKE),
    "cpu": Suite(CPU),
    "cpu-avx512": Suite(on_avx512(2)),
    "cpu-avx512-16": Suite(on_avx512(16)),
    "gpu": Suite(GPU, means=GPU_MEANS),
    "hopper": Suite(hopper("forward")),
    "hopper-backward": Suite(hopper("backward")),
    "hopper-features": Suite((*hopper_features("forward"), *hopper_features("backward"))),
    "features": Suite((*features("forward", **ON_CPU), *features("training", **ON_CPU))),
    "features-gpu": Suite((*features("forward", **ON_GPU), *features("backward", **ON_GPU))),
    "masks-gpu": Suite((*masks_on_gpu("forward"), *masks_on_gpu("backward"))),
    "cache": Suite(CACHE),
    "cache-gpu": Suite(CACHE_GPU, means=CACHE_MEANS),
}


def suite(name: str) -> Suite:
    if name not in SUITES:
        raise ArgumentError(f"suite: got {name!r}, need one of {', '.join(SUITES)}")
    return SUITES[name]
