"""The Hopper backward on a Hopper GPU: is it right, and how fast beside cuDNN, the portable backend and FlashAttention-4?

    python benchmarks/gpu_hopper_backward.py [--only compile,check,stress,time,variants,host] [--dims 64,128] [--out file.json]

Kernels are compiled first, in parallel. Every group of checks and every head dim's timing is a process of its own under a time
limit, so that a kernel that hangs costs seconds. Gradients that are further from fp64 than twice cuDNN's get no speed.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parent)]

from gpu_hopper_gradients import contenders, error_of, exact_head, normal_like  # noqa: E402
from gpu_hopper_shapes import CAUSAL, PAD, WINDOW, Shape, build, cells, executed_flops, groups, problem_of  # noqa: E402
from gpu_hopper_tasks import host_times, machine, rates_line  # noqa: E402

DIMS = (64, 128, 256)


def checks() -> dict[str, list[Shape]]:
    """The forward's groups; what the backward refuses is left out by its verdict."""
    result = groups()
    for d in DIMS:
        result[f"d{d} gqa"] += [Shape(d, h=8, hk=2, sq=700, sk=500), Shape(d, WINDOW, h=4, hk=1, sq=600)]
        result[f"deterministic d{d}"] = [
            Shape(d), Shape(d, CAUSAL, 1000), Shape(d, CAUSAL, 257, 700, h=4, hk=2), Shape(d, WINDOW, 600, layout="bshd"),
            Shape(d, PAD.format("130, 130"), sk=500, poison=(130, 500)), Shape(d, CAUSAL, softcap=20.0),
            Shape(d, PAD.format("100, 100")[:-1] + ", torch.tensor([90, 90], device=device))", poison=(0, 90)),
        ]  # fmt: skip
    result["softcap"] += [Shape(256, CAUSAL, softcap=20.0), Shape(64, softcap=20.0)]
    result["other dims"] += [Shape(192, CAUSAL), Shape(96, CAUSAL, sq=1000), Shape(192, CAUSAL, dv=128, h=4, hk=2)]
    result["mixed dims"] += [Shape(64, dv=256), Shape(256, dv=128), Shape(256, WINDOW, dv=64)]
    return result


# --- inside the processes --------------------------------------------------------------------------------------------------


def check_group(name: str) -> dict[str, Any]:
    """Every shape of a group against the oracle; every second one with a gradient of the LSE too."""
    import torch

    from tilewise.backends.base import BackwardInputs
    from tilewise.backends.hopper.backend import backend
    from tilewise.numerics import bounds

    wrong, done, refused = [], 0, 0
    for i, shape in enumerate(checks()[name]):
        problem, inputs = build(shape)
        problem = replace(problem, deterministic=name.startswith("deterministic"))
        if not backend.supports(problem, inputs, backward=True).ok:
            refused += 1
            continue
        given = inputs
        if shape.poison is not None:
            k, v = inputs.k.clone(), inputs.v.clone()
            k[:, :, slice(*shape.poison)] = float("nan")
            v[:, :, slice(*shape.poison)] = float("nan")
            given = inputs._replace(k=k, v=v)
        out, lse = backend.forward(problem, given)
        dout = normal_like(out, 2)
        dlse = normal_like(lse, 3) if i % 2 else None
        poisoned = torch.full((1 << 26,), float("nan"), device="cuda")
        del poisoned  # fresh memory holds NaN from here on
        grads = backend.backward(problem, given, BackwardInputs(out, lse, dout, dlse))
        torch.cuda.synchronize()
        if shape.lengths is not None and shape.poison is not None:
            clean = backend.backward(problem, inputs, BackwardInputs(out, lse, dout, dlse))
            for x, y in zip(grads[:3], clean[:3], strict=True):
                wrong += (
                    [] if close(x[:, :, : shape.poison[0]], y[:, :, : shape.poison[0]]) else [f"{shape}: NaN crossed"]
                )
        else:
            wrong += [f"{shape}: {excess}" for excess in bounds.check_backward(problem, inputs, dout, dlse, grads)]
        done += 1
    return {"checked": done, "wrong": wrong, "refused": refused}


def close(x: Any, y: Any) -> bool:
    return bool(((x - y).abs() <= 0.02 * y.abs().max()).all())


def stress() -> dict[str, Any]:
    """A thousand launches of awkward shapes: dK and dV bitwise equal, dQ up to the order of its sums, or bitwise if asked."""
    import torch

    from tilewise.backends.base import BackwardInputs
    from tilewise.backends.hopper.backend import backend

    differing = {}
    shapes = [Shape(d, CAUSAL, 1000, b=2, h=20) for d in DIMS] + [Shape(128, WINDOW, 777, b=2, h=20, hk=5)]
    shapes += [Shape(128, PAD.format("900, 3"), 1000), Shape(256, sq=500, b=4, h=16)]
    alike = [Shape(d, mask, 1000, b=2, h=20) for d in DIMS for mask in ("None", CAUSAL)]
    for shape, deterministic in [*((shape, False) for shape in shapes), *((shape, True) for shape in alike)]:
        problem, inputs = build(shape)
        problem = replace(problem, deterministic=deterministic)
        out, lse = backend.forward(problem, inputs)
        dout = normal_like(out, 2)
        first = backend.backward(problem, inputs, BackwardInputs(out, lse, dout, None))
        bad = torch.zeros(3, device="cuda", dtype=torch.int64)
        for _ in range(1000):
            again = backend.backward(problem, inputs, BackwardInputs(out, lse, dout, None))
            for i, (x, y) in enumerate(zip(again[:3], first[:3], strict=True)):
                bad[i] += (x != y).any() if i or problem.deterministic else ((x - y).abs() > 0.01 * y.abs().max()).any()
        differing[f"{shape}{' deterministic' * deterministic}"] = bad.tolist()
    return {"differing launches (dq, dk, dv)": differing}


def time_dim(argument: str) -> dict[str, Any]:
    """All cells of a head dim, contenders interleaved."""
    from tilewise.lab.bench.timing import Effort, Spread, cuda_clock, interleave

    d, _, skipped = argument.partition(" without ")
    result = {}
    for name, shape in cells(int(d)):
        problem, inputs = build(shape)
        dout = normal_like(inputs.q, 2)
        runs = contenders(problem, inputs, dout, shape.mask != "None")
        served = ("tilewise", "triton") if "window" in name else tuple(runs)
        runs = {who: run for who, run in runs.items() if who in served and who not in skipped}
        errors = {}
        if problem.group == 1:
            exact = exact_head(problem, inputs, dout)
            errors = {who: error_of(run(), exact) for who, run in runs.items()}
            del exact
        allowed = [2 * e for e in errors.get("cudnn", [0.01] * 3)]
        wrong = [who for who, found in errors.items() if any(not x <= y for x, y in zip(found, allowed, strict=True))]
        samples = interleave(
            {who: run for who, run in runs.items() if who not in wrong}, Effort(0.5, 4, 20, 5e-3), cuda_clock
        )
        flops = 2.5 * executed_flops(problem) * 1e-12
        spread = {who: Spread.of([flops / s for s in seconds]) for who, seconds in samples.items()}
        result[name] = {
            "tflops": {who: s.p50 for who, s in spread.items()},
            "p20, p80": {who: (s.p20, s.p80) for who, s in spread.items()},
            "errors": errors,
            "wrong": wrong,
        }
        print(json.dumps({name: result[name]}), flush=True)
    return result


def variant_tiles(d: int, full: bool) -> dict[str, Any]:
    from tilewise.backends.hopper.backward.config import KEYS, SEPARATE_DQ, SEPARATE_DQ_UNMASKED

    apart = {"two passes": (SEPARATE_DQ_UNMASKED if full else SEPARATE_DQ)[d, d]}
    return apart if SEPARATE_DQ[d, d] == KEYS[d, d] else {"sums": KEYS[d, d], **apart}


def variant_cells(d: int) -> list[tuple[str, Shape]]:
    return [
        (f"d{d} {'causal' if mask else 'full'} {s}", Shape(d, CAUSAL if mask else "None", s, b=16384 // s, h=2048 // d))
        for mask in (False, True)
        for s in (512, 1024, 2048, 16384)
    ]


def variants(argument: str) -> dict[str, Any]:
    """Both ways to dQ and their single kernels at one head dim, interleaved; no result is checked here."""
    import torch

    from tilewise.backends.gpu.record import Recording
    from tilewise.backends.hopper.backend import backend
    from tilewise.backends.hopper.backward import launch
    from tilewise.lab.bench.timing import Effort, cuda_clock, interleave

    device = torch.device("cuda", 0)
    result = {}
    for name, shape in variant_cells(int(argument)):
        problem, inputs = build(shape)
        out, lse = backend.forward(problem, inputs)
        dout = normal_like(out, 2)
        grads = [torch.empty_like(x) for x in inputs[:3]]
        runs: dict[str, Any] = {}
        tiles = variant_tiles(int(argument), shape.mask == "None")
        for variant, tile in tiles.items():
            plan = launch.plan_on(problem, device, False, tile)
            scratch = torch.empty(plan.stats + plan.dq, device="cuda")
            memory = launch.Memory(*inputs[:3], out, lse, dout, None, *grads, scratch, None, None)
            runs[variant] = partial(launch.launch, problem, memory, Recording(0, plan))
            runs[variant]()
            steps = [launch.launch_of(step, plan, memory, ()) for step in plan.steps]
            runs |= {f"{variant}: {step.name}": call.bound() for step, call in zip(plan.steps, steps, strict=True)}
        samples = interleave(runs, Effort(0.3, 4, 12, 4e-3), cuda_clock)
        flops = 2.5 * executed_flops(problem)
        times = {k: statistics.median(s) for k, s in samples.items()}
        result[name] = {k: flops / times[k] * 1e-12 for k in tiles}
        result[name] |= {f"{k} µs": t * 1e6 for k, t in times.items() if ":" in k}
        print(json.dumps({name: result[name]}), flush=True)
    return result


def host_time() -> dict[str, Any]:
    """Wall time of forward and backward of a tiny call through autograd, in µs."""
    import torch

    import tilewise as tw

    _, inputs = build(Shape(64, sq=128, b=1, h=8))
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    dout = normal_like(q, 2)

    def trained(call: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(q, k, v), (q, k, v), dout)

    runs = {
        "tw.attention": trained(partial(tw.attention, backend="hopper")),
        "tw.attention, auto": trained(tw.attention),
        "tw.attention, triton": trained(partial(tw.attention, backend="triton")),
        "sdpa": trained(torch.nn.functional.scaled_dot_product_attention),
    }
    return host_times(runs, 200)


def kernels() -> list[tuple[Any, ...]]:
    """All kernels that the checks and timings need, each once: what `kernel_for` takes."""
    from tilewise.backends.hopper.backward import launch

    found: dict[Any, Any] = {}

    def add(problem: Any, **more: Any) -> None:
        for step in launch.make_plan(problem, 132, lambda *what: what, **more).steps:
            found[str((step.kernel[0], step.kernel[1], step.kernel[3], kind(step.kernel[2])))] = step.kernel

    for name, group in checks().items():
        for i, shape in enumerate(group):
            problem = replace(problem_of(shape), deterministic=name.startswith("deterministic"))
            add(problem, with_dlse=bool(i % 2))
    for d in DIMS:
        for _, shape in cells(d) + variant_cells(d):
            for tile in variant_tiles(d, shape.mask == "None").values():
                add(problem_of(shape), tile=tile)
    return sorted(found.values(), key=lambda what: what[0] in ("preprocess_kernel", "postprocess_kernel"))


def kind(arguments: Any) -> Any:
    return tuple(kind(x) for x in arguments) if isinstance(arguments, tuple) else arguments is None


def compile_share(argument: str) -> dict[str, Any]:
    """Every n-th kernel from the i-th on; loading it compiles its launcher too."""
    from tilewise.backends.hopper.backward import launch

    i, n = map(int, argument.split("/"))
    mine = kernels()[i::n]
    for what in mine:
        launch.kernel_for(*what)[(1, 1, 1)]
    return {"kernels": len(mine)}


# --- the parent ----------------------------------------------------------------------------------------------------------------

TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "check": check_group, "compile": compile_share, "time": time_dim, "host": lambda _: host_time(),
    "variants": variants, "stress": lambda _: stress(), "machine": lambda _: machine(),
}  # fmt: skip


def child(task: str, argument: str, limit: float) -> dict[str, Any]:
    """A task in a process of its own; what it printed last is its result."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--task", task, "--argument", argument]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else (late.stdout or "")
        return {"failed": f"no answer in {limit:.0f} s", "printed": printed[-3000:]}
    if done.returncode:
        return {"failed": (done.stderr.strip() or done.stdout)[-1500:], "printed": done.stdout[-3000:]}
    return {
        **json.loads(done.stdout.splitlines()[-1]),
        "seconds": time.perf_counter() - start,
        "said": done.stderr[-300:],
    }


def show(phase: str, name: str, result: dict[str, Any]) -> None:
    if "failed" in result:
        print(f"{phase:8} {name:22} FAILED: {result['failed']}\n{result.get('printed', '')}", flush=True)
    elif phase == "check":
        wrong = len(result["wrong"])
        print(
            f"check    {name:22} {result['checked']:3} shapes, {wrong} wrong, {result['refused']} refused", flush=True
        )
        for line in result["wrong"][:4]:
            print("         ", line[:500], flush=True)
    elif phase in ("time", "variants"):
        for cell, row in result.items():
            if isinstance(row, dict):
                print(
                    rates_line(cell, row.get("tflops", row)),
                    f"WRONG {row['wrong']} {row['errors']}" if row.get("wrong") else "",
                    flush=True,
                )
    else:
        print(f"{phase:8} {name} {json.dumps(result)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="compile,check,time,host")
    parser.add_argument("--dims", default="128,64,256")
    parser.add_argument("--groups", default="", help="only groups of checks whose name contains one of these words")
    parser.add_argument("--without", default="", help="contenders to leave out of the timing")
    parser.add_argument("--out", default=None)
    parser.add_argument("--task", default=None)
    parser.add_argument("--argument", default="")
    options = parser.parse_args()
    if options.task:
        print(json.dumps(TASKS[options.task](options.argument)), flush=True)
        return
    names = [name for name in checks() if any(word in name for word in options.groups.split(","))]
    dims = options.dims.split(",")
    timed = [f"{d} without {options.without}" for d in dims]
    record: dict[str, Any] = {"machine": child("machine", "", 40)}
    work = {
        "compile": ([f"{i}/15" for i in range(15)], 15, 200), "check": (names, 12, 70), "stress": (["all"], 1, 90),
        "time": (timed, 1, 120), "variants": (dims, 1, 90), "host": (["tiny call"], 1, 60),
    }  # fmt: skip
    for phase in options.only.split(","):
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
