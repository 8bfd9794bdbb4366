"""What the Hopper measurements run on: shapes to check, cells to time, and how a shape becomes a Problem with its Inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

TOKENS, HIDDEN = 16384, 2048


class Shape(NamedTuple):
    """One call; lengths chosen around the edges of tiles. `mask` is an expression over tilewise's masks."""

    d: int = 128
    mask: str = "None"
    sq: int = 300
    sk: int | None = None
    b: int = 2
    h: int = 3
    hk: int | None = None
    dv: int | None = None
    dtype: str = "bfloat16"
    softcap: float = 0.0
    scale: float | None = None
    layout: str = "bhsd"
    poison: tuple[int, int] | None = None  # keys [first, last) that no query sees hold NaN
    gain: float = 1.0
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # packed: of queries and keys; then sq, sk, b say nothing


PAD = "tw.key_padding(torch.tensor([{}], device=device))"
CAUSAL, WINDOW = "tw.causal()", "tw.causal() & tw.window(100)"
EDGES = ((1, 1), (64, 64), (65, 63), (128, 128), (129, 127), (192, 256), (1, 500), (500, 1), (257, 1000), (1000, 257))


def groups() -> dict[str, list[Shape]]:
    """Checks by the process they run in: one for each kind of kernel, so that one that hangs stops no other."""
    result: dict[str, list[Shape]] = {}
    for d in (64, 128, 256):
        large = [Shape(d, sq=2048, b=1, h=8), Shape(d, sq=4100, sk=4000, b=1, h=2), Shape(d, sq=520, b=8, h=40)]
        result[f"d{d} full"] = [Shape(d, sq=q, sk=k) for q, k in EDGES] + large
        result[f"d{d} causal"] = [shape._replace(mask=CAUSAL) for shape in result[f"d{d} full"]]
        result[f"d{d} window"] = [Shape(d, m, q, k) for q, k in EDGES[3:] for m in (WINDOW, "tw.window(70, 20)")]
        result[f"d{d} window"] += [Shape(d, "tw.causal() & tw.window(1024)", 4096, b=1, h=2)]
        result[f"d{d} padding"] = [
            Shape(d, PAD.format("300, 130")), Shape(d, PAD.format("0, 1")), Shape(d, f"{CAUSAL} & " + PAD.format("299, 77")),
            Shape(d, PAD.format("130, 130"), sk=500, poison=(130, 500)),
            Shape(d, f"{CAUSAL} & " + PAD.format("250, 250"), poison=(250, 300)),
            Shape(d, PAD.format("100, 100")[:-1] + ", torch.tensor([90, 90], device=device))", poison=(0, 90)),
        ]  # fmt: skip
        result[f"d{d} fp16"] = [Shape(d, dtype="float16", layout="bshd"), Shape(d, gain=30.0, dtype="float16")]
        result[f"d{d} gqa"] = [Shape(d, CAUSAL, h=8, hk=2, layout="bshd"), Shape(d, h=6, hk=1, sk=700, layout="bshd")]
    result["top-left, prefix"] = [
        Shape(128, "tw.causal('top_left')", 200, 333, poison=(200, 333)), Shape(128, "tw.causal('top_left')", 333, 200),
        Shape(128, "tw.prefix(150)", poison=(150, 300)), Shape(128, "tw.causal(offset=40)", 200, 500),
        Shape(64, "tw.prefix(150)", poison=(150, 300)),
    ]  # fmt: skip
    result["prefix-lm, offsets"] = [
        Shape(128, "tw.causal() | tw.prefix(150)", 300, 400), Shape(64, "tw.causal() | tw.prefix(150)", 400, 400),
        Shape(128, "tw.causal(offset=torch.tensor([3, 170], device=device))", 200, 400),
    ]  # fmt: skip
    result["softcap"] = [Shape(128, CAUSAL, softcap=20.0), Shape(128, softcap=2.0), Shape(64, CAUSAL, softcap=20.0)]
    result["scale"] = [Shape(128, scale=-0.2), Shape(64, scale=0.0)]
    result["other dims"] = [Shape(96), Shape(80, CAUSAL), Shape(192, CAUSAL, dv=128), Shape(8), Shape(160)]
    result["mixed dims"] = [Shape(64, dv=128), Shape(128, dv=64), Shape(64, CAUSAL, dv=256), Shape(256, CAUSAL, dv=64)]
    result["mixed dims"] += [Shape(128, dv=256), Shape(192, dv=192, sq=1000)]
    packed = ((5, 33, 0, 200, 129), (5, 400, 7, 0, 129))
    long = ((1000, 64, 2000), (1000, 640, 2000))
    for d in (64, 128, 256):
        masks = ("None", CAUSAL, WINDOW)
        result[f"d{d} varlen"] = [Shape(d, mask, lengths=given, h=4, hk=2) for mask in masks for given in (packed, long)]
        result[f"d{d} varlen"] += [Shape(d, CAUSAL, lengths=((130, 300), (130, 300)), poison=(130, 430))]
    for d in (128, 256):
        few = [Shape(d, sq=300, sk=8192), Shape(d, CAUSAL, 256, 8192, h=4, hk=2), Shape(d, sq=130, sk=4096, gain=30.0)]
        result[f"d{d} long rows"] = [*few, Shape(d, CAUSAL, 9000, b=1, h=2), Shape(d, CAUSAL, 140, 5000, softcap=20.0)]
    many = Shape(256, sq=1030, sk=8192, h=10)
    grouped = many._replace(b=1, sq=2050, sk=4096, h=8, hk=2, layout="bshd")
    result["d256 many rows"] = [many, grouped, many._replace(dtype="float16")]
    result["d256 many rows"] += [many._replace(d=192, dv=200), many._replace(scale=-0.2)]
    result["nothing"] = [Shape(128, "~tw.full()"), Shape(64, "~tw.full()"), Shape(128, CAUSAL, 500, 100, gain=1000.0)]
    return result


def problem_of(shape: Shape) -> Any:
    """The Problem alone, where there is no GPU."""
    import torch

    import tilewise as tw
    from tilewise.problem import Problem

    batch, sq, sk = shape.b, shape.sq, shape.sk
    if shape.lengths is not None:
        batch, (sq, sk) = len(shape.lengths[0]), map(sum, shape.lengths)
    return Problem.of(
        batch=batch, heads=shape.h, kv_heads=shape.hk, seqlen=sq, kv_seqlen=sk, head_dim=shape.d, head_dim_v=shape.dv,
        dtype=shape.dtype, mask=eval(shape.mask, {"tw": tw, "torch": torch, "device": "cpu"}), scale=shape.scale,
        softcap=shape.softcap, varlen=shape.lengths is not None,
    )  # fmt: skip


def build(shape: Shape) -> tuple[Any, Any]:
    """The Problem and its Inputs on the GPU, as a call of the public function makes them."""
    import torch

    import tilewise as tw
    from tilewise.api.options import DEFAULTS
    from tilewise.api.parse import build_problem
    from tilewise.backends.base import Inputs

    packed = shape.lengths is not None
    sq, sk = map(sum, shape.lengths) if shape.lengths is not None else (shape.sq, shape.sk or shape.sq)
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(h: int, s: int, d: int, gain: float = 1.0) -> torch.Tensor:
        tokens_first = shape.layout == "bshd" or packed
        rows = 1 if packed else shape.b
        sides = (rows, s, h, d) if tokens_first else (rows, h, s, d)
        x = (torch.randn(sides, device="cuda", generator=generator) * gain).to(getattr(torch, shape.dtype))
        return x.transpose(1, 2) if tokens_first else x

    kv_heads = shape.hk or shape.h
    qkv = normal(shape.h, sq, shape.d, shape.gain), normal(kv_heads, sk, shape.d), normal(kv_heads, sk, shape.dv or shape.d)
    starts = [torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32) for lengths in shape.lengths or ()]
    inputs = Inputs(*qkv, **dict(zip(("cu_q", "cu_k"), starts, strict=False)))
    mask = eval(shape.mask, {"tw": tw, "torch": torch, "device": "cuda"})
    options = {"mask": mask, "scale": shape.scale, "softcap": shape.softcap, "return_lse": True}
    return build_problem(inputs, {**DEFAULTS, **options})


def executed_flops(problem: Any) -> float:
    """4·d for every score the mask allows (d the mean of both head dims)."""
    if not problem.program.structure:
        pairs = problem.seqlen_q * problem.seqlen_k
    else:
        (lo, hi), shift = problem.program.ints, problem.seqlen_k - problem.seqlen_q
        ends = ((q + shift + lo, q + shift + hi + 1) for q in range(problem.seqlen_q))
        pairs = sum(max(0, min(end, problem.seqlen_k) - max(start, 0)) for start, end in ends)
    return 2.0 * problem.batch * problem.heads * pairs * (problem.head_dim + problem.head_dim_v)


def cells(d: int) -> list[tuple[str, Shape]]:
    h = HIDDEN // d
    result = [
        (f"d{d} {'causal' if causal else 'full'} {s}", Shape(d, CAUSAL if causal else "None", s, b=TOKENS // s, h=h))
        for causal in (False, True)
        for s in (512, 2048, 8192, 16384)
    ]
    if d == 128:
        result.append(("d128 causal 16384 gqa 32/8", Shape(d, CAUSAL, 16384, b=1, h=32, hk=8)))
        result.append(("d128 window 4096 of 16384", Shape(d, "tw.causal() & tw.window(4096)", 16384, b=1, h=16)))
    return result
