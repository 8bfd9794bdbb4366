"""Run a choice of the tests under every version of torch that tilewise is tested with on a CPU.

    python tools/test_versions.py                the oldest supported torch, then the one of this environment
    python tools/test_versions.py --only 2.10.0

An older torch goes into an environment of its own, `.venv-torch-<version>`, with everything else as pinned. It must be a build
for CPUs: before anything is installed the package index is asked what that torch requires, and a build for GPUs, which would
bring gigabytes of libraries, is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
OLDEST = "2.10.0"
TESTS = (
    "tests/ops",
    "tests/conformance",
    *(f"tests/api/test_{name}.py" for name in ("semantics", "call_cache", "bad_input")),
    "tests/backends/test_aten.py",
    *(f"tests/integrations/test_{name}.py" for name in ("sdpa", "nn", "flash_attn", "transformers")),
)
"""What depends on torch: the compiler, operators, semantics, the cache of calls, and the integrations."""
GPU_ONLY = re.compile(r"^(nvidia|cuda|triton|rocm|pytorch-triton|intel)")
NOT_FOR_TESTS = {"torch", "triton", "ruff", "mypy", "hatchling", "editables"}


class NoCpuBuild(Exception):
    """The package index has no such torch for this machine, or only one for GPUs."""


def pip(python: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def requirements_here(lines: list[str]) -> list[Requirement]:
    """Those that hold on this machine, extras left out."""
    found = [Requirement(line) for line in lines]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def cpu_build(torch: str) -> tuple[str, list[str]]:
    """The requirement of a CPU build in the package index, and what it needs."""
    reasons = []
    for wanted in (f"torch=={torch}+cpu", f"torch=={torch}"):
        asked = pip(
            sys.executable, "install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:",
            "--report", "-", wanted,
        )  # fmt: skip
        if asked.returncode:
            reasons.append(f"{wanted}: not in the package index for this machine")
            continue
        (wheel,) = json.loads(asked.stdout)["install"]
        needs = requirements_here(wheel["metadata"].get("requires_dist", []))
        libraries = [r.name for r in needs if GPU_ONLY.match(r.name.lower())]
        if not libraries:
            return wanted, [str(r).split(";")[0].strip() for r in needs]
        reasons.append(f"{wanted}: a build for GPUs, which requires {libraries[0]} and {len(libraries) - 1} more")
    raise NoCpuBuild("; ".join(reasons))


def environment(torch: str) -> Path:
    """The Python of an environment with that torch, made on first use and again when the pins change."""
    home = ROOT / f".venv-torch-{torch}"
    python, stamp = home / "bin" / "python", home / ".installed"
    pins, project = (ROOT / "constraints.txt").read_text(), (ROOT / "pyproject.toml").read_text()
    state = hashlib.sha256((pins + project).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == state:
        return python
    wanted, needs = cpu_build(torch)
    print(f"torch {torch}: making {home.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    others = home / "constraints.txt"
    others.write_text("".join(line for line in pins.splitlines(True) if not re.match(r"(torch|triton)==", line)))
    declared = tomllib.loads(project)["project"]
    needs += [*declared["dependencies"], *declared["optional-dependencies"]["dev"]]
    chosen = [str(r) for r in requirements_here(needs) if r.name not in NOT_FOR_TESTS]
    for arguments in (["--no-deps", wanted], ["-c", str(others), *chosen]):
        done = pip(python, "install", *arguments)
        if done.returncode:
            sys.exit(f"torch {torch}: pip install {' '.join(arguments)} failed:\n{done.stderr}")
    stamp.write_text(state)
    return python


def run_tests(python: Path | str, torch: str, workers: str, more: list[str]) -> bool:
    """Whether the tests pass there."""
    print(f"torch {torch}: {' '.join(more or TESTS)}", flush=True)
    settings = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-q", "-n", workers, "--dist", "worksteal", *(more or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=settings, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="this version of torch alone")
    parser.add_argument("--workers", default="2")
    parser.add_argument("tests", nargs="*", help="these tests instead of the choice")
    given = parser.parse_args()
    own = version("torch")
    results = {}
    for torch in [given.only] if given.only else [OLDEST, own]:
        try:
            python = sys.executable if torch == own else environment(torch)
        except NoCpuBuild as reason:
            sys.exit(
                f"torch {torch}: not tested, there is no CPU build of it here ({reason}). "
                "Nothing was installed. Point pip at an index that has one (PIP_EXTRA_INDEX_URL) and try again."
            )
        results[torch] = run_tests(python, torch, given.workers, given.tests)
    for torch, passed in results.items():
        print(f"torch {torch}: {'passed' if passed else 'FAILED'}")
    sys.exit(not all(results.values()))


if __name__ == "__main__":
    main()
