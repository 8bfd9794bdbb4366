"""Parts of the measurement: is it right, and is the planner's tile the best there is?"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from gpu_timing import (
    MASKS,
    RECORDS,
    Call,
    Clock,
    Job,
    backward_trial,
    compile_ahead,
    flops,
    geometry,
    interleaved,
    make,
    our_gradients,
    ours,
    peer_gradients,
    peers,
    show,
    trial_of,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.backends.base import BackwardInputs, Needs
from tilewise.backends.triton import host
from tilewise.masks import causal, full

FORWARD = {
    64: ["64,64,4,3", "64,64,4,3p", "64,64,4,4", "128,64,4,3p", "128,128,8,3p", "64,128,4,3"],
    128: ["64,64,4,3", "64,64,4,3p", "64,64,4,4", "128,64,8,3p", "128,128,8,3p", "128,128,8,3"],
}
BACKWARD = {
    64: ["64,64,4,3/64,64,4,3", "64,64,4,2/64,64,4,3", "128,64,4,2/64,64,4,3", "64,64,4,3p/64,64,4,3p"],
    128: ["32,64,4,3/64,64,4,3", "32,64,4,3/64,32,4,3", "32,64,4,2/128,64,8,3", "32,64,4,3p/64,64,4,3p"],
}


def smoke(clock: Clock, args: argparse.Namespace) -> None:
    """Does it run and is it right? Small problems against SDPA's math in fp64."""
    for d, mask in ((64, causal()), (128, full()), (256, causal()), (40, causal())):
        call = make(2, 4, 300, d, mask, kv_heads=2)
        print(f"  d {d} {call.problem.program.structure!r}:", errors(call), flush=True)


PRECISIONS = (
    (torch.float32, "default"),
    (torch.float32, "tf32"),
    (torch.bfloat16, "default"),
    (torch.float16, "default"),
)


def accuracy(clock: Clock, args: argparse.Namespace) -> None:
    """Errors at S 2048 against fp64, for each dtype."""
    for dtype, precision in PRECISIONS:
        if clock.left() < 10:
            print(f"  time is up before {dtype} {precision}")
            continue
        base = {"batch": 1, "heads": 4, "seqlen": 2048, "dtype": dtype, "precision": precision}
        kinds = [({**base, "d": d}, mask) for d in (64, 128) for mask in ("full", "causal")]
        parts = (None, Needs(False, True, True), Needs(True, False, False))
        jobs = [Job({**shape, "mask": mask}, needs=needs) for shape, mask in kinds for needs in parts]
        compile_ahead(jobs, args.workers)
        for shape, mask in kinds:
            call = make(**shape, mask=MASKS[mask]())
            title = f"{call.problem.dtype} {precision} d {call.problem.head_dim} {mask}"
            found = errors(call)
            text = "  ".join(f"{name} {relative:.1e} {largest:.1e}" for name, (relative, largest) in found.items())
            print(f"  {title:32} relative, largest: {text}", flush=True)
            RECORDS.append({"case": f"accuracy {title}", "relative_and_largest": found})


def errors(call: Call) -> dict[str, tuple[float, float]]:
    """Error of output and gradients against SDPA's math in fp64: of the whole by norm, and the largest of all elements."""
    q, k, v = (x.double().requires_grad_() for x in call.inputs[:3])
    p = call.problem
    rows = torch.arange(p.seqlen_q, device=q.device)[:, None] + p.seqlen_k - p.seqlen_q
    keep = torch.arange(p.seqlen_k, device=q.device)[None, :] <= rows if p.program.structure == "b" else None
    wide = (x.repeat_interleave(p.group, 1) for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(q, *wide, attn_mask=keep)
    out, lse = host.backend.forward(p, call.inputs)
    dout = torch.randn_like(out)
    wanted = (want, *torch.autograd.grad(want, (q, k, v), dout.double()))
    got = (out, *host.backend.backward(p, call.inputs, BackwardInputs(out, lse, dout))[:3])
    found = {}
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        assert x is not None
        gap = x.double() - y.detach()
        found[name] = float(gap.norm() / y.norm()), float(gap.abs().max())
    return found


def planner_jobs() -> list[Job]:
    jobs = []
    for d in (64, 128):
        for mask in ("full", "causal"):
            options = {"batch": 8, "heads": 2048 // d, "seqlen": 2048, "d": d, "mask": mask}
            jobs += [Job(options, trial_of(tile)) for tile in FORWARD[d]] + [Job(options), Job(options, needs=Needs())]
            jobs += [Job(options, backward_trial(pair), Needs()) for pair in BACKWARD[d]]
    return jobs


def planner(clock: Clock, args: argparse.Namespace) -> None:
    """The planner's tile beside others, forward and backward: its time over the best one's."""
    compile_ahead(planner_jobs(), args.workers)
    worst: dict[str, float] = {}
    for passes in ("forward", "backward"):
        for shape in geometry(args.s):
            for name, mask in MASKS.items():
                if name == "window":
                    continue
                d, s = shape["d"], shape["seqlen"]
                if clock.left() < 3:
                    print(f"  time is up before {passes} d {d} {name} S {s}")
                    continue
                call = make(**shape, mask=mask())
                if passes == "forward":
                    runs = {**peers(call, name == "causal"), "plan": ours(call)}
                    runs |= {tile: ours(call, trial_of(tile)) for tile in FORWARD[d]}
                else:
                    runs = {**peer_gradients(call, name == "causal"), "plan": our_gradients(call)}
                    runs |= {pair: our_gradients(call, None, backward_trial(pair)) for pair in BACKWARD[d]}
                times = interleaved(runs, rounds=5, budget_ms=3.0)
                rivals = [ms["p50"] for other, ms in times.items() if other != "fa2"]
                over = times["plan"]["p50"] / min(rivals)
                worst[passes] = max(worst.get(passes, 0.0), over)
                title = f"{passes} d {d} {name} S {s}"
                show(title, flops(call.problem, passes == "backward"), times, plan_over_best=over)
    print("  the planner's time over the best one's, at worst:", {k: round(v, 3) for k, v in worst.items()}, flush=True)
    RECORDS.append({"case": "planner", "plan_over_best_at_worst": worst})
