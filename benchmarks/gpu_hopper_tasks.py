"""The tasks of `gpu_hopper.py`, each run in a process of its own."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_hopper_shapes import CAUSAL, PAD, WINDOW, Shape, build, cells, executed_flops, groups, problem_of

Runs = dict[str, Callable[[], Any]]
FA4_MASKS = ("full", "causal", "gqa", "window")


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
    shapes += [Shape(256, sq=300, sk=4096, h=40), Shape(256, sq=600, sk=6144, b=1, h=30)]
    for shape in shapes:
        problem, inputs = build(shape)
        out, lse = backend.forward(problem, inputs)
        bad = torch.zeros((), device="cuda", dtype=torch.int64)
        for _ in range(1000):
            again, lse_again = backend.forward(problem, inputs)
            bad += (again != out).any() | (lse_again != lse).any()
        differing[str(shape)] = int(bad)
    return {"differing launches": differing}


def contenders(problem: Any, inputs: Any, shape: Shape, fa4: bool) -> Runs:
    """This backend and its peers, those that know the mask."""
    import torch

    from tilewise.backends.hopper.backend import backend

    q, k, v = inputs.q, inputs.k, inputs.v
    aten = torch.ops.aten
    runs: Runs = {"tilewise": lambda: backend.forward(problem, inputs)[0]}
    if "window" not in shape.mask:
        causal = shape.mask != "None"
        if k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        runs["cudnn"] = lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, causal, False)[0]
        runs["fa2"] = lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[0]
    if fa4:
        runs["fa4"] = fa4_run(inputs, shape)
    return runs


def fa4_run(inputs: Any, shape: Shape) -> Callable[[], Any]:
    """FlashAttention-4 on copies in its own layout (B, S, H, D)."""
    from flash_attn.cute import flash_attn_func

    packed = [x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v)]
    settings: dict[str, Any] = {"causal": shape.mask != "None"}
    if "window" in shape.mask:
        width = int(shape.mask.rsplit("(", 1)[1].rstrip(")"))
        settings = {"window_size": (width - 1, 0)}

    def run() -> Any:
        out = flash_attn_func(*packed, **settings)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def has_fa4() -> bool:
    import importlib.util

    return importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn.cute") is not None


def compile_fa4(argument: str) -> dict[str, Any]:
    """One kernel of FlashAttention-4 into its cache on disk (FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1): "128 causal"."""
    if not has_fa4():
        return {"absent": True}
    d, mask = argument.split()
    shape = Shape(int(d), "None" if mask == "full" else CAUSAL, 512, b=2, h=8, hk=2 if mask == "gqa" else None)
    if mask == "window":
        shape = shape._replace(mask="tw.causal() & tw.window(4096)")
    fa4_run(build(shape)[1], shape)()
    return {}


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


def variant_tiles(problem: Any) -> dict[str, Any]:
    """Tiles that differ from the chosen one in one respect."""
    from tilewise.backends.hopper import launch
    from tilewise.backends.hopper.config import NARROW, TABLE, shortened

    base = launch.make_plan(problem, 132, lambda *_: None).config
    plain = {"rescaled early" if base.LAZY_RESCALE else "rescaled late": base._replace(LAZY_RESCALE=not base.LAZY_RESCALE)}
    if base.BLOCK_N == 128 and base.WARPGROUPS == 2:
        plain["no turns"] = base._replace(PINGPONG=False)
    if base.BLOCK_DV == 256:
        plain["turns"] = base._replace(PINGPONG=True)
    if base.Q_IN_REGISTERS:
        plain["queries in memory"] = base._replace(Q_IN_REGISTERS=0)
    if base.BLOCK_D == base.BLOCK_DV == 64:
        other = TABLE[64, 64] if base.WARPGROUPS == 2 else NARROW
        plain[f"{other.BLOCK_M} queries"] = other
    if base.BAND and problem.seqlen_q <= 2048 and base.BLOCK_D < 256:
        tile = NARROW if base.BLOCK_D == 64 else TABLE[base.BLOCK_D, base.BLOCK_DV]
        plain["128 keys" if base.BLOCK_N == 64 else "64 keys"] = tile if base.BLOCK_N == 64 else shortened(tile)
    return plain


def variant_runs(problem: Any, inputs: Any) -> Runs:
    import torch

    from tilewise.backends.gpu.record import Recording
    from tilewise.backends.hopper import launch

    device = torch.device("cuda", 0)
    plans = {name: launch.plan_on(problem, device, tile) for name, tile in variant_tiles(problem).items()}
    return {name: partial(first_of, launch.launch, problem, inputs, Recording(0, plan)) for name, plan in plans.items()}


def first_of(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)[0]


def time_dim(argument: str) -> dict[str, Any]:
    """All cells of a head dim, contenders interleaved; "64+": variants of the tile among them."""
    from tilewise.lab.bench.timing import Effort, Spread, cuda_clock, interleave

    d, fa4 = int(argument.rstrip("+")), has_fa4()
    result = {}
    for name, shape in cells(d):
        problem, inputs = build(shape)
        runs = contenders(problem, inputs, shape, fa4)
        if argument.endswith("+"):
            runs.pop("fa2", None)
            runs |= variant_runs(problem, inputs)
        errors = {who: sampled_error(problem, inputs, run()) for who, run in runs.items()}
        good = {who: run for who, run in runs.items() if errors[who] is None}
        samples = interleave(good, Effort(seconds=0.16 * len(good), least=5, most=30, sample=5e-3), cuda_clock)
        flops = executed_flops(problem) * 1e-12
        spread = {who: Spread.of([flops / s for s in seconds]) for who, seconds in samples.items()}
        result[name] = {
            "tflops": {who: s.p50 for who, s in spread.items()},
            "p20, p80": {who: (s.p20, s.p80) for who, s in spread.items()},
            "wrong": {who: e for who, e in errors.items() if e},
        }
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
    return host_times(runs, 300)


def host_times(runs: dict[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    """Microseconds of host time a call, medians of seven."""
    import torch

    result = {}
    for name, run in runs.items():
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times.append((time.perf_counter() - start) / calls * 1e6)
        result[name] = statistics.median(times)
    return result


def rates_line(cell: str, rates: dict[str, float]) -> str:
    """A cell's contenders, and our ratio to the better peer."""
    best = max((x for who, x in rates.items() if who in ("cudnn", "fa4")), default=None)
    ratio = f"  ratio {rates['tilewise'] / best:.3f}" if best and "tilewise" in rates else ""
    return f"{cell:28} {'  '.join(f'{who} {x:.0f}' for who, x in rates.items())}{ratio}"


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


def kernels() -> list[tuple[Any, ...]]:
    """All kernels that the checks and timings need, each once: what `kernel_for` takes."""
    from tilewise.backends.hopper import launch

    make = partial(launch.make_plan, processors=132, compile_=lambda *what: what)
    plans = [make(problem_of(shape)) for group in groups().values() for shape in group]
    for d in (64, 128, 256):
        for _, shape in cells(d):
            problem = problem_of(shape)
            plans += [make(problem), *(make(problem, tile=tile) for tile in variant_tiles(problem).values())]
    return list({(p.kernel[0], str(launch.pointers(p.kernel[1])), p.kernel[2]): p.kernel for p in plans}.values())


def compile_share(argument: str) -> dict[str, Any]:
    """Every n-th kernel from the i-th on; loading it compiles its launcher too."""
    from tilewise.backends.hopper import launch

    i, n = map(int, argument.split("/"))
    mine = kernels()[i::n]
    for what in mine:
        launch.kernel_for(*what)[(1, 1, 1)]
    return {"kernels": len(mine)}
