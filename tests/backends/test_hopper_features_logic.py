"""The Hopper kernels with sinks and other features, run as Python threads: right results and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.backends import test_hopper_backward_logic as backward_logic
from tests.backends import test_hopper_forward_logic as forward_logic
from tests.backends import test_hopper_lists_logic as lists_logic
from tests.backends.gluon_values import Value
from tests.backends.test_hopper_backward_logic import PAD, Shape, build
from tests.numerics import checks
from tilewise.backends.hopper.backward import choose
from tilewise.backends.hopper.plan import supports
from tilewise.backends.tiled import backend as tiled
from tilewise.hardware import lookup
from tilewise.numerics.philox import philox

CAUSAL, WINDOW = "tw.causal()", "tw.causal() & tw.window(100)"
PACKED = ((5, 133, 0, 70), (5, 140, 7, 70))
SINKS = [
    Shape(64, WINDOW, 200, h=4, hk=2, sinks=True, dlse=True),
    Shape(128, PAD.format("130, 0"), 70, 200, b=2, h=2, hk=2, sinks=True),
    Shape(64, CAUSAL, h=2, hk=1, sinks=True, lengths=PACKED),
    Shape(256, CAUSAL, 130, 100, h=2, softcap=3.0, sinks=True),
]
ALIBI = [
    Shape(64, CAUSAL, 200, h=2, hk=1, alibi=1, dlse=True),
    Shape(64, "None", 130, 200, b=2, alibi=2),
    Shape(128, CAUSAL, 70, 200, h=2, hk=1, b=2, alibi=2),
    Shape(128, WINDOW, 200, alibi=1, sinks=True, deterministic=True),
    Shape(256, "tw.causal() | tw.prefix(90)", 130, h=2, hk=1, alibi=1),
    Shape(64, CAUSAL, h=2, hk=1, alibi=2, lengths=PACKED),
    Shape(128, "tw.causal('top_left')", alibi=1, lengths=PACKED),
    Shape(128, CAUSAL, 130, h=2, softcap=3.0, alibi=1),
    Shape(64, CAUSAL, 130, alibi=1, scale=-0.2),
]
DROPOUT = [
    Shape(64, CAUSAL, 200, h=2, hk=1, b=2, dropout=0.3, dlse=True),
    Shape(128, CAUSAL, 130, 200, h=2, hk=1, dropout=0.1),
    Shape(256, WINDOW, 130, h=2, hk=1, dropout=0.6),
    Shape(64, CAUSAL, h=2, hk=1, dropout=0.1, lengths=PACKED),
    Shape(128, "None", 130, h=2, dropout=0.2, alibi=1, sinks=True, softcap=3.0),
    Shape(32, CAUSAL, 130, 200, h=2, hk=1, dropout=0.3),
    Shape(16, "None", 100, 150, dropout=0.3, dv=48),
    Shape(40, WINDOW, 200, h=2, hk=1, dropout=0.3, scale=-0.2),
    Shape(56, CAUSAL, 200, h=2, dropout=0.2, alibi=1, softcap=3.0, dv=24),
    Shape(64, CAUSAL, 200, h=2, hk=1, dropout=0.3, deterministic=True),
]
BIAS = [
    Shape(64, "None", 200, h=2, hk=1, b=2, bias="bhqk", dlse=True),
    Shape(128, CAUSAL, 130, 200, h=2, hk=1, b=2, bias="hqk"),
    Shape(64, CAUSAL, 130, 131, h=2, bias="hqk", softcap=3.0, deterministic=True),
    Shape(128, "None", 70, 200, h=2, b=2, bias="bk", bias_dtype=torch.float32),
    Shape(256, WINDOW, 130, h=2, hk=1, bias="hqk", bias_dtype=torch.float16, sinks=True),
    Shape(64, "None", 130, 200, h=2, bias="qk", bias_dtype=torch.float32, scale=-0.2),
    Shape(128, CAUSAL, 130, h=2, bias="hq", dropout=0.2),
    Shape(64, CAUSAL, h=2, hk=1, bias="bhqk", lengths=PACKED),
    Shape(32, CAUSAL, 130, 200, h=2, hk=1, bias="hqk", dropout=0.2),
    Shape(48, WINDOW, 200, h=2, bias="bhqk", scale=-0.2, sinks=True, dv=24),
]
NAMED = {"sinks": SINKS, "alibi": ALIBI, "dropout": DROPOUT, "bias": BIAS}
SHAPES = [shape for shapes in NAMED.values() for shape in shapes]


def name(shape: Shape) -> str:
    feature = next(feature for feature, shapes in NAMED.items() if shape in shapes)
    return f"{feature}{NAMED[feature].index(shape)}-d{shape.d}"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "FEW_KEYS", {})
    monkeypatch.setattr(Value, "permute", lambda x, order: Value(x.value.permute(order)), raising=False)


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_results(shape: Shape) -> None:
    problem, inputs = build(shape)
    assert supports(problem, lookup("h200")).ok
    assert checks.check_forward(problem, inputs, *forward_logic.run(problem, inputs, None)) == []


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_gradients(shape: Shape) -> None:
    problem, inputs = build(shape)
    assert supports(problem, lookup("h200"), backward=True).ok
    out, lse = tiled.backend.forward(replace(problem, tile=()), inputs)
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g).bfloat16()
    dlse = torch.randn(lse.shape, generator=g) if shape.dlse else None
    found = backward_logic.run(problem, inputs, out.contiguous(), lse, dout, dlse)
    assert (found.dsinks is not None) == shape.sinks and (found.dbias is not None) == bool(shape.bias)
    assert checks.check_backward(problem, inputs, dout, dlse, found) == []


@pytest.mark.parametrize("shape", [shape for shape in BIAS if shape.d <= 64], ids=name)
def test_gradients_without_that_of_the_bias(shape: Shape) -> None:
    problem, inputs = build(shape)
    out, lse = tiled.backend.forward(problem, inputs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = backward_logic.run(problem, inputs, out.contiguous(), lse, dout, None, wanted=False)
    assert found.dbias is None
    assert checks.check_backward(problem, inputs, dout, None, found) == []


def test_keys_that_only_dq_would_tell_of_raise_the_flag() -> None:
    """A hidden key whose scores are -inf gives no weight, and dK and dV of 0; but dQ adds 0 · inf."""
    problem, inputs = build(Shape(64, "None", 128, 200, bias="hqk"))
    assert inputs.bias is not None
    inputs.q[..., 0] = inputs.q[..., 0].abs() + 0.5
    inputs.bias[..., 150] = -float("inf")
    flags = []
    for number in (1.0, -float("inf")):
        inputs.k[:, :, 150, 0] = 1.0
        out, lse = tiled.backend.forward(problem, inputs)
        inputs.k[:, :, 150, 0] = number
        flags.append(torch.zeros(1, dtype=torch.int64))
        found = backward_logic.run(problem, inputs, out, lse, torch.ones_like(out), None, wanted=False, flag=flags[-1])
        assert found.dk is not None and found.dv is not None and bool(found.dk.isfinite().all() & found.dv.isfinite().all())
    assert [int(flag) for flag in flags] == [0, 1]


LISTED = [
    Shape(64, lists_logic.CAUSAL_DOCUMENTS, 400, h=2, hk=1, sinks=True, alibi=1, dropout=0.2),
    Shape(128, lists_logic.CAUSAL_DOCUMENTS, 400, h=2, hk=1, sinks=True, alibi=1, dropout=0.2),
    Shape(256, lists_logic.CAUSAL_DOCUMENTS, 400, h=2, hk=1, alibi=1, dropout=0.2),
]


@pytest.mark.parametrize("shape", LISTED, ids=lambda shape: f"d{shape.d}")
def test_features_go_with_tile_lists(shape: Shape) -> None:
    problem, inputs = build(shape)
    assert supports(problem, lookup("h200"), backward=True).ok
    out, lse = lists_logic.run_forward(problem, inputs)
    assert checks.check_forward(problem, inputs, out, lse) == []
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = lists_logic.run_backward(problem, inputs, out, lse, dout, None)
    assert checks.check_backward(problem, inputs, dout, None, found) == []


@pytest.mark.parametrize("bias", ["", "hqk"])
def test_sinks_far_away(bias: str) -> None:
    """Some have all the weight, some none, one nearly all; of rows without keys a finite one is the log-sum-exp."""
    problem, inputs = build(Shape(64, CAUSAL, 100, 70, h=6, hk=1, sinks=True, bias=bias))
    sinks = torch.tensor([float("inf"), float("-inf"), 3e38, -3e38, 60.0, -60.0])
    inputs = inputs._replace(sinks=sinks)
    out, lse = forward_logic.run(problem, inputs, None)
    assert checks.check_forward(problem, inputs, out, lse) == []
    assert torch.equal(lse[0, :, 0], sinks) and torch.equal(lse[0, 2], sinks[2].expand(100)) and out[0, 2].count_nonzero() == 0
    found = backward_logic.run(problem, inputs, out, lse, torch.ones_like(out), None)
    assert all(x is None or bool(x.isfinite().all()) for x in found)
    assert found.dq is not None and found.dsinks is not None
    assert found.dq[:, [0, 2]].count_nonzero() == 0 and found.dsinks[:4].tolist() == [0.0] * 4


PTX: dict[str, Callable[..., int]] = {
    "mov.b32": lambda x: x,
    "add.u32": lambda x, y: (x + y) & 0xFFFFFFFF,
    "mul.wide.u32": lambda x, y: x * y,
    "lop3.b32": lambda x, y, z, table: x ^ y ^ z if table == 0x96 else -1,
    "setp.ge.u32": lambda x, y: int(x >= y),
    "or.b32": lambda x, y: x | y,
}


def run_ptx(text: str, operands: list[int]) -> list[int]:
    """Straight-line PTX of unsigned words, as far as dropout uses it."""
    known: dict[str, int] = {f"${i}": x for i, x in enumerate(operands)}
    for line in text.strip("{} ").split(";"):
        op, _, names = line.strip().removeprefix("@kept ").partition(" ")
        if op in ("", ".reg") or ("@kept" in line and not known["kept"]):
            continue
        if op == "mov.b64":
            low, high = names[1 : names.index("}")].split(", ")
            known[low], known[high] = known["wide"] & 0xFFFFFFFF, known["wide"] >> 32
        else:
            into, *given = names.split(", ")
            known[into] = PTX[op](*(known[word] if word in known else int(word, 0) for word in given))
    return [known[f"${i}"] for i in range(len(operands) // 8)]


@pytest.mark.parametrize("calls", [2, 4])
def test_the_instructions_of_dropout(calls: int) -> None:
    from tilewise.backends.hopper.dropout import _philox

    written = getattr(_philox, "fn", _philox)(calls)
    counters = torch.randint(0, 2**32, (4, calls), generator=torch.Generator().manual_seed(0))
    seed, below = 1234567890123456789, 0x80000001
    low, high = seed & 0xFFFFFFFF, seed >> 32
    shared = [x for x in (low, high, below) for _ in range(calls)]
    found = run_ptx(written, [0] * calls + counters.flatten().tolist() + shared)
    words = philox(tuple(counters), torch.tensor(seed))  # type: ignore[arg-type]
    assert found == [sum(int(word[e] >= below) << i for i, word in enumerate(words)) for e in range(calls)]


@pytest.mark.parametrize("d", [64, 128])
def test_a_bias_that_hides(d: int) -> None:
    """Keys and rows of -inf, and a row of the lowest finite number, which sees all keys alike."""
    problem, inputs = build(Shape(d, "None", 150, h=2, hk=1, bias="hqk"))
    assert inputs.bias is not None
    inputs.bias[:, :, 5] = torch.finfo(torch.bfloat16).min
    inputs.bias[..., 10:25] = inputs.bias[:, 1, 40:45] = float("-inf")
    out, lse = forward_logic.run(problem, inputs, None)
    assert checks.check_forward(problem, inputs, out, lse) == []
    assert out[:, 1, 40:45].count_nonzero() == 0 and bool((lse[:, 1, 40:45] == -float("inf")).all())
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    dout[:, :, 5] = 0.0  # a log-sum-exp near the lowest number has no digits left for gradients
    found = backward_logic.run(problem, inputs, out, lse, dout, None)
    assert checks.check_backward(problem, inputs, dout, None, found) == []


@pytest.mark.parametrize(("dbias", "mask"), [(False, CAUSAL), (True, f"tw.causal() & {PAD.format('130, 77')}")])
def test_a_call_with_a_bias_is_made_twice(dbias: bool, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time it reads copies, and only if the flag is up."""
    from tilewise.backends.base import BackwardInputs, Needs
    from tilewise.backends.gpu.launch import Address, Descriptor, signature
    from tilewise.backends.hopper import launch
    from tilewise.backends.hopper.backward import launch as backward_launch
    from tilewise.backends.hopper.hidden import HiddenArguments

    problem, inputs = build(Shape(64, mask, 200, h=2, hk=1, b=2, bias="hqk"))
    found: list[tuple[tuple[torch.Tensor, ...], list[Any]]] = []

    class Kept:
        def __init__(self, plan: Any) -> None:
            self.plan = plan

        def repeat(self, tensors: Any) -> bool:
            return False

        def record(self, tensors: Any, launches: Any) -> None:
            found.append((tensors, launches))

    for module in (launch, backward_launch):
        monkeypatch.setattr(module, "recorder", SimpleNamespace(get=lambda problem, key, device, make: Kept(make())))
        monkeypatch.setattr(module, "kernel_for", lambda name, *_: name)
        monkeypatch.setattr(module, "spec_of", lambda index: lookup("h200"))
    out, lse = launch.run_forward(problem, inputs)
    needs = Needs(dbias=dbias)
    grads = backward_launch.run_backward(problem, inputs, BackwardInputs(out, lse, torch.ones_like(out), None, needs))
    assert (grads.dbias is not None) == dbias
    names = [[getattr(x.kernel, "__name__", x.kernel) for x in launches] for _, launches in found]
    assert names[0] == ["forward_kernel", "hidden_kernel", "forward_kernel"]
    twice, last = (["keys_kernel", "queries_kernel"], []) if dbias else (["keys_kernel"], ["postprocess_kernel"])
    assert names[1] == ["preprocess_kernel", *twice, "hidden_kernel", *twice, *last]
    for one in found[1][1]:
        if one.options is not None:
            signature(one.args)
    cleared = next(one.args for one in found[1][1] if getattr(one.kernel, "__name__", "") == "hidden_kernel")
    if not dbias:  # the sums of dQ, all of them
        assert cleared[1].cleared.data_ptr() == found[1][1][0].args[0].dq_ptr.data_ptr() and cleared[1].size > 200 * 4 * 64

    def leaves(x: Any) -> Iterator[torch.Tensor]:
        while isinstance(x, Descriptor | Address):  # a map of a part has both
            x = x.base
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple):
            for part in x:
                yield from leaves(part)

    for tensors, launches in found:
        known = {id(x) for x in tensors}
        for one in launches:
            own = {id(x.order) for x in one.args if getattr(x, "order", None) is not None}
            assert all(id(x) in known | own for x in leaves(one.args)), "an address would stay that of this call"
        again = [one.args[-1].bias_again for one in launches if hasattr(one.args[-1], "bias_again")]
        half = len(again) // 2
        assert again == [0] * half + [1] * half
        flags = [one.args[-1].bias_flag.data_ptr() for one in launches if hasattr(one.args[-1], "bias_again")]
        raised = next(one.args[0].flag.data_ptr() for one in launches if isinstance(one.args[0], HiddenArguments))
        assert flags == [raised] * half + [raised + 16] * half, "the second time looks at what the copies' kernel leaves"
        first = [x.base for one in launches[: len(launches) // 2] for x in one.args if isinstance(x, Descriptor)]
        last = [x.base for one in launches[len(launches) // 2 :] for x in one.args if isinstance(x, Descriptor)]
        for x in (inputs.q, inputs.k, inputs.v):
            assert id(x) in map(id, first) and id(x) not in map(id, last)
