"""Measure the Triton backend on a GPU, part by part; each part prints a short table and adds to one JSON file.

    PYTHONPATH=src python tools/measure_gpu.py smoke forward --json out.json --seconds 200

Parts: smoke, conform, accuracy, forward, backward, suite, fp32, window, varlen, decode, host. A part stops at its time limit
and says what it left out. Kernels are compiled in parallel first (no GPU needed for that), then timed side by side with SDPA's
backends: the contenders of a case take turns in every round, and medians over the rounds are shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
import traceback
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from tilewise.backends.base import Inputs, Needs  # noqa: E402
from tilewise.iomodel.tile import TilePlan  # noqa: E402
from tilewise.masks import Binding, causal, full, window  # noqa: E402
from tilewise.problem import Problem  # noqa: E402

DEVICE = "cuda"
RECORDS: list[dict[str, Any]] = []
PEERS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "eff": SDPBackend.EFFICIENT_ATTENTION}

FORWARD = {
    64: ["64,64,4,3", "64,64,4,3p", "64,64,4,4", "128,64,4,3p", "64,32,4,4p", "64,128,4,3"],
    128: ["64,64,4,3", "64,64,4,3p", "128,64,8,3p", "128,128,8,3p", "64,64,4,4", "64,32,4,4"],
}
BACKWARD = {
    64: ["64,64,4,2/64,64,4,3", "64,64,4,3/64,64,4,3", "128,64,4,2/64,64,4,3"],
    128: ["32,64,4,3/64,32,4,3", "32,64,4,2/128,64,8,3", "32,64,4,3/64,64,4,3", "64,64,8,2/64,32,4,3"],
}
"""Queries, keys, warps, stages; `p` reads the streamed operands through pointers. A backward has a tile for dK and dV and one
for dQ."""


class Clock:
    """A part's time limit."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()


class Call(NamedTuple):
    """One attention problem with its tensors on the GPU."""

    problem: Problem
    inputs: Inputs


def make(
    batch: int,
    heads: int,
    seqlen: int,
    d: int,
    mask: Any = None,
    *,
    keys: int | None = None,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | None = None,
    **features: Any,
) -> Call:
    device = device or DEVICE
    problem = Problem.of(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen=seqlen,
        kv_seqlen=keys,
        head_dim=d,
        mask=mask,
        dtype=str(dtype).removeprefix("torch."),
        device=DEVICE,
        **features,
    )
    problem._program.append(
        problem.mask.lower(Binding(problem.shape, problem.varlen, lambda x: torch.as_tensor(x, device=device)))
    )
    shape = (batch, heads, seqlen, d), (batch, problem.kv_heads, problem.seqlen_k, d)
    fresh = torch.empty if device == "meta" else torch.randn
    q, k, v = (fresh(s, dtype=dtype, device=device) for s in (shape[0], shape[1], shape[1]))
    return Call(problem, Inputs(q, k, v))


def tile_of(text: str, pass_: str) -> TilePlan:
    m, n, warps, stages = map(int, text.rstrip("p").split(","))
    return TilePlan(m, n, stages, warps, pass_=pass_)


def trial_of(text: str, pass_: str = "forward") -> Any:
    from tilewise.backends.triton.run import Trial

    return Trial((tile_of(text, pass_),), "p" not in text)


def backward_trial(text: str) -> Any:
    from tilewise.backends.triton.run import Trial

    keys, queries = text.split("/")
    return Trial((tile_of(keys, "backward_dkdv"), tile_of(queries, "backward_dq")), "p" not in text)


def flops(p: Problem, backward: bool = False) -> float:
    """Of the pairs a full or causal mask allows; a backward counts as 2.5 forwards, as is the custom."""
    if p.mask == full():
        pairs = p.seqlen_q * p.seqlen_k
    else:
        pairs = p.seqlen_q * (p.seqlen_q + 1) // 2
    return 4.0 * p.batch * p.heads * pairs * p.head_dim * (2.5 if backward else 1.0)


# ---- compiling ahead ------------------------------------------------------------------------------------------------


def compile_one(job: tuple[dict[str, Any], Any, Needs | None]) -> str:
    """In a worker process: compile a trial's kernels into triton's cache on disk. Returns what went wrong, if anything."""
    options, trial, needs = job
    said: list[str] = []
    try:
        from compile_matrix import resources
        from triton.backends.compiler import GPUTarget

        from tilewise.backends.gpu.launch import Descriptor, compile_for, signature
        from tilewise.backends.triton import run

        def describe(x: torch.Tensor, y: torch.Tensor, rows: int, wanted: bool) -> tuple[Any, Any]:
            return (Descriptor(x, rows, x.shape[3]), Descriptor(y, rows, y.shape[3])) if wanted else (None, None)

        launches: list[Any] = []
        run.descriptors = describe
        run.fitting = lambda problem, pass_, build, tile, device: build(tile)
        run.perform = lambda key, moving, build: launches.extend(build())
        options = {**options, "mask": MASKS[options.get("mask", "full")]()}
        problem, inputs = make(**options, device="meta")
        out = torch.empty_like(inputs.q)
        lse = torch.empty(out.shape[:3], dtype=torch.float32, device="meta")
        if needs is None:
            run.run_forward(problem, inputs, out, lse, trial)
        else:
            run.run_backward(problem, inputs, run.Saved(out, lse, out, None), needs, trial)
        major, minor = CAPABILITY
        for kernel, _, args, config, settings in launches:
            target = GPUTarget("cuda", major * 10 + minor, 32)
            _, spilled = resources(compile_for(target, kernel, signature(args), config, settings))
            if spilled:
                label = f"{config.BLOCK_M},{config.BLOCK_N},{settings.num_warps},{settings.num_stages}"
                said.append(f"{kernel.__name__} {label} spills {spilled} B")
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return f"{trial}: {type(error).__name__} {str(error)[-300:]}"
    return "; ".join(f"d {options['d']} {text}" for text in said)


CAPABILITY = (9, 0)
MASKS: dict[str, Callable[[], Any]] = {"full": full, "causal": causal, "window": lambda: window(1024)}


def compile_ahead(jobs: list[tuple[dict[str, Any], Any, Needs | None]], workers: int) -> None:
    start = time.monotonic()
    import multiprocessing

    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for problem in pool.map(compile_one, jobs):
            if problem:
                print("  compiling:", problem)
    print(f"  compiled {len(jobs)} kernels in {time.monotonic() - start:.0f} s", flush=True)


# ---- timing ---------------------------------------------------------------------------------------------------------


def interleaved(contenders: dict[str, Callable[[], Any]], rounds: int = 5, budget_ms: float = 12.0) -> dict[str, float]:
    """Median milliseconds of each; a contender that raises is left out, with a line saying why."""
    live: dict[str, tuple[Callable[[], Any], int]] = {}
    for name, fn in contenders.items():
        try:
            fn()
            torch.cuda.synchronize()
            start = time.perf_counter()
            fn()
            torch.cuda.synchronize()
            live[name] = fn, max(1, min(200, int(budget_ms / 1e3 / max(1e-6, time.perf_counter() - start))))
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:160]}")
    times: dict[str, list[float]] = {name: [] for name in live}
    for _ in range(rounds):
        for name, (fn, repeat) in live.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeat):
                fn()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / repeat)
    return {name: statistics.median(values) for name, values in times.items()}


def table(title: str, work: float, times: dict[str, float], unit: str = "TFLOP/s", scale: float = 1e9) -> None:
    parts = [f"{name} {work / ms / scale:.0f}" for name, ms in sorted(times.items(), key=lambda item: item[1])]
    print(f"  {title:28} " + "  ".join(parts), flush=True)
    RECORDS.append({"case": title, "unit": unit, "work": work, "ms": times})


def peers(call: Call, is_causal: bool, which: tuple[str, ...] = ("fa2", "cudnn")) -> dict[str, Callable[[], Any]]:
    q, k, v = call.inputs[:3]
    gqa = call.problem.group > 1

    def run(backend: Any) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=gqa)

    return {name: (lambda b=PEERS[name]: run(b)) for name in which}


def peer_gradients(
    call: Call, is_causal: bool, which: tuple[str, ...] = ("fa2", "cudnn")
) -> dict[str, Callable[[], Any]]:
    result = {}
    for name in which:
        q, k, v = (x.detach().clone().requires_grad_() for x in call.inputs[:3])
        try:
            with sdpa_kernel(PEERS[name]):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=call.problem.group > 1)
            dout = torch.randn_like(out)
            result[name] = lambda o=out, i=(q, k, v), d=dout: torch.autograd.grad(o, i, d, retain_graph=True)
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:120]}")
    return result


def ours(call: Call, trial: Any = None) -> Callable[[], Any]:
    from tilewise.backends.base import empty_lse, empty_out
    from tilewise.backends.triton import run

    out, lse = empty_out(call.inputs.q, call.problem.head_dim_v), empty_lse(call.inputs.q)
    return lambda: run.run_forward(call.problem, call.inputs, out, lse, trial or run.PLANNED)


def our_gradients(call: Call, needs: Needs = Needs(), trial: Any = None) -> Callable[[], Any]:  # noqa: B008
    from tilewise.backends.triton import host, run

    out, lse = host.backend.forward(call.problem, call.inputs)
    saved = run.Saved(out, lse, torch.randn_like(out), None)
    return lambda: run.run_backward(call.problem, call.inputs, saved, needs, trial or run.PLANNED)


def geometry(tokens: int = 16384, hidden: int = 2048) -> list[tuple[int, int, dict[str, int]]]:
    return [
        (d, s, {"batch": tokens // s, "heads": hidden // d, "seqlen": s, "d": d})
        for d in (64, 128)
        for s in (512, 2048, 8192, 16384)
    ]


# ---- parts ----------------------------------------------------------------------------------------------------------


def smoke(clock: Clock, args: argparse.Namespace) -> None:
    """Does it run and is it right? Small problems against SDPA's math in fp64."""
    for d, mask in ((64, causal()), (128, full()), (256, causal()), (40, causal())):
        call = make(2, 4, 300, d, mask, kv_heads=2)
        print(f"  d {d} {call.problem.program.structure!r}:", errors(call), flush=True)


def errors(call: Call, needs_grad: bool = True) -> str:
    """Max-abs errors of output and gradients against SDPA's math in fp64, and SDPA FA2's own error for scale."""
    from tilewise.backends.triton import host

    q, k, v = (x.double().requires_grad_() for x in call.inputs[:3])
    p = call.problem
    group = p.group
    rows = torch.arange(p.seqlen_q, device=q.device)[:, None] + p.seqlen_k - p.seqlen_q
    keep = torch.arange(p.seqlen_k, device=q.device)[None, :] <= rows if p.program.structure == "b" else None
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), attn_mask=keep
        )
    out, lse = host.backend.forward(p, call.inputs)
    text = f"out {(out.double() - want).abs().max():.1e}"
    if needs_grad:
        dout = torch.randn_like(out)
        wanted = torch.autograd.grad(want, (q, k, v), dout.double())
        got = host.backend.backward(p, call.inputs, out, lse, dout, None, Needs())
        text += "".join(
            f" {n} {(x.double() - y).abs().max():.1e}" for n, x, y in zip(("dq", "dk", "dv"), got, wanted, strict=False)
        )
    return text


def conform_share(share: tuple[int, int]) -> list[tuple[str, str]]:
    """In a worker process: some neighbouring cases, which often share kernels, each with what was found: "" is right."""
    if importlib.util.find_spec("pytest") is None:
        sys.modules["pytest"] = types.ModuleType("pytest")
    from tests.conformance.cases import CASES, build
    from tests.conformance.harness import excesses
    from tilewise import dispatch

    results = []
    for case in CASES[slice(*share)]:
        try:
            built = build(case, DEVICE)
            verdict = dispatch.judge("triton", built.problem, built.inputs)
            found = "not served" if not verdict.ok else ""
            for _ in range(3 if verdict.ok else 0):  # as it comes, prepared, and replayed
                found = found or str(excesses(built, "triton", lse_gradient=case.lse_gradient) or "")[:300]
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[-400:]}"
        results.append((case.name, found))
    return results


def conform(clock: Clock, args: argparse.Namespace) -> None:
    """The conformance suite on the GPU, shared out over processes; it needs no pytest beyond the name."""
    import multiprocessing
    from concurrent.futures import as_completed

    sys.modules.setdefault("pytest", types.ModuleType("pytest"))
    from tests.conformance.cases import CASES

    found: dict[str, str] = {}
    pool = ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn"))
    shares = [(i, i + 3) for i in range(0, len(CASES), 3)]
    try:
        for done in as_completed([pool.submit(conform_share, share) for share in shares], timeout=clock.left()):
            found.update(done.result())
    except TimeoutError:
        print(f"  time is up: {[case.name for case in CASES if case.name not in found]} left out")
    pool.shutdown(wait=False, cancel_futures=True)
    wrong = {name: why for name, why in found.items() if why not in ("", "not served")}
    refused = [name for name, why in found.items() if why == "not served"]
    print(f"  {len(found) - len(wrong) - len(refused)} right, {len(wrong)} wrong, not served: {refused}")
    for name, why in wrong.items():
        print(f"  WRONG {name}: {why}", flush=True)
    RECORDS.append({"case": "conformance", "of": len(CASES), "found": found})


def accuracy(clock: Clock, args: argparse.Namespace) -> None:
    """Errors at S 2048 against fp64, for each dtype."""
    for dtype, precision in (
        (torch.float32, "default"),
        (torch.float32, "tf32"),
        (torch.bfloat16, "default"),
        (torch.float16, "default"),
    ):
        for mask in (full(), causal()):
            call = make(1, 4, 2048, 128, mask, dtype=dtype, precision=precision)
            print(f"  {dtype} {precision} {call.problem.program.structure!r}:", errors(call), flush=True)


def forward(clock: Clock, args: argparse.Namespace) -> None:
    jobs: list[Any] = []
    for d in args.d:
        for mask in ("full", "causal"):
            options = {"batch": 8, "heads": 2048 // d, "seqlen": 2048, "d": d, "mask": mask}
            jobs += [(options, trial_of(tile), None) for tile in FORWARD[d]]
    compile_ahead(jobs, args.workers)
    for d, s, shape in geometry():
        for name, mask in (("full", full()), ("causal", causal())):
            if d not in args.d or s not in args.s:
                continue
            if clock.left() < 5:
                print(f"  time is up before d {d} {name} S {s}")
                return
            call = make(**shape, mask=mask)
            runs = {**peers(call, name == "causal"), "plan": ours(call)}
            runs |= {tile: ours(call, trial_of(tile)) for tile in FORWARD[d]}
            table(f"fwd d {d} {name} S {s}", flops(call.problem), interleaved(runs))


def backward(clock: Clock, args: argparse.Namespace) -> None:
    jobs: list[Any] = []
    for d in args.d:
        for mask in ("full", "causal"):
            options = {"batch": 8, "heads": 2048 // d, "seqlen": 2048, "d": d, "mask": mask}
            jobs += [(options, backward_trial(pair), Needs()) for pair in BACKWARD[d]]
    compile_ahead(jobs, args.workers)
    speeds: dict[int, dict[str, list[float]]] = {d: {} for d in args.d}
    for d, s, shape in geometry():
        for name, mask in (("full", full()), ("causal", causal())):
            if d not in args.d or s not in args.s:
                continue
            if clock.left() < 4:
                print(f"  time is up before d {d} {name} S {s}")
                continue
            call = make(**shape, mask=mask)
            runs = peer_gradients(call, name == "causal", ("fa2",))
            runs |= {pair: our_gradients(call, Needs(), backward_trial(pair)) for pair in BACKWARD[d]}
            times = interleaved(runs, rounds=3, budget_ms=6.0)
            table(f"bwd d {d} {name} S {s}", flops(call.problem, True), times)
            for pair in BACKWARD[d]:
                speeds[d].setdefault(pair, []).append(times.get("fa2", 1.0) / times.get(pair, 1e9))
    for d, found in speeds.items():
        means = {pair: statistics.geometric_mean(values) for pair, values in found.items()}
        print(
            f"  d {d}: ratio to fa2 in geometric mean",
            {pair: round(mean, 3) for pair, mean in means.items()},
            flush=True,
        )
        if means:
            args.best[d] = max(means, key=means.__getitem__)


def suite(clock: Clock, args: argparse.Namespace) -> None:
    """The bench suite `gpu` with the backward tiles that `backward` found best, saved as a record beside the JSON."""
    from dataclasses import replace

    from tilewise.bench import records
    from tilewise.bench.cases import Case, Tensors
    from tilewise.bench.contenders import contender, tilewise
    from tilewise.bench.engine import geometric_means, measure
    from tilewise.bench.suites import suite as by_name
    from tilewise.bench.timing import Effort
    from tilewise.planner import tuned

    kept: dict[int, Any] = {}

    class Kept(Case):
        """All cases of the suite draw the same numbers; drawing them anew would take most of the time."""

        def tensors(self, seed: int = 0) -> Tensors:
            if not kept:
                kept[seed] = Case.tensors(self, seed)
            p = self.problem()
            shape = (p.batch, p.heads, p.seqlen_q, p.head_dim)
            return Tensors(*(x.view(shape) for x in kept[seed]))

    for d, pair in args.best.items():
        print(f"  d {d}: backward with {pair}")
        for text, pass_ in zip(pair.split("/"), ("backward_dkdv", "backward_dq"), strict=True):
            entry = replace(tuned.TUNED[0], pass_=pass_, head_dim=d, tile=tile_of(text, pass_))
            tuned.TUNED = (entry, *tuned.TUNED)
    ours = replace(tilewise("triton"), name="tilewise")
    wanted = by_name("gpu")
    measured = []
    for case in wanted.cases:
        if clock.left() < 3:
            print(f"  time is up: {len(wanted.cases) - len(measured)} cases left out")
            break
        fields = {name: getattr(case, name) for name in case.__dataclass_fields__}
        record = measure(Kept(**fields), [ours, *(contender(name) for name in case.against)], Effort(0.15, 5, 40))
        measured.append(record)
        if record.ratio is None:
            print(f"  {case.name}: {[result.to_dict() for result in record.results]}"[:600])
        else:
            print(
                f"  {case.name}: {record.ratio.p50:.2f} ({record.ratio.p20:.2f} to {record.ratio.p80:.2f})", flush=True
            )
    means = geometric_means(measured, wanted.means)
    print("  geometric means", {mean.group: mean.ratio for mean in means})
    document = records.document("gpu", measured, means=[mean.to_dict() for mean in means])
    document["ok"] = all(r.right and r.passed is not False for r in measured) and all(m.passed for m in means)
    records.save(document, args.json.parent if args.json else Path("."))


FP32_FORWARD = ("64,32,4,2", "64,32,4,3", "64,64,4,2", "128,32,8,2", "128,32,4,2", "128,64,8,1", "64,64,8,1")
FP32_KEYS = ("32,32,4,2", "32,64,4,1", "64,32,4,1", "16,64,4,2", "32,64,8,1", "32,32,4,1")
FP32_QUERIES = ("32,32,4,2", "64,32,4,1", "64,32,4,2", "64,32,8,1", "64,16,4,2", "32,32,4,1")


def fp32(clock: Clock, args: argparse.Namespace) -> None:
    keys_only, queries_only = Needs(False, True, True), Needs(True, False, False)
    trials: dict[str, tuple[Needs | None, Any]] = {tile: (None, trial_of(tile + "p")) for tile in FP32_FORWARD}
    trials |= {"K" + tile: (keys_only, trial_of(tile + "p", "backward_dkdv")) for tile in FP32_KEYS}
    trials |= {"Q" + tile: (queries_only, trial_of(tile + "p", "backward_dq")) for tile in FP32_QUERIES}
    options = {"batch": 8, "heads": 16, "seqlen": 2048, "d": 128, "dtype": torch.float32, "mask": "causal"}
    compile_ahead([(options, t, n) for n, t in trials.values()], args.workers)
    call = make(8, 16, 2048, 128, causal(), dtype=torch.float32)
    runs = peers(call, True, ("eff",))
    runs |= {tile: ours(call, trial) for tile, (needs, trial) in trials.items() if needs is None}
    table("fp32 fwd d 128 causal S 2048", flops(call.problem), interleaved(runs, rounds=3))
    runs = peer_gradients(call, True, ("eff",))
    runs |= {t: our_gradients(call, needs, trial) for t, (needs, trial) in trials.items() if needs is not None}
    table("fp32 bwd d 128 causal S 2048", flops(call.problem, True), interleaved(runs, rounds=3))


def windows(clock: Clock, args: argparse.Namespace) -> None:
    """window(1024) at 16k must be at least 8 times faster than unmasked attention by the same kernel."""
    for d in (64, 128):
        base, near = make(1, 2048 // d, 16384, d, full()), make(1, 2048 // d, 16384, d, window(1024))
        runs = {
            "full": ours(base, None),
            "window": ours(near, None),
            "causal": ours(make(1, 2048 // d, 16384, d, causal()), None),
        }
        times = interleaved(runs, rounds=3)
        print(
            f"  d {d}: full {times['full']:.3f} ms, window {times['window']:.3f} ms: {times['full'] / times['window']:.1f}x",
            times,
        )
        RECORDS.append({"case": f"window d {d}", "ms": times})


def varlen(clock: Clock, args: argparse.Namespace) -> None:
    """Packed sequences of equal length against the dense batch."""
    for d, s in ((64, 2048), (128, 2048)):
        dense = make(16384 // s, 2048 // d, s, d, causal())
        problem = Problem.of(
            batch=16384 // s,
            heads=2048 // d,
            seqlen=16384,
            head_dim=d,
            mask=causal(),
            varlen=True,
            dtype="bfloat16",
            device=DEVICE,
        )
        cu = torch.arange(0, 16385, s, dtype=torch.int32, device=DEVICE)
        q, k, v = (
            torch.randn(16384, 2048 // d, d, dtype=torch.bfloat16, device=DEVICE).transpose(0, 1)[None]
            for _ in range(3)
        )
        packed = Call(problem, Inputs(q, k, v, cu_q=cu, cu_k=cu))
        runs = {"dense": ours(dense, None), "packed": ours(packed, None)}
        runs |= {"dense bwd": our_gradients(dense, Needs()), "packed bwd": our_gradients(packed, Needs())}
        times = interleaved(runs)
        print(f"  d {d} S {s}: " + "  ".join(f"{name} {ms:.3f} ms" for name, ms in times.items()), flush=True)
        RECORDS.append({"case": f"varlen d {d} S {s}", "ms": times})


def decode(clock: Clock, args: argparse.Namespace) -> None:
    """Bytes of K and V over time."""
    from tilewise.backends.triton.run import Trial

    shapes = ((8, 32, 8, 16384), (1, 32, 8, 131072), (64, 32, 8, 4096), (1, 64, 8, 8192), (8, 16, 1, 16384))
    blocks = ((64, 4, 4), (128, 3, 4), (64, 3, 4), (128, 2, 8), (32, 4, 4))
    jobs: list[Any] = []
    for heads, kv_heads in sorted({shape[1:3] for shape in shapes}):
        for block, stages, warps in blocks:
            plan = TilePlan(16, block, stages, warps, splits=4, pack_gqa=True, pass_="decode")
            options = {"batch": 2, "heads": heads, "seqlen": 1, "d": 128, "keys": 4096, "kv_heads": kv_heads}
            jobs.append((options, Trial((plan,), False), None))
            if stages > 2 and block > 32:
                jobs.append((options, Trial((plan,), True), None))
    compile_ahead(jobs, args.workers)
    for batch, heads, kv_heads, keys in shapes:
        call = make(batch, heads, 1, 128, keys=keys, kv_heads=kv_heads)
        size = 2.0 * batch * kv_heads * keys * 128 * 2
        runs = {**peers(call, False), "plan": ours(call)}
        for block, stages, warps in blocks:
            programs = batch * kv_heads
            for waves in (1, 2, 4):
                splits = max(1, min(keys // block, 132 * waves // programs))
                plan = TilePlan(16, block, stages, warps, splits=splits, pack_gqa=True, pass_="decode")
                runs[f"{block},{stages},{warps}/{splits}"] = ours(call, Trial((plan,), False))
                if stages > 2 and block > 32:
                    runs[f"{block},{stages},{warps}/{splits}t"] = ours(call, Trial((plan,), True))
        times = interleaved(runs, rounds=3, budget_ms=3.0)
        parts = [f"{name} {size / ms / 1e9:.2f}" for name, ms in sorted(times.items(), key=lambda item: item[1])]
        print(f"  B {batch} {heads}/{kv_heads} keys {keys} TB/s: " + "  ".join(parts), flush=True)
        RECORDS.append({"case": f"decode B {batch} {heads}/{kv_heads} {keys}", "bytes": size, "ms": times})


def host(clock: Clock, args: argparse.Namespace) -> None:
    """Host time of a tiny call: the device is never waited for inside the loop."""
    import tilewise as tw

    q, k, v = (torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    raw = ours(make(1, 2, 64, 64))
    calls = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
        "tilewise": lambda: tw.attention(q, k, v, backend="triton"),
        "run_forward": raw,
    }
    for name, fn in calls.items():
        for _ in range(20):
            fn()
        torch.cuda.synchronize()
        found = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(100):
                fn()
            found.append((time.perf_counter() - start) * 1e4)
            torch.cuda.synchronize()
        print(f"  {name}: {statistics.median(found):.1f} µs", flush=True)
        RECORDS.append({"case": f"host {name}", "us": statistics.median(found)})
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.enable()
    for _ in range(200):
        raw()
    profile.disable()
    torch.cuda.synchronize()
    pstats.Stats(profile).sort_stats("tottime").print_stats(14)


PARTS: dict[str, Callable[[Clock, argparse.Namespace], None]] = {
    "smoke": smoke,
    "conform": conform,
    "accuracy": accuracy,
    "forward": forward,
    "backward": backward,
    "suite": suite,
    "fp32": fp32,
    "window": windows,
    "varlen": varlen,
    "decode": decode,
    "host": host,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--json", type=Path, help="where the records go")
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit of each part")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--d", type=int, nargs="*", default=[64, 128], help="head dims for forward and backward")
    parser.add_argument("--s", type=int, nargs="*", default=[512, 2048, 8192, 16384], help="lengths of the same")
    parser.add_argument("--only", nargs="*", help="words that conformance cases must match")
    args = parser.parse_args()
    args.best = {}
    import triton

    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    for name in args.parts:
        print(f"{name}:", flush=True)
        start = time.monotonic()
        try:
            PARTS[name](Clock(args.seconds), args)
        except Exception:
            traceback.print_exc(limit=-6)
        print(f"  ({name} took {time.monotonic() - start:.0f} s)", flush=True)
        if args.json:
            args.json.write_text(
                json.dumps(
                    {"device": torch.cuda.get_device_name(), "triton": triton.__version__, "records": RECORDS}, indent=1
                )
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
