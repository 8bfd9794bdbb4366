"""Kernels for sm_90 are not assembled by ptxas 12.8 where Triton brings a newer one."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from tools.compile_checks import DECODE, portable, problem_of
from tools.gpu_launches import launches
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import PTXASError

from tilewise.backends.gpu import assemble
from tilewise.backends.gpu.assemble import MARK, compile_soundly
from tilewise.backends.gpu.compiled import Kernels
from tilewise.backends.gpu.launch import signature
from tilewise.backends.gpu.sass import Instruction
from tilewise.errors import KernelError
from tilewise.hardware import device

HOPPER = GPUTarget("cuda", 90, 32)
PRODUCT = "HGMMA.64x16x16.F32 R24, R40, gdesc[UR4].tnspB, R24"
SOUND = [Instruction(0, "USGXT.U32 UR6, UR8, 0xe"), Instruction(16, "UMOV UR7, 0xc0000010"), Instruction(32, PRODUCT)]
LOST = [Instruction(0, "ULDC UR6, c[0x0][0x2a0]"), *SOUND[1:]]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of the two assemblers that Triton brings, to be set; no driver."""
    found = {"ptxas": "12.8", "ptxas-blackwell": "12.9"}
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(assemble, "driver_version", lambda: None)
    monkeypatch.setattr(assemble, "disassembled", lambda cubin: SOUND)
    monkeypatch.setattr(
        assemble, "_version", lambda tool: tuple(map(int, found[os.path.basename(tool.path)].split(".")))
    )
    return found


def used(target: GPUTarget = HOPPER, needed: bool = True) -> tuple[str, dict[str, str]]:
    """The assembler a kernel goes through, and its options."""
    found = []

    def build(options: dict[str, str]) -> SimpleNamespace:
        found.append((os.path.basename(knobs.nvidia.ptxas.path), options))
        return SimpleNamespace(asm={"cubin": b""})

    compile_soundly(target, needed, build)
    return found[0]


def test_the_newer_one_takes_the_place_of_12_8(versions: dict[str, str]) -> None:
    before = knobs.nvidia.ptxas.path
    assert used() == ("ptxas-blackwell", {"ptx_options": MARK})
    assert knobs.nvidia.ptxas.path == before
    assert "TRITON_PTXAS_PATH" not in os.environ


@pytest.mark.parametrize(("own", "newer"), [("12.9", "13.1"), ("12.8", "12.8"), ("13.0", "12.9")])
def test_a_right_one_stays_and_another_old_one_is_not_taken(versions: dict[str, str], own: str, newer: str) -> None:
    versions |= {"ptxas": own, "ptxas-blackwell": newer}
    assert used() == ("ptxas", {})


@pytest.mark.parametrize(
    "target", [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 100, 32), GPUTarget("hip", "gfx942", 64)]
)
def test_other_gpus_have_no_such_products(versions: dict[str, str], target: GPUTarget) -> None:
    assert used(target) == ("ptxas", {})


def test_the_users_own_choice_stays(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", knobs.nvidia.ptxas.path)
    assert used() == ("ptxas", {})


def test_where_there_is_no_other_its_code_is_looked_through(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions["ptxas-blackwell"] = "13.1"
    monkeypatch.setattr(assemble, "driver_version", lambda: (12, 8))
    assert used() == ("ptxas", {})
    monkeypatch.setattr(assemble, "disassembled", lambda cubin: LOST)
    with pytest.raises(KernelError, match="TRITON_PTXAS_PATH"):
        used()
    assert used(needed=False) == ("ptxas", {})
    monkeypatch.setattr(assemble, "driver_version", lambda: (13, 0))
    assert used()[0] == "ptxas-blackwell"


def crashing(*crashes: str, needed: bool = True) -> list[str]:
    """The assemblers a kernel goes through when some of them crash."""
    found = []

    def build(options: dict[str, str]) -> SimpleNamespace:
        found.append(os.path.basename(knobs.nvidia.ptxas.path))
        if found[-1] in crashes:
            raise PTXASError("ptxas failed with error code -11")
        return SimpleNamespace(asm={"cubin": b""})

    compile_soundly(HOPPER, needed, build)
    return found


def test_an_assembler_that_crashes_leaves_the_kernel_to_the_other(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert crashing("ptxas-blackwell") == ["ptxas-blackwell", "ptxas"]
    assert crashing("ptxas", needed=False) == ["ptxas", "ptxas-blackwell"]
    with pytest.raises(PTXASError):
        crashing("ptxas", "ptxas-blackwell")
    monkeypatch.setattr(assemble, "disassembled", lambda cubin: LOST)
    with pytest.raises(KernelError, match="ptxas 12"):  # the other's code is looked through
        crashing("ptxas-blackwell")


def test_a_kernel_that_cannot_be_made_says_so_and_is_not_tried_again() -> None:
    tried = []

    def make() -> None:
        tried.append(1)
        raise PTXASError("ptxas failed with error code -11\nmore")

    kernels = Kernels("triton")
    for _ in range(2):
        with pytest.raises(
            KernelError, match=r"'triton' could not compile forward_kernel .*PTXASError.*code -11.*tiled"
        ):
            kernels.get("a key", "forward_kernel", make)
    assert len(tried) == 1
    assert kernels.get("another", "forward_kernel", lambda: 5) == 5


def test_a_triton_without_a_second_assembler(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "nvidia", SimpleNamespace(ptxas=knobs.nvidia.ptxas))
    assert used() == ("ptxas", {})


@pytest.mark.parametrize(
    ("change", "trusted"),
    [
        ({}, True),
        ({"mask": "causal"}, True),
        ({"d": 64, "lengths": (512, 512), "dtype": "float16"}, True),
        ({"dtype": "float32"}, False),
        ({"d": 64, "head_dim_v": 128}, False),
        ({"d": 24, "head_dim_v": 10}, False),
        ({"mask": "causal | prefix(7)"}, False),
        ({"sinks": True}, False),
        ({"bias": (1, 8, 1024, 1024)}, False),
        ({"dropout_p": 0.1}, False),
        (DECODE, False),
    ],
    ids=str,
)
def test_12_8_is_trusted_with_what_was_looked_through(change: dict[str, Any], trusted: bool) -> None:
    problem, inputs = problem_of(portable("", **change))
    found = [launch for name, launch in launches(problem, inputs, device("h200")) if name in ("forward", "decode")]
    for launch in found:
        types, _, attributes = signature(launch.args)
        assert assemble.proven(types, attributes, launch.config) == trusted
    assert found


def test_12_8_is_not_trusted_with_rows_at_any_address() -> None:
    problem, inputs = problem_of(portable(""))
    odd = inputs._replace(q=inputs.q[..., 1:, :].as_strided(inputs.q.shape, (1, 1, 129, 1)))
    launch = launches(problem, odd, device("h200"), maps=False)[0][1]
    types, _, attributes = signature(launch.args)
    assert not assemble.proven(types, attributes, launch.config)
