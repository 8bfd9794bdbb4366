"""The models in bf16 on a GPU, without pytest: a line for each, and a failure if one is outside the criterion.

PYTHONPATH=src:. python -m tests.integrations.gpu
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import transformers

from tests.integrations.models import CASES, excesses, lag, run_three, size
from tilewise.integrations.transformers import register


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--compiled", action="store_true", help="let transformers compile Llama's steps over a static cache"
    )
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    register()
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"{name}, {options.dtype}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'model':>8}  error/eager's: logits  gradients   tokens behind / allowed: dynamic     static   seconds")
    failed = 0
    for case in CASES:
        if not case.swappable():
            print(f"{case.name:>8}  computes its attention itself in this transformers")
            continue
        start = time.perf_counter()
        ours, eager, exact = run_three(case, options.device, dtype)
        found = excesses(ours, eager, exact, torch.finfo(dtype).eps / 2)
        a, b, c = (torch.cat([g.flatten() for g in n.gradients.values()]) for n in (ours, eager, exact))
        logits = size(ours.logits - exact.logits) / size(eager.logits - exact.logits)
        behind = ["-", "-"]
        if case.generates:
            compiled = options.compiled and case.name == "llama"
            lags = [lag(case, cache, options.device, dtype, compiled=compiled) for cache in (None, "static")]
            found += [f"tokens: {x}" for x in lags if not x.ok]
            behind = [f"{x.most:.3f}/{x.slack:.3f}" for x in lags]
        seconds = time.perf_counter() - start
        ratio = size(a - c) / size(b - c)
        print(f"{case.name:>8}  {logits:>20.3f}  {ratio:>9.3f}   {behind[0]:>32}  {behind[1]:>9}  {seconds:>8.1f}")
        for line in found:
            print(f"{'':>10}FAILED {line}")
        failed += bool(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
