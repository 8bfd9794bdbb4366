"""Compare every model type: `python -m tests.integrations.zoo [--write] [type …]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import transformers

from tests.integrations.zoo.compare import Outcome, compare, start
from tests.integrations.zoo.table import PAGE, read, save, stale

LEAST = 150  # types that are compared


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integrations.zoo", description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all of them without any")
    parser.add_argument("--write", action="store_true", help="write the pages (only the types, if given), do not check them")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    types = chosen.types or sorted(transformers.CONFIG_MAPPING.keys())
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn"), initializer=start) as pool:
        for outcome in pool.map(compare, types):
            outcomes.append(outcome)
            print(f"{len(outcomes)}/{len(types)}", *outcome, sep="  ", flush=True)
    counts = Counter(o.verdict for o in outcomes)
    print(dict(counts))
    wrong = [f"{o.model_type}: {o.detail}" for o in outcomes if o.verdict == "different"]
    if not chosen.types and counts["equal"] < LEAST:
        wrong.append(f"only {counts['equal']} types are compared, need {LEAST}")
    if chosen.write:
        kept = read(PAGE.read_text(encoding="utf-8")) if chosen.types else {}
        save({**kept, **{o.model_type: o for o in outcomes}}.values())
    else:
        wrong += stale(outcomes, read(PAGE.read_text(encoding="utf-8")))
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
