"""From a Kernel to machine code for this CPU, kept on disk between processes.

A cache entry is named by a digest of everything that shapes the code: this package's sources, the kernel, what the system says of
its CPU, and llvmlite's version. It starts with a magic word and a digest of its name and content, so a torn, damaged or
misplaced file is noticed, ignored and written anew; so is one that another user owns or could have written. Writing is atomic
(a fresh file renamed into place), so processes never see half a file; a directory that is missing or cannot be written only costs
the time to compile again. An entry holds an image where `image` can make one, and then LLVM is not even loaded: that alone takes
a tenth of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.backends.cpu import image
from tilewise.backends.cpu.spec import Kernel
from tilewise.errors import KernelError
from tilewise.hardware.cache import cache_root, open_regular, write_atomic
from tilewise.hardware.host import MACHINE

MAGIC = b"tilewise-cpu-2\0\0"
IMAGE, OBJECT = b"image---", b"object--"
PASSES = ("ipsccp", "loop_simplify", "loop_rotate", "instruction_combine", "simplify_cfg")
"""What the IR needs: its loops already have the shape of the registers. LLVM's standard pipeline takes more than four times as
long and gives code of the same speed."""


class Machine(NamedTuple):
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


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: building makes objects by the ten thousand and no garbage, and every look through a
    process that holds torch takes a tenth of a second."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@cache
def _binding() -> Any:
    with uncollected():
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
    target = target_machine(machine)
    module = binding.parse_assembly(emitters.emit(kernel, machine.arch))
    module.triple = machine.triple
    module.data_layout = str(target.target_data)
    module.verify()
    builder = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(speed_level=2))
    passes = binding.create_new_module_pass_manager()
    for name in PASSES:
        getattr(passes, f"add_{name}_pass")()
    passes.run(module, builder)
    return module, target


def assembly(kernel: Kernel, machine: Machine) -> str:
    module, target = optimised(kernel, machine)
    return str(target.emit_assembly(module))


def build(kernel: Kernel, machine: Machine) -> bytes:
    """The kernel's object file."""
    module, target = optimised(kernel, machine)
    return bytes(target.emit_object(module))


def build_text(text: str, machine: Machine) -> bytes:
    """The object file of a small module in LLVM IR."""
    return bytes(target_machine(machine).emit_object(_binding().parse_assembly(text)))


def entry_form(code: bytes, symbol: str) -> bytes:
    """What an entry holds of an object: an image if it can be one."""
    linked = image.link(code, symbol) if image.supported() else None
    return OBJECT + code if linked is None else IMAGE + linked


# -- loading


class Loaded:
    """Code in memory; lives as long as this object."""

    def __init__(self, code: bytes, symbol: str = "worker") -> None:
        kind, content = code[: len(IMAGE)], code[len(IMAGE) :]
        if kind == IMAGE:
            self.holder: Any = image.Mapped(content)
            self.address = self.holder.address
        else:
            binding = _binding()
            # llvmlite's own memory manager puts code and constants side by side: further than 2 GiB apart, LLVM would abort
            target = target_machine(host())
            self.holder = binding.create_mcjit_compiler(binding.parse_assembly(""), target, use_lmm=True)
            self.holder.add_object_file(binding.ObjectFileRef.from_data(content))
            self.holder.finalize_object()
            self.address = self.holder.get_function_address(symbol)
        if not self.address:
            raise OSError(f"the object holds no {symbol}")
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(self.address)


_kernels: dict[Kernel, Loaded | Exception] = {}
"""Every kernel of this process, or why it could not be compiled: that is not tried twice. Kernels differ in what changes code,
never in lengths, so a process has few, and none is forgotten."""
_lock = threading.RLock()


def worker(kernel: Kernel) -> Any:
    """The kernel's entry point, `worker(arguments, buffer)`; compiled on first use. KernelError whatever goes wrong with that."""
    with _lock:
        if kernel not in _kernels:
            _kernels[kernel] = _obtain(kernel)
    loaded = _kernels[kernel]
    if isinstance(loaded, Exception):
        reason = f"{type(loaded).__name__}: {loaded}"
        message = f"backend 'cpu' could not compile its kernel ({reason}); backend='tiled' needs no compiler"
        raise KernelError(message) from loaded
    return loaded.call


def is_ready(kernel: Kernel) -> bool:
    """Is it in this process already, compiled or not to be?"""
    return kernel in _kernels


def _obtain(kernel: Kernel) -> Loaded | Exception:
    try:
        return _load(entry_path(repr(kernel)), "worker", lambda: build(kernel, host()))
    except MemoryError:
        raise
    except Exception as error:  # LLVM's or the system's
        return error.with_traceback(None)


def load_text(text: str, symbol: str) -> Loaded:
    """A function of a small module in LLVM IR."""
    return _load(entry_path(text).with_suffix(".text"), symbol, lambda: build_text(text, host()))


def _load(path: Path, symbol: str, make: Callable[[], bytes]) -> Loaded:
    """From the cache if it is there; made, and left there, if not."""
    code = read_entry(path)
    if code is None:
        with uncollected():
            code = entry_form(make(), symbol)
        write_entry(path, code)
        write_entry(proof_path(), b"works")
    try:
        return Loaded(code, symbol)
    except OSError:
        if not code.startswith(IMAGE):
            raise
        with uncollected():  # a system that keeps memory from becoming executable may still let LLVM do it its own way
            return Loaded(OBJECT + make(), symbol)


def awake() -> bool:
    """Is LLVM loaded already?"""
    return _binding.cache_info().currsize > 0


def obstacle() -> str | None:
    """Why LLVM cannot compile here; None if it can, or once has."""
    if read_entry(proof_path()) is not None:
        return None
    try:
        host()
    except (ImportError, OSError, RuntimeError) as error:
        return f"llvmlite does not work here: {error}"
    return None


def _forget_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


# -- the disk


@cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def fingerprint() -> str:
    """What code depends on besides the kernel: the system's account of its CPUs and llvmlite's version."""
    import llvmlite

    try:
        lines = set(Path("/proc/cpuinfo").read_text(errors="replace").splitlines())
        about = sorted(line for line in lines if line.split("\t")[0].strip() in _CPUINFO_KEYS)
    except OSError:
        about = []
    if not about:
        machine = host()
        about = [machine.triple, machine.cpu, machine.features]
    return "\0".join((MACHINE, *about, llvmlite.__version__))


_CPUINFO_KEYS = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)


def entry_path(what: str) -> Path:
    """Of a kernel's `repr`, or of a text."""
    return _named(_source_digest(), what, fingerprint(), suffix=".o")


def proof_path() -> Path:
    """A small entry that says LLVM has compiled on this machine."""
    return _named(fingerprint(), suffix=".works")


def _named(*content: str, suffix: str) -> Path:
    return cache_root() / "cpu" / (hashlib.sha256("\0".join(content).encode()).hexdigest()[:40] + suffix)


def read_entry(path: Path) -> bytes | None:
    """The code, if the file is whole and ours: it will be run, so nobody else may have been able to write it."""
    try:
        with open_regular(path) as file:
            if not _private(os.fstat(file.fileno())) or not _private(path.parent.stat()):
                return None
            data = file.read()
    except OSError:
        return None
    head = len(MAGIC) + hashlib.sha256().digest_size
    if len(data) <= head or not data.startswith(MAGIC):
        return None
    code = data[head:]
    return code if _seal(path, code) == data[len(MAGIC) : head] else None


def _private(status: os.stat_result) -> bool:
    """Does it belong to this user (or the system's), and may no other write it?"""
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


def _seal(path: Path, code: bytes) -> bytes:
    """Over the name too: a whole file under another kernel's name must not be taken for that kernel."""
    return hashlib.sha256(path.name.encode() + b"\0" + code).digest()


def write_entry(path: Path, code: bytes) -> None:
    write_atomic(path, MAGIC + _seal(path, code) + code)
