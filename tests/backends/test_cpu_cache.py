"""Compiled kernels on disk: reused, and never trusted blindly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("llvmlite")

from tilewise.backends.base import Inputs
from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu import image, plan
from tilewise.backends.cpu.backend import backend
from tilewise.backends.cpu.spec import Kernel, Register
from tilewise.hardware.cache import CACHE_VARIABLE
from tilewise.hardware.probe import probe_cpu
from tilewise.problem import Problem

PROBLEM = Problem.of(heads=1, head_dim=8, seqlen=20, dtype="float32")
SCRIPT = """
import torch, sys
from tilewise.backends.base import Inputs
from tilewise.backends.cpu.backend import backend
from tilewise.problem import Problem
torch.set_num_threads(2)
g, total = torch.Generator().manual_seed(0), 0.0
for seqlen in (20, 300):  # one thread, two threads
    q, k, v = (torch.randn(1, 2, seqlen, 64, generator=g) for _ in range(3))
    out, _ = backend.forward(Problem.of(heads=2, head_dim=64, seqlen=seqlen, dtype="float32"), Inputs(q, k, v))
    total += out.double().sum().item()
print(total, "llvmlite.binding" in sys.modules or "tilewise.backends.cpu.ir" in sys.modules)
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has compiled nothing yet."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiler, "_kernels", {})
    return tmp_path / "cpu"


def attend() -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 20, 8, generator=g) for _ in range(3))
    problem = Problem.of(heads=1, head_dim=8, seqlen=20, dtype="float32")
    return backend.forward(problem, Inputs(q, k, v))[0]


def expected() -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 20, 8, generator=g) for _ in range(3))
    return torch.softmax(q @ k.mT / 8**0.5, -1) @ v


def only_entry(directory: Path) -> Path:
    (entry,) = directory.glob("*.o")
    return entry


def test_an_entry_is_written_and_read_back(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = attend()
    assert only_entry(directory).exists()
    compiler._kernels.clear()
    monkeypatch.setattr(compiler, "build", lambda *_: pytest.fail("compiled again"))
    assert torch.equal(attend(), first)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "foreign", "misplaced"])
def test_a_damaged_entry_is_built_again(directory: Path, damage: str) -> None:
    attend()
    entry = only_entry(directory)
    good = entry.read_bytes()
    bad = {
        "flip": good[:-20] + bytes([good[-20] ^ 1]) + good[-19:],
        "truncate": good[: len(good) // 2],
        "empty": b"",
        "foreign": b"not one of ours" * 100,
        "misplaced": compiler.MAGIC + compiler._seal(entry.with_name("other.o"), good[-100:]) + good[-100:],
    }[damage]
    entry.write_bytes(bad)
    compiler._kernels.clear()
    torch.testing.assert_close(attend(), expected())
    assert entry.read_bytes() == good, "the damaged entry should have been replaced"


@pytest.mark.parametrize("what", ["entry", "directory"])
def test_what_others_could_have_written_is_not_run(directory: Path, what: str) -> None:
    attend()
    entry = only_entry(directory)
    open_to_all = entry if what == "entry" else entry.parent
    open_to_all.chmod(open_to_all.stat().st_mode | 0o022)
    assert compiler.read_entry(entry) is None
    compiler._kernels.clear()
    torch.testing.assert_close(attend(), expected())


def test_a_directory_that_cannot_be_used_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way of a directory")
    monkeypatch.setenv(CACHE_VARIABLE, str(blocked))
    monkeypatch.setattr(compiler, "_kernels", {})
    torch.testing.assert_close(attend(), expected())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="permissions do not bind this user")
def test_a_read_only_directory_only_costs_time(directory: Path) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o500)
    torch.testing.assert_close(attend(), expected())


def test_the_name_depends_on_kernel_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = probe_cpu()
    kernel, backward = (plan.kernel_for(PROBLEM, tile, spec) for tile in plan.tiles(PROBLEM, spec).values())
    base = compiler.entry_path(repr(kernel))
    assert compiler.entry_path(repr(backward)) != base
    monkeypatch.setattr(compiler, "fingerprint", lambda: "another machine")
    assert compiler.entry_path(repr(kernel)) != base


@pytest.mark.skipif(not image.supported(), reason="images are for Linux")
@pytest.mark.parametrize("kind", ["forward", "backward", "decode"])
@pytest.mark.parametrize("triple", ["aarch64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"])
def test_kernels_become_images(kind: str, triple: str) -> None:
    """Every reference of a kernel must be one that `link` knows, or processes would load LLVM to load a kernel."""
    lanes = 4 if triple.startswith("aarch64") else 16
    cpu = "neoverse-n1" if lanes == 4 else "skylake-avx512"
    kernel = Kernel(kind, "float32", Register(lanes, 4, 4), "b")
    assert image.link(compiler.build(kernel, compiler.Machine(triple, cpu, "")), "worker") is not None


@pytest.mark.skipif(not image.supported(), reason="images are for Linux")
def test_image_and_object_compute_the_same(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_image = attend()
    assert compiler.read_entry(only_entry(directory)).startswith(compiler.IMAGE)  # type: ignore[union-attr]
    only_entry(directory).unlink()
    compiler._kernels.clear()
    monkeypatch.setattr(image, "link", lambda data, symbol: None)
    assert torch.equal(attend(), with_image)
    assert compiler.read_entry(only_entry(directory)).startswith(compiler.OBJECT)  # type: ignore[union-attr]


@pytest.mark.skipif(not image.supported(), reason="images are for Linux")
def test_memory_that_may_not_be_executable_is_left_to_llvm(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(content: bytes) -> None:
        raise OSError("not allowed")

    monkeypatch.setattr(image, "Mapped", refuse)
    torch.testing.assert_close(attend(), expected())


def test_what_is_no_plain_object_is_left_to_llvm() -> None:
    assert image.link(b"", "worker") is None
    assert image.link(b"\xcf\xfa\xed\xfe" + bytes(100), "worker") is None
    outside = "declare void @elsewhere()\ndefine void @team() nounwind {\n  call void @elsewhere()\n  ret void\n}"
    assert image.link(compiler.build_text(outside, compiler.host()), "team") is None
    written = "@cell = global i64 0\ndefine void @team() nounwind {\n  store i64 1, ptr @cell\n  ret void\n}"
    assert image.link(compiler.build_text(written, compiler.host()), "team") is None


def test_processes_share_the_directory_without_clashing(tmp_path: Path) -> None:
    """Several start at once on an empty cache; a later one finds the entry and generates nothing."""
    environment = {**os.environ, CACHE_VARIABLE: str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True)

    outputs = [process.communicate(timeout=120)[0].split() for process in [start() for _ in range(3)]]
    assert len({total for total, _ in outputs}) == 1
    assert not list((tmp_path / "cpu").glob("*.part"))
    total, generated = start().communicate(timeout=120)[0].split()
    assert total == outputs[0][0]
    assert generated == str(not image.supported()), "a cached kernel should need neither code generator nor LLVM"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("kind", ["pipe", "directory", "link to a pipe", "device"])
def test_an_entry_that_is_no_ordinary_file_is_built_again(directory: Path, kind: str) -> None:
    """A pipe would be waited for without end."""
    attend()
    for entry in [only_entry(directory), *directory.glob("*.works")]:
        entry.unlink()
        if kind == "directory":
            entry.mkdir(mode=0o755)
        elif kind == "device":
            entry.symlink_to("/dev/zero")
        else:
            os.mkfifo(entry if kind == "pipe" else entry.with_suffix(".pipe"), 0o600)
            if kind != "pipe":
                entry.symlink_to(entry.with_suffix(".pipe"))
    compiler._kernels.clear()
    assert compiler.obstacle() is None
    torch.testing.assert_close(attend(), expected())
