"""Running a script again under another version of triton, which is installed beside the environment's on first use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_under(version: str, script: str, arguments: list[str]) -> int:
    """The script's exit status with that triton."""
    home = ROOT / "build" / f"triton-{version}"
    if not home.exists():
        unfinished = home.with_name(f"{home.name}.part")  # renamed when whole: an interrupted installation is not taken for one
        shutil.rmtree(unfinished, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished)]
        subprocess.run([*install, f"triton=={version}"], check=True)
        unfinished.rename(home)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home), str(ROOT / "src")])}
    return subprocess.run([sys.executable, script, *arguments], env=environment, check=False).returncode
