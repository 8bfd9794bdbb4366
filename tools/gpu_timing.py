"""What measuring the Triton backend takes: calls with tensors, tiles to try, peers, kernels compiled ahead, and turns."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.backends.base import BackwardInputs, Inputs, Needs, empty_lse, empty_out
from tilewise.backends.triton import host, run
from tilewise.masks import Binding, causal, full, window
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

DEVICE = "cuda"
RECORDS: list[dict[str, Any]] = []
PEERS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "eff": SDPBackend.EFFICIENT_ATTENTION}
MASKS: dict[str, Callable[[], Any]] = {"full": full, "causal": causal, "window": lambda: window(1024)}


class Clock:
    """A part's time limit."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()


class Call(NamedTuple):
    """One attention problem with its tensors."""

    problem: Problem
    inputs: Inputs


class Job(NamedTuple):
    """Kernels to compile ahead: the options of `make` with a mask's name, the tiles, and of what the gradients are wanted."""

    options: dict[str, Any]
    trial: run.Trial = run.PLANNED
    needs: Needs | None = None


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
    varlen: bool = False,
    tokens_first: bool = False,
    **features: Any,
) -> Call:
    """A call on unit-normal inputs; `varlen` packs the batch, all of it sequences of `seqlen` tokens.

    Packed tokens have their heads side by side in memory; with `tokens_first` those of a dense batch have, too.
    """
    device = device or DEVICE
    total = batch * seqlen if varlen else seqlen
    problem = Problem.of(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen=total,
        kv_seqlen=keys,
        head_dim=d,
        mask=mask,
        dtype=str(dtype).removeprefix("torch."),
        device=DEVICE,
        varlen=varlen,
        **features,
    )
    binding = Binding(problem.shape, problem.varlen, lambda x: torch.as_tensor(x, device=device))
    problem.memory["program"] = problem.mask.lower(binding)
    fresh = torch.empty if device == "meta" else torch.randn
    if varlen:
        q, k, v = (
            fresh((total, n, d), dtype=dtype, device=device).transpose(0, 1)[None]
            for n in (heads, problem.kv_heads, problem.kv_heads)
        )
        cu = torch.arange(0, total + 1, seqlen, dtype=torch.int32, device=device)
        return Call(problem, Inputs(q, k, v, cu_q=cu, cu_k=cu))
    shape = (batch, heads, seqlen, d), (batch, problem.kv_heads, problem.seqlen_k, d)
    if tokens_first:
        shape = tuple((b, s, h, d) for b, h, s, d in shape)  # type: ignore[assignment]
    q, k, v = (fresh(s, dtype=dtype, device=device) for s in (shape[0], shape[1], shape[1]))
    if tokens_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return Call(problem, Inputs(q, k, v))


def tile_of(text: str, pass_: str) -> TilePlan:
    m, n, warps, stages = map(int, text.rstrip("p").split(","))
    return TilePlan(m, n, stages, warps, pass_=pass_)


def trial_of(text: str, pass_: str = "forward") -> run.Trial:
    """Queries, keys, warps, stages; `p` reads the streamed operands through pointers."""
    return run.Trial((tile_of(text, pass_),), "p" not in text)


def backward_trial(text: str) -> run.Trial:
    """A tile for dK and dV, and one for dQ."""
    keys, queries = text.split("/")
    return run.Trial((tile_of(keys, "backward_dkdv"), tile_of(queries, "backward_dq")), "p" not in text)


def flops(p: Problem, backward: bool = False) -> float:
    """Of the pairs a full or causal mask allows; a backward counts as 2.5 forwards, as is the custom."""
    pairs = p.seqlen_q * p.seqlen_k if p.mask == full() else p.seqlen_q * (p.seqlen_q + 1) // 2
    return 4.0 * p.batch * p.heads * pairs * p.head_dim * (2.5 if backward else 1.0)


def geometry(lengths: list[int], tokens: int = 16384, hidden: int = 2048) -> list[dict[str, int]]:
    return [{"batch": tokens // s, "heads": hidden // d, "seqlen": s, "d": d} for d in (64, 128) for s in lengths]


def compile_one(job: Job) -> str:
    """In a worker process: compile kernels into triton's cache on disk. Returns what is to be said about them."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    said: list[str] = []
    options = dict(job.options)
    try:
        from compile_matrix import resources
        from gpu_launches import launches
        from triton.backends.compiler import GPUTarget

        from tilewise.backends.gpu.launch import compile_for, signature
        from tilewise.hardware import device

        options["mask"] = MASKS[options.get("mask", "full")]()
        problem, inputs = make(**options, device="meta")
        maps = job.trial.maps if job.trial.maps is not None else run.worth_maps(problem)
        for name, launch in launches(problem, inputs, device("h200"), needs=job.needs, trial=job.trial, maps=maps):
            config, settings = launch.config, launch.options
            compiled = compile_for(GPUTarget("cuda", 90, 32), launch.kernel, signature(launch.args), config, settings)
            _launcher(compiled)
            spilled = resources(compiled, "")[1]
            if spilled:
                tile = f"{config.BLOCK_M},{config.BLOCK_N},{settings.num_warps},{settings.num_stages}"
                said.append(f"d {options['d']} {problem.dtype} {name} {tile} spills {spilled} B")
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return f"{options} {job.trial}: {type(error).__name__} {str(error)[-300:]}"
    return "; ".join(said)


def _launcher(compiled: Any) -> None:
    """Some tritons compile a launcher for each signature, too; without a GPU at hand they cannot."""
    if torch.cuda.is_available():
        from triton.runtime import driver

        driver.active.launcher_cls(compiled.src, compiled.metadata)


def compile_ahead(jobs: list[Job], workers: int) -> None:
    start = time.monotonic()
    said: dict[str, None] = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for text in pool.map(compile_one, jobs):
            said.update(dict.fromkeys(filter(None, text.split("; "))))
    for text in said:
        print("  compiling:", text)
    print(f"  compiled the kernels of {len(jobs)} trials in {time.monotonic() - start:.0f} s", flush=True)


def interleaved(
    contenders: dict[str, Callable[[], Any]], rounds: int = 5, budget_ms: float = 12.0
) -> dict[str, dict[str, float]]:
    """Milliseconds of each (p20, p50, p80 over the rounds); one that raises is left out, with a line saying why."""
    live: dict[str, tuple[Callable[[], Any], int]] = {}
    for name, fn in contenders.items():
        try:
            for _ in range(3):  # as it comes, recorded, repeated
                fn()
            torch.cuda.synchronize()
            start = time.perf_counter()
            fn()
            torch.cuda.synchronize()
            live[name] = fn, max(1, min(200, int(budget_ms / 1e3 / max(1e-6, time.perf_counter() - start))))
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:160]}")
    times: dict[str, list[float]] = {name: [] for name in live}
    names = list(live)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            fn, repeat = live[name]
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeat):
                fn()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / repeat)
    return {name: spread(values) for name, values in times.items()}


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {"p20": ordered[round(0.2 * last)], "p50": statistics.median(ordered), "p80": ordered[round(0.8 * last)]}


def show(title: str, work: float, times: dict[str, dict[str, float]], unit: str = "TFLOP/s", **more: Any) -> None:
    """A line of speeds, fastest first, and the record."""
    scale = 1e9
    order = sorted(times.items(), key=lambda item: item[1]["p50"])
    digits = 0 if unit == "TFLOP/s" else 2
    parts = [f"{name} {work / ms['p50'] / scale:.{digits}f}" for name, ms in order]
    print(f"  {title:28} " + "  ".join(parts), flush=True)
    RECORDS.append({"case": title, "unit": unit, "work": work, "ms": times, **more})


def peers(call: Call, is_causal: bool, which: tuple[str, ...] = ("fa2",)) -> dict[str, Callable[[], Any]]:
    q, k, v = call.inputs[:3]
    gqa = call.problem.group > 1

    def held(backend: Any) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=gqa)

    return {name: (lambda b=PEERS[name]: held(b)) for name in which}


def peer_gradients(call: Call, is_causal: bool, which: tuple[str, ...] = ("fa2",)) -> dict[str, Callable[[], Any]]:
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


def ours(call: Call, trial: run.Trial = run.PLANNED) -> Callable[[], Any]:
    out, lse = empty_out(call.inputs.q, call.problem.head_dim_v), empty_lse(call.inputs.q)
    return lambda: run.run_forward(call.problem, call.inputs, out, lse, trial)


def our_gradients(call: Call, needs: Needs | None = None, trial: run.Trial = run.PLANNED) -> Callable[[], Any]:
    out, lse = host.backend.forward(call.problem, call.inputs)
    given = BackwardInputs(out, lse, torch.randn_like(out), needs=needs or Needs())
    return lambda: run.run_backward(call.problem, call.inputs, given, trial)
