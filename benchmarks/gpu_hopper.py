"""The Hopper forward on a Hopper GPU: is it right, and how fast beside cuDNN, FlashAttention-2 and, where installed, -4?

    python benchmarks/gpu_hopper.py [--only compile,check,stress,time,variants,host] [--dims 64,128] [--out file.json]

Kernels are compiled first, in parallel. Every group of checks and every head dim's timing is a process of its own under a time
limit, so that a kernel that hangs costs seconds. A result outside the derived bounds of the fp64 oracle gets no speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

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
    result["nothing"] = [Shape(128, "~tw.full()"), Shape(64, "~tw.full()"), Shape(128, CAUSAL, 500, 100, gain=1000.0)]
    return result


# --- inside the processes --------------------------------------------------------------------------------------------------


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
    from tilewise.api.describe import Request, describe

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
    starts = None
    if shape.lengths is not None:
        starts = tuple(torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32) for lengths in shape.lengths)
    mask = eval(shape.mask, {"tw": tw, "torch": torch, "device": "cuda"})
    return describe(qkv, Request(mask=mask, scale=shape.scale, softcap=shape.softcap), starts)


def check_group(name: str) -> dict[str, Any]:
    """Every shape of a group against the oracle."""
    import torch

    from tilewise.backends.hopper.backend import backend
    from tilewise.numerics import bounds

    wrong, done = [], 0
    for shape in groups()[name]:
        problem, inputs = build(shape)
        verdict = backend.supports(problem, inputs)
        if not verdict.ok:
            wrong.append(f"{shape}: refused, {verdict.reasons}")
            continue
        given = inputs
        if shape.poison is not None:
            k, v = inputs.k.clone(), inputs.v.clone()
            k[:, :, slice(*shape.poison)] = float("nan")
            v[:, :, slice(*shape.poison)] = float("nan")
            given = inputs._replace(k=k, v=v)
        poisoned = torch.full((1 << 24,), float("nan"), device="cuda")
        del poisoned  # fresh memory holds NaN from here on
        out, lse = backend.forward(problem, given)
        torch.cuda.synchronize()
        if shape.lengths is not None and shape.poison is not None:
            # NaN in the second sequence must stay there
            clean = backend.forward(problem, inputs)[0][:, :, : shape.poison[0]]
            wrong += [] if torch.equal(out[:, :, : shape.poison[0]], clean) else [f"{shape}: NaN crossed sequences"]
        else:
            wrong += [f"{shape}: {excess}" for excess in bounds.check_forward(problem, inputs, out, lse)]
        done += 1
    return {"checked": done, "wrong": wrong}


def stress() -> dict[str, Any]:
    """A thousand launches of awkward shapes, all bitwise equal."""
    import torch

    from tilewise.backends.hopper.backend import backend

    differing = {}
    shapes = [Shape(d, CAUSAL, 1000, b=2, h=40) for d in (64, 128)]
    shapes += [Shape(256, WINDOW, 777, b=2, h=20), Shape(128, PAD.format("900, 3"), 1000)]
    for shape in shapes:
        problem, inputs = build(shape)
        out, lse = backend.forward(problem, inputs)
        bad = torch.zeros((), device="cuda", dtype=torch.int64)
        for _ in range(1000):
            again, lse_again = backend.forward(problem, inputs)
            bad += (again != out).any() | (lse_again != lse).any()
        differing[str(shape)] = int(bad)
    return {"differing launches": differing}


def contenders(problem: Any, inputs: Any, causal: bool) -> dict[str, Callable[[], Any]]:
    import torch

    from tilewise.backends.hopper.backend import backend

    q, k, v = inputs.q, inputs.k, inputs.v
    aten = torch.ops.aten
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    runs: dict[str, Callable[[], Any]] = {"tilewise": lambda: backend.forward(problem, inputs)[0]}
    runs["cudnn"] = lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, causal, False)[0]
    runs["fa2"] = lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[0]
    try:
        from flash_attn.cute import flash_attn_func

        packed = [x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v)]
        runs["fa4"] = lambda: flash_attn_func(*packed, causal=causal)[0].transpose(1, 2)
    except ImportError:
        pass
    return runs


def sampled_error(problem: Any, inputs: Any, out: Any) -> str | None:
    """The last 64 rows of the first and last head against the oracle: None, or the excess."""
    from tilewise.backends.base import Inputs
    from tilewise.numerics import bounds
    from tilewise.problem import Problem

    rows = min(64, problem.seqlen_q)
    for b, h in ((0, 0), (problem.batch - 1, problem.heads - 1)):
        kv = h // problem.group
        k, v = (x[b : b + 1, kv : kv + 1] for x in (inputs.k, inputs.v))
        part = Inputs(inputs.q[b : b + 1, h : h + 1, -rows:], k, v)
        small = Problem.of(
            heads=1, seqlen=rows, kv_seqlen=problem.seqlen_k, head_dim=problem.head_dim, head_dim_v=problem.head_dim_v,
            dtype=problem.dtype, mask=problem.mask, scale=problem.scale, device="cuda",
        )  # fmt: skip
        for excess in bounds.check_forward(small, part, out[b : b + 1, h : h + 1, -rows:]):
            return str(excess)
    return None


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


def time_dim(d: int) -> dict[str, Any]:
    """All cells of a head dim, contenders interleaved."""
    from tilewise.bench.timing import Effort, cuda_clock, interleave

    result = {}
    for name, shape in cells(d):
        problem, inputs = build(shape)
        runs = contenders(problem, inputs, shape.mask != "None")
        if "window" in name:
            runs = {"tilewise": runs["tilewise"]}
        errors = {who: sampled_error(problem, inputs, run()) for who, run in runs.items()}
        good = {who: run for who, run in runs.items() if errors[who] is None}
        samples = interleave(good, Effort(seconds=0.9, least=5, most=30, sample=8e-3), cuda_clock)
        rate = {who: executed_flops(problem) / statistics.median(s) * 1e-12 for who, s in samples.items()}
        result[name] = {"tflops": rate, "wrong": {who: e for who, e in errors.items() if e}}
        print(json.dumps({name: result[name]}), flush=True)
    return result


def host_time() -> dict[str, Any]:
    """Wall time of a tiny call, in µs: the backend alone, the public function, SDPA."""
    import torch

    import tilewise as tw
    from tilewise import dispatch
    from tilewise.backends.hopper.backend import backend

    if "hopper" not in dispatch.REGISTRY:
        dispatch.register("hopper", dispatch.Entry("tilewise.backends.hopper", ("cuda",)), first=True)
    problem, inputs = build(Shape(64, sq=128, b=1, h=8))
    q, k, v = inputs.q, inputs.k, inputs.v
    runs = {
        "backend": lambda: backend.forward(problem, inputs),
        "tw.attention": lambda: tw.attention(q, k, v, backend="hopper"),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    result = {}
    for name, run in runs.items():
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(300):
                run()
            times.append((time.perf_counter() - start) / 300 * 1e6)
        result[name] = statistics.median(times)
    return result


def machine() -> dict[str, Any]:
    """What a record must say to be comparable."""
    import datetime

    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def variant_tiles(d: int, base: Any, narrow: Any) -> dict[str, Any]:
    if d == 64:
        return {"base": base, "narrow": narrow, "narrow, no turns": narrow._replace(PINGPONG=False)}
    return {"base": base, "no turns" if base.PINGPONG else "turns": base._replace(PINGPONG=not base.PINGPONG)}


def variant_plans(d: int, problem: Any) -> dict[str, Any]:
    """The table's plan and those that differ from it in one respect."""
    from unittest.mock import patch

    from tilewise.backends.hopper import launch, order
    from tilewise.backends.hopper.config import NARROW, TABLE

    base = TABLE[d, d]
    make = partial(launch.make_plan, problem, launch.multiprocessors(0), launch.kernel_for)
    plans = {name: make(tile) for name, tile in variant_tiles(d, base, NARROW).items()}
    plans["one tile a program"] = launch.make_plan(problem, 1 << 30, launch.kernel_for, base)
    if problem.program.structure:
        for size in (8, 40):
            with patch.object(launch, "L2_BYTES", size << 20):
                plans[f"L2 {size} MiB"] = make(base)
        for keys in (64, 320):
            with patch.object(order, "OVERHEAD_KEYS", keys):
                plans[f"overhead {keys}"] = make(base)
    return plans


def variants(d: int) -> dict[str, Any]:
    """The levers one by one at one head dim, interleaved."""
    import torch

    from tilewise.backends.hopper import launch
    from tilewise.bench.timing import Effort, cuda_clock, interleave

    device = torch.device("cuda", 0)
    result = {}
    for name, shape in cells(d):
        if not name.endswith((" 512", " 2048", "causal 16384")):
            continue
        problem, inputs = build(shape)
        plans = {k: launch.on_gpu(plan, device) for k, plan in variant_plans(d, problem).items()}
        with torch.cuda.device(device):
            runs = {k: partial(launch.launch, problem, inputs, plan) for k, plan in plans.items()}
            samples = interleave(runs, Effort(seconds=0.9, least=5, most=20, sample=5e-3), cuda_clock)
        result[name] = {k: executed_flops(problem) / statistics.median(s) * 1e-12 for k, s in samples.items()}
        print(json.dumps({name: result[name]}), flush=True)
    return result


def kernels() -> list[tuple[Any, ...]]:
    """All kernels that the checks and timings need, each once: what `kernel_for` takes."""
    from tilewise.backends.hopper import launch
    from tilewise.backends.hopper.config import NARROW, TABLE

    shapes = [shape for group in groups().values() for shape in group]
    shapes += [shape for d in (64, 128, 256) for _, shape in cells(d)]
    plans = [launch.make_plan(problem_of(shape), 132, lambda *what: what) for shape in shapes]
    for d in (64, 128, 256):
        for _, shape in cells(d):
            for tile in variant_tiles(d, TABLE[d, d], NARROW).values():
                plans.append(launch.make_plan(problem_of(shape), 132, lambda *what: what, tile))
    return list({(p.kernel[0], str(launch.pointers(p.kernel[1])), p.kernel[2]): p.kernel for p in plans}.values())


def compile_share(argument: str) -> dict[str, Any]:
    """Every n-th kernel from the i-th on; loading it compiles its launcher too."""
    from tilewise.backends.hopper import launch

    i, n = map(int, argument.split("/"))
    mine = kernels()[i::n]
    for what in mine:
        launch.kernel_for(*what)[(1, 1, 1)]
    return {"kernels": len(mine)}


# --- the parent ----------------------------------------------------------------------------------------------------------------


def child(task: str, argument: str, limit: float) -> dict[str, Any]:
    """A task in a process of its own; what it printed last is its result."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--task", task, "--argument", argument]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else (late.stdout or "")
        return {"failed": f"no answer in {limit:.0f} s", "printed": printed[-3000:]}
    seconds = time.perf_counter() - start
    if done.returncode:
        return {"failed": (done.stderr.strip() or done.stdout)[-1500:], "printed": done.stdout[-3000:], "seconds": seconds}
    return {**json.loads(done.stdout.splitlines()[-1]), "seconds": seconds}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "check": check_group, "compile": compile_share, "time": lambda d: time_dim(int(d)), "host": lambda _: host_time(),
    "variants": lambda d: variants(int(d)), "stress": lambda _: stress(), "machine": lambda _: machine(),
}  # fmt: skip


def show(phase: str, name: str, result: dict[str, Any]) -> None:
    if "failed" in result:
        print(f"{phase:8} {name:22} FAILED: {result['failed']}\n{result.get('printed', '')}", flush=True)
    elif phase == "check":
        wrong, seconds = len(result["wrong"]), result["seconds"]
        print(f"check    {name:22} {result['checked']:3} shapes, {wrong} wrong, {seconds:.0f} s", flush=True)
        for line in result["wrong"][:4]:
            print("         ", line[:600], flush=True)
    elif phase in ("time", "variants"):
        for cell, row in result.items():
            if cell != "seconds":
                rates = row.get("tflops", row)
                best = max((x for who, x in rates.items() if who in ("cudnn", "fa4")), default=None)
                ratio = f"  ratio {rates['tilewise'] / best:.3f}" if best and "tilewise" in rates else ""
                line = "  ".join(f"{who} {x:.0f}" for who, x in rates.items())
                print(f"{cell:28} {line}{ratio}", row.get("wrong") or "", flush=True)
    else:
        print(f"{phase:8} {name} {json.dumps(result)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="compile,check,time,host")
    parser.add_argument("--dims", default="128,64,256")
    parser.add_argument("--groups", default="", help="only groups of checks whose name contains this")
    parser.add_argument("--out", default=None)
    parser.add_argument("--task", default=None)
    parser.add_argument("--argument", default="")
    options = parser.parse_args()
    if options.task:
        print(json.dumps(TASKS[options.task](options.argument)), flush=True)
        return
    phases = options.only.split(",")
    names = [name for name in groups() if options.groups in name]
    dims = options.dims.split(",")
    record: dict[str, Any] = {"machine": child("machine", "", 40)}
    work = {
        "compile": ([f"{i}/14" for i in range(14)], 14, 200), "check": (names, 12, 60), "stress": (["all"], 1, 60),
        "time": (dims, 1, 90), "variants": (dims, 1, 90), "host": (["tiny call"], 1, 40),
    }  # fmt: skip
    for phase in phases:
        items, together, limit = work[phase]
        begin = time.perf_counter()
        with ThreadPoolExecutor(together) as pool:
            for name, result in zip(items, pool.map(lambda n, p=phase, s=limit: child(p, n, s), items), strict=True):
                record.setdefault(phase, {})[name] = result
                if phase != "compile" or "failed" in result:
                    show(phase, name, result)
        print(f"-- {phase}: {time.perf_counter() - begin:.0f} s", flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
