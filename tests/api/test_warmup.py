"""`warmup` compiles what calls need and nothing twice, in any number of processes; what cannot be compiled is named."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.api.compile_pool import compile_in_processes
from tilewise.api.model_config import problems_of_config
from tilewise.errors import ArgumentError, ArgumentTypeError, DeviceError, KernelError
from tilewise.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}


def described(config: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (p.seqlen_q, p.seqlen_k, p.heads, p.kv_heads, p.head_dim, p.head_dim_v, p.dtype, str(p.mask))
        for p in problems_of_config(config)
    ]


def test_a_model_becomes_problems() -> None:
    same = (32, 8, 128, 128, "bfloat16", "causal()")
    assert described(LLAMA) == [(4096, 4096, *same), (1, 4096, *same)]
    mixed = {**LLAMA, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2, "model_type": "gpt_oss"}
    assert [str(p.mask) for p in problems_of_config(mixed)][::2] == ["causal()", "causal() & window(128)"]
    assert all(p.sinks for p in problems_of_config(mixed))
    assert {row[-1] for row in described({**LLAMA, "sliding_window": 4096})} == {"causal() & window(4096)"}
    assert {row[-1] for row in described({**LLAMA, "sliding_window": 4096, "use_sliding_window": False})} == {"causal()"}
    latent = {"num_attention_heads": 16, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    assert described(latent)[0][2:6] == (16, 16, 192, 128)
    gemma = {"text_config": {**LLAMA, "head_dim": 256, "attn_logit_softcapping": 50.0}, "model_type": "gemma3"}
    assert problems_of_config(gemma)[0].softcap == 50.0 and problems_of_config(gemma)[0].head_dim == 256
    bert = {"model_type": "bert", "num_attention_heads": 12, "hidden_size": 768, "max_position_embeddings": 512, "dtype": "fp32"}
    assert described(bert) == [(512, 512, 12, 12, 64, 64, "float32", "full()")]
    assert [p.seqlen_q for p in problems_of_config(LLAMA, 100)] == [100, 1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "has no num_attention_heads"),
        ({**LLAMA, "num_attention_heads": "32"}, "num_attention_heads is '32'"),
        ({**LLAMA, "torch_dtype": "float8"}, "dtype is 'float8'"),
        (Path("no such file.json"), "cannot read"),
        (Path(__file__), "is no JSON"),
    ],
)
def test_bad_configurations_are_named(config: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        tw.warmup(config)


def test_bad_arguments_are_named() -> None:
    problem = Problem.of(heads=1, head_dim=16, seqlen=16)
    with pytest.raises(ArgumentTypeError, match="problems_or_config: got int"):
        tw.warmup(3)
    with pytest.raises(ArgumentTypeError, match="problems_or_config: got nothing"):
        tw.warmup([])
    with pytest.raises(ArgumentError, match="processes: got 0"):
        tw.warmup(problem, processes=0)
    for device in ("quantum", "meta", *([] if torch.cuda.is_available() else ["cuda"])):
        with pytest.raises(DeviceError, match="device: got"):
            tw.warmup(problem, device=device)


def test_what_was_warmed_is_not_compiled_again(tmp_path: Path) -> None:
    """In this process, and in the next: kernels are on disk."""
    pytest.importorskip("llvmlite")
    script = """
import json, sys, torch, tilewise as tw
from tilewise.backends.cpu import compile as compiler
made, build = [], compiler.build
compiler.build = lambda kernel, machine: made.append(kernel.kind) or build(kernel, machine)
features = dict(heads=2, head_dim=16, seqlen=40, dtype="float32", mask=tw.causal(), device="cpu")
report = tw.warmup([tw.Problem.of(**features), tw.Problem.of(**features, sinks=True)], processes=int(sys.argv[1]), device="cpu")
warmed = list(made)
q = torch.randn(1, 2, 40, 16, requires_grad=True)
tw.attention(q, q, q, mask=tw.causal()).sum().backward()
print(json.dumps([report.to_dict(), warmed, made, len(tw.warmup(tw.Problem.of(**features), device="cpu").kernels)]))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TILEWISE_CACHE_DIR": str(tmp_path)}
    answers = []
    for processes in ("2", "1"):
        done = subprocess.run([sys.executable, "-c", script, processes], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    (first, warmed, made, again), (second, *_, later, _) = answers
    assert first["ok"] and first["problems"] == 2 and [one["name"] for one in first["kernels"]] == ["cpu forward", "cpu backward"]
    assert warmed == made == later == [] and again == 0, "they were compiled elsewhere, and only once"
    assert first["processes"] == 2 and second["processes"] == 1


def test_processes_answer_and_may_die() -> None:
    done: list[int] = []
    makes = [partial(print, "compilers are talkative"), partial(int, "x"), partial(os._exit, 7), partial(int, "2")]
    found = compile_in_processes(makes, 1, lambda i, count: done.append(count))
    wrong = ["invalid literal for int() with base 10: 'x'", "the compiling process ended with status 7"]
    assert [error for _, error in found] == [None, *wrong, None]
    assert done == [1, 2, 3, 4] and all(seconds >= 0 for seconds, _ in found)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU backends believe in an H200; tensors are on the CPU."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from tilewise.backends.hopper import launch
    from tilewise.backends.hopper.backward import launch as backward
    from tilewise.backends.triton import run
    from tilewise.hardware import lookup

    target = GPUTarget("cuda", 90, 32)
    there = SimpleNamespace(get_current_device=lambda: 0, get_current_target=lambda: target)
    monkeypatch.setattr(type(driver), "active", there)
    monkeypatch.setattr(run, "spec_of", lambda device: lookup("h200"))
    for module in (launch, backward):
        monkeypatch.setattr(module, "spec_of", lambda index: lookup("h200"))


MASKS = {
    "causal": lambda: tw.causal(),
    "padding": lambda: tw.key_padding(torch.tensor([64, 9])),
    "documents": lambda: tw.causal() & tw.documents(torch.zeros(64, dtype=torch.int32)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_kernels_of_a_gpu_are_named_without_compiling(name: str, mask: str, h200: None) -> None:
    from tilewise import dispatch
    from tilewise.api.warmup import stand_ins
    from tilewise.backends.base import BackwardInputs, empty_lse, empty_out
    from tilewise.backends.gpu import classify
    from tilewise.backends.gpu.record import recorder

    if name == "hopper" and mask == "documents":
        return
    problem = Problem.of(batch=2, heads=2, head_dim=64, seqlen=64, mask=MASKS[mask]())
    inputs = stand_ins(problem, torch.device("cpu"))
    given = BackwardInputs(empty_out(inputs.q, 64), empty_lse(inputs.q), inputs.q)
    backend, before, kept = dispatch.get(name), len(recorder._recordings), len(classify._kept)
    forward, gradients = backend.missing_kernels(problem, inputs), backend.missing_kernels(problem, inputs, given)
    names = [job.name for job in (*forward, *gradients)]
    assert f"{name} forward_kernel" in names[: len(forward)] and f"{name} keys_kernel" in names[len(forward) :]
    assert (mask == "documents") == ("triton classify_kernel" in names)
    assert len(recorder._recordings) == before and len(classify._kept) == kept, "nothing is kept of what was not filled"
    assert "kept" not in problem.memory
    for job in (*forward, *gradients):
        again = pickle.loads(pickle.dumps(job.make))
        assert again.func is job.make.func and repr(again.args) == repr(job.make.args)  # type: ignore[attr-defined]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton")
    from tilewise.backends.gpu.compiled import Kernels

    return Kernels("triton")


def test_a_kernel_made_ahead_is_waited_for(kernels: Any) -> None:
    go, made = threading.Event(), []

    def make() -> str:
        made.append(threading.current_thread().name)
        assert go.wait(20)
        return "kernel"

    def fail() -> str:
        raise ValueError("no registers left\nat all")

    for key, function in (("a", make), ("a", make), ("b", fail)):
        kernels.ahead(key, function)
    threading.Timer(0.05, go.set).start()
    assert kernels.get("a", "name", lambda: "another") == "kernel" and made == ["tilewise-compile"]
    with pytest.raises(KernelError, match=r"could not compile name .*ValueError: no registers left"):
        kernels.get("b", "name", lambda: "another")
    assert kernels.get("c", "name", lambda: "here") == "here"
    kernels.ahead("c", fail)
    assert kernels.get("c", "name", fail) == "here", "what is there is not made again"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_of_fork_compiles_for_itself(kernels: Any) -> None:
    go = threading.Event()
    kernels.ahead("a", lambda: go.wait(20) and "parent's")
    child = os.fork()
    if child == 0:
        got = kernels.get("a", "name", lambda: "child's")
        kernels.ahead("b", lambda: "by its thread")
        os._exit(0 if got == "child's" and kernels.get("b", "name", lambda: "not") == "by its thread" else 1)
    go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kernels.get("a", "name", lambda: "another") == "parent's"


def test_a_process_ends_in_the_middle_of_compiling() -> None:
    pytest.importorskip("triton")
    script = """
import time
from tilewise.backends.gpu.compiled import Kernels
kernels = Kernels("triton")
for i in range(50):
    kernels.ahead(i, lambda: time.sleep(0.2))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr


class Ahead:
    """A backend's answers about the backward, and what came of them."""

    def __init__(self, failing: bool = False) -> None:
        self.asked, self.started, self.failing = 0, 0, failing

    def missing_kernels(self, problem: Problem, inputs: Any, given: Any = None) -> list[Any]:
        self.asked += 1
        if self.failing:
            raise KernelError("no kernel")
        assert given.needs == (True, False, True, False, False)
        return [SimpleNamespace(ahead=self.start), SimpleNamespace(ahead=None)]

    def start(self) -> None:
        self.started += 1


@pytest.mark.parametrize(("switch", "failing"), [("", False), ("0", False), ("", True)])
def test_gradients_are_prepared_once_for_a_problem(monkeypatch: pytest.MonkeyPatch, switch: str, failing: bool) -> None:
    from tilewise.backends.base import Inputs, Needs
    from tilewise.ops import ahead

    backend = Ahead(failing)
    monkeypatch.setattr(ahead, "_seen", set())
    monkeypatch.setattr(ahead.dispatch, "select", lambda *args, **options: SimpleNamespace(backend=backend))
    monkeypatch.setenv("TILEWISE_AHEAD", switch)
    q = torch.randn(1, 1, 16, 16, requires_grad=True)
    inputs = Inputs(q, q.detach(), q)
    for seqlen in (16, 16, 32):
        problem = Problem.of(heads=1, head_dim=16, seqlen=seqlen)
        ahead.compile_backward(problem, inputs, (q, q[..., 0]), "auto", Needs(dk=False))
        assert problem.memory["ahead"]
    assert backend.asked == (0 if switch else 2) and backend.started == (0 if switch or failing else 2)
