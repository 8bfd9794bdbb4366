"""Parts of the measurement: fp32, windows, packed batches, decoding, and what a call costs the host."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from gpu_timing import (
    DEVICE,
    MASKS,
    RECORDS,
    Clock,
    Job,
    backward_trial,
    compile_ahead,
    flops,
    interleaved,
    make,
    our_gradients,
    ours,
    peer_gradients,
    peers,
    show,
    spread,
    trial_of,
)

from tilewise.backends.base import Needs
from tilewise.backends.triton import run

FP32_FORWARD = {
    64: ["64,64,4,2", "64,32,4,2", "128,64,8,2"],
    128: ["64,32,4,2", "128,32,8,2"],
}
FP32_KEYS = {
    64: ["64,64,4,2", "64,128,8,2", "32,64,4,2r168"],
    128: ["32,128,8,2", "32,64,4,2"],
}
FP32_QUERIES = {
    64: ["64,64,4,2", "128,64,8,2", "64,32,4,2r168"],
    128: ["128,32,8,2", "128,64,8,1", "64,32,4,2"],
}
FP32_ALONE = {64: [], 128: ["32,128,8,2", "64,128,8,1", "32,64,4,2"]}
KEYS_ONLY, QUERIES_ONLY = Needs(False, True, True), Needs(True, False, False)
DK_ONLY, DV_ONLY = Needs(False, True, False), Needs(False, False, True)


def fp32_shape(d: int, s: int) -> dict[str, Any]:
    return {"batch": 16384 // s, "heads": 2048 // d, "seqlen": s, "d": d, "dtype": torch.float32}


def fp32_tiles(clock: Clock, args: argparse.Namespace) -> None:
    """Tiles for fp32: forward, dK with dV (K), each of them alone (dK, dV), dQ alone (Q), all with the passes before it."""
    trials: dict[int, dict[str, tuple[Needs | None, run.Trial]]] = {}
    for d in (64, 128):
        trials[d] = {tile: (None, trial_of(tile)) for tile in FP32_FORWARD[d]}
        trials[d] |= {"K" + tile: (KEYS_ONLY, trial_of(tile, "backward_dkdv")) for tile in FP32_KEYS[d]}
        trials[d] |= {"dK" + tile: (DK_ONLY, trial_of(tile, "backward_dkdv")) for tile in FP32_ALONE[d]}
        trials[d] |= {"dV" + tile: (DV_ONLY, trial_of(tile, "backward_dkdv")) for tile in FP32_ALONE[d]}
        trials[d] |= {"Q" + tile: (QUERIES_ONLY, trial_of(tile, "backward_dq")) for tile in FP32_QUERIES[d]}
    jobs = [
        Job({**fp32_shape(d, 2048), "mask": "causal"}, trial, needs)
        for d in trials
        for needs, trial in trials[d].values()
    ]
    compile_ahead(jobs, args.workers)
    for d, found in trials.items():
        call = make(**fp32_shape(d, 2048), mask=MASKS["causal"]())
        runs = peers(call, True, ("eff",))
        runs |= {tile: ours(call, trial) for tile, (needs, trial) in found.items() if needs is None}
        show(f"fp32 forward tiles d {d}", flops(call.problem), interleaved(runs, rounds=3, budget_ms=6.0))
        runs = peer_gradients(call, True, ("eff",))
        runs |= {t: our_gradients(call, needs, trial) for t, (needs, trial) in found.items() if needs is not None}
        show(f"fp32 backward tiles d {d}", flops(call.problem, True), interleaved(runs, rounds=3, budget_ms=6.0))


FP32_OTHER = {
    ("backward", 64): backward_trial("64,128,8,2/128,64,8,2"),
    ("backward", 128): run.Trial(apart=False),
}
"""What might have been chosen instead of the planner's tiles and of dK and dV apart."""


def fp32_jobs(kinds: list[tuple[int, str]]) -> list[Job]:
    """A job for each kernel, so that they are compiled side by side."""
    jobs = []
    for d, name in kinds:
        shape = {**fp32_shape(d, 2048), "mask": name}
        parts = (KEYS_ONLY, QUERIES_ONLY) if d == 64 else (DK_ONLY, DV_ONLY, QUERIES_ONLY)
        jobs += [Job(shape), *(Job(shape, needs=needs) for needs in parts)]
        other = FP32_OTHER["backward", d]
        jobs += [Job(shape, other, KEYS_ONLY), *([Job(shape, other, QUERIES_ONLY)] if other.tiles else [])]
    return jobs


def fp32(clock: Clock, args: argparse.Namespace) -> None:
    """fp32 with the planner's choices, and with others, against SDPA's memory-efficient backend."""
    kinds = [(d, name) for d in (64, 128) for name in ("full", "causal")]
    compile_ahead(fp32_jobs(kinds), args.workers)
    ratios: dict[str, list[float]] = {"forward": [], "backward": []}
    for d, name in kinds:
        for s in (512, 2048, 8192):
            call = make(**fp32_shape(d, s), mask=MASKS[name]())
            for passes, peer, own in (("forward", peers, ours), ("backward", peer_gradients, our_gradients)):
                runs = {**peer(call, name == "causal", ("eff",)), "plan": own(call)}
                if (passes, d) in FP32_OTHER and clock.left() > 0:
                    runs["other"] = own(call, trial=FP32_OTHER[passes, d])
                times = interleaved(runs, rounds=5, budget_ms=4.0)
                ratio = times["eff"]["p50"] / times["plan"]["p50"]
                ratios[passes].append(ratio)
                title = f"fp32 {passes} d {d} {name} S {s}: {ratio:.2f}"
                show(title, flops(call.problem, passes == "backward"), times, ratio=ratio)
    means = {passes: statistics.geometric_mean(found) for passes, found in ratios.items() if found}
    print("  ratio to the memory-efficient backend in geometric mean", means, flush=True)
    RECORDS.append({"case": "fp32 means", "ratio": means})


def windows(clock: Clock, args: argparse.Namespace) -> None:
    """window(1024) at 16k against unmasked attention by the same kernel."""
    shapes = [{"batch": 1, "heads": 2048 // d, "seqlen": 16384, "d": d} for d in (64, 128)]
    kinds = [(shape, name, needs) for shape in shapes for name in MASKS for needs in (None, Needs())]
    compile_ahead([Job({**shape, "mask": name}, needs=needs) for shape, name, needs in kinds], args.workers)
    for shape in shapes:
        d = shape["d"]
        calls = {name: make(**shape, mask=mask()) for name, mask in MASKS.items()}
        for passes, own in (("forward", ours), ("backward", our_gradients)):
            times = interleaved({name: own(call) for name, call in calls.items()}, rounds=5, budget_ms=4.0)
            ratio = times["full"]["p50"] / times["window"]["p50"]
            text = "  ".join(f"{name} {ms['p50']:.3f} ms" for name, ms in times.items())
            print(f"  window(1024) of 16k, {passes} d {d}: {ratio:.1f} times faster ({text})", flush=True)
            RECORDS.append({"case": f"window {passes} d {d}", "ms": times, "ratio": ratio})


def varlen_jobs() -> list[Job]:
    forms: tuple[dict[str, Any], ...] = ({}, {"varlen": True})  # a dense batch has one signature in either layout
    return [
        Job({"batch": 8, "heads": 2048 // d, "seqlen": 2048, "d": d, "mask": name, **form}, needs=needs)
        for d in (64, 128)
        for name in ("causal", "full")
        for form in forms
        for needs in (None, Needs())
    ]


def varlen(clock: Clock, args: argparse.Namespace) -> None:
    """Packed sequences of equal length against dense batches: equal work, in the same layout in memory and heads first."""
    compile_ahead(varlen_jobs(), args.workers)
    for s in (512, 2048):
        for d, name in ((d, name) for d in (64, 128) for name in ("causal", "full")):
            if clock.left() < 2:
                print(f"  time is up before d {d} {name} S {s}")
                continue
            shape = {"batch": 16384 // s, "heads": 2048 // d, "seqlen": s, "d": d}
            calls = {
                "packed": make(**shape, mask=MASKS[name](), varlen=True),
                "dense": make(**shape, mask=MASKS[name](), tokens_first=True),
                "heads first": make(**shape, mask=MASKS[name]()),
            }
            for passes, own in (("forward", ours), ("backward", our_gradients)):
                times = interleaved({who: own(call) for who, call in calls.items()}, rounds=7, budget_ms=3.0)
                ratio, other = (times["packed"]["p50"] / times[who]["p50"] for who in ("dense", "heads first"))
                title = f"varlen {passes} d {d} {name} S {s}"
                print(f"  {title}: {ratio:.3f} times the time of dense, {other:.3f} of heads first", flush=True)
                RECORDS.append({"case": title, "ms": times, "ratio": ratio, "to_heads_first": other})


def decode(clock: Clock, args: argparse.Namespace) -> None:
    """Bytes of K and V over time, with the planner's tile and splits."""
    shapes = ((8, 32, 8, 16384), (1, 32, 8, 131072), (64, 32, 8, 4096), (1, 64, 8, 8192), (8, 16, 1, 16384))
    jobs = [
        Job({"batch": b, "heads": h, "seqlen": 1, "d": 128, "keys": n, "kv_heads": hk}, run.Trial(maps=False))
        for b, h, hk, n in shapes
    ]
    compile_ahead(jobs, args.workers)
    for batch, heads, kv_heads, keys in shapes:
        call = make(batch, heads, 1, 128, keys=keys, kv_heads=kv_heads)
        size = 2.0 * batch * kv_heads * keys * 128 * 2
        runs = {**peers(call, False, ("cudnn", "fa2")), "plan": ours(call)}
        times = interleaved(runs, rounds=7, budget_ms=3.0)
        ratio = times["cudnn"]["p50"] / times["plan"]["p50"]
        show(f"decode B {batch} {heads}/{kv_heads} {keys}: {ratio:.2f}", size, times, unit="TB/s", ratio=ratio)


def host_time(clock: Clock, args: argparse.Namespace) -> None:
    """Host time of a tiny call: the device is never waited for inside the loop."""
    import tilewise as tw

    tensors = [torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    calls = {
        "sdpa": lambda: F.scaled_dot_product_attention(*tensors),
        "tilewise": lambda: tw.attention(*tensors, backend="triton"),
        "sdpa causal": lambda: F.scaled_dot_product_attention(*tensors, is_causal=True),
        "tilewise causal": lambda: tw.attention(*tensors, mask=tw.causal(), backend="triton"),
        "run_forward": ours(make(1, 2, 64, 64)),
        "sdpa with gradient": lambda: F.scaled_dot_product_attention(*leaves),
        "tilewise with gradient": lambda: tw.attention(*leaves, backend="triton"),
    }
    for fn in calls.values():
        for _ in range(20):
            fn()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(9):
        for name, fn in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                fn()
            found[name].append((time.perf_counter() - start) * 1e4)
    for name, times in found.items():
        print(f"  {name}: {statistics.median(times):.1f} µs", flush=True)
        RECORDS.append({"case": f"host {name}", "us": spread(times)})
