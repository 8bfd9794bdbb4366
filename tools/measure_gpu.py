"""Measure the Triton backend on a GPU, part by part; each part prints a short table and adds to one JSON file.

    PYTHONPATH=src python tools/measure_gpu.py smoke planner --json out.json --seconds 200

A part stops at its time limit and says what it left out. Kernels are compiled in parallel first (no GPU needed for that), then
timed side by side with SDPA's backends: the contenders of a case take turns in every round; medians over the rounds are shown,
the record has p20 and p80, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "tools")]

import gpu_conform  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_shapes  # noqa: E402
import torch  # noqa: E402
from gpu_timing import RECORDS, Clock  # noqa: E402

PARTS: dict[str, Callable[[Clock, argparse.Namespace], None]] = {
    "smoke": gpu_parts.smoke,
    "conform": gpu_conform.conform,
    "accuracy": gpu_parts.accuracy,
    "planner": gpu_parts.planner,
    "fp32": gpu_shapes.fp32,
    "fp32-tiles": gpu_shapes.fp32_tiles,
    "window": gpu_shapes.windows,
    "varlen": gpu_shapes.varlen,
    "decode": gpu_shapes.decode,
    "host": gpu_shapes.host_time,
}


def document(about: dict[str, str]) -> str:
    return json.dumps({**about, "records": RECORDS}, indent=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--json", type=Path, help="where the records go")
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit of each part")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--cases", nargs="*", default=[], help="names of the conformance cases to run; none: all")
    parser.add_argument("--s", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192, 16384], help="lengths")
    args = parser.parse_args()
    import triton

    about = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(*about.values(), flush=True)
    args.save = lambda: args.json.write_text(document(about)) if args.json else None
    for name in args.parts:
        print(f"{name}:", flush=True)
        start = time.monotonic()
        try:
            PARTS[name](Clock(args.seconds), args)
        except Exception:
            traceback.print_exc(limit=-6)
        print(f"  ({name} took {time.monotonic() - start:.0f} s)", flush=True)
        args.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
