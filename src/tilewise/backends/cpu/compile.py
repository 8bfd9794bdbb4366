"""From a Kernel to machine code for this CPU, kept on disk between processes.

A cache entry is named by a digest of everything that shapes the code: this package's sources, the kernel, the CPU's name and
features, and llvmlite's version. It starts with a magic word and a digest of its name and content, so a torn, damaged or
misplaced file is noticed, ignored and written anew. Writing is atomic (a fresh file renamed into place), so processes never
see half a file; a directory that is missing or cannot be written only costs the time to compile again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tilewise.backends.cpu.spec import Kernel
from tilewise.hardware.cache import cache_root

MAGIC = b"tilewise-cpu-1\0\0"
PASSES = (
    *("ipsccp", "instruction_combine", "simplify_cfg", "new_gvn"),
    *("loop_simplify", "loop_rotate", "instruction_combine", "simplify_cfg"),
)
"""What the IR needs: its loops already have the shape of the registers. LLVM's standard pipeline takes four times as long and
gives code of the same speed."""


@dataclass(frozen=True)
class Machine:
    """What code is generated for."""

    triple: str
    cpu: str
    features: str

    @property
    def arch(self) -> str:
        first = self.triple.split("-", 1)[0]
        return "aarch64" if first in ("aarch64", "arm64") else "x86_64" if first in ("x86_64", "amd64") else first


@cache
def host() -> Machine:
    binding = _binding()
    return Machine(
        binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    )


@cache
def _binding() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


def target_machine(machine: Machine) -> Any:
    binding = _binding()
    if machine.triple != host().triple:
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(machine.triple)
    return target.create_target_machine(cpu=machine.cpu, features=machine.features, opt=3, reloc="pic", codemodel="default")


def optimised(kernel: Kernel, machine: Machine) -> tuple[Any, Any]:
    """The kernel's module after LLVM's passes, with its target machine."""
    from tilewise.backends.cpu import emitters

    binding = _binding()
    machine_code = target_machine(machine)
    module = binding.parse_assembly(emitters.emit(kernel, machine.arch))
    module.triple = machine.triple
    module.data_layout = str(machine_code.target_data)
    module.verify()
    builder = binding.create_pass_builder(machine_code, binding.create_pipeline_tuning_options(speed_level=2))
    passes = binding.create_new_module_pass_manager()
    for name in PASSES:
        getattr(passes, f"add_{name}_pass")()
    passes.run(module, builder)
    return module, machine_code


def assembly(kernel: Kernel, machine: Machine) -> str:
    module, machine_code = optimised(kernel, machine)
    return str(machine_code.emit_assembly(module))


def build(kernel: Kernel, machine: Machine) -> bytes:
    module, machine_code = optimised(kernel, machine)
    return bytes(machine_code.emit_object(module))


# -- loading


def jit_text(text: str) -> Any:
    """An engine holding the functions of a small module in LLVM's own words; it must be kept as long as they are called."""
    binding = _binding()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(text), target_machine(host()))
    engine.finalize_object()
    return engine


class Loaded:
    """Code in memory; lives as long as this object."""

    def __init__(self, code: bytes) -> None:
        binding = _binding()
        empty = binding.parse_assembly("")
        self.engine = binding.create_mcjit_compiler(empty, target_machine(host()))
        self.engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self.engine.finalize_object()
        self.address = self.engine.get_function_address("worker")
        if not self.address:
            raise OSError("the object holds no worker")
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(self.address)


_loaded: dict[Kernel, Loaded] = {}
_lock = threading.RLock()


def worker(kernel: Kernel) -> Any:
    """The kernel's entry point, `worker(arguments, buffer)`; compiled on first use."""
    found = _loaded.get(kernel)
    if found is not None:
        return found.call
    with _lock:
        found = _loaded.get(kernel)
        if found is None:
            found = _loaded[kernel] = _obtain(kernel)
        return found.call


def _obtain(kernel: Kernel) -> Loaded:
    path = entry_path(kernel)
    code = read_entry(path)
    if code is None:
        code = build(kernel, host())
        write_entry(path, code)
    return Loaded(code)


def _forget_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


# -- the disk


def cache_dir() -> Path:
    return cache_root() / "cpu"


@cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def entry_path(kernel: Kernel) -> Path:
    import llvmlite

    machine = host()
    words = (_source_digest(), repr(kernel), machine.triple, machine.cpu, machine.features, llvmlite.__version__)
    return cache_dir() / (hashlib.sha256("\0".join(words).encode()).hexdigest()[:40] + ".o")


def read_entry(path: Path) -> bytes | None:
    """The code, if the file is whole and ours."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    head = len(MAGIC) + hashlib.sha256().digest_size
    if len(data) <= head or not data.startswith(MAGIC):
        return None
    code = data[head:]
    return code if _seal(path, code) == data[len(MAGIC) : head] else None


def _seal(path: Path, code: bytes) -> bytes:
    """Over the name too: a whole file under another kernel's name must not be taken for that kernel."""
    return hashlib.sha256(path.name.encode() + b"\0" + code).digest()


def write_entry(path: Path, code: bytes) -> None:
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + _seal(path, code) + code)
        os.replace(temporary, path)
        temporary = None
    except OSError:
        pass
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
